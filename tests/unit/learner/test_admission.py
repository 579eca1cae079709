"""Which segments are admitted, and which groups are trained on: one test a rule. Random sequences are in test_pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, Verdict, VersionSpan
from echo2.learner.rollouts.admission import (
    DROPPED_MAX_RATIO,
    GroupRules,
    OpenGroups,
    problem_of_end,
    problem_of_segment,
)
from echo2.staleness.rule import Ledger
from tests.unit.learner.stage import STOP, draw, piece


def new_groups(bound: int = 2, per_step: int = 4, per_group: int = 2, **options: Any) -> OpenGroups:
    return OpenGroups(GroupRules(bound, per_step, per_group, vocabulary_size=50, **options), Ledger(bound))


def filled(
    groups: OpenGroups, cursor: int, version: int = 0, rewards: tuple[float | None, ...] = (0.0, 1.0)
) -> GroupId:
    """The id of a group whose rollouts came and were scored."""
    group_id = groups.open_group(draw(cursor)).group_id
    for index, value in enumerate(rewards):
        assert groups.receive(piece(group_id, index, [9, STOP], version=version), 0).verdict is Verdict.ADMITTED
        groups.reward(group_id, index, value)
    return group_id


def verdict(groups: OpenGroups, *of_piece: Any, attempt: int = 0, **changes: Any) -> Verdict:
    return groups.receive(piece(*of_piece, **changes), attempt).verdict


@given(
    groups=st.integers(1, 64),
    n=st.integers(1, 16),
    bound=st.integers(0, 16),
    planned=st.none() | st.integers(0, 10_000),
)
def test_the_cap_is_between_one_batch_and_as_many_as_stay_fresh(
    groups: int, n: int, bound: int, planned: int | None
) -> None:
    rules = GroupRules(bound, groups * n, n, 50)
    cap = rules.cap_groups(planned)
    assert rules.groups_per_step <= cap <= rules.groups_per_step * (bound + 1)
    if planned and rules.rollouts_per_step <= planned <= rules.rollouts_per_step * (bound + 1):
        assert cap == planned // n
    assert rules.cap_groups(None) == min(2, bound + 1) * groups, "without a plan: one sampled, one in the buffer"


def test_groups_behind_a_closed_one_move_up_to_an_earlier_step() -> None:
    """Else they wait for a version that comes only with the step that waits for them."""
    groups = new_groups(per_step=2)  # one group a step
    filled(groups, 0)
    ids = [groups.open_group(draw(cursor)).group_id for cursor in range(1, 4)]
    assert groups.move_up() == []
    for index in range(2):  # the rewards of the second group fail: it is closed untrained
        assert verdict(groups, ids[0], index, [9, STOP]) is Verdict.ADMITTED
        groups.reward(ids[0], index, None)
    moved = groups.move_up()
    assert [(spec.group_id, spec.consume_step) for spec in moved] == [(ids[1], 1), (ids[2], 2)]
    assert [group.spec.consume_step for group in groups.lacking] == [1, 2]
    assert groups.move_up() == []
    last = filled(groups, 4)  # what is sampled goes before what is not: the step it takes is no one else's
    groups.close_family(ids[1], "stale")
    assert groups.move_up() == [] and last in groups.groups


@pytest.mark.parametrize("is_buffered", [True, False])
def test_what_is_too_old_is_dropped_at_admission_or_out_of_the_buffer_and_its_prompt_offered_again(
    is_buffered: bool,
) -> None:
    groups = new_groups(bound=1, per_step=4)
    late = filled(groups, 0) if is_buffered else groups.open_group(draw(0)).group_id
    groups.next_step = Step(2)
    if is_buffered:
        assert groups.draw_batch() is None and groups.counts.dropped_stale == 2
    else:
        assert verdict(groups, late, 0, [9, STOP]) is Verdict.STALE
    (closure,) = groups.take_closures()
    assert closure.reason == "stale" and closure.retry is not None and closure.retry.cursor == 0
    again = groups.open_group(closure.retry)
    assert again.group_id != late and again.prompt_token_ids == (5, 6, 7) and again.sampling == draw(0).sampling


# ---- what is not worth training on


@given(rewards=st.lists(st.floats(-1, 1), max_size=5), dropped=st.integers(0, 20))
def test_equal_rewards_are_dropped_until_the_step_has_dropped_its_share(rewards: list[float], dropped: int) -> None:
    has_contrast = len(rewards) > 1 and max(rewards) - min(rewards) > 1e-6
    rules = GroupRules(4, 8, 2, 50, drops_equal_rewards=True)
    assert rules.drops(rewards, dropped) == (not has_contrast and dropped < DROPPED_MAX_RATIO * 4)
    assert not GroupRules(4, 8, 2, 50).drops(rewards, 0), "off by default"


def test_a_step_drops_a_bounded_number_of_groups_without_contrast_and_then_trains_on_them() -> None:
    groups = new_groups(per_step=2, drops_equal_rewards=True)
    kept = [filled(groups, cursor, rewards=(1.0, 1.0)) in groups.groups for cursor in range(3)]
    assert kept == [False, False, True]
    assert [(closure.reason, closure.retry) for closure in groups.take_closures()] == [("no contrast", None)] * 2
    assert groups.draw_batch() is not None
    assert filled(groups, 3, rewards=(1.0, 1.0)) not in groups.groups, "the next step may drop again"


# ---- what no honest worker sends

SPEC = GroupSpec(GroupId("g"), (5, 6), 4, SamplingParams(max_new_tokens=6, stop_token_ids=(STOP,)), 0)
FILTERED = replace(SPEC, sampling=replace(SPEC.sampling, top_p=0.9))
COLD = replace(SPEC, sampling=replace(SPEC.sampling, temperature=0.7))


@pytest.mark.parametrize(
    ("spec", "raw", "is_refused"),
    [
        (SPEC, (-1.0, -2.0 - 1e-6), False),
        (SPEC, (-1.0, -18.0), True),  # honest where it was looked at, forged where it is trained on
        (SPEC, (-1.0, 0.0), True),
        (FILTERED, (-1.1, -2.4), False),  # a filter makes its tokens likelier
        (FILTERED, (-1.1, -1.9), True),
        (COLD, (-1.4, -1.7), False),  # at another temperature only one of the two is used
    ],
)
def test_the_two_numbers_of_a_token_stand_in_the_relation_that_its_sampling_says(
    spec: GroupSpec, raw: tuple[float, ...], is_refused: bool
) -> None:
    segment = replace(piece("g", 0, [7, 7]), logprobs=(-1.0, -2.0), raw_logprobs=raw)
    problem = problem_of_segment(segment, spec, 50, [Version(0)])
    assert (problem is not None) == is_refused and "token 1" in (problem or "token 1")
    trained = spec.sampling.trained_logprobs((-1.0,), (-2.0,))
    assert trained == ((-1.0,) if spec is COLD else (-2.0,)), "the raw number at temperature 1"


@pytest.mark.parametrize(
    ("tokens", "reason", "text"),
    [
        ((7,), FinishReason.LENGTH, "expected 6 tokens where it ends for its length, got 1"),
        ((7,) * 6, FinishReason.LENGTH, None),
        ((7,) * 7, FinishReason.LENGTH, "at most 6"),
        ((7, 8), FinishReason.STOP, "a stop token at its end"),
        ((7, STOP), FinishReason.STOP, None),
        ((7, STOP, 8), FinishReason.UNFINISHED, "its first stop token"),
        ((7, STOP, STOP), FinishReason.STOP, "its first stop token"),
        ((7, 8), FinishReason.UNFINISHED, None),
    ],
)
def test_a_rollout_ends_where_its_lease_says_and_nowhere_else(
    tokens: tuple[int, ...], reason: FinishReason, text: str | None
) -> None:
    numbers = (-1.0,) * len(tokens)
    rollout = Rollout(GroupId("g"), 0, tokens, numbers, numbers, (VersionSpan(Version(2), len(tokens)),), reason)
    for held_tokens in range(min(3, len(tokens))):  # a stop token that was held already ends it too
        problem = problem_of_end(rollout, held_tokens, SPEC)
        assert (problem is None) == (text is None) and (text or "") in (problem or "")

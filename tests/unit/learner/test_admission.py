"""Which segments are admitted, and which groups are trained on: one test a rule. Random sequences are in test_pool."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, RolloutSegment, SamplingParams, Verdict, VersionSpan
from echo2.learner.rollouts.admission import OpenGroups, problem_of_end, problem_of_segment
from echo2.learner.rollouts.selection import GroupRules, PruningRule
from echo2.staleness.ledger import Ledger
from tests.unit.learner.stage import STOP, draw, piece


def new_groups(bound: int = 2, per_step: int = 4, per_group: int = 2, **options: Any) -> OpenGroups:
    return OpenGroups(GroupRules(bound, per_step, per_group, vocabulary_size=50, **options), Ledger(bound))


def fill(groups: OpenGroups, group_id: str, version: int = 0) -> None:
    for index in range(groups.rules.rollouts_per_group):
        verdict = groups.receive(piece(group_id, index, [9, STOP], version=version), 0)
        assert verdict.verdict is Verdict.ADMITTED
        groups.reward(GroupId(group_id), index, float(index))


def test_a_batch_is_drawn_of_complete_scored_groups_only() -> None:
    groups = new_groups()
    first, second = (groups.open_group(draw(i)).group_id for i in range(2))
    fill(groups, first)
    assert groups.draw_batch() is None
    fill(groups, second)
    batch = groups.draw_batch()
    assert batch is not None and batch.rollout_count == 4 and groups.next_step == 1
    assert [closure.group_id for closure in groups.take_closures()] == [first, second]
    assert groups.groups == {}


def test_groups_that_grow_stale_first_are_trained_first() -> None:
    groups = new_groups(per_step=2)
    groups.publish(Version(1))
    newer, older = (groups.open_group(draw(i)).group_id for i in range(2))
    fill(groups, newer, version=1)
    fill(groups, older, version=0)
    batch = groups.draw_batch()
    assert batch is not None and batch.groups[0].spec.group_id == older


def test_groups_behind_a_closed_one_move_up_to_an_earlier_step() -> None:
    """Else they wait for a version that comes only with the step that waits for them."""
    groups = new_groups(per_step=2)  # one group a step
    ids = [groups.open_group(draw(cursor)).group_id for cursor in range(4)]
    fill(groups, ids[0])
    assert groups.move_up() == []
    for index in range(2):  # the rewards of the second group fail: it is closed untrained
        assert groups.receive(piece(ids[1], index, [9, STOP]), 0).verdict is Verdict.ADMITTED
        groups.reward(ids[1], index, None)
    moved = groups.move_up()
    assert [(spec.group_id, spec.consume_step) for spec in moved] == [(ids[2], 1), (ids[3], 2)]
    assert [spec.consume_step for spec in groups.incomplete_specs()] == [1, 2]
    assert groups.move_up() == []


def test_a_stale_segment_is_refused_at_admission_and_its_prompt_offered_again() -> None:
    groups = new_groups(bound=1, per_step=2)
    late = groups.open_group(draw(0)).group_id
    for cursor in (1, 2):
        fill(groups, groups.open_group(draw(cursor)).group_id)
    for _ in range(2):
        assert groups.draw_batch() is not None
    groups.take_closures()
    verdict = groups.receive(piece(late, 0, [9, STOP], version=0), 0)
    assert verdict.verdict is Verdict.STALE
    (closure,) = groups.take_closures()
    assert closure.reason == "stale" and closure.retry is not None and closure.retry.cursor == 0
    again = groups.open_group(closure.retry)
    assert again.group_id != late and again.prompt_token_ids == (5, 6, 7) and again.sampling == draw(0).sampling


def test_a_buffered_group_that_grew_stale_is_dropped_at_consumption() -> None:
    groups = new_groups(bound=1, per_step=4)
    waiting = groups.open_group(draw(0)).group_id
    fill(groups, waiting)
    groups.next_step = type(groups.next_step)(2)
    assert groups.draw_batch() is None
    assert groups.counts.dropped_stale == 2 and waiting not in groups.groups


def test_a_finished_rollout_sent_again_changes_nothing() -> None:
    groups = new_groups()
    group_id = groups.open_group(draw(0)).group_id
    assert groups.receive(piece(group_id, 0, [9, STOP]), 0).verdict is Verdict.ADMITTED
    assert groups.receive(piece(group_id, 0, [9, STOP]), 0).verdict is Verdict.DUPLICATE
    assert groups.receive(piece(group_id, 0, [8, 8, STOP]), 0).verdict is Verdict.DUPLICATE
    assert groups.groups[group_id].rollouts[0].token_ids == (9, STOP)


def test_a_trained_group_sent_again_is_a_duplicate_and_not_trained() -> None:
    groups = new_groups(per_step=2)
    group_id = groups.open_group(draw(0)).group_id
    fill(groups, group_id)
    assert groups.draw_batch() is not None
    assert groups.receive(piece(group_id, 0, [9, STOP]), 0).verdict is Verdict.DUPLICATE
    assert groups.receive(piece(group_id, 0, [9]), 0).verdict is Verdict.CLOSED
    assert groups.draw_batch() is None


def test_a_gap_is_answered_with_the_count_held() -> None:
    groups = new_groups()
    group_id = groups.open_group(draw(0)).group_id
    assert groups.receive(piece(group_id, 1, [3, 4]), 0).held_tokens == 2
    verdict = groups.receive(piece(group_id, 1, [5], offset=3), 0)
    assert verdict.verdict is Verdict.RESEND and verdict.held_tokens == 2


def test_an_older_attempt_is_closed_once_a_newer_one_has_reported() -> None:
    groups = new_groups()
    group_id = groups.open_group(draw(0)).group_id
    groups.receive(piece(group_id, 0, [3]), 0)
    held = groups.take_over(group_id, 1)
    assert held is not None and held[0].token_ids == (3,)
    assert groups.receive(piece(group_id, 0, [4], offset=1), 0).verdict is Verdict.CLOSED
    assert groups.receive(piece(group_id, 0, [4], offset=1), 1).verdict is Verdict.HELD


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        (piece("g00000000", 2, [3]), "index"),
        (piece("g00000000", 0, [50]), "token ids"),
        (piece("g00000000", 0, [3], version=7), "published versions"),
        (piece("g00000000", 0, [3] * 9), "at most 8"),
    ],
)
def test_a_broken_segment_is_refused_with_its_reason(segment: RolloutSegment, text: str) -> None:
    groups = new_groups()
    groups.open_group(draw(0))
    verdict = groups.receive(segment, 0)
    assert verdict.verdict is Verdict.REFUSED and text in verdict.message
    assert groups.counts.refused == 1


def test_different_tokens_for_held_positions_are_refused_but_a_new_beginning_is_taken() -> None:
    groups = new_groups()
    group_id = groups.open_group(draw(0)).group_id
    groups.receive(piece(group_id, 0, [3, 4, 5]), 0)
    assert groups.receive(piece(group_id, 0, [9], offset=1), 0).verdict is Verdict.REFUSED
    assert groups.receive(piece(group_id, 0, [7, 8]), 0).verdict is Verdict.HELD
    assert groups.groups[group_id].rollouts[0].token_ids == (7, 8)


def test_a_failed_reward_costs_only_its_rollout() -> None:
    groups = new_groups(per_step=2)
    group_id = groups.open_group(draw(0)).group_id
    for index, value in enumerate((None, 1.0)):
        groups.receive(piece(group_id, index, [9, STOP]), 0)
        groups.reward(group_id, index, value)
    batch = groups.draw_batch()
    assert batch is not None and batch.groups[0].rewards == (1.0,) and batch.groups[0].rollouts[0].index == 1


def test_a_group_without_contrast_is_dropped_when_asked() -> None:
    groups = new_groups(per_step=2, drops_equal_rewards=True)
    group_id = groups.open_group(draw(0)).group_id
    for index in range(2):
        groups.receive(piece(group_id, index, [9, STOP]), 0)
        groups.reward(group_id, index, 1.0)
    assert groups.draw_batch() is None
    (closure,) = groups.take_closures()
    assert closure.reason == "no contrast" and closure.retry is None


def test_a_step_drops_a_bounded_number_of_groups_without_contrast_and_then_trains_on_them() -> None:
    groups = new_groups(per_step=2, drops_equal_rewards=True)

    def offered(cursor: int) -> bool:
        """Whether a group without contrast is kept."""
        group_id = groups.open_group(draw(cursor)).group_id
        for index in range(2):
            groups.receive(piece(group_id, index, [9, STOP]), 0)
            groups.reward(group_id, index, 1.0)
        return group_id in groups.groups

    assert [offered(cursor) for cursor in range(3)] == [False, False, True]
    assert groups.draw_batch() is not None
    assert not offered(3), "the next step may drop again"


@given(cuts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20), seed=st.integers(0, 99))
def test_segments_in_any_overlap_give_the_rollout_as_it_was_sampled(cuts: list[tuple[int, int]], seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(2, 50) for _ in range(7)] + [STOP]
    groups = new_groups()
    group_id = groups.open_group(draw(0)).group_id
    for low, high in [*cuts, (0, 8)]:
        end = max(low, high)
        verdict = groups.receive(piece(group_id, 0, tokens[min(low, high) : end], offset=min(low, high)), 0)
        held = groups.groups[group_id].rollouts[0].token_ids
        assert list(held) == tokens[: verdict.held_tokens]
    assert groups.receive(piece(group_id, 0, tokens), 0).verdict is Verdict.DUPLICATE
    assert list(groups.groups[group_id].rollouts[0].token_ids) == tokens


def test_a_rollout_that_repeats_itself_is_admitted_as_it_stands_and_half_of_a_group_is_let_be() -> None:
    rule = PruningRule(loop_tokens=4, loop_repeats=2, period_max=2)
    groups = new_groups(per_step=2, per_group=2, pruning=rule)
    group_id = groups.open_group(draw(0)).group_id
    assert groups.receive(piece(group_id, 0, [7, 8, 7]), 1).verdict is Verdict.HELD
    pruned = groups.receive(piece(group_id, 0, [8], offset=3), 1)
    assert pruned.verdict is Verdict.ADMITTED and pruned.held_tokens == 4
    assert groups.groups[group_id].rollouts[0].finish_reason is FinishReason.LENGTH
    assert groups.receive(piece(group_id, 0, [7], offset=4), 1).verdict is Verdict.DUPLICATE
    assert groups.receive(piece(group_id, 1, [7, 8, 7, 8]), 1).verdict is Verdict.HELD, "the other half is let be"
    assert groups.counts.pruned == 1 and groups.counts.admitted == 1


# ---- what no honest worker sends: one test a lie

SPEC = GroupSpec(GroupId("g"), (5, 6), 4, SamplingParams(max_new_tokens=6, stop_token_ids=(STOP,)), 0)
FILTERED = replace(SPEC, sampling=replace(SPEC.sampling, top_p=0.9))
COLD = replace(SPEC, sampling=replace(SPEC.sampling, temperature=0.7))
PUBLISHED = (Version(0), Version(2))


def segment(logprobs: tuple[float, ...], raw: tuple[float, ...]) -> RolloutSegment:
    spans = (VersionSpan(Version(2), len(logprobs)),)
    return RolloutSegment(GroupId("g"), 0, 0, (7,) * len(raw), logprobs, raw, spans, FinishReason.UNFINISHED)


def rollout(tokens: tuple[int, ...], reason: FinishReason) -> Rollout:
    numbers = (-1.0,) * len(tokens)
    return Rollout(GroupId("g"), 0, tokens, numbers, numbers, (VersionSpan(Version(2), len(tokens)),), reason)


@pytest.mark.parametrize(
    ("spec", "logprobs", "raw", "is_refused"),
    [
        (SPEC, (-1.0, -2.0), (-1.0, -2.0 - 1e-6), False),
        (SPEC, (-1.0, -2.0), (-1.0, -18.0), True),  # honest where it was looked at, forged where it is trained on
        (SPEC, (-1.0, -2.0), (-1.0, 0.0), True),
        (FILTERED, (-1.0, -2.0), (-1.1, -2.4), False),  # a filter makes its tokens likelier
        (FILTERED, (-1.0, -2.0), (-1.1, -1.9), True),
        (COLD, (-1.0, -2.0), (-1.4, -1.7), False),  # at another temperature only one of the two is used
    ],
)
def test_the_two_numbers_of_a_token_stand_in_the_relation_that_its_sampling_says(
    spec: GroupSpec, logprobs: tuple[float, ...], raw: tuple[float, ...], is_refused: bool
) -> None:
    problem = problem_of_segment(segment(logprobs, raw), spec, 50, PUBLISHED)
    assert (problem is not None) == is_refused
    assert problem is None or "token 1" in problem


def test_what_training_uses_is_the_raw_number_at_temperature_1_and_the_other_elsewhere() -> None:
    assert (
        SPEC.sampling.trained_logprobs((-1.0,), (-2.0,))
        == FILTERED.sampling.trained_logprobs((-1.0,), (-2.0,))
        == (-2.0,)
    )
    assert COLD.sampling.trained_logprobs((-1.0,), (-2.0,)) == (-1.0,)


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
    problem = problem_of_end(rollout(tokens, reason), 0, SPEC)
    assert (problem is None) == (text is None) and (text or "") in (problem or "")


def test_a_stop_token_that_was_held_already_ends_the_rollout_too() -> None:
    assert problem_of_end(rollout((7, STOP, 8), FinishReason.UNFINISHED), 2, SPEC) is not None

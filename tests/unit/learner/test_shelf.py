from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, RolloutSegment, SamplingParams, Verdict, VersionSpan
from echo2.learner.batch import Batch
from echo2.learner.group import Draw
from echo2.learner.selection import PruningRule
from echo2.learner.shelf import Shelf, ShelfConfig
from echo2.staleness.ledger import Ledger

STOP = 1


def new_shelf(bound: int = 2, per_step: int = 4, per_group: int = 2, **options: Any) -> Shelf:
    config = ShelfConfig(bound, per_step, per_group, vocabulary_size=50, **options)
    return Shelf(config, Ledger(bound))


def draw(cursor: int) -> Draw:
    return Draw(cursor, 0, (5, 6, 7), SamplingParams(max_new_tokens=8, stop_token_ids=(STOP,), seed=cursor))


def piece(group_id: str, index: int, tokens: list[int], offset: int = 0, version: int = 0) -> RolloutSegment:
    finish = FinishReason.STOP if tokens and tokens[-1] == STOP else FinishReason.UNFINISHED
    return RolloutSegment(
        GroupId(group_id),
        index,
        offset,
        tuple(tokens),
        tuple(-0.5 for _ in tokens),
        tuple(-0.5 for _ in tokens),
        (VersionSpan(Version(version), len(tokens)),) if tokens else (),
        finish,
    )


def fill(shelf: Shelf, group_id: str, version: int = 0) -> None:
    for index in range(shelf.config.rollouts_per_group):
        verdict = shelf.receive(piece(group_id, index, [9, STOP], version=version), 0)
        assert verdict.verdict is Verdict.ADMITTED
        shelf.reward(GroupId(group_id), index, float(index))


def test_a_batch_is_drawn_of_complete_scored_groups_only() -> None:
    shelf = new_shelf()
    first, second = (shelf.open_group(draw(i), 0).group_id for i in range(2))
    fill(shelf, first)
    assert shelf.draw_batch() is None
    fill(shelf, second)
    batch = shelf.draw_batch()
    assert batch is not None and batch.rollout_count == 4 and shelf.next_step == 1
    assert [closure.group_id for closure in shelf.take_closures()] == [first, second]
    assert shelf.groups == {}


def test_groups_that_grow_stale_first_are_trained_first() -> None:
    shelf = new_shelf(per_step=2)
    shelf.publish(Version(1))
    newer, older = (shelf.open_group(draw(i), 0).group_id for i in range(2))
    fill(shelf, newer, version=1)
    fill(shelf, older, version=0)
    batch = shelf.draw_batch()
    assert batch is not None and batch.groups[0].spec.group_id == older


def test_groups_behind_a_closed_one_move_up_to_an_earlier_step() -> None:
    """Else they wait for a version that comes only with the step that waits for them."""
    shelf = new_shelf(per_step=2)  # one group a step
    ids = [shelf.open_group(draw(cursor), cursor).group_id for cursor in range(4)]
    fill(shelf, ids[0])
    assert shelf.move_up() == []
    for index in range(2):  # the rewards of the second group fail: it is closed untrained
        assert shelf.receive(piece(ids[1], index, [9, STOP]), 0).verdict is Verdict.ADMITTED
        shelf.reward(ids[1], index, None)
    moved = shelf.move_up()
    assert [(spec.group_id, spec.consume_step) for spec in moved] == [(ids[2], 1), (ids[3], 2)]
    assert [spec.consume_step for spec in shelf.incomplete_specs()] == [1, 2]
    assert shelf.move_up() == []


def test_a_stale_segment_is_refused_at_admission_and_its_prompt_offered_again() -> None:
    shelf = new_shelf(bound=1, per_step=2)
    late = shelf.open_group(draw(0), 0).group_id
    for cursor in (1, 2):
        fill(shelf, shelf.open_group(draw(cursor), 0).group_id)
    for _ in range(2):
        assert shelf.draw_batch() is not None
    shelf.take_closures()
    verdict = shelf.receive(piece(late, 0, [9, STOP], version=0), 0)
    assert verdict.verdict is Verdict.STALE
    (closure,) = shelf.take_closures()
    assert closure.reason == "stale" and closure.retry is not None and closure.retry.cursor == 0
    again = shelf.open_group(closure.retry, 2)
    assert again.group_id != late and again.prompt_token_ids == (5, 6, 7) and again.sampling == draw(0).sampling


def test_a_buffered_group_that_grew_stale_is_dropped_at_consumption() -> None:
    shelf = new_shelf(bound=1, per_step=4)
    waiting = shelf.open_group(draw(0), 0).group_id
    fill(shelf, waiting)
    shelf.next_step = type(shelf.next_step)(2)
    assert shelf.draw_batch() is None
    assert shelf.counts.dropped_stale == 2 and waiting not in shelf.groups


def test_a_finished_rollout_sent_again_changes_nothing() -> None:
    shelf = new_shelf()
    group_id = shelf.open_group(draw(0), 0).group_id
    assert shelf.receive(piece(group_id, 0, [9, STOP]), 0).verdict is Verdict.ADMITTED
    assert shelf.receive(piece(group_id, 0, [9, STOP]), 0).verdict is Verdict.DUPLICATE
    assert shelf.receive(piece(group_id, 0, [8, 8, STOP]), 0).verdict is Verdict.DUPLICATE
    assert shelf.groups[group_id].rollouts[0].token_ids == (9, STOP)


def test_a_trained_group_sent_again_is_a_duplicate_and_not_trained() -> None:
    shelf = new_shelf(per_step=2)
    group_id = shelf.open_group(draw(0), 0).group_id
    fill(shelf, group_id)
    assert shelf.draw_batch() is not None
    assert shelf.receive(piece(group_id, 0, [9, STOP]), 0).verdict is Verdict.DUPLICATE
    assert shelf.receive(piece(group_id, 0, [9]), 0).verdict is Verdict.CLOSED
    assert shelf.draw_batch() is None


def test_a_gap_is_answered_with_the_count_held() -> None:
    shelf = new_shelf()
    group_id = shelf.open_group(draw(0), 0).group_id
    assert shelf.receive(piece(group_id, 1, [3, 4]), 0).held_tokens == 2
    verdict = shelf.receive(piece(group_id, 1, [5], offset=3), 0)
    assert verdict.verdict is Verdict.RESEND and verdict.held_tokens == 2


def test_an_older_attempt_is_closed_once_a_newer_one_has_reported() -> None:
    shelf = new_shelf()
    group_id = shelf.open_group(draw(0), 0).group_id
    shelf.receive(piece(group_id, 0, [3]), 0)
    held = shelf.held_rollouts(group_id, 1)
    assert held is not None and held[0].token_ids == (3,)
    assert shelf.receive(piece(group_id, 0, [4], offset=1), 0).verdict is Verdict.CLOSED
    assert shelf.receive(piece(group_id, 0, [4], offset=1), 1).verdict is Verdict.HELD


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
    shelf = new_shelf()
    shelf.open_group(draw(0), 0)
    verdict = shelf.receive(segment, 0)
    assert verdict.verdict is Verdict.REFUSED and text in verdict.message
    assert shelf.counts.refused == 1


def test_different_tokens_for_held_positions_are_refused_but_a_new_beginning_is_taken() -> None:
    shelf = new_shelf()
    group_id = shelf.open_group(draw(0), 0).group_id
    shelf.receive(piece(group_id, 0, [3, 4, 5]), 0)
    assert shelf.receive(piece(group_id, 0, [9], offset=1), 0).verdict is Verdict.REFUSED
    assert shelf.receive(piece(group_id, 0, [7, 8]), 0).verdict is Verdict.HELD
    assert shelf.groups[group_id].rollouts[0].token_ids == (7, 8)


def test_a_failed_reward_costs_only_its_rollout() -> None:
    shelf = new_shelf(per_step=2)
    group_id = shelf.open_group(draw(0), 0).group_id
    for index, value in enumerate((None, 1.0)):
        shelf.receive(piece(group_id, index, [9, STOP]), 0)
        shelf.reward(group_id, index, value)
    batch = shelf.draw_batch()
    assert batch is not None and batch.groups[0].rewards == (1.0,) and batch.groups[0].rollouts[0].index == 1


def test_a_group_without_contrast_is_dropped_when_asked() -> None:
    shelf = new_shelf(per_step=2, drops_equal_rewards=True)
    group_id = shelf.open_group(draw(0), 0).group_id
    for index in range(2):
        shelf.receive(piece(group_id, index, [9, STOP]), 0)
        shelf.reward(group_id, index, 1.0)
    assert shelf.draw_batch() is None
    (closure,) = shelf.take_closures()
    assert closure.reason == "no contrast" and closure.retry is None


def test_a_step_drops_a_bounded_number_of_groups_without_contrast_and_then_trains_on_them() -> None:
    shelf = new_shelf(per_step=2, drops_equal_rewards=True)

    def offered(cursor: int) -> bool:
        """Whether a group without contrast is kept."""
        group_id = shelf.open_group(draw(cursor), 0).group_id
        for index in range(2):
            shelf.receive(piece(group_id, index, [9, STOP]), 0)
            shelf.reward(group_id, index, 1.0)
        return group_id in shelf.groups

    assert [offered(cursor) for cursor in range(3)] == [False, False, True]
    assert shelf.draw_batch() is not None
    assert not offered(3), "the next step may drop again"


@given(cuts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20), seed=st.integers(0, 99))
def test_segments_in_any_overlap_give_the_rollout_as_it_was_sampled(cuts: list[tuple[int, int]], seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(2, 50) for _ in range(7)] + [STOP]
    shelf = new_shelf()
    group_id = shelf.open_group(draw(0), 0).group_id
    for low, high in [*cuts, (0, 8)]:
        end = max(low, high)
        verdict = shelf.receive(piece(group_id, 0, tokens[min(low, high) : end], offset=min(low, high)), 0)
        held = shelf.groups[group_id].rollouts[0].token_ids
        assert list(held) == tokens[: verdict.held_tokens]
    assert shelf.receive(piece(group_id, 0, tokens), 0).verdict is Verdict.DUPLICATE
    assert list(shelf.groups[group_id].rollouts[0].token_ids) == tokens


class ShelfMachine(RuleBasedStateMachine):
    """Any order of offers, reports, copies, publications and draws keeps the promises of the module."""

    @initialize(bound=st.integers(0, 4))
    def begin(self, bound: int) -> None:
        self.shelf = new_shelf(bound=bound)
        self.cursor = 0
        self.names: list[GroupId] = []
        self.times_trained: Counter[tuple[GroupId, int]] = Counter()
        self.batches: list[Batch] = []

    @rule()
    def offer(self) -> None:
        self.names.append(self.shelf.open_group(draw(self.cursor), 0).group_id)
        self.cursor += 1

    @rule(pick=st.integers(0, 1000), index=st.integers(0, 1), token=st.sampled_from([STOP, 2, 3]))
    def report(self, pick: int, index: int, token: int) -> None:
        if not self.names:
            return
        group_id = self.names[pick % len(self.names)]
        version = self.shelf.published[pick % len(self.shelf.published)]
        group = self.shelf.groups.get(group_id)
        held = group.rollouts[index].token_ids if group else ()
        spans = group.rollouts[index].version_spans if group else ()
        version = max(version, spans[-1].version) if spans else version
        self.shelf.receive(piece(group_id, index, [token], len(held), version), 0)
        self.shelf.reward(group_id, index, float(token))

    @rule()
    def publish(self) -> None:
        if self.shelf.next_step > self.shelf.published[-1]:
            self.shelf.publish(Version(self.shelf.next_step))

    @rule()
    def draw_and_train(self) -> None:
        step = self.shelf.next_step
        batch = self.shelf.draw_batch()
        if batch is None:
            return
        assert batch.step == step and len(batch.groups) == 2
        for group in batch.groups:
            for rollout in group.rollouts:
                self.times_trained[(group.spec.group_id, rollout.index)] += 1
                assert rollout.is_finished and rollout.oldest_version is not None
                assert rollout.oldest_version >= step - self.shelf.config.staleness_bound

    @rule()
    def offer_again(self) -> None:
        for closure in self.shelf.take_closures():
            assert closure.group_id not in self.shelf.groups
            if closure.retry is not None:
                self.names.append(self.shelf.open_group(closure.retry, 0).group_id)

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        if hasattr(self, "shelf"):
            assert all(count == 1 for count in self.times_trained.values())
            assert self.shelf.ledger.over_stale_tokens() == 0


TestShelfMachine = ShelfMachine.TestCase
TestShelfMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_rollout_that_repeats_itself_is_admitted_as_it_stands_and_half_of_a_group_is_let_be() -> None:
    rule = PruningRule(loop_tokens=4, loop_repeats=2, period_max=2)
    shelf = new_shelf(per_step=2, per_group=2, pruning=rule)
    group_id = shelf.open_group(draw(0), 0).group_id
    assert shelf.receive(piece(group_id, 0, [7, 8, 7]), 1).verdict is Verdict.HELD
    pruned = shelf.receive(piece(group_id, 0, [8], offset=3), 1)
    assert pruned.verdict is Verdict.ADMITTED and pruned.held_tokens == 4
    assert shelf.groups[group_id].rollouts[0].finish_reason is FinishReason.LENGTH
    assert shelf.receive(piece(group_id, 0, [7], offset=4), 1).verdict is Verdict.DUPLICATE
    assert shelf.receive(piece(group_id, 1, [7, 8, 7, 8]), 1).verdict is Verdict.HELD, "the other half is let be"
    assert shelf.counts.pruned == 1 and shelf.counts.admitted == 1

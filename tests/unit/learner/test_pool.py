"""The pool's promises, whatever the order of reports, rewards, versions, bars, plans, evaluations, checkpoints and kills."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from time import process_time
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2.base.errors import DiskFull
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, Routing, SamplingParams, Verdict, VersionSpan, Work
from echo2.learner.audit import Habits
from echo2.learner.rollouts import admission, workers
from echo2.learner.rollouts.admission import RETRIES_MAX, OpenGroups, cap_groups, problem_of_end, problem_of_segment
from echo2.learner.rollouts.evaluation import MOVES_MAX, OPEN_MAX, QuestionSet
from echo2.learner.rollouts.groups import (
    NOBODY,
    SentTokens,
    TurnOf,
    evaluated_version,
    extended,
    is_later_turn,
    root_of,
    turn_of,
)
from echo2.learner.rollouts.journal import closed, drawn
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.learner.made import groups_config, rollout_of
from tests.unit.learner.stage import ALICE, BOB, PATIENCE_S, SAMPLING, STOP, Stage, draw, piece

WORKERS = (ALICE, BOB)
USEFUL = (Verdict.HELD, Verdict.ADMITTED)


class PoolMachine(RuleBasedStateMachine):
    """After each call: callers know what the pool holds, and a kill at this moment loses nothing that was promised."""

    @initialize(bound=st.integers(0, 3), drops=st.booleans(), evaluates=st.booleans())
    def begin(self, bound: int, drops: bool, evaluates: bool) -> None:
        sets = (QuestionSet("held_out", 3, 1), QuestionSet("hard", 2, 2)) if evaluates else ()
        self.stage = Stage(groups_config(bound, drops=drops), sets)
        self.pool = self.stage.pool
        self.names: list[GroupId] = []
        self.attempts: dict[GroupId, int] = {}  # the newest that took over or reported, since the start
        self.sent: dict[tuple[GroupId, int], list[PeerId]] = {}  # each token's worker
        self.now = 0.0

    def teardown(self) -> None:
        """Once faults stop, every open evaluation ends, and the trainer gets its batch."""
        if not hasattr(self, "stage"):
            return
        stage = self.stage
        for _ in range(40):
            for group_id in stage.questions:
                for index in range(stage.offered[group_id].rollout_count):
                    version = evaluated_version(group_id)
                    stage.report(piece(group_id, index, [9, STOP], version=version), attempt=9)  # type: ignore[arg-type]
            while stage.prompts.due:
                stage.reward(0.0)
            if not stage.questions:
                break
        assert not stage.questions and not stage.pool.evaluation_waits_for, stage.pool._evaluation
        opened: set[str] = set()
        for _, record in stage.journal.records:
            if record.HasField("opened"):
                assert record.opened.group.group_id not in opened, "a group is opened once"
                opened.add(record.opened.group.group_id)
            elif record.HasField("closed"):
                opened.discard(record.closed.group_id)

    @rule(
        pick=st.integers(0, 1000), index=st.integers(0, 2), last=st.sampled_from([STOP, STOP, 2, 49, 50]),
        more=st.lists(st.sampled_from([2, 3, STOP]), max_size=2), attempt=st.integers(0, 2), is_exact=st.booleans(),
        back=st.sampled_from([0, 0, 1, 2, 9, -1, -1]),
    )  # fmt: skip
    def report(
        self, pick: int, index: int, last: int, more: list[int], attempt: int, is_exact: bool, back: int
    ) -> None:
        """`back`: how many of the tokens that are held come once more, or other ones in their place; -1: one is missing."""
        groups, names = self.stage.pool.groups, self.all_names()
        group_id = names[pick % len(names)]
        group = groups.groups.get(group_id)
        held = group.rollouts[index] if group is not None and index < len(group.rollouts) else None
        version, exact = groups.published[pick % len(groups.published)], evaluated_version(group_id)
        if held is not None and held.version_spans:
            version = max(version, held.version_spans[-1].version)
        if is_exact and exact is not None:
            version = exact
        tokens = held.token_ids if held is not None else ()
        offset = max(0, len(tokens) - back)
        again = tokens[offset:] if pick % 3 else (4,) * len(tokens[offset:])
        segment = piece(group_id, index, [*again, *more, last], offset, version)
        expected, grown = self.judged(segment, attempt)
        sender = WORKERS[pick % 2]
        (verdict,) = self.stage.report(segment, attempt=attempt, sender=sender)
        assert verdict is expected, (segment, held)
        if verdict in USEFUL:
            assert group is not None and group.rollouts[index].token_ids == grown
            kept = len(tokens) if grown[: len(tokens)] == tokens else 0
            before = self.sent.get((group_id, index), [])[:kept]
            self.sent[group_id, index] = before + [sender] * (len(grown) - kept)
        synced = [record for _, record in self.stage.journal.records[: self.stage.journal.synced]]
        if verdict is Verdict.ADMITTED:
            kept = {(record.rollout.rollout.group_id, record.rollout.rollout.index) for record in synced}
            assert (group_id, index) in kept, "it is on the disk first"

    @rule(pick=st.integers(0, 1000), again=st.integers(0, 11), turns=st.integers(1, 3))
    def finish(self, pick: int, again: int, turns: int) -> None:
        """All of a group comes, and what the world has to answer: later turns first, then rewards."""
        root = root_of([*self.stage.pool.groups.groups][pick % len(self.stage.pool.groups.groups)])
        for turn in range(turns):
            family = [group for name, group in self.stage.pool.groups.groups.items() if root_of(name) == root]
            for name, index in [(group.spec.group_id, i) for group in family for i in range(len(group.rollouts))]:
                names = self.all_names()
                number = names.index(name) + again * len(names)
                self.report(number, index, STOP, [], attempt=2, is_exact=True, back=0)
            for number in range(len(self.stage.prompts.due)):
                self.stage.reward(number % 2, (7,) if turn + 1 < turns else ())

    def all_names(self) -> list[GroupId]:
        """Of the groups so far, closed ones too."""
        self.names += [name for name in self.stage.pool.groups.groups if name not in self.names]
        return self.names

    def judged(self, segment: Rollout, attempt: int) -> tuple[Verdict, tuple[int, ...]]:
        """The verdict by the rules in words, from what is held, and the rollout as the segment makes it."""
        groups, name = self.stage.pool.groups, segment.group_id
        group, exact, (span,) = groups.groups.get(name), evaluated_version(name), segment.version_spans
        if group is None:
            trained = {done.spec.group_id for batch in self.stage.batches for done in batch.groups}
            return Verdict.DUPLICATE if root_of(name) in trained and segment.is_finished else Verdict.CLOSED, ()
        if attempt < self.attempts.get(name, 0):
            return Verdict.CLOSED, ()  # one that a later one has replaced adds nothing
        known = [exact]  # an evaluation takes tokens of its version alone
        if exact is None:
            known = [each for each in groups.published if each >= group.min_version]
        if segment.index >= len(group.rollouts) or max(segment.token_ids) >= 50 or span.version not in known:
            return Verdict.REFUSED, ()
        self.attempts[name] = attempt
        held = group.rollouts[segment.index]
        if held.is_finished:
            return Verdict.DUPLICATE, ()
        if segment.offset > len(held.token_ids):
            return Verdict.RESEND, ()
        grown = held.token_ids[: segment.offset] + segment.token_ids
        old = [span.version for span in held.version_spans]
        if grown[: len(held.token_ids)] != held.token_ids[: len(grown)]:
            if segment.offset:
                return Verdict.REFUSED, ()
            old = []  # a worker that lost its state begins anew
        elif len(grown) < len(held.token_ids):
            grown = held.token_ids
        if STOP in grown[:-1] or len(grown) > SAMPLING.max_new_tokens:
            return Verdict.REFUSED, ()
        if exact is None and min([*old, span.version]) < groups.next_step - self.stage.pool.groups.bound:
            return Verdict.STALE, ()
        return Verdict.ADMITTED if segment.is_finished else Verdict.HELD, grown

    @rule(pick=st.integers(0, 1000), attempt=st.integers(0, 2))
    def take_over(self, pick: int, attempt: int) -> None:
        names = list(self.stage.pool.groups.groups)
        group_id = names[pick % len(names)]
        held = self.stage.tell(self.stage.pool.groups.take_over, group_id, attempt)
        assert (held is None) == (attempt < self.attempts.get(group_id, 0))
        if held is not None:
            self.attempts[group_id] = attempt

    @rule(reward=st.sampled_from([None, 0.0, 1.0]), says=st.integers(0, 3), pick=st.integers(0, 100))
    def world_answers(self, reward: float | None, says: int, pick: int) -> None:
        if due := self.stage.prompts.due:
            self.stage.reward(reward, (7,) if says == 0 else (), pick % len(due))

    @rule(are_ready=st.booleans())
    def trainer_is_free(self, are_ready: bool) -> None:
        groups = self.stage.pool.groups
        if are_ready:  # else few batches are ever drawn
            for number in range(3):
                self.finish(number, 0, 1)
        step = groups.next_step
        fresh = [group for group in groups.training if group.is_ready and not is_later_turn(group.spec.group_id)]
        ages = {group.spec.group_id: self.oldest_of(group.spec.group_id) for group in fresh}
        ages = {name: oldest for name, oldest in ages.items() if oldest >= step - self.stage.pool.groups.bound}
        expected = {(name, index): self.whole(name, index) for name in ages for index in range(2)}
        batch = self.stage.next_batch()
        assert (batch is None) == (len(ages) < 2)
        if batch is None:
            return
        synced = [record for _, record in self.stage.journal.records[: self.stage.journal.synced]]
        assert drawn(batch) in synced, "its composition is on the disk first"
        assert (
            batch.step == step
            and [group.spec.group_id for group in batch.groups] == sorted(ages, key=ages.__getitem__)[:2]
        )
        for group in batch.groups:
            assert evaluated_version(group.spec.group_id) is None
            for place, rollout in enumerate(group.rollouts):
                senders = [sent.peer_id for sent in group.senders[place] for _ in range(sent.token_count)]
                assert (group.text_of(place)[0], senders) == expected[group.spec.group_id, rollout.index]
                assert rollout.is_finished and rollout.oldest_version is not None
                assert rollout.oldest_version >= step - self.stage.pool.groups.bound

    def oldest_of(self, root: GroupId) -> int:
        """The version of a group's oldest token, of all turns: by it a batch takes those first that grow stale first."""
        groups = self.stage.pool.groups.groups
        family = [group for name, group in groups.items() if root_of(name) == root]
        return min(s.version for group in family for rollout in group.rollouts for s in rollout.version_spans)

    def whole(self, root: GroupId, index: int) -> tuple[list[int], list[PeerId]]:
        """A rollout's turns, between them what the world said; and who sent its tokens."""
        groups, turn = self.stage.pool.groups.groups, 1
        text, senders = [*groups[root].rollouts[index].token_ids], [*self.sent[root, index]]
        while (later := groups.get(GroupId(f"{root}.{index}.{turn}"))) is not None:
            text += [7, *later.rollouts[0].token_ids]
            senders += self.sent[later.spec.group_id, 0]
            turn += 1
        return text, senders

    @rule(is_due=st.booleans())
    def publish(self, is_due: bool) -> None:
        groups = self.stage.pool.groups
        if groups.next_step > groups.published[-1]:
            version = Version(groups.next_step)
            self.stage.tell(self.stage.pool.on_published, version)
            if is_due:
                self.stage.tell(self.stage.pool.evaluate, version, False)

    @rule(is_last=st.booleans())
    def evaluate(self, is_last: bool) -> None:
        self.stage.tell(self.stage.pool.evaluate, self.stage.pool.groups.published[-1], is_last)

    @rule(worker=st.sampled_from(WORKERS), is_back=st.booleans())
    def bar(self, worker: PeerId, is_back: bool) -> None:
        pool = self.stage.pool
        if is_back:
            self.stage.tell(pool.release, worker)
            return
        self.stage.tell(pool.accuse, worker, "planted", is_certain=True)
        assert not any(group.is_sent_by(worker) for group in pool.groups.groups.values())
        assert pool.barred[worker] == "planted"

    @rule(rollouts=st.none() | st.integers(1, 40))
    def plan(self, rollouts: int | None) -> None:
        self.stage.tell(self.stage.pool.on_plan, rollouts)
        assert self.stage.pool.cap_rollouts == rollouts

    @rule(passed_s=st.sampled_from([1.0, PATIENCE_S]))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s
        self.stage.tell(self.stage.pool.tick, self.now)

    @rule()
    def checkpoint(self) -> None:
        self.stage.take_checkpoint()

    @rule(kept=st.none() | st.integers(0, 3))
    def kill(self, kept: int | None) -> None:
        """Of the process; with `kept`, of the machine: then unsynced records are lost."""
        step = self.stage.pool.groups.next_step
        cap = self.stage.pool.cap_rollouts
        self.stage.start(kept)
        self.attempts.clear()
        assert self.stage.pool.groups.next_step == step
        self.stage.tell(self.stage.pool.on_plan, cap)

    # ---- after every call

    @invariant()
    def the_coordinator_knows_every_group_and_its_step(self) -> None:
        groups, offered = self.stage.pool.groups, self.stage.offered
        self.attempts = {name: attempt for name, attempt in self.attempts.items() if name in groups.groups}
        assert offered.keys() <= groups.groups.keys()
        assert all(offered[group.spec.group_id] == group.spec for group in groups.lacking)

    @invariant()
    def as_many_groups_are_in_flight_as_the_cap_allows(self) -> None:
        if self.stage.pool.exhausted is None:
            in_flight = self.stage.pool.groups.in_flight_groups
            assert in_flight >= cap_groups(self.stage.config, self.stage.pool.cap_rollouts)

    @invariant()
    def the_journal_gives_back_what_is_held(self) -> None:
        held = self.stage.pool.groups
        groups, history = self.stage.restored()
        assert not history.groups and not history.finished, "it lasts as long as the learner"
        assert groups.next_step == held.next_step and history.cursor == self.stage.pool.cursor
        assert held.groups.keys() <= groups.groups.keys()
        extra = groups.groups.keys() - held.groups.keys()
        assert all(evaluated_version(name) is not None for name in extra), "answers stay until it is over"
        for group_id, group in held.groups.items():
            finished = [rollout if rollout.is_finished else None for rollout in group.rollouts]
            assert [r if r.is_finished else None for r in groups.groups[group_id].rollouts] == finished

    @invariant()
    def what_was_acknowledged_is_trained_dropped_or_held(self) -> None:
        stage = self.stage
        trained = {group.spec.group_id for batch in stage.batches for group in batch.groups}
        dropped = {name for name, reason in stage.closed if reason != "complete"}
        groups, _ = stage.restored()
        for group_id, index in stage.acknowledged:
            if {group_id, root_of(group_id)} & (trained | dropped) or self._is_over(group_id):
                continue
            assert groups.groups[group_id].rollouts[index].is_finished, f"{group_id}/{index} is lost"

    def _is_over(self, group_id: GroupId) -> bool:
        """Whether it belongs to an evaluation that ended, moved on, or asks the question again."""
        records = (record for _, record in self.stage.journal.records)
        is_over = closed(group_id) in records or Step(0) < self.stage.checkpoint[0]
        return evaluated_version(group_id) is not None and is_over

    @invariant()
    def nothing_is_trained_twice_and_answers_count_once(self) -> None:
        trained = [group.spec.group_id for batch in self.stage.batches for group in batch.groups]
        assert len(set(trained)) == len(trained) and self.stage.pool.groups.ledger.over_stale_tokens() == 0
        for group in self.stage.answered:
            spans = {span.version for rollout in group.rollouts for span in rollout.version_spans}
            assert spans == {evaluated_version(group.spec.group_id)} == {group.spec.exact_version}
        versions = [row["step"] for row in self.stage.evaluations.rows]
        assert all(first < second for first, second in pairwise(versions)), "a version has one result"
        sets = self.stage.evaluations.sets
        for row in self.stage.evaluations.rows:
            assert row["eval/rollouts"] >= sum(each.questions * each.samples for each in sets)
            for each in sets:
                assert {f"eval/{each.name}/reward", f"eval/{each.name}/pass@{each.samples}"} <= row.keys()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=90, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("kept", range(6))
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_power_cut_while_what_a_barred_worker_sent_is_dropped_leaves_no_turn_without_those_before_it(
    evaluates: bool, kept: int
) -> None:
    """The disk has the first few of the records since the last sync. A turn left alone would be the reopened question's, or opened
    again as the next one of the turn before the one that is missing."""
    machine = PoolMachine()
    machine.begin(bound=0, drops=False, evaluates=evaluates)
    machine.evaluate(is_last=False)
    machine.finish(again=0, pick=2 * evaluates, turns=3)
    machine.checkpoint()
    machine.bar(worker=ALICE, is_back=False)
    for lost in (kept, None):
        machine.kill(lost)
        machine.what_was_acknowledged_is_trained_dropped_or_held()
        machine.the_journal_gives_back_what_is_held()
    machine.bar(worker=BOB, is_back=False)
    machine.the_journal_gives_back_what_is_held()
    machine.teardown()


def test_a_full_disk_acknowledges_nothing_and_what_was_acknowledged_comes_back() -> None:
    stage = Stage()
    first, second, *_ = stage.offered
    assert stage.report(piece(first, 0, [9, STOP])) == [Verdict.ADMITTED]
    stage.journal.is_full = True
    with pytest.raises(DiskFull):
        stage.report(piece(second, 0, [9, STOP]))
    stage.journal.is_full = False
    stage.start(kept=0)
    assert stage.pool.groups.groups[first].rollouts[0].is_finished and len(stage.prompts.due) == 1
    assert second in stage.offered and not stage.pool.groups.groups[second].is_begun, "it is sampled again"
    assert stage.report(piece(second, 0, [9, STOP])) == [Verdict.ADMITTED]


def test_a_duplicate_is_acknowledged_once_the_first_copy_is_on_the_disk() -> None:
    """The first copy's answer may have been lost, with its worker or on the way."""
    stage = Stage()
    segment = piece(next(iter(stage.offered)), 0, [9, STOP])

    async def twice() -> None:
        first = asyncio.create_task(stage.pool.report([segment], 0, ALICE))
        await asyncio.sleep(0)
        assert stage.journal.synced < len(stage.journal.records), "the first copy waits for the disk"
        (verdict,) = await stage.pool.report([segment], 0, ALICE)
        assert verdict.verdict is Verdict.DUPLICATE and stage.journal.synced == len(stage.journal.records)
        await first

    stage.loop.run_until_complete(twice())


def test_who_sends_what_no_honest_worker_sends_is_barred_and_told_to_the_coordinator() -> None:
    stage = Stage()
    group_id = next(iter(stage.offered))
    for _ in range(workers.IMPOSSIBLE_MAX):
        assert stage.accused == []
        assert stage.report(piece(group_id, 0, [9], version=99)) == [Verdict.REFUSED]
    ((worker, reason, is_certain),) = stage.accused
    assert worker == ALICE and is_certain and "99" in reason and ALICE in stage.pool.barred
    assert stage.report(piece(group_id, 0, [9], version=99)) == [Verdict.REFUSED] and len(stage.accused) == 1
    restored = Stage()
    restored.pool.groups.resumed_at = restored.pool.groups.next_step
    for _ in range(workers.IMPOSSIBLE_MAX):
        assert restored.report(piece(group_id, 0, [9], version=99)) == [Verdict.REFUSED]
    assert restored.accused == [], "the learner has been restored from a backup, and who was ahead of it follows"


def test_a_stop_ends_the_wait_for_a_batch_and_for_evaluations() -> None:
    stage = begun()

    async def wait_and_stop() -> None:
        waiting = asyncio.gather(stage.pool.next_batch(), stage.pool.evaluations_ended())
        await asyncio.sleep(0)
        stage.pool.stop()
        assert await asyncio.wait_for(waiting, 1.0) == [None, None]

    stage.loop.run_until_complete(wait_and_stop())


def test_a_worker_does_not_choose_by_the_report_how_it_is_tested() -> None:
    stage = Stage()
    worker = PeerId("w")
    assert stage.pool.habits_of(worker) == Habits(False, False)
    stage.pool.note_habits(worker, Habits(True, False))
    assert stage.pool.habits_of(worker).draws_by_seed
    for keeps_cache in (False, True):
        stage.pool.note_habits(worker, Habits(keeps_cache, True))
    assert stage.pool.habits_of(worker) == Habits(False, True)


def new_groups(*shape: int, **options: Any) -> OpenGroups:
    return OpenGroups(groups_config(*shape, **options), 50)


def filled(
    groups: OpenGroups, cursor: int, version: int = 0, rewards: tuple[float | None, ...] = (0.0, 1.0)
) -> GroupId:
    """The id of a group whose rollouts came and were scored."""
    group_id = groups.open_group(cursor, draw(cursor)).group_id
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
def test_the_cap_is_at_least_a_batch_and_stays_fresh(groups: int, n: int, bound: int, planned: int | None) -> None:
    config = groups_config(bound, groups * n, n)
    cap = cap_groups(config, planned)
    assert groups <= cap <= groups * (bound + 1)
    if planned and groups * n <= planned <= groups * n * (bound + 1):
        assert cap == planned // n
    assert cap_groups(config, None) == min(2, bound + 1) * groups, "without a plan: one sampled, one in the buffer"


def test_groups_behind_a_closed_one_move_up_to_an_earlier_step() -> None:
    """Else they wait for a version that comes only with the step that waits for them."""
    groups = new_groups(2, 2)  # one group a step
    filled(groups, 0)
    ids = [groups.open_group(cursor, draw(cursor)).group_id for cursor in range(1, 4)]
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
    groups = new_groups(2, 2)  # what moves up between two turns goes on for its earlier step
    first, second = [groups.open_group(cursor, draw(cursor)).group_id for cursor in range(2)]
    for index in range(2):
        assert verdict(groups, second, index, [9, STOP]) is Verdict.ADMITTED
    groups.close_family(first, "stale")
    assert groups.move_up() == [], "no worker has it"
    turn = groups.open_turn(turn_of(second, 0), (7,))
    assert turn is not None and turn.consume_step == 0


@pytest.mark.parametrize("is_buffered", [True, False])
def test_stale_groups_are_dropped_and_their_prompts_offered_again(is_buffered: bool) -> None:
    groups = new_groups(1)
    late = filled(groups, 0) if is_buffered else groups.open_group(0, draw(0)).group_id
    groups.next_step = Step(2)
    if is_buffered:
        assert groups.draw_batch() is None and groups.counts.dropped_stale == 2
    else:
        assert verdict(groups, late, 0, [9, STOP]) is Verdict.STALE
    (closure,) = groups.take_closures()
    assert closure.reason == "stale" and closure.again == (0, 1)
    again = groups.open_group(0, draw(0), 1)
    assert again.group_id != late and again.prompt_token_ids == (5, 6, 7) and again.sampling == draw(0)[1]


@pytest.mark.parametrize("versions", [(0, 0), (1, 2, 1, 2, 1, 2, 1)])
def test_who_names_versions_that_no_honest_worker_had_is_accused_and_the_group_stays(versions: tuple[int, ...]) -> None:
    """An older one would make the group stale; each change of version costs the audit a forward pass."""
    groups = new_groups(1)
    groups.next_step = Step(2)
    for published in (1, 2):
        groups.publish(Version(published))
    name = groups.open_group(0, draw(0)).group_id
    spans = tuple(VersionSpan(Version(version), 1) for version in versions)
    lie = replace(piece(name, 0, [9] * len(versions)), version_spans=spans)
    for _ in range(workers.IMPOSSIBLE_MAX):
        assert groups.receive(lie, 0, ALICE).verdict is Verdict.REFUSED
    assert [accused.peer_id for accused in groups.workers.accused] == [ALICE]
    assert verdict(groups, name, 0, [9, STOP], version=1) is Verdict.ADMITTED
    *_, later = (groups.open_group(number, draw(number)) for number in range(1, 5))
    groups.next_step = Step(9)
    assert later.consume_step > 2 and groups.groups[later.group_id].min_version == 1, "the oldest that a worker has"
    assert verdict(groups, groups.open_group(9, draw(9)).group_id, 0, [9], version=2) is Verdict.REFUSED
    overdue = groups.open(replace(later, group_id=GroupId("overdue")), 1, 0)
    assert groups.groups[overdue.group_id].min_version == later.consume_step - 1 < 8


@pytest.mark.parametrize("row_bytes", [0, 5])
def test_routes_that_the_model_has_no_use_for_are_not_kept(row_bytes: int) -> None:
    """Else a worker fills the learner's memory and journal: 16 MiB a rollout."""
    groups = OpenGroups(groups_config(), 50, row_bytes=row_bytes)
    name = groups.open_group(0, draw(0)).group_id
    for index, size in enumerate((5, 2048)):
        segment = replace(piece(name, index, [9, STOP]), routing=Routing(b"", bytes(2 * size)))
        assert groups.receive(segment, 0).verdict is Verdict.ADMITTED
    assert [len(rollout.routing.tokens) for rollout in groups.groups[name].rollouts] == [2 * row_bytes, 0]


def test_what_is_remembered_of_earlier_steps_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "STEPS_REMEMBERED", 4)
    groups = new_groups(2, 2)  # one group a step
    groups.resumed_at = groups.next_step
    names = []
    for step in range(20):
        names.append(filled(groups, step, version=step))
        assert groups.draw_batch() is not None
        groups.publish(Version(step + 1))
    assert len(groups.ledger.trained) == 4 and len(groups.published) == 4 + 2 + 1
    late = [verdict(groups, name, 0, [9, STOP]) for name in (names[0], names[-1])]
    assert late == [Verdict.CLOSED, Verdict.DUPLICATE]
    name = groups.open_group(20, draw(20)).group_id
    for _ in range(workers.IMPOSSIBLE_MAX):
        assert groups.receive(piece(name, 0, [9], version=99), 0, ALICE).verdict is Verdict.REFUSED
    assert groups.workers.accused, "whoever was ahead of a restored learner has followed it long ago"


# ---- what is not worth training on


def test_a_step_drops_a_bounded_number_of_groups_without_contrast_and_then_trains_on_them() -> None:
    groups = new_groups(2, 2, drops=True)
    kept = [filled(groups, cursor, rewards=(1.0, 1.0)) in groups.groups for cursor in range(3)]
    assert kept == [False, False, True]
    assert [(closure.reason, closure.again) for closure in groups.take_closures()] == [("no contrast", None)] * 2
    assert groups.draw_batch() is not None
    assert filled(groups, 3, rewards=(1.0, 1.0)) not in groups.groups, "the next step may drop again"
    groups = new_groups(2, 2)
    assert filled(groups, 0, rewards=(1.0, 1.0)) in groups.groups, "unless it is asked for, none is dropped"


# ---- what no honest worker sends

STOPS = SamplingParams(
    max_new_tokens=6, stop_token_ids=(STOP,), stop_strings=(b"ab",), stop_piece_ids=(2, 3), stop_pieces=(b"a", b"b")
)
SPEC = GroupSpec(GroupId("g"), (5, 6), 4, STOPS, 0)
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
def test_a_token_s_two_numbers_have_a_relation(spec: GroupSpec, raw: tuple[float, ...], is_refused: bool) -> None:
    segment = replace(piece("g", 0, [7, 7]), logprobs=(-1.0, -2.0), raw_logprobs=raw)
    problem = problem_of_segment(segment, spec, 50, [Version(0)])
    assert (problem is not None) == is_refused and "token 1" in (problem or "token 1")
    trained = spec.sampling.trained_logprobs((-1.0,), (-2.0,))
    assert trained == ((-1.0,) if spec is COLD else (-2.0,)), "the raw number at temperature 1"


@pytest.mark.parametrize(
    ("tokens", "reason", "text"),
    [
        ((7, 2, 3), FinishReason.STOP, None),  # its stop string
        ((7, 3, 2), FinishReason.STOP, "a stop token at its end"),
        ((7, 2, 3, 8), FinishReason.UNFINISHED, "its first stop string, got 1 tokens behind it"),
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
def test_a_rollout_ends_where_its_lease_says(tokens: tuple[int, ...], reason: FinishReason, text: str | None) -> None:
    rollout = rollout_of(tokens, spans=[(2, len(tokens))], reason=reason)
    for held_tokens in range(min(3, len(tokens))):  # a stop token that was held already ends it too
        problem = problem_of_end(rollout, held_tokens, SPEC)
        assert (problem is None) == (text is None) and (text or "") in (problem or "")


SETS = (QuestionSet("held_out", 3, 1), QuestionSet("hard", 2, 4))


def begun(version: int = 0, sets: tuple[QuestionSet, ...] = SETS) -> Stage:
    stage = Stage(groups_config(4), sets)
    stage.tell(stage.pool.evaluate, Version(version), False)
    return stage


def publish(stage: Stage, *versions: int) -> None:
    for version in versions:
        stage.tell(stage.pool.on_published, Version(version))


def tick(stage: Stage, now: float) -> None:
    stage.tell(stage.pool.tick, now)


def versions(stage: Stage) -> set[Version | None]:
    return {evaluated_version(group_id) for group_id in stage.questions}


def test_it_is_answered_by_its_version_alone_and_no_batch_is_drawn_of_it() -> None:
    stage = begun()
    first, *_ = stage.questions
    assert len(stage.questions) == 5
    publish(stage, 1)
    assert stage.report(piece(first, 0, [9, STOP], version=1)) == [Verdict.REFUSED], "a token of another version"
    waiting = stage.loop.create_task(stage.pool.evaluations_ended())
    rewards = [(0.0,), (1.0,), (0.0,), (1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0)]
    for group_id, each in zip(stage.questions, rewards, strict=True):
        stage.fill(group_id, rewards=each)
    stage.loop.run_until_complete(asyncio.wait_for(waiting, 1.0))
    (row,) = stage.evaluations.rows
    unbiased = {"hard/pass@1": (0.25 + 0.5) / 2, "hard/pass@2": (0.5 + 5 / 6) / 2, "hard/pass@4": 1.0}
    expected = {**unbiased, "held_out/reward": 1 / 3, "hard/exact": 0.375, "reward": 0.35, "rollouts": 11, "tokens": 22}
    assert {name: row[f"eval/{name}"] for name in expected} == pytest.approx(expected) and len(stage.answered) == 5
    assert stage.next_batch() is None and not stage.questions
    groups = stage.pool.groups
    assert groups.ledger.histogram() == {} and groups.counts.admitted == 0 and not groups.evaluation


@pytest.mark.parametrize("left_out", [{1}, {0, 1, 2}])
def test_questions_that_cannot_be_asked_are_left_out_of_its_result(left_out: set[int]) -> None:
    stage = Stage(sets=(QuestionSet("held_out", 3, 1),))
    ask = stage.evaluations.draw
    stage.evaluations.draw = lambda version, number: (  # type: ignore[method-assign, assignment, return-value]
        None if number in left_out else ask(version, number)
    )
    stage.tell(stage.pool.evaluate, Version(0), False)
    assert len(stage.questions) == 3 - len(left_out)
    for question in stage.questions:
        stage.answer(question)
    assert [row["eval/rollouts"] for row in stage.evaluations.rows] == [2][: len(left_out) < 3]
    assert not stage.pool.evaluation_waits_for


def test_a_fleet_that_is_gone_does_not_hold_the_end_up() -> None:
    stage = begun()
    tick(stage, 0.0)
    assert "0 of 5 prompts answered" in stage.pool.evaluation_waits_for
    stage.answer(stage.questions[0])
    for now in (PATIENCE_S - 1, 2 * PATIENCE_S - 2):
        tick(stage, now)
    assert not stage.evaluations.reasons
    tick(stage, 2 * PATIENCE_S)
    (reason,) = stage.evaluations.reasons
    assert not stage.evaluations.rows and "no answer to the evaluation of version 0 came" in reason
    assert not stage.pool.evaluation_waits_for and not stage.questions
    stage.loop.run_until_complete(stage.pool.evaluations_ended())


@pytest.mark.parametrize(
    ("is_begun", "newer", "is_last_out", "after_s"),
    [
        (False, 2, False, 0.0),
        (False, 1, True, 0.1 * PATIENCE_S),  # the workers that come now hold the last version alone
        (False, 1, False, PATIENCE_S),
        (True, 1, False, PATIENCE_S),
        (True, 2, False, 0.1 * PATIENCE_S),  # the fleet has left its version
    ],
)
def test_when_one_moves_to_a_newer_version(is_begun: bool, newer: int, is_last_out: bool, after_s: float) -> None:
    stage = begun(6)
    if is_begun:
        stage.report(piece(stage.questions[0], 0, [9], version=6))
    tick(stage, 0.0)
    publish(stage, *range(7, 7 + newer))
    if is_last_out:
        stage.tell(stage.pool.evaluate, Version(6 + newer), True)
    if after_s:
        tick(stage, after_s - 0.1)
        assert versions(stage) == {Version(6)}
    tick(stage, after_s)
    assert versions(stage) == {Version(6 + newer)}


def least_s(works: Sequence[Callable[[], object]]) -> float:
    spent_s = []
    for work in works:
        began = process_time()
        work()
        spent_s.append(process_time() - began)
    return min(spent_s)


def test_a_report_takes_no_longer_however_many_turns_are_open() -> None:
    """Each turn of each rollout is a group: with some thousands, to go through all with every report took the loop's time."""

    def report_s(turns: int) -> float:
        stage = Stage(groups_config(4, 512, 8), prompts=10**6)
        groups = stage.pool.groups
        for root in list(groups.groups):
            for index in range(8):
                at = TurnOf(root, index, 0)
                for _ in range(turns):
                    number = 0 if at.turn else index
                    groups.groups[at.group_id].rollouts[number] = piece(at.group_id, number, [9, STOP])
                    groups.open_turn(at, (7,))
                    at = at.next
        names = [name for name, group in groups.groups.items() if not group.is_sampled][:20]
        return least_s([partial(stage.report, piece(name, 0, [9]), attempt=1) for name in names])

    assert report_s(4) < 5 * report_s(0)


def test_a_report_of_a_long_rollout_checks_its_own_tokens_alone() -> None:
    held, new = piece("g", 0, [9] * 30_000), piece("g", 0, [9, STOP], offset=30_000, version=1)
    whole = extended(held, new)
    assert whole is not None and whole == replace(whole) and whole.is_finished and whole.token_ids[-2:] == (9, STOP)
    assert [(span.version, span.count) for span in whole.version_spans] == [(0, 30_000), (1, 2)]
    assert len(held.token_ids) == 30_000
    assert least_s([lambda: extended(held, new)] * 20) < 0.5 * least_s([lambda: replace(held)] * 20), "as to check all"


def test_one_that_moves_takes_the_place_of_the_one_that_waited_and_one_overtaken_meanwhile_moves_at_once() -> None:
    """Else the last version would be evaluated twice, or one behind it that no worker holds any more."""
    for last in (7, 8):
        stage = begun(6)
        tick(stage, 0.0)
        publish(stage, 7)
        stage.tell(stage.pool.evaluate, Version(7), last == 7)
        publish(stage, *range(8, last + 1))
        tick(stage, PATIENCE_S)
        assert versions(stage) == {Version(last)}
        for group_id in stage.questions:
            stage.answer(group_id)
        assert [*stage.evaluations.rewards] == [last] and not stage.questions
        stage.loop.run_until_complete(stage.pool.evaluations_ended())
    stage = begun(6)
    publish(stage, 7)
    stage.tell(stage.pool.evaluate, Version(7), False)
    publish(stage, 8, 9)
    for group_id in stage.questions:
        stage.answer(group_id)
    tick(stage, 0.0)
    assert versions(stage) == {Version(9)}, "no worker holds the one before any more"


def test_one_that_moved_a_few_times_is_given_up() -> None:
    stage, now = begun(), 0.0
    for version in range(1, MOVES_MAX + 2):
        (newest,) = versions(stage)
        assert newest is not None
        stage.report(piece(stage.questions[0], 0, [9], version=newest))
        publish(stage, version)
        tick(stage, now)
        now += PATIENCE_S
        tick(stage, now)
    assert not stage.evaluations.rows and len(stage.evaluations.reasons) == 1


@pytest.mark.parametrize("is_overtaken", [False, True])
@pytest.mark.parametrize("answered", [0, 3])
def test_a_token_now_and_then_does_not_hold_it_up(is_overtaken: bool, answered: int) -> None:
    """Once answers show how long one takes, only answers count; before the first, tokens count for a while."""
    stage = begun(6, (QuestionSet("held_out", 100, 1),))
    questions = stage.questions
    tick(stage, 0.0)
    for _ in range(answered):
        stage.answer(questions.pop())
    publish(stage, *((7, 8) if is_overtaken else ()))
    now, tokens = 0.0, 0
    while versions(stage) == {Version(6)}:
        stage.report(piece(questions[tokens // 7], 0, [9], tokens % 7, version=6), sender=BOB)
        now, tokens = now + 4.0, tokens + 1
        tick(stage, now)
    patience_s = PATIENCE_S * (0.1 if is_overtaken else 1.0) * (1 if answered else 4)
    assert now - 8.0 <= patience_s <= now
    assert bool(stage.evaluations.reasons) != is_overtaken, "it moves to the newest version, if there is one"


def test_one_whose_answers_take_long_gets_longer_than_the_patience() -> None:
    stage = begun(0, (QuestionSet("held_out", 8, 1),))
    tick(stage, 0.0)
    now, answer_s = 0.0, 0.9 * PATIENCE_S
    for group_id in stage.questions[:4]:
        stage.report(piece(group_id, 0, [9]))
        for share in (0.0, 0.5):
            tick(stage, now + share * answer_s)
        now += answer_s
        stage.report(piece(group_id, 0, [STOP], offset=1))
        stage.reward(1.0)
        tick(stage, now)
    tick(stage, now + 4 * answer_s - 1)
    assert not stage.evaluations.reasons
    tick(stage, now + 4 * answer_s + 1)
    assert len(stage.evaluations.reasons) == 1


def test_an_overtaken_one_whose_rewards_take_long_is_not_sampled_again() -> None:
    stage = begun(6)
    for group_id in stage.questions:
        for index in range(stage.offered[group_id].rollout_count):
            stage.report(piece(group_id, index, [9, STOP], version=6))
    tick(stage, 0.0)
    publish(stage, 7, 8)
    tick(stage, 0.9 * PATIENCE_S)
    assert "evaluation of version 6" in stage.pool.evaluation_waits_for
    tick(stage, PATIENCE_S)
    assert "evaluation of version 8" in stage.pool.evaluation_waits_for


def test_what_a_barred_worker_answered_is_answered_again_by_others_also_after_a_kill() -> None:
    stage = begun()
    first, second, third, *others = stage.questions
    stage.answer(first, 1.0, BOB)
    stage.answer(second, 0.0, ALICE)
    stage.report(piece(third, 0, [9, STOP]), sender=ALICE)
    stage.reward(0.0, said=(7,))
    (turn,) = set(stage.questions) - {third, *others}
    stage.answer(turn, 1.0, BOB)
    stage.tell(stage.pool.accuse, BOB, "planted", is_certain=True)
    again = {f"{first}r1", f"{third}r1", *others}
    assert set(stage.questions) == again
    stage.start()
    assert len(stage.prompts.due) == 1 and set(stage.questions) == again, "only ALICE's is due"
    stage.reward(0.0)
    for group_id in stage.questions:
        stage.answer(group_id, 0.0)
    assert [*stage.evaluations.rewards.values()] == [0.0]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_questions_of_sets_that_changed_meanwhile_are_asked_again_and_no_others(count: int) -> None:
    stage = begun(0, (QuestionSet("held_out", 3, 1), QuestionSet("hard", 2, 2)))
    for group_id in stage.questions[1:]:
        stage.answer(group_id, 1.0)
    stage.evaluations.sets = (QuestionSet("held_out", 1, 1), QuestionSet("others", count, 2))
    for _ in range(2):
        stage.start()
    while stage.prompts.due:
        stage.reward(0.5)
    assert len(stage.questions) == 1 + min(count, 2) and not stage.failures
    for group_id in stage.questions:
        stage.answer(group_id, 0.25)
    (row,) = stage.evaluations.rows
    assert row["eval/held_out/reward"] == 0.25 and row["eval/rollouts"] == 1 + 2 * count


def test_a_question_in_its_second_turn_and_a_result_without_room_on_the_disk_go_on_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = begun(0, (QuestionSet("held_out", 1, 1),))
    (only,) = stage.questions
    assert stage.report(piece(only, 0, [9, STOP])) == [Verdict.ADMITTED]
    stage.reward(0.0, said=(7,))
    (later,) = set(stage.questions) - {only}
    stage.start()
    assert stage.questions == [later]
    with monkeypatch.context() as full:
        full.setattr(stage.evaluations, "record", mock.Mock(side_effect=DiskFull("no space left")))
        stage.answer(later, 0.5)
    stage.start()
    stage.reward(0.5)
    assert [*stage.evaluations.rewards.values()] == [0.5]


@pytest.mark.parametrize(("too_long", "in_no_pass"), [(set(), set()), ({1}, set()), (set(), {3})])
@pytest.mark.parametrize("changed", [{}, {"temperature": 0.7}, {"max_new_tokens": 4}])
def test_groups_begun_with_other_sampling_than_the_run_s_now_are_drawn_again(
    changed: dict[str, Any], too_long: set[int], in_no_pass: set[int]
) -> None:
    """Engines that are laid out for shorter sequences would refuse them all, and no step would come."""
    stage = Stage()
    before = set(stage.offered)
    stage.fill(min(before))
    stage.prompts.sampling, stage.prompts.too_long = replace(stage.prompts.sampling, **changed), too_long
    stage.prompts.split.has = lambda cursor: cursor not in in_no_pass
    stage.start()
    names, gone = set(stage.pool.groups.roots), too_long | in_no_pass
    again = {f"{name}r1" for name in before if int(name[1:]) not in gone} | {"g00000004" for _ in gone}
    assert names == (again if changed or too_long else before) and not stage.failures
    stage.start()
    assert set(stage.pool.groups.roots) == names, "once"
    assert {group.spec.sampling.max_new_tokens for group in stage.pool.groups.roots.values()} == {
        stage.prompts.sampling.max_new_tokens
    }


def test_a_question_whose_workers_are_barred_is_asked_again_so_often_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RETRIES_MAX, Work.EVALUATE, 1)
    stage = begun()
    first, *others = stage.questions
    for tries, worker in (("", ALICE), ("r1", BOB)):
        assert set(stage.questions) == {f"{first}{tries}", *others}
        stage.answer(GroupId(f"{first}{tries}"), 1.0, worker)
        stage.tell(stage.pool.accuse, worker, "planted", is_certain=True)
    assert set(stage.questions) == set(others)


def test_questions_open_at_once_are_bounded_and_all_turns_of_one_are_closed_with_it() -> None:
    stage = begun(0, (QuestionSet("large", OPEN_MAX + 40, 1),))
    for version in (5, 9):  # the newest of those due is next
        stage.tell(stage.pool.evaluate, Version(version), False)
    most, (root, *_) = 0, stage.questions
    stage.report(piece(root, 0, [9, STOP]))
    stage.reward(None, said=(7,))
    (turn,) = [group_id for group_id in stage.questions if group_id.startswith(f"{root}.")]
    stage.report(piece(turn, 0, [9, STOP]))
    stage.reward(1.0)
    assert not {root, turn} & set(stage.questions)
    while versions(stage) == {Version(0)}:
        most = max(most, len(stage.questions))
        stage.answer(stage.questions[0])
    assert most == OPEN_MAX and len(stage.answered) == OPEN_MAX + 40 and versions(stage) == {Version(9)}
    (row,) = stage.evaluations.rows
    assert (row["eval/tokens"], row["eval/pass@1"]) == (2 * (OPEN_MAX + 40) + 2, 1.0), "of a lone set under short names"


def test_answers_keep_their_journal_segment_until_their_evaluation_is_over() -> None:
    """Else a restart would have lost rollouts that their workers were told are admitted, once no open group is as old."""
    stage = begun(0, (QuestionSet("large", OPEN_MAX + 1, 1),))
    early = stage.questions
    train_a_step(stage)
    for group_id in early:
        stage.answer(group_id)
    train_a_step(stage)
    (late,) = stage.questions
    stage.start(kept=0)
    assert stage.questions == [late] and len(stage.prompts.due) == len(early)
    for _ in early:
        stage.reward(0.5)
    stage.answer(late, 0.5)
    assert [*stage.evaluations.rewards.values()] == [0.5]


def train_a_step(stage: Stage) -> None:
    for group_id in [name for name in stage.offered if name not in stage.questions]:
        stage.fill(group_id)
    while stage.next_batch() is not None:
        stage.take_checkpoint()


LIAR, HONEST, BOMBER = PeerId("liar"), PeerId("honest"), PeerId("bomber")
A, B, G = PeerId("a"), PeerId("b"), GroupId("g")


def delivered(peer_id: PeerId, heard: int, admitted: float) -> pb.WorkerDelivered:
    return pb.WorkerDelivered(peer_id=peer_id, heard_rollouts=heard, admitted_rollouts=admitted)


def scored(records: workers.SenderRecords, authors: list[PeerId], times: int, *, is_held: bool) -> int | None:
    """Of so many completions of these authors, at which they are accused; None if they are not."""
    before = len(records.accused)
    for number in range(times):
        records.on_scored(authors, 2.0 if is_held else 0.01, is_held)
        if len(records.accused) > before:
            return number + 1
    return None


def test_who_sends_impossible_reports_again_and_again_is_accused_once_and_who_delivers_as_much_is_not() -> None:
    records = workers.SenderRecords()
    for problem in ("got 57", "another"):
        records.accused.clear()
        for _ in range(workers.IMPOSSIBLE_MAX + 5):
            records.on_impossible(LIAR, problem)
            records.on_impossible(HONEST, "a slip")
            records.on_admission([SentTokens(HONEST, 2)], HONEST)
        (accusation,) = records.accused
        assert accusation.peer_id == LIAR and accusation.is_certain and problem in accusation.reason
        records.forgive(LIAR)


def test_who_blocks_scorers_far_more_often_than_others_is_accused_once_until_it_is_forgiven() -> None:
    records = workers.SenderRecords()
    for number in (1, 2):
        assert scored(records, [HONEST], 100, is_held=False) is None
        assert scored(records, [BOMBER], 100, is_held=True) == workers.HELD_MIN
        assert scored(records, [BOMBER], 100, is_held=True) is None and len(records.accused) == number
        assert "16 of its 16 recent completions held up their scorer, for 32 s in all" in records.accused[-1].reason
        records.forgive(BOMBER)
    assert records.completions_held == 2 * (workers.HELD_MIN + 100) == records.seconds_held / 2
    records = workers.SenderRecords()
    for _ in range(200):
        assert scored(records, [HONEST], 99, is_held=False) is scored(records, [HONEST], 1, is_held=True) is None
    scored(records, [BOMBER], 20_000, is_held=False)
    assert scored(records, [BOMBER], 400, is_held=True), "a good past does not pay for long"


def test_a_policy_that_blocks_scorers_by_itself_makes_nobody_guilty() -> None:
    records = workers.SenderRecords()
    for _ in range(500):
        for worker in (HONEST, BOMBER):
            assert scored(records, [worker], 1, is_held=True) is scored(records, [worker], 3, is_held=False) is None
    assert scored(workers.SenderRecords(), [BOMBER], 500, is_held=True) is None, "nobody to compare it with"


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("partners", [1, 4])
def test_a_shared_completion_is_charged_to_whoever_has_such_more_often(begins: bool, partners: int) -> None:
    records = workers.SenderRecords()
    names = [PeerId(f"honest {number}") for number in range(partners)]
    assert records.likeliest([BOMBER, names[0]]) == names[0], "of unknown ones the last"
    for number in range(2 * workers.HELD_MIN):
        for name in names:
            assert scored(records, [name], 10, is_held=False) is None
        partner = names[number % partners]
        scored(records, [BOMBER, partner] if begins else [partner, BOMBER], 1, is_held=True)
    assert [accusation.peer_id for accusation in records.accused] == [BOMBER]
    for order in ([BOMBER, names[0]], [names[0], BOMBER]):
        assert records.likeliest(order) == BOMBER, "whose rewards wait"


def test_rollouts_are_heard_of_for_some_seconds_and_each_counts_once() -> None:
    records = workers.SenderRecords()
    records.on_tokens(NOBODY, G, 0)
    assert records.take_deliveries(0.0) == [], "the first report is that nothing came"
    for index in (0, 1, 1, 1):
        records.on_tokens(A, G, index)
    assert records.take_deliveries(workers.NEWS_S - 0.01) is None
    assert records.take_deliveries(workers.NEWS_S) == [delivered(A, 2, 0.0)], "a worker that was silent before is news"
    records.on_tokens(A, G, 2)
    assert records.take_deliveries(2 * workers.NEWS_S) is None, "more of a worker that is known is not"
    assert records.take_deliveries(workers.NEWS_S + workers.TELL_S) == [delivered(A, 3, 0.0)]
    assert records.take_deliveries(workers.NEWS_S + workers.HEARD_S + 0.1) == [delivered(A, 1, 0.0)]
    assert records.take_deliveries(workers.NEWS_S + workers.TELL_S + workers.HEARD_S + 0.2) == []


def test_an_admitted_rollout_counts_for_its_workers_by_their_share_and_the_last_proven_ones_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = workers.SenderRecords()
    records.on_admission((SentTokens(A, 30), SentTokens(B, 90)), B)
    records.on_admission((SentTokens(A, 5),), A)
    shares = [delivered(A, 0, 1.25), delivered(B, 0, 0.75)]
    assert records.take_deliveries(0.0) == shares
    assert records.take_deliveries(workers.TELL_S) == [], "reported once"
    monkeypatch.setattr("echo2.learner.bets.WORKERS_MAX", 3)
    records = workers.SenderRecords()
    records.on_tokens(PeerId("heard"), G, 0)
    for name in ("a", "b", "c", "a", "d"):
        records.on_admission([SentTokens(PeerId(name), 4)], PeerId(name))
    assert [name for name in ("heard", "a", "b", "c", "d") if records.is_proven(PeerId(name))] == ["a", "c", "d"]


# ---- failures in a row


@pytest.mark.parametrize(("rollouts_per_step", "limit"), [(4, 64), (1000, 2000)])
def test_failures_of_two_steps_in_a_row_end_the_run(rollouts_per_step: int, limit: int) -> None:
    streak = workers.FailureStreak("rewards", rollouts_per_step)
    for number in range(limit - 1):
        assert (streak.text == "") == (number < workers.SHOWN_FROM)
        assert not streak.on_failure("KeyError: 1")
    streak.on_success()
    texts = [streak.on_failure("TypeError: odd" if number == 3 else f"KeyError: {number}") for number in range(limit)]
    assert not any(texts[:-1]) and texts[-1] == (
        f"expected rewards that succeed, got {limit} rewards failed one after another, {limit - 1} of them like this: "
        f"KeyError: {limit - 1}"
    )


def test_one_worker_among_several_ends_nothing_by_what_it_sends() -> None:
    streak = workers.FailureStreak("rewards", 4)
    streak.on_success("honest")
    assert not any(streak.on_failure("ValueError: junk", "bad") for _ in range(64 * workers.ALONE_TIMES - 1))
    streak.on_success("honest")
    assert not any(streak.on_failure("ValueError: junk", "bad") for _ in range(64))
    assert streak.on_failure("ValueError: junk", "honest"), "the others meet it too"
    only = workers.FailureStreak("rewards", 4)
    only.on_success("only")
    assert any(only.on_failure("ValueError: junk", "only") for _ in range(64)), "the only worker counts as all"

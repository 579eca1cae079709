"""The pool's promises, whatever the order of reports, rewards, versions, bars, plans, evaluations, checkpoints and kills."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2.base.errors import DiskFull
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import RolloutSegment, Verdict
from echo2.learner.audit import Habits
from echo2.learner.rollouts.admission import GroupRules
from echo2.learner.rollouts.evaluation import QuestionSet
from echo2.learner.rollouts.groups import evaluated_version, is_later_turn, root_of
from echo2.learner.rollouts.journal import BatchDrawn, Finished, GroupDropped, Opened
from echo2.learner.rollouts.workers import IMPOSSIBLE_MAX
from tests.unit.learner.stage import ALICE, BOB, PATIENCE_S, SAMPLING, STOP, Stage, piece

WORKERS = (ALICE, BOB)
USEFUL = (Verdict.HELD, Verdict.ADMITTED)


class PoolMachine(RuleBasedStateMachine):
    """After each call: callers know what the pool holds, and a kill at this moment loses nothing that was promised."""

    @initialize(bound=st.integers(0, 3), drops=st.booleans(), evaluates=st.booleans())
    def begin(self, bound: int, drops: bool, evaluates: bool) -> None:
        sets = (QuestionSet("held_out", 3, 1), QuestionSet("hard", 2, 2)) if evaluates else ()
        self.stage = Stage(GroupRules(bound, 4, 2, 50, drops_equal_rewards=drops), sets)
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
        opened: set[GroupId] = set()
        for _, record in stage.journal.records:
            if isinstance(record, Opened):
                assert record.spec.group_id not in opened, "a group is opened once"
                opened.add(record.spec.group_id)
            elif isinstance(record, GroupDropped):
                opened.discard(record.group_id)

    @rule(
        pick=st.integers(0, 1000), index=st.integers(0, 2), last=st.sampled_from([STOP, STOP, 2, 49, 50]),
        more=st.lists(st.sampled_from([2, 3, STOP]), max_size=2), attempt=st.integers(0, 2), is_exact=st.booleans(),
        back=st.sampled_from([0, 0, 0, 1, 2, 9, -1]),
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
            assert any(isinstance(r, Finished) and r.rollout.group_id == group_id for r in synced), (
                "it is on the disk first"
            )

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

    def judged(self, segment: RolloutSegment, attempt: int) -> tuple[Verdict, tuple[int, ...]]:
        """The verdict by the rules in words, from what is held, and the rollout as the segment makes it."""
        groups, name = self.stage.pool.groups, segment.group_id
        group, exact, (span,) = groups.groups.get(name), evaluated_version(name), segment.version_spans
        if group is None:
            trained = {done.spec.group_id for batch in self.stage.batches for done in batch.groups}
            return Verdict.DUPLICATE if root_of(name) in trained and segment.is_final else Verdict.CLOSED, ()
        if attempt < self.attempts.get(name, 0):
            return Verdict.CLOSED, ()  # one that a later one has replaced adds nothing
        known = groups.published if exact is None else [exact]  # an evaluation takes tokens of its version alone
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
        if exact is None and min([*old, span.version]) < groups.next_step - self.stage.rules.staleness_bound:
            return Verdict.STALE, ()
        return Verdict.ADMITTED if segment.is_final else Verdict.HELD, grown

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

    @rule()
    def trainer_is_free(self) -> None:
        groups = self.stage.pool.groups
        step = groups.next_step
        fresh = [group for group in groups.training if group.is_ready and not is_later_turn(group.spec.group_id)]
        ages = {group.spec.group_id: self.oldest_of(group.spec.group_id) for group in fresh}
        ages = {name: oldest for name, oldest in ages.items() if oldest >= step - self.stage.rules.staleness_bound}
        expected = {(name, index): self.whole(name, index) for name in ages for index in range(2)}
        batch = self.stage.next_batch()
        assert (batch is None) == (len(ages) < 2)
        if batch is None:
            return
        synced = [record for _, record in self.stage.journal.records[: self.stage.journal.synced]]
        assert BatchDrawn(step, *_drawn(synced, step)) in synced, "its composition is on the disk first"
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
                assert rollout.oldest_version >= step - self.stage.rules.staleness_bound

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
        if hasattr(self, "stage"):
            groups, offered = self.stage.pool.groups, self.stage.offered
            self.attempts = {name: attempt for name, attempt in self.attempts.items() if name in groups.groups}
            assert offered.keys() <= groups.groups.keys()
            for group in groups.lacking:
                assert offered[group.spec.group_id] == group.spec

    @invariant()
    def as_many_groups_are_in_flight_as_the_cap_allows(self) -> None:
        if hasattr(self, "stage") and self.stage.pool.exhausted is None:
            in_flight = self.stage.pool.groups.in_flight_groups
            assert in_flight >= self.stage.rules.cap_groups(self.stage.pool.cap_rollouts)

    @invariant()
    def the_journal_gives_back_what_is_held(self) -> None:
        if not hasattr(self, "stage"):
            return
        held = self.stage.pool.groups
        groups, history = self.stage.restored()
        assert groups.next_step == held.next_step and history.cursor == self.stage.pool.cursor
        assert held.groups.keys() <= groups.groups.keys()
        extra = groups.groups.keys() - held.groups.keys()
        assert all(evaluated_version(name) is not None for name in extra), (
            "answers are kept until the evaluation is over"
        )
        for group_id, group in held.groups.items():
            finished = [rollout if rollout.is_finished else None for rollout in group.rollouts]
            assert [r if r.is_finished else None for r in groups.groups[group_id].rollouts] == finished

    @invariant()
    def what_was_acknowledged_is_trained_dropped_or_held(self) -> None:
        if not hasattr(self, "stage"):
            return
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
        return evaluated_version(group_id) is not None and (
            GroupDropped(group_id) in records or Step(0) < self.stage.checkpoint[0]
        )

    @invariant()
    def nothing_is_trained_twice_and_answers_count_once(self) -> None:
        if not hasattr(self, "stage"):
            return
        trained = [group.spec.group_id for batch in self.stage.batches for group in batch.groups]
        assert len(set(trained)) == len(trained) and self.stage.pool.groups.ledger.over_stale_tokens() == 0
        for group in self.stage.answered:
            spans = {span.version for rollout in group.rollouts for span in rollout.version_spans}
            assert spans == {evaluated_version(group.spec.group_id)} == {group.spec.exact_version}
        versions = [result.version for result in self.stage.evaluations.results if result.sets]
        assert all(first < second for first, second in pairwise(versions)), "a version has one result"
        for result in self.stage.evaluations.results:
            for each, asked in zip(result.sets, self.stage.evaluations.rules.sets, strict=False):
                assert [len(samples) for samples in each.rewards] == [asked.samples] * asked.questions


def _drawn(records: list[object], step: Step) -> tuple[object, object]:
    return next((r.group_ids, r.rewards) for r in reversed(records) if isinstance(r, BatchDrawn) and r.step == step)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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


def test_a_batch_has_the_oldest_groups_and_is_on_the_disk_before_it_is_handed_out() -> None:
    stage = Stage()
    stage.tell(stage.pool.on_published, Version(1))
    first, second, third, *_ = stage.offered
    for group_id, version in ((first, 1), (second, 0), (third, 0)):
        stage.fill(group_id, version)
    batch = stage.next_batch()
    assert batch is not None and [group.spec.group_id for group in batch.groups] == [second, third]
    assert stage.journal.synced == len(stage.journal.records)


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


def test_a_resumed_learner_has_its_open_groups_its_place_in_the_prompts_and_the_retries_that_were_due() -> None:
    stage = Stage()
    opened, cursor = dict(stage.offered), stage.pool.cursor
    stage.report(piece(next(iter(opened)), 0, [9]))
    stage.take_checkpoint()
    stage.start(kept=0)
    assert stage.offered == opened and stage.pool.cursor == cursor, "no group is opened twice and no prompt passed over"
    stage.tell(stage.pool.accuse, ALICE, "planted", is_certain=True)
    assert stage.offered == opened, "of a group without tokens from the worker nothing is dropped"


def test_who_sends_what_no_honest_worker_sends_is_barred_and_told_to_the_coordinator() -> None:
    stage = Stage()
    group_id = next(iter(stage.offered))
    for _ in range(IMPOSSIBLE_MAX):
        assert stage.accused == []
        assert stage.report(piece(group_id, 0, [9], version=99)) == [Verdict.REFUSED]
    ((worker, reason, is_certain),) = stage.accused
    assert worker == ALICE and is_certain and "99" in reason and ALICE in stage.pool.barred
    assert stage.report(piece(group_id, 0, [9], version=99)) == [Verdict.REFUSED] and len(stage.accused) == 1


def test_a_stop_ends_the_wait_for_a_batch() -> None:
    stage = Stage()

    async def wait_and_stop() -> None:
        waiting = asyncio.create_task(stage.pool.next_batch())
        await asyncio.sleep(0)
        stage.pool.stop()
        assert await waiting is None

    stage.loop.run_until_complete(wait_and_stop())


def test_a_worker_does_not_choose_by_the_report_how_it_is_tested() -> None:
    stage = Stage(GroupRules(2, 4, 2, 50))
    worker = PeerId("w")
    assert stage.pool.habits_of(worker) == Habits(False, False)
    stage.pool.note_habits(worker, Habits(True, False))
    assert stage.pool.habits_of(worker).draws_by_seed
    for keeps_cache in (False, True):
        stage.pool.note_habits(worker, Habits(keeps_cache, True))
    assert stage.pool.habits_of(worker) == Habits(False, True)

"""The evaluation by the fleet, by its events: any order of them ends it, with all answers of one version or with a reason."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import Rollout, Verdict, Work
from echo2.learner import batcher_events as b
from echo2.learner.batch import TrainGroup
from echo2.learner.batcher import Batcher
from echo2.learner.episodes import turn_of
from echo2.learner.exam import MOVES_MAX, OPEN_MAX, ExamResult, ExamRules, ExamSet, SetResult, exam_row
from echo2.learner.group import Draw, exam_version_of
from echo2.learner.history import History, Opened, Record
from echo2.learner.offers import OfferConfig
from echo2.learner.shelf import Shelf, ShelfConfig
from echo2.staleness.ledger import Ledger
from tests.unit.learner.test_shelf import STOP, draw, piece

PATIENCE_S = 60.0
SETS = (ExamSet("held_out", 3, 1), ExamSet("hard", 2, 4))
WORKERS = (PeerId("a"), PeerId("b"))


class Caller:
    """Carries the actions out, and can be killed: then its journal alone is left."""

    def __init__(self, sets: tuple[ExamSet, ...] = SETS) -> None:
        self.rules = ExamRules(sets, PATIENCE_S)
        self.journal: list[Record] = []
        self.offered: dict[GroupId, Work] = {}
        self.results: list[ExamResult] = []
        self.answered: list[TrainGroup] = []
        self.trained: list[GroupId] = []
        self.to_score: list[Rollout] = []
        self.verdicts: list[Verdict] = []
        self.cursor = 0
        self.start()

    def start(self) -> None:
        """Begins, or comes back from what the journal says."""
        history, shelf = History(), Shelf(ShelfConfig(4, 4, 2, 50), Ledger(4))
        for record in self.journal:
            history.apply(record, shelf.next_step)
        history.restore(shelf)
        while history.next_batch(shelf) is not None:
            pass
        shelf.take_closures()
        self.batcher = Batcher(shelf, OfferConfig(4, 2, 4), self.rules)
        self.to_score = []
        held = history.exam_groups()
        done = {result.version for result in self.results}
        self.tell(b.Resumed({version: groups for version, groups in held.items() if version not in done}))
        self.offered = {spec.group_id: spec.work for spec, _ in self.batcher.lacking()}  # as the hello tells

    def tell(self, event: b.Event) -> None:
        self._do(self.batcher.handle(event))

    def _do(self, actions: list[b.Action]) -> None:
        for action in actions:
            match action:
                case b.Keep(record):
                    self.journal.append(record)
                case b.Score(rollout):
                    self.to_score.append(rollout)
                case b.OfferGroups(specs):
                    self.offered |= {spec.group_id: spec.work for spec in specs}
                case b.Close(group_ids, _):
                    for group_id in group_ids:
                        self.offered.pop(group_id, None)
                case b.AskPrompts(again, fresh):
                    draws = (*again, *(draw(self.cursor + n) for n in range(fresh)))
                    self.cursor += fresh
                    self._do(self.batcher.handle(b.PromptsDrawn(draws)))
                case b.AskQuestions(version, numbers):
                    asked = tuple(Draw(number, 0, (5, 6), draw(0).sampling) for number in numbers)
                    self._do(self.batcher.handle(b.QuestionsDrawn(version, asked)))
                case b.AnswerReport(verdicts, _):
                    self.verdicts = [verdict.verdict for verdict in verdicts]
                case b.Answered(group):
                    self.answered.append(group)
                case b.Examined(result):
                    self.results.append(result)
                case b.Train(batch):
                    self.trained += [group.spec.group_id for group in batch.groups]
                case _:
                    pass

    def questions(self) -> list[GroupId]:
        return [group_id for group_id, work in self.offered.items() if work is Work.EVALUATE]

    def report(self, group_id: GroupId, index: int, version: int, sender: PeerId = WORKERS[0]) -> None:
        self.tell(b.Reported((piece(group_id, index, [9, STOP], version=version),), 0, sender))

    def answer(self, group_id: GroupId, reward: float = 1.0, sender: PeerId = WORKERS[0]) -> None:
        """All samples of a question, scored."""
        version, group = exam_version_of(group_id), self.batcher.group(group_id)
        assert version is not None and group is not None
        for index in range(len(group.rollouts)):
            self.report(group_id, index, version, sender)
            self.tell(b.Rewarded(group_id, index, reward, {"exact": reward}))


def test_an_exam_is_answered_by_its_version_alone_and_no_batch_is_drawn_of_it() -> None:
    caller = Caller()
    caller.tell(b.ExamDue(Version(0)))
    first, *_ = caller.questions()
    assert len(caller.questions()) == 5
    caller.tell(b.VersionLeft(Version(1)))
    caller.report(first, 0, 1)
    assert caller.verdicts == [Verdict.REFUSED], "a token of another version is in no exam"
    for number, group_id in enumerate(caller.questions()):
        caller.answer(group_id, float(number % 2))
    (result,) = caller.results
    assert [one.rewards for one in result.sets] == [((0.0,), (1.0,), (0.0,)), ((1.0,) * 4, (0.0,) * 4)]
    assert result.rollouts == 11 and result.tokens == 22 and len(caller.answered) == 5
    caller.tell(b.BatchWanted())
    held = caller.batcher.held
    assert not caller.trained and not caller.questions() and held.ledger.histogram() == {} and held.counts.admitted == 0
    row = exam_row(result, 2.0)
    assert row["eval/hard/pass@4"] == 0.5 and row["eval/hard/exact"] == 0.5 and row["eval/reward"] == pytest.approx(0.4)


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    one = SetResult("s", ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0)), {})
    assert one.ks == (1, 2, 4)
    assert [one.pass_at(k) for k in one.ks] == pytest.approx([(0.25 + 0.5) / 2, (0.5 + 5 / 6) / 2, 1.0])


def test_a_killed_learner_goes_on_with_the_answers_that_it_acknowledged() -> None:
    caller = Caller()
    caller.tell(b.ExamDue(Version(0)))
    first, second, *others = caller.questions()
    caller.answer(first)
    caller.report(second, 0, 0)
    caller.start()
    assert {second, first}.isdisjoint(caller.questions()), "what is sampled is not sampled again"
    assert {(one.group_id, one.index) for one in caller.to_score} == {(first, 0), (second, 0)}
    for group_id in (first, second):
        caller.tell(b.Rewarded(group_id, 0, 1.0))
    for group_id in others:
        caller.answer(group_id)
    assert [result.reward for result in caller.results] == [1.0]
    caller.start()
    assert not caller.questions(), "it is over"


def test_a_fleet_that_is_gone_does_not_hold_the_end_up() -> None:
    caller = Caller()
    caller.tell(b.ExamDue(Version(0)))
    caller.tell(b.ExamTick(0.0))
    assert "0 of 5 prompts answered" in caller.batcher.exam_waits_for
    caller.answer(caller.questions()[0])
    caller.tell(b.ExamTick(PATIENCE_S - 1))
    caller.tell(b.ExamTick(2 * PATIENCE_S - 2))
    assert not caller.results
    caller.tell(b.ExamTick(2 * PATIENCE_S))
    (result,) = caller.results
    assert not result.sets and "nothing of the evaluation of version 0 came" in result.reason
    assert not caller.batcher.exam_waits_for and not caller.questions()


def test_an_exam_that_nobody_began_moves_to_a_newer_version_at_once_and_a_begun_one_when_it_stands_still() -> None:
    caller = Caller()
    caller.tell(b.ExamDue(Version(0)))
    for version in (1, 2):
        caller.tell(b.VersionLeft(Version(version)))
    caller.tell(b.ExamTick(0.0))
    assert {exam_version_of(group_id) for group_id in caller.questions()} == {Version(2)}
    now = 0.0
    for version in range(3, 3 + MOVES_MAX + 1):
        newest = exam_version_of(caller.questions()[0])
        assert newest is not None
        caller.report(caller.questions()[0], 0, newest)
        caller.tell(b.VersionLeft(Version(version)))
        caller.tell(b.ExamTick(now))
        now += PATIENCE_S
        caller.tell(b.ExamTick(now))
    assert [bool(result.sets) for result in caller.results] == [False], "it is moved a few times, then given up"


@pytest.mark.parametrize(("newer", "waits_s"), [(1, PATIENCE_S), (2, 0.1 * PATIENCE_S)])
def test_a_begun_exam_whose_version_the_fleet_has_left_moves_without_the_whole_patience(
    newer: int, waits_s: float
) -> None:
    """Its leases were handed back and every worker has swapped: the end of a run waited ten minutes for it."""
    caller = Caller()
    caller.tell(b.ExamDue(Version(6)))
    caller.report(caller.questions()[0], 0, 6)
    caller.tell(b.ExamTick(0.0))
    for version in range(7, 7 + newer):
        caller.tell(b.VersionLeft(Version(version)))
    caller.tell(b.ExamTick(waits_s - 0.1))
    assert {exam_version_of(group_id) for group_id in caller.questions()} == {Version(6)}
    caller.tell(b.ExamTick(waits_s))
    assert {exam_version_of(group_id) for group_id in caller.questions()} == {Version(6 + newer)}


def test_an_overtaken_exam_whose_rewards_take_long_is_not_sampled_again() -> None:
    caller = Caller()
    caller.tell(b.ExamDue(Version(6)))
    for group_id in caller.questions():
        group = caller.batcher.group(group_id)
        assert group is not None
        for index in range(len(group.rollouts)):
            caller.report(group_id, index, 6)
    caller.tell(b.ExamTick(0.0))
    for version in (7, 8):
        caller.tell(b.VersionLeft(Version(version)))
    caller.tell(b.ExamTick(0.9 * PATIENCE_S))
    assert "evaluation of version 6" in caller.batcher.exam_waits_for
    caller.tell(b.ExamTick(PATIENCE_S))
    assert "evaluation of version 8" in caller.batcher.exam_waits_for


def test_what_a_barred_worker_answered_is_answered_again_by_others() -> None:
    caller = Caller()
    caller.tell(b.ExamDue(Version(0)))
    first, second, *_ = caller.questions()
    caller.answer(first, 1.0, WORKERS[1])
    caller.answer(second, 0.0, WORKERS[0])
    caller.tell(b.WorkerBarred(WORKERS[1]))
    assert f"{first}r1" in caller.questions() and second not in caller.questions()
    for group_id in caller.questions():
        caller.answer(group_id, 0.0)
    assert [result.reward for result in caller.results] == [0.0]


def test_a_large_exam_opens_a_bounded_number_of_questions_at_once() -> None:
    caller = Caller((ExamSet("large", 3 * OPEN_MAX, 1),))
    caller.tell(b.ExamDue(Version(0)))
    most = 0
    while questions := caller.questions():
        most = max(most, len(questions))
        caller.answer(questions[0])
    assert most == OPEN_MAX and len(caller.answered) == 3 * OPEN_MAX and len(caller.results) == 1


def test_one_exam_at_a_time_and_the_newest_of_those_due_is_next() -> None:
    caller = Caller()
    for version in (0, 5, 9):
        caller.tell(b.ExamDue(Version(version)))
    for group_id in caller.questions():
        caller.answer(group_id)
    assert {exam_version_of(group_id) for group_id in caller.questions()} == {Version(9)}


class ExamMachine(RuleBasedStateMachine):
    """Reports of any version and worker, rewards, bars, versions, time and kills in any order."""

    @initialize()
    def begin(self) -> None:
        self.caller, self.now, self.newest, self.due = Caller(), 0.0, 0, 0
        self.caller.tell(b.ExamDue(Version(0)))

    @rule(
        pick=st.integers(0, 1000), index=st.integers(0, 3), version=st.integers(-1, 3), sender=st.sampled_from(WORKERS)
    )
    def report(self, pick: int, index: int, version: int, sender: PeerId) -> None:
        if names := sorted(self.caller.offered):
            group_id = names[pick % len(names)]
            exact = exam_version_of(group_id)
            self.caller.report(group_id, index, version if version >= 0 or exact is None else exact, sender)

    @rule(reward=st.sampled_from([None, 0.0, 1.0]))
    def score(self, reward: float | None) -> None:
        if self.caller.to_score:
            rollout = self.caller.to_score.pop(0)
            at = turn_of(rollout.group_id, rollout.index)
            self.caller.tell(b.Rewarded(at.root, at.index, reward))

    @rule(worker=st.sampled_from(WORKERS))
    def bar(self, worker: PeerId) -> None:
        self.caller.tell(b.WorkerBarred(worker))

    @rule()
    def train(self) -> None:
        self.caller.tell(b.BatchWanted())

    @rule(is_due=st.booleans())
    def publish(self, is_due: bool) -> None:
        held = self.caller.batcher.held
        if held.next_step > held.published[-1]:
            self.newest = held.next_step
            self.caller.tell(b.VersionLeft(Version(self.newest)))
            if is_due:
                self.caller.tell(b.ExamDue(Version(self.newest)))

    @rule(passed_s=st.sampled_from([1.0, PATIENCE_S]))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s
        self.caller.tell(b.ExamTick(self.now))

    @rule()
    def kill(self) -> None:
        self.caller.start()

    @invariant()
    def nothing_of_an_exam_is_trained_and_each_answer_is_of_one_version(self) -> None:
        if not hasattr(self, "caller"):
            return
        assert all(exam_version_of(group_id) is None for group_id in self.caller.trained)
        for group in self.caller.answered:
            version = exam_version_of(group.spec.group_id)
            spans = {span.version for rollout in group.rollouts for span in rollout.version_spans}
            assert spans == {version} == {group.spec.exact_version}
        versions = [result.version for result in self.caller.results]
        assert all(first < second for first, second in pairwise(versions)), "a version has one result"

    def teardown(self) -> None:
        """Once faults stop, the exam ends."""
        if not hasattr(self, "caller"):
            return
        for _ in range(40):
            for group_id in self.caller.questions():
                self.caller.answer(group_id)
            while self.caller.to_score:
                self.score(0.0)
        assert not self.caller.questions() and not self.caller.batcher.exam_waits_for
        kept = [record for record in self.caller.journal if isinstance(record, Opened)]
        assert len({record.spec.group_id for record in kept}) == len(kept), "a group is opened once"


TestExamMachine = ExamMachine.TestCase
TestExamMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_all_turns_of_an_answered_question_are_closed_with_it() -> None:
    caller = Caller((ExamSet("held_out", 1, 1),))
    caller.tell(b.ExamDue(Version(0)))
    (root,) = caller.questions()
    caller.report(root, 0, 0)
    caller.tell(b.Said(turn_of(root, 0), (7,)))
    (turn,) = [group_id for group_id in caller.questions() if group_id != root]
    caller.report(turn, 0, 0)
    caller.tell(b.Rewarded(root, 0, 1.0))
    assert not caller.questions() and [result.tokens for result in caller.results] == [4]

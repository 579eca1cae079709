"""Agents evaluated: held-out problems played by the same agents, of one version, apart from training, lost episodes left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec, SamplingParams, Verdict, Work
from echo2.learner import batcher_events as b
from echo2.learner.batcher import Batcher
from echo2.learner.exam import ExamResult, ExamRules, ExamSet, exam_row
from echo2.learner.group import Draw, exam_version_of, is_driven_root
from echo2.learner.history import History, Record
from echo2.learner.offers import OfferConfig
from echo2.learner.shelf import Shelf, ShelfConfig
from echo2.staleness.ledger import Ledger
from tests.unit.learner.test_shelf import STOP, piece

SETS = (ExamSet("held_out", 2, 1), ExamSet("hard", 1, 3))
RUN = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=8, stop_token_ids=(STOP,), seed=7)
GREEDY = replace(RUN, temperature=0.0, top_p=1.0)
ALICE = PeerId("alice")


class Caller:
    """Carries the actions out; `drawn` are the problems that agents may begin with."""

    def __init__(self) -> None:
        self.journal: list[Record] = []
        self.results: list[ExamResult] = []
        self.start()

    def start(self) -> None:
        """Begins, or comes back from what the journal says."""
        history, shelf = History(), Shelf(ShelfConfig(4, 4, 2, 50, is_driven=True), Ledger(4))
        for record in self.journal:
            history.apply(record, shelf.next_step)
        history.restore(shelf)
        shelf.take_closures()
        self.batcher = Batcher(shelf, OfferConfig(4, 2, 4), ExamRules(SETS, 60.0, is_driven=True))
        self.driven: dict[GroupId, GroupSpec] = {}
        self.offered: dict[GroupId, GroupSpec] = {}
        self.sampled: list[GroupId] = []
        self.scored: list[object] = []
        self.verdicts: list[Verdict] = []
        self.call_group: GroupId | None = None
        self.tell(b.Resumed(history.exam_groups()))

    def tell(self, event: b.Event) -> None:
        self._do(self.batcher.handle(event))

    def _do(self, actions: list[b.Action]) -> None:
        for action in actions:
            match action:
                case b.Keep(record):
                    self.journal.append(record)
                case b.Drive(spec, _):
                    self.driven[spec.group_id] = spec
                case b.OfferGroups(specs):
                    self.offered |= {spec.group_id: spec for spec in specs}
                case b.Close(group_ids, _):
                    for group_id in group_ids:
                        self.driven.pop(group_id, None)
                        self.offered.pop(group_id, None)
                case b.CallOpened(group_id):
                    self.call_group = group_id
                case b.CallSampled(rollout):
                    self.sampled.append(rollout.group_id)
                case b.Score(rollout):
                    self.scored.append(rollout)
                case b.AskQuestions(version, numbers):
                    asked = tuple(Draw(number, 0, (0,), GREEDY) for number in numbers)
                    self._do(self.batcher.handle(b.QuestionsDrawn(version, asked)))
                case b.AnswerReport(verdicts, _):
                    self.verdicts = [verdict.verdict for verdict in verdicts]
                case b.Examined(result):
                    self.results.append(result)
                case _:
                    pass

    @property
    def problems(self) -> list[GroupId]:
        return [name for name in self.driven if exam_version_of(name) is not None]

    def play(self, root: GroupId, version: int = 0, calls: int = 2) -> int:
        """The calls of one episode, one behind the other; returns its chain."""
        chain: int | None = None
        prompt = (5, 6)
        for _ in range(calls):
            self.tell(b.CallAsked(root, chain, prompt, RUN))
            assert self.call_group is not None
            _, index, _ = self.call_group.split(".")
            chain = int(index)
            tokens = [9, STOP]
            self.tell(b.Reported((piece(self.call_group, 0, tokens, version=version),), 0, ALICE))
            prompt = (*prompt, *tokens, 7)
        assert chain is not None
        return chain

    def end(self, root: GroupId, chain: int, reward: float | None, *, is_final: bool = True) -> None:
        self.tell(b.EpisodeEnded(root, {chain: 2}, reward, is_final, {"steps": 2.0} if reward is not None else {}))


def begun() -> Caller:
    caller = Caller()
    caller.tell(b.ExamDue(Version(0)))
    return caller


def test_held_out_problems_are_played_by_one_version_and_none_is_trained_on() -> None:
    caller = begun()
    one, two, hard = caller.problems
    assert [caller.driven[name].rollout_count for name in (one, two, hard)] == [1, 1, 3]
    assert all(is_driven_root(name) for name in caller.problems)
    caller.tell(b.CallAsked(one, None, (5, 6), RUN))
    assert caller.call_group is not None
    leased = caller.offered[caller.call_group]
    assert (leased.work, leased.exact_version) == (Work.EVALUATE, Version(0)), "workers at that very version alone"
    assert (leased.sampling.temperature, leased.sampling.top_p) == (0.0, 1.0), "as evaluations sample, not as the run"
    assert leased.sampling.max_new_tokens == RUN.max_new_tokens
    caller.tell(b.VersionLeft(Version(1)))
    caller.tell(b.Reported((piece(caller.call_group, 0, [9, STOP], version=1),), 0, ALICE))
    assert caller.verdicts == [Verdict.REFUSED], "a token of another version is in no evaluation"
    caller.tell(b.Reported((piece(caller.call_group, 0, [9, STOP], version=0),), 0, ALICE))
    assert caller.verdicts == [Verdict.ADMITTED] and caller.sampled == [caller.call_group]
    caller.tell(b.EpisodeEnded(one, {0: 1}, 1.0, True, {"steps": 1.0}))
    caller.end(two, caller.play(two), 0.0)
    for reward in (1.0, 0.0, 1.0):
        caller.end(hard, caller.play(hard), reward)
    (result,) = caller.results
    assert [one.rewards for one in result.sets] == [((1.0,), (0.0,)), ((1.0, 0.0, 1.0),)]
    row = exam_row(result, 1.0)
    assert row["eval/rollouts"] == 5 and row["eval/lost_episodes"] == 0 and row["eval/hard/steps"] == 2.0
    assert not caller.problems and not any(exam_version_of(name) is not None for name in caller.offered)
    assert not caller.scored, "the agent or its task gives the reward, not the learner's own scoring"
    held = caller.batcher.held
    assert held.ledger.histogram() == {} and held.counts.admitted == 0


def test_an_evaluated_agent_may_choose_its_temperature_and_nothing_else_of_the_draw() -> None:
    caller = begun()
    one, *_ = caller.problems
    caller.tell(b.CallAsked(one, None, (5, 6), RUN, 0.7))
    assert caller.call_group is not None
    leased = caller.offered[caller.call_group].sampling
    assert leased.temperature == 0.7 and leased.top_p == GREEDY.top_p and leased.seed != RUN.seed


def test_a_lost_episode_is_left_out_and_not_worth_nothing() -> None:
    caller = begun()
    one, two, hard = caller.problems
    caller.end(one, caller.play(one), None, is_final=False)  # broke, and is begun anew
    caller.end(one, caller.play(one), 1.0)
    caller.end(two, caller.play(two), None)  # lost for good
    for reward in (1.0, None, 0.0):
        caller.end(hard, caller.play(hard), reward)
    (result,) = caller.results
    assert [(one.name, one.rewards) for one in result.sets] == [("held_out", ((1.0,),)), ("hard", ((1.0, 0.0),))]
    assert result.lost == 2 and exam_row(result, 1.0)["eval/lost_episodes"] == 2


def test_an_evaluation_whose_episodes_are_all_lost_is_given_up_and_says_why() -> None:
    caller = begun()
    for root in caller.problems:
        for _ in range(caller.driven[root].rollout_count):
            caller.tell(b.EpisodeEnded(root, {}, None))
    (result,) = caller.results
    assert not result.sets and result.reason == "all 5 episodes of agents were lost"


def test_agents_play_again_after_a_restart_under_other_names() -> None:
    """A worker that still samples for an episode of before cannot add to one of now."""
    caller = begun()
    before = caller.problems
    caller.end(before[0], caller.play(before[0]), 1.0)
    open_call = caller.play(before[1], calls=1)
    caller.start()
    assert len(caller.problems) == 3 and not set(caller.problems) & set(before)
    caller.tell(b.Reported((piece(GroupId(f"{before[1]}.{open_call}.1"), 0, [9, STOP], version=0),), 0, ALICE))
    assert caller.verdicts == [Verdict.CLOSED]
    for root in caller.problems:
        for _ in range(caller.driven[root].rollout_count):
            caller.end(root, caller.play(root), 0.5)
    assert caller.results[-1].reward == 0.5


def test_what_a_barred_worker_sampled_is_played_again() -> None:
    caller = begun()
    one, *_ = before = caller.problems
    caller.end(one, caller.play(one), 1.0)
    caller.play(before[1])
    caller.tell(b.WorkerBarred(ALICE))
    assert len(caller.problems) == 3 and len(set(caller.problems) - set(before)) == 2


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_two_chains_of_an_episode_count_once(reward: float) -> None:
    caller = begun()
    one, two, hard = caller.problems
    first, second = caller.play(one), caller.play(one)
    caller.tell(b.EpisodeEnded(one, {first: 2, second: 2}, reward))
    caller.end(two, caller.play(two), 1.0 - reward)
    for _ in range(3):
        caller.end(hard, caller.play(hard), 0.5)
    assert caller.results[0].sets[0].rewards == ((reward,), (1.0 - reward,))

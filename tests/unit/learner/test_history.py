"""What the journal says happened, and which groups come back by it."""

from __future__ import annotations

import pytest

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan, Work
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Draw, SentTokens, TurnOf
from echo2.learner.rollouts.history import BatchDrawn, EpisodeScored, Finished, GroupDropped, History, Opened, Record
from echo2.learner.rollouts.selection import GroupRules
from echo2.staleness.ledger import Ledger

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(1,))


def opened(group_id: GroupId, cursor: int, rollouts: int) -> Opened:
    return Opened(Draw(cursor, 0, (5, 6), SAMPLING), GroupSpec(group_id, (5, 6), rollouts, SAMPLING, 0))


def finished(group_id: GroupId) -> Finished:
    spans = (VersionSpan(Version(0), 2),)
    rollout = Rollout(group_id, 0, (4, 1), (-0.5, -0.25), (-0.5, -0.25), spans, FinishReason.STOP)
    return Finished(rollout, (SentTokens(PeerId("alice"), 2),))


def problem(cursor: int) -> tuple[list[GroupId], list[Record]]:
    """Two seats at which agents play: of one a call has ended and its next is open, of the other the first is open."""
    root = GroupId(f"a{cursor:08d}")
    calls = [TurnOf(root, chain, depth).group_id for chain, depth in ((0, 1), (0, 2), (1, 1))]
    told: list[Record] = [opened(root, cursor, 2), *(opened(call, cursor, 1) for call in calls), finished(calls[0])]
    return [root, *calls], told


def restored(records: list[Record], next_step: int = 0) -> OpenGroups:
    history, groups = History(), OpenGroups(GroupRules(4, 2, 2, 100, is_driven=True), Ledger(4), Step(next_step))
    for record in records:
        history.apply(record, Step(0))
    history.restore(groups)
    return groups


def test_a_problem_comes_back_with_all_calls_of_its_agents() -> None:
    names, told = problem(0)
    groups = restored(told)
    assert list(groups.groups) == names and groups.incomplete_specs() == [
        groups.groups[name].spec for name in names[2:]
    ]
    assert [turn.rollout.token_ids for turn in groups.turns(names[0], 0)] == [(4, 1), ()]


@pytest.mark.parametrize("end", ["dropped", "trained"])
def test_of_a_problem_that_has_ended_no_call_comes_back(end: str) -> None:
    gone, told = problem(0)
    others, told_of_others = problem(1)
    last: Record = GroupDropped(gone[0])
    if end == "trained":
        told.append(EpisodeScored(gone[0], (0, 1), 1.0))
        last = BatchDrawn(Step(0), (gone[0],), ((1.0, 1.0),))
    groups = restored([*told, *told_of_others, last], next_step=1)
    assert list(groups.groups) == others
    assert groups.incomplete_specs(), "those of the other are open still"


def test_of_a_dropped_evaluation_no_call_comes_back() -> None:
    roots = [GroupId(f"x{3:08d}-{number:05d}") for number in range(2)]
    records: list[Record] = []
    for number, root in enumerate(roots):
        call = TurnOf(root, 0, 1).group_id
        records += [opened(root, number, 1), opened(call, number, 1)]
    assert list(restored([*records, GroupDropped(roots[0])]).groups) == [roots[1], TurnOf(roots[1], 0, 1).group_id]


def test_the_questions_of_an_evaluation_do_not_count_as_prompts_of_the_run() -> None:
    """Else a restart passes over as many prompts as the evaluation has questions."""
    history = History()
    history.apply(opened(GroupId("g00000004"), 4, 2), Step(0))
    spec = GroupSpec(GroupId("e00000000-00031"), (5, 6), 1, SAMPLING, 0, Work.EVALUATE, Version(0))
    history.apply(Opened(Draw(31, 0, (5, 6), SAMPLING), spec), Step(0))
    assert history.cursor == 5


def test_a_version_may_be_evaluated_again_after_it_was_given_up() -> None:
    root = GroupId("e00000003-00000")
    groups = restored([opened(root, 0, 1), GroupDropped(root), opened(root, 0, 1), finished(root)])
    assert groups.groups[root].is_sampled

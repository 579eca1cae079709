"""What the journal says happened, and which groups come back by it."""

from __future__ import annotations

import pytest

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.episodes import SentTokens, TurnOf
from echo2.learner.group import Draw
from echo2.learner.history import BatchDrawn, EpisodeScored, Finished, GroupDropped, History, Opened, Record
from echo2.learner.shelf import Shelf, ShelfConfig
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


def restored(records: list[Record], next_step: int = 0) -> Shelf:
    history, shelf = History(), Shelf(ShelfConfig(4, 2, 2, 100, is_driven=True), Ledger(4), Step(next_step))
    for record in records:
        history.apply(record, Step(0))
    history.restore(shelf)
    return shelf


def test_a_problem_comes_back_with_all_calls_of_its_agents() -> None:
    names, told = problem(0)
    shelf = restored(told)
    assert list(shelf.groups) == names and shelf.incomplete_specs() == [shelf.groups[name].spec for name in names[2:]]
    assert [turn.rollout.token_ids for turn in shelf.turns(names[0], 0)] == [(4, 1), ()]


@pytest.mark.parametrize("end", ["dropped", "trained"])
def test_of_a_problem_that_has_ended_no_call_comes_back(end: str) -> None:
    gone, told = problem(0)
    others, told_of_others = problem(1)
    last: Record = GroupDropped(gone[0])
    if end == "trained":
        told.append(EpisodeScored(gone[0], (0, 1), 1.0))
        last = BatchDrawn(Step(0), (gone[0],), ((1.0, 1.0),))
    shelf = restored([*told, *told_of_others, last], next_step=1)
    assert list(shelf.groups) == others
    assert shelf.incomplete_specs(), "those of the other are open still"


def test_of_a_dropped_evaluation_no_call_comes_back() -> None:
    roots = [GroupId(f"x{3:08d}-{number:05d}") for number in range(2)]
    told: list[Record] = []
    for number, root in enumerate(roots):
        call = TurnOf(root, 0, 1).group_id
        told += [opened(root, number, 1), opened(call, number, 1)]
    history = History()
    for record in [*told, GroupDropped(roots[0])]:
        history.apply(record, Step(0))
    (left,) = history.exam_groups().values()
    assert [group.spec.group_id for group in left] == [roots[1], TurnOf(roots[1], 0, 1).group_id]
    assert not restored(told).groups, "none of them is trained on"

"""The history checker finds each kind of violation in a history that has one, and none in a good one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.coordinator_history import History
from echo2.base.ids import GroupId, LeaseId, PeerId
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.coordinator.fleet.members import Member
from echo2.coordinator.leases.lease import GroupPhase, Lease, OpenGroup
from echo2.coordinator.store import StateSnapshot
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

A, B = PeerId("a"), PeerId("b")


def member(peer: PeerId) -> Member:
    return Member(peer, pb.WorkerHello(name=peer), 0.0, 0.0)


def lease(group: str, worker: PeerId, attempt: int = 1) -> Lease:
    return Lease(LeaseId(f"{group}/{attempt}"), GroupId(group), worker, attempt, 0.0, 9.0, 0.0)


def group(name: str, lease_id: str | None = None, attempts: int = 1) -> OpenGroup:
    spec = GroupSpec(GroupId(name), (1,), 4, SamplingParams(max_new_tokens=8), 0)
    phase = GroupPhase.LEASED if lease_id else GroupPhase.QUEUED
    return OpenGroup(spec, phase, 0.0, attempts, lease_id=LeaseId(lease_id) if lease_id else None)


def good() -> History:
    """Two workers, three groups: one made and closed, one leased to B, one waiting."""
    history = History()
    for worker in (A, B):
        history.is_welcomed(worker)
    history.is_offered(["g", "h", "i"])
    assert history.is_granted("g/1", "g", A, 1, 9.0)
    assert history.is_granted("h/1", "h", B, 1, 9.0)
    assert not history.is_granted("h/1", "h", B, 1, 19.0), "a renewal"
    history.has_ended("g/1")
    assert history.is_admitted("g", 1)
    assert not history.is_admitted("g", 2)
    history.is_closed(["g"])
    return history


def kept() -> StateSnapshot:
    return StateSnapshot(
        groups=(group("h", "h/1"), group("i", attempts=0)), leases=(lease("h", B),), members=(member(A), member(B))
    )


def test_a_good_history_has_no_violation_and_what_is_right_is_none() -> None:
    history = good()
    assert history.judge_saved(kept()) == [] == history.judge(kept(), ["g", "h", "i"])
    assert (history.duplicates, len(history.trained)) == (1, 1)
    taken_back = StateSnapshot(members=(member(A), member(B)), groups=(group("h"), group("i", attempts=0)))
    assert good().judge_saved(taken_back, {B}) == [], "B has no stream, and its group waits"
    history.is_granted("h/2", "h", A, 2, 9.0)
    history.is_revoked("h/1", is_foreign=True)
    history.is_closed(["h"])
    history.is_revoked("h/2", is_foreign=True)
    recalled = good()
    recalled.is_revoked("h/1", is_foreign=False)
    assert history.violations == recalled.violations == []


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda h: h.is_granted("h/1", "h", A, 1, 9.0), "lease h/1 of b was told to a"),
        (lambda h: h.is_granted("x", "h", A, 1, 9.0), "granted to b and to a"),
        (lambda h: (h.is_granted("h/3", "h", A, 3, 9.0), h.is_granted("h/2", "h", B, 2, 9.0)), "after attempt 3"),
        (lambda h: h.is_granted("z/1", "z", A, 1, 9.0), "never offered"),
        (lambda h: h.is_revoked("h/1", is_foreign=True), "attempt 1 is its newest"),
        (lambda h: h.is_welcomed(PeerId("c")), "worker c was welcomed"),
        (lambda h: h.is_granted("i/1", "i", A, 1, 9.0), "lease i/1 was told to a and is not in the state"),
        (lambda h: h.is_granted("i/1", "i", A, 1, 9.0), "attempt 1 at i was told, the state knows 0"),
        (lambda h: h.is_granted("i/1", "i", A, 1, 0.0), "no deadline"),
    ],
)
def test_each_violation_on_the_fleets_side_is_found(spoil: Callable[[History], object], expected: str) -> None:
    history = good()
    spoil(history)
    assert [one for one in history.judge(kept(), []) if expected in one]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (StateSnapshot(kept().groups, kept().leases, (member(A),)), "worker b was welcomed"),
        (StateSnapshot(kept().groups, (), kept().members), "lease h/1 was told to b and is not in the state"),
        (StateSnapshot(kept().groups[1:], (), kept().members), "lease h/1 was told to b and is not in the state"),
        (StateSnapshot(kept().groups, (lease("h", A),), kept().members), "the state has a as attempt 1"),
        (StateSnapshot(kept().groups, (lease("h", B), lease("h", A, 2)), kept().members), "group h has two leases"),
        (StateSnapshot((group("h", "other"),), kept().leases, kept().members), "which is not in the state"),
        (StateSnapshot(kept().groups[:1], kept().leases, kept().members), "i was offered before a kill"),
        (
            StateSnapshot((*kept().groups, group("g", "g/2", 2)), (*kept().leases, lease("g", A, 2)), kept().members),
            "g is admitted and closed and leased again",
        ),
    ],
)
def test_each_violation_of_the_state_is_found(saved: StateSnapshot, expected: str) -> None:
    assert [one for one in good().judge(saved, ["g", "h", "i"]) if expected in one]

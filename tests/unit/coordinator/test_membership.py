"""Life and work of workers: the stated rule and the operator's word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import LimitExceeded, NotAllowed
from echo2.base.ids import PeerId, RunId
from echo2.coordinator.fleet.members import Activation, Liveness, LivenessRule, Membership, OperatorSetting
from echo2.coordinator.fleet.record import WorkerRecords
from echo2.coordinator.planning.telemetry import WorkerHello

A = PeerId("a")
RULE = LivenessRule(suspect_after_s=3.0, gone_after_s=9.0)
HELLO = WorkerHello(1, "a", RunId("r"), price_usd_per_hour=3600.0)


def joined(now: float = 0.0) -> Membership:
    fleet = Membership(RULE, 2, WorkerRecords(60.0))
    fleet.change_of(fleet.on_hello(A, HELLO, now), now)
    return fleet


def state_at(fleet: Membership, now: float) -> Liveness:
    fleet.change_of(fleet.members[A], now)
    return fleet.members[A].last_liveness


@given(silent_s=st.floats(0, 100))
def test_silence_makes_suspect_then_gone(silent_s: float) -> None:
    expected = Liveness.ALIVE if silent_s < 3 else Liveness.SUSPECT if silent_s < 9 else Liveness.GONE
    assert state_at(joined(), silent_s) is expected


@given(cut_s=st.floats(0, 2.9), later_s=st.floats(0, 100))
def test_broken_stream_makes_suspect_at_once_and_gone_sooner(cut_s: float, later_s: float) -> None:
    fleet = joined()
    fleet.on_disconnect(A, cut_s)
    assert state_at(fleet, cut_s + later_s) is (Liveness.SUSPECT if cut_s + later_s - cut_s < 3 else Liveness.GONE)


def test_after_a_restart_all_have_the_longer_time_to_come_back() -> None:
    old = joined()
    fleet = Membership(RULE, 2, WorkerRecords(60.0))
    fleet.restore(list(old.members.values()), 100.0)
    assert state_at(fleet, 108.0) is Liveness.SUSPECT
    assert state_at(fleet, 109.5) is Liveness.GONE
    fleet.on_hello(A, HELLO, 110.0)
    assert state_at(fleet, 110.0) is Liveness.ALIVE


def test_who_was_gone_before_a_restart_stays_gone_until_it_comes_again() -> None:
    old = joined()
    old.on_leave(A, 1.0)
    old.change_of(old.members[A], 1.0)
    old.members[A].has_left = False  # that is not kept on disk
    fleet = Membership(RULE, 2, WorkerRecords(60.0))
    fleet.restore(list(old.members.values()), 1.5)
    assert state_at(fleet, 1.6) is Liveness.GONE
    fleet.on_hello(A, HELLO, 2.0)
    assert state_at(fleet, 2.0) is Liveness.ALIVE


def test_good_bye_is_gone_at_once() -> None:
    fleet = joined()
    fleet.on_leave(A, 1.0)
    assert state_at(fleet, 1.0) is Liveness.GONE


def test_operators_word_goes_before_the_plan_and_a_ban_holds_until_it_is_lifted() -> None:
    fleet = joined()
    member = fleet.members[A]
    member.is_wanted = False
    assert member.activation is Activation.STANDBY
    fleet.set(A, OperatorSetting.ACTIVE, "", 1.0)
    assert member.activation is Activation.ACTIVE
    fleet.set(A, OperatorSetting.BANNED, "bad rollouts", 1.0)
    with pytest.raises(NotAllowed, match="bad rollouts"):
        fleet.on_hello(A, HELLO, 2.0)
    fleet.set(A, OperatorSetting.AUTOMATIC, "", 3.0)
    fleet.on_hello(A, HELLO, 4.0)
    with pytest.raises(NotAllowed, match="expected a worker of this run"):
        fleet.set(PeerId("nobody"), OperatorSetting.ACTIVE, "", 1.0)


def test_who_is_banned_is_known_without_looking_through_the_fleet_also_after_a_restart() -> None:
    old = joined()
    old.set(A, OperatorSetting.BANNED, "bad rollouts", 1.0)
    assert list(old.banned) == [A]
    fleet = Membership(RULE, 2, WorkerRecords(60.0))
    fleet.restore(list(old.members.values()), 2.0)
    assert list(fleet.banned) == [A]
    fleet.set(A, OperatorSetting.AUTOMATIC, "", 3.0)
    assert not fleet.banned


def test_fleet_has_a_limit() -> None:
    fleet = joined()
    fleet.on_hello(PeerId("b"), HELLO, 0.0)
    with pytest.raises(LimitExceeded, match="2 workers at most"):
        fleet.on_hello(PeerId("c"), HELLO, 0.0)

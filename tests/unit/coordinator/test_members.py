"""Life and work of workers: the stated rule, the operator's word, trials of newcomers, and prices, which are claims."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from echo2.base.errors import LimitExceeded, NotAllowed
from echo2.base.ids import PeerId
from echo2.coordinator.fleet import members as fleet_members
from echo2.coordinator.fleet.members import TRIAL_S, Activation, Liveness, Member, Membership, OperatorSetting
from echo2.coordinator.fleet.record import WorkerRecords
from echo2.coordinator.fleet.tokens import TokenBook
from echo2.coordinator.hub import timed_section
from echo2.coordinator.money.costs import Money
from echo2.coordinator.money.provisioning import MachineOffer, MachineState, RentedMachine
from echo2.coordinator.planning.telemetry import believed_rate
from echo2.coordinator.store import _ROWS
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan as plan_of
from echo2.cost_model.snapshot import PlanConfig
from echo2.outside import SteadyClock
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_lease_book import delivery
from tests.unit.coordinator.test_planner_input import beat, board, fleet_snapshot

A = PeerId("a")
NONE = math.inf
RATE, LIE = 20.0, 1000.0  # rollouts/s


def membership(suspect_after_s: float = 3.0, gone_after_s: float = 9.0, workers_max: int = 2) -> Membership:
    return Membership(suspect_after_s, gone_after_s, workers_max, WorkerRecords(60.0))


def join(fleet: Membership, name: str = "a", price: float = 1.0, now: float = 0.0) -> Member:
    hello = pb.WorkerHello(name=name, price_usd_per_hour=price)
    member = fleet.on_hello(PeerId(name), hello, now)
    fleet.change_of(member, now)
    return member


def state_at(fleet: Membership, now: float) -> Liveness:
    fleet.change_of(fleet.members[A], now)
    return fleet.members[A].last_liveness


# ---- alive, suspect, gone


@given(cut_s=st.none() | st.floats(0, 2.9), later_s=st.floats(0, 100))
def test_silence_makes_suspect_then_gone_a_broken_stream_sooner(cut_s: float | None, later_s: float) -> None:
    fleet = membership()
    join(fleet)
    if cut_s is None:
        expected = Liveness.ALIVE if later_s < 3 else Liveness.SUSPECT if later_s < 9 else Liveness.GONE
    else:
        fleet.on_disconnect(A, cut_s)
        expected = Liveness.SUSPECT if cut_s + later_s - cut_s < 3 else Liveness.GONE
    assert state_at(fleet, (cut_s or 0.0) + later_s) is expected
    assert fleet.members[A].may_lease is (expected is Liveness.ALIVE)


@pytest.mark.parametrize("said_good_bye", [True, False])
def test_after_a_restart_all_have_the_longer_time_to_come_back_and_who_was_gone_stays_gone(said_good_bye: bool) -> None:
    old, fleet = membership(), membership()
    member = join(old)
    if said_good_bye:
        old.on_leave(A, 1.0)
        assert state_at(old, 1.0) is Liveness.GONE
        member.has_left = False  # that is not kept on disk
    fleet.restore([member], 100.0)
    assert state_at(fleet, 108.0) is (Liveness.GONE if said_good_bye else Liveness.SUSPECT)
    assert state_at(fleet, 109.5) is Liveness.GONE
    join(fleet, now=110.0)
    assert state_at(fleet, 110.0) is Liveness.ALIVE


def test_the_operators_word_goes_before_the_plan_and_a_ban_holds_over_a_restart_until_it_is_lifted() -> None:
    fleet = membership()
    member = join(fleet)
    member.is_wanted = False
    for setting in ("automatic", "active", "draining", "quarantined", "banned"):
        fleet.set(A, OperatorSetting(setting), "bad rollouts")
        assert member.activation is Activation(setting.replace("automatic", "standby"))
    again = membership()
    again.restore([member], 2.0)
    assert list(again.banned) == [A]
    with pytest.raises(NotAllowed, match="bad rollouts"):
        join(again)
    again.set(A, OperatorSetting.AUTOMATIC, "")
    join(again)
    assert not again.banned
    join(again, "b")
    with pytest.raises(LimitExceeded, match="2 workers at most"):
        join(again, "c")
    again.members[PeerId("b")].last_liveness = Liveness.GONE
    join(again, "c")  # those that are gone count no more
    with pytest.raises(NotAllowed, match="expected a worker of this run"):
        again.set(PeerId("nobody"), OperatorSetting.ACTIVE, "")


# ---- newcomers


class Fleet:
    """Workers of which the learner tells what they delivered."""

    def __init__(self) -> None:
        self.membership = membership(1e6, 2e6, 1000)
        self.records = self.membership.records
        self.records.on_delivered((), 0.0)

    def worker(self, name: str, rate: float = RATE, price: float = 1.0, delivered: float = 0.0) -> Member:
        """`rate`: rollouts/s that it claims; 0: it has no weights yet."""
        member = join(self.membership, name, price)
        self.membership.on_heartbeat(member.peer_id, beat(rate, 1.0) if rate else pb.Heartbeat(), None, 0.0)
        if delivered:
            self.records.on_delivered((delivery(member.peer_id, 8, delivered),), 0.0)
        return member

    def on_trial(self, now: float = 0.0, cap: float = NONE, is_spent: bool = False) -> set[str]:
        members = list(self.membership.members.values())
        fleet_members.try_newcomers(members, cap, now, is_spent)
        return {member.peer_id for member in members if member.is_on_trial}

    def plan(self) -> Plan:
        known = board(1.0)
        known.on_publish(pb.VersionPublished(version=1, has_parent=True, artifact_bytes=1000), 0.0, [], 0.0)
        snapshot = fleet_snapshot(known, list(self.membership.members.values()), 0.0, {})
        return plan_of(snapshot, PlanConfig(4, dwell_s=0.0))


def test_at_the_start_all_are_on_trial_and_in_the_plan_whatever_they_claim_and_none_at_the_budget() -> None:
    fleet = Fleet()
    fleet.worker("honest")
    fleet.worker("liar", LIE, price=0.0)
    fleet.worker("loading", 0.0)
    assert fleet.on_trial() == {"honest", "liar", "loading"} == set(fleet.plan().pool)
    assert fleet.on_trial(is_spent=True) == set()


def test_a_plan_is_made_of_what_was_delivered_and_no_claim_of_a_newcomer_is_in_it() -> None:
    fleet = Fleet()
    for number in range(5):
        fleet.worker(f"h{number}", delivered=200.0)
    fleet.on_trial()
    before = fleet.plan()
    assert len(before.pool) == 4 and before.predicted_utilisation > 0.95
    liars = [fleet.worker(f"liar{number}", LIE, price=0.0) for number in range(20)]
    assert len(fleet.on_trial()) == 5, "as many as have delivered"
    after = fleet.plan()
    assert (after.pool, after.kappa, after.predicted_utilisation) == (
        before.pool, before.kappa, before.predicted_utilisation
    )  # fmt: skip
    fleet.records.on_delivered((delivery(liars[1].peer_id, 8, 1.0),), 1.0)
    fleet.on_trial(1.0)
    assert believed_rate(liars[1]) < 1.0
    assert len(set(fleet.plan().pool) & set(before.pool)) >= 3, "a little buys a little"
    fleet.membership.set(liars[0].peer_id, OperatorSetting.ACTIVE, "")
    fleet.membership.change_of(liars[0], 0.0)
    assert liars[0].peer_id in fleet.plan().pool, "the operator's word takes it in"


def test_trials_that_bring_nothing_end_and_come_again_after_a_time_that_doubles() -> None:
    fleet = Fleet()
    fleet.worker("honest", delivered=100.0)
    fleet.worker("first")
    fleet.worker("second")
    assert fleet.on_trial(2.0) == {"first"} == fleet.on_trial(2.0 + TRIAL_S - 1)
    assert fleet.on_trial(2.0 + TRIAL_S) == {"second"}
    was_on, now, begun = False, 2.0 + 2 * TRIAL_S, []
    while len(begun) < 4:
        is_on = "first" in fleet.on_trial(now)
        if is_on and not was_on:
            begun.append(now)
        was_on, now = is_on, now + 1.0
    gaps = [after - before for before, after in pairwise(begun)]
    assert all(later >= 1.3 * sooner for sooner, later in pairwise(gaps)), gaps


def test_a_trial_needs_weights_room_under_the_cap_to_the_cent_and_no_pause() -> None:
    fleet = Fleet()
    fleet.worker("honest", price=3.0, delivered=100.0)
    fleet.worker("loading", 0.0)
    dear, cheap = fleet.worker("a-dear", price=2.5), fleet.worker("b-cheap", price=1.5)
    assert fleet.on_trial(cap=5.0) == {"b-cheap"}
    assert fleet.on_trial(cap=6.0) == {"b-cheap"}, "one place, and it is taken"
    fleet.records.bar(cheap.peer_id, "", 10.0, 1.0)
    assert fleet.on_trial(2.0, cap=6.0) == {"a-dear"}
    dear.setting = OperatorSetting.STANDBY
    assert fleet.on_trial(2.0, cap=6.0) == set()
    full = Fleet()
    for number in range(4):
        full.worker(f"h{number}", price=0.2, delivered=100.0)
    full.worker("last", price=0.2)
    assert full.on_trial(cap=1.0) == {"last"}, "1 - 4 * 0.2 is less than 0.2"


# ---- prices

OFFERS = (
    MachineOffer("big", "manual", gpu="H100", usd_per_hour=2.0),
    MachineOffer("spot", "manual", gpu="H100", usd_per_hour=1.2),
)


def limit_of(
    member: Member, fleet: Membership, machine: float | None = None, cap: float = NONE, budget: float = NONE
) -> fleet_members.PriceLimit:
    """Where these offers are made, and the worker is on a machine rented at that price."""
    tokens = TokenBook(1)
    money = Money(fleet, tokens, SteadyClock())
    money.offers = OFFERS
    if machine is not None:
        token = tokens.create("s" * 43, "worker", "", 60.0, 0, 0.0)
        token.peers.add(member.peer_id)
        money.machines["m"] = RentedMachine(
            "m", "big", "manual", "", MachineState.RUNNING, machine, 0.0, token_id=token.token_id
        )
    return money.limit_of(member, timed_section(usd_per_hour_cap=cap, usd_budget=budget))


@pytest.mark.parametrize(
    ("machine", "gpu", "cap", "budget", "expected"),
    [
        (None, "", NONE, NONE, 38.4), (None, "4 x RTX4090", NONE, NONE, 14.0), (None, "999 x RTX4090", NONE, NONE, 28.0),
        (None, "H100", NONE, NONE, 2.0), (0.7, "H100", NONE, NONE, 0.7), (None, "A100", 5.0, NONE, 5.0),
        (None, "A100", 5.0, 3.0, 3.0), (None, "H100", 5.0, 30.0, 2.0), (None, "H100", NONE, 0.0, 0.0),
    ],
)  # fmt: skip
def test_a_price_is_bounded_by_offers(
    machine: float | None, gpu: str, cap: float, budget: float, expected: float
) -> None:
    fleet = membership()
    member = join(fleet)
    member.hello.gpu = gpu
    limit = limit_of(member, fleet, machine, cap, budget)
    assert limit.usd_per_hour == pytest.approx(expected) and limit.what
    for member.price_limit, member.hello.price_usd_per_hour in ((limit, expected), (limit, expected * 1.01 + 0.01)):
        assert member.asks_too_much is (member.hello.price_usd_per_hour > expected)


def test_what_a_heartbeat_leaves_out_stays_as_it_was_but_links_end_with_their_session_and_measures_with_their_gpu(
) -> None:  # fmt: skip
    fleet = membership()
    member = join(fleet)
    fleet.on_heartbeat(A, beat(RATE), None, 0.5)
    whole = pb.Heartbeat(links={"links": [{"peer_id": "b"}]}, log={"lines": [{"text": "slow disk"}]})
    fleet.on_heartbeat(A, whole, None, 1.0)
    fleet.on_heartbeat(A, pb.Heartbeat(running_sequences=3), None, 2.0)
    assert [link.peer_id for link in member.heartbeat.links.links] == ["b"]
    assert (member.heartbeat.log, member.heartbeat.running_sequences) == (whole.log, 3)
    for gpu, rate in (("", RATE), ("H100", 0.0)):
        fleet.on_hello(A, pb.WorkerHello(name="a", gpu=gpu), 3.0)
        assert not member.heartbeat.links.links and member.heartbeat.log.lines
        assert member.measures.value("rollouts_per_s") == rate


def test_a_price_above_the_limit_waits_and_the_operator_approves_that_price_alone() -> None:
    fleet = membership()
    member = join(fleet, price=6.0)
    assert not member.asks_too_much
    member.price_limit = limit_of(member, fleet, cap=5.0)
    assert member.activation is Activation.STANDBY and "the operator may activate it" in member.activation_reason
    fleet.set(A, OperatorSetting.ACTIVE, "agreed")
    assert member.activation is Activation.ACTIVE
    member.hello.price_usd_per_hour = 6.1
    assert member.activation is Activation.STANDBY
    restored = Member(A, member.hello, 0.0, 0.0, setting=OperatorSetting.ACTIVE, price_approved=member.price_approved)
    membership().restore([restored], 0.0)
    restored.price_limit = member.price_limit
    assert restored.activation is Activation.STANDBY, "a restart approves no other price"
    restored.hello.price_usd_per_hour = 5.9
    assert restored.activation is Activation.ACTIVE


def test_a_price_that_was_approved_when_no_release_saved_that_is_approved_still() -> None:
    text = _ROWS["members"].to_json(join(membership(), price=6.0)).replace('"automatic"', '"active"')
    row = {name: value for name, value in json.loads(text).items() if name != "price_approved"}
    member = _ROWS["members"].from_json(json.dumps(row))
    fleet = membership()
    fleet.restore([member], 0.0)
    member.price_limit = limit_of(member, fleet, cap=5.0)
    assert member.activation is Activation.ACTIVE
    member.hello.price_usd_per_hour = 6.1
    assert member.activation is Activation.STANDBY

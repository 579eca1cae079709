"""Cap and budget hold on what is about to be done, whatever plan led there; the learner hears of each; rates are corrected."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.broadcast.trees import weighted_plan
from echo2.coordinator.fleet import members as fleet_members
from echo2.coordinator.fleet.members import WINDOW, Activation, Liveness, Member, Membership, OperatorSetting
from echo2.coordinator.fleet.record import WorkerRecords
from echo2.coordinator.fleet.tokens import TokenBook
from echo2.coordinator.hub import BUDGET_TICKS, MEMBERS_KEPT_TICKS, Hub
from echo2.coordinator.money.costs import FleetCosts, Money, meter
from echo2.coordinator.money.provisioning import MachineState, RentedMachine
from echo2.coordinator.planning import telemetry
from echo2.coordinator.planning.service import Planning, snapshot_of
from echo2.coordinator.planning.telemetry import RATIO_LEAST, CurrentPlan, LearnerBoard, Totals, broadcast_nodes
from echo2.coordinator.streams import StreamSession, WorkerStream
from echo2.cost_model.plan import Plan
from echo2.cost_model.relations import DeltaSizeEstimator
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import options
from tests.unit.coordinator.test_lease_book import delivery
from tests.unit.coordinator.test_planner_input import beat, board, fleet, link
from tests.unit.coordinator.test_provisioner import Cloud, Scene
from tests.unit.cost_model.fleets import plan_of


def plan(pool: list[PeerId], cap: int = 64, promised: float = 0.98) -> Plan:
    return plan_of(
        5.0, 5.0, pool=tuple(pool), in_flight_cap_rollouts=cap, predicted_utilisation=promised, usd_per_hour=1.0
    )


class Fleet(Scene):
    """A hub with workers at these prices, which are heard at each step of the clock."""

    def __init__(self, folder: Path, *prices: float, **chosen: Any) -> None:
        super().__init__(folder, Cloud(), **chosen)
        for number, price in enumerate(prices):
            peer = PeerId(f"w{number}")
            hello = pb.WorkerHello(name=peer, price_usd_per_hour=price)
            self.hub.membership.on_hello(peer, hello, self.clock.now())
        self.everybody = list(self.hub.membership.members)

    def passes(self, seconds: float, ticks: int = 0) -> None:
        self.clock.time += seconds
        for peer_id in self.everybody:
            self.hub.membership.members[peer_id].heard_at = self.clock.now()
        for _ in range(ticks):
            self.hub.tick()


def working(hub: Hub) -> list[Member]:
    return [one for one in hub.membership.members.values() if one.activation is Activation.ACTIVE]


def working_usd(hub: Hub) -> float:
    return sum(one.hello.price_usd_per_hour for one in working(hub))


@pytest.mark.parametrize("seed", range(8))
async def test_no_plan_spends_beyond_the_cap_and_none_at_all_beyond_the_budget(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    prices = (round(draw.uniform(0.1, 3.0), 2) for _ in range(12))
    fleet = Fleet(tmp_path, *prices, usd_per_hour_cap=5.0, usd_budget=8.0)
    hub, sent = fleet.hub, []
    hub.learner.send = lambda order: bool(sent.append(order)) or True  # type: ignore[method-assign]
    for member in hub.membership.members.values():
        member.is_wanted = False
        hub.membership.change_of(member, fleet.clock.now())
    for turn in range(30):
        fleet.passes(draw.uniform(1, 1800))
        before = len(sent)
        known = draw.sample(fleet.everybody, draw.randrange(13))  # the others came since the plan was begun
        hub.adopt_plan(plan(draw.sample(known, draw.randrange(len(known) + 1)), 100 + turn), known, True)
        assert working_usd(hub) <= 5.0 + 1e-6
        if hub.money.sums().usd_chosen >= 8.0:
            assert not {one.peer_id for one in working(hub)} & set(known)
        assert any(order.WhichOneof("kind") == "plan" for order in sent[before:]), "the learner is told of each"
    assert hub.money.sums().usd_chosen >= 8.0, "the budget is reached"
    hub.change_settings({"usd_per_hour_cap": 0.3, "usd_budget": 1e6})
    hub.adopt_plan(plan(fleet.everybody), fleet.everybody, is_acted_on=True)
    assert working_usd(hub) <= 0.3


async def test_whom_the_operator_activates_has_the_room_under_the_cap_before_others(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 1.0, usd_per_hour_cap=1.0)
    first, chosen = fleet.everybody
    fleet.hub.set_worker(chosen, OperatorSetting.ACTIVE, "the operator's word")
    fleet.hub.adopt_plan(plan([first, chosen]), fleet.everybody, is_acted_on=True)
    assert [one.peer_id for one in working(fleet.hub)] == [chosen]
    fleet.hub.set_worker(chosen, OperatorSetting.STANDBY, "")
    fleet.hub.set_worker(first, OperatorSetting.AUTOMATIC, "")
    assert [one.peer_id for one in working(fleet.hub)] == [first], "by the plan, and there is room now"


async def test_a_plan_that_is_only_advised_is_acted_on_when_the_operator_applies_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 1.0, planner_mode="advise")
    drain, stay = fleet.everybody
    advised = replace(plan([stay]), drain=(drain,))
    fleet.hub.adopt_plan(advised, fleet.everybody, is_acted_on=False, is_settled=False)
    assert len(working(fleet.hub)) == 2
    await fleet.commands.act("plan/apply", b"{}")
    assert [one.peer_id for one in working(fleet.hub)] == [stay]
    assert not fleet.hub.plan.is_settled, "what it promises rests on as little as before"


@pytest.mark.parametrize("mode", ["advise", "approve", "auto"])
@pytest.mark.parametrize("has_plan", [True, False])
async def test_a_spent_budget_stops_all_spending_and_is_said(tmp_path: Path, mode: str, has_plan: bool) -> None:
    fleet = Fleet(tmp_path, 1.0, 1.0, 1.0, 1.0, usd_per_hour_cap=math.inf, usd_budget=8.0, planner_mode=mode)
    hub = fleet.hub
    if has_plan:
        hub.adopt_plan(plan(fleet.everybody), fleet.everybody, is_acted_on=True)
    for _ in range(40):
        fleet.passes(360, BUDGET_TICKS)
        assert working_usd(hub) == (4.0 if hub.money.sums().usd_chosen < 8.0 else 0.0)
    assert 8.0 <= hub.money.sums().usd_chosen <= 8.0 + 0.4 + 1e-9, "what one step of the clock costs"
    assert "budget of 8 USD is spent" in hub.membership.members[fleet.everybody[0]].activation_reason
    hub.board.on_hello(PeerId("learner"), board(10.0).hello, fleet.clock.now())
    assert any("budget" in step.text and "spent" in step.text for step in fleet.commands.view.advice().steps)
    fleet.commands.change_settings({"usd_budget": 20.0}, {})
    fleet.passes(0.0, BUDGET_TICKS)
    await Planning(hub)._plan_pool()
    assert working_usd(hub) == (0.0 if has_plan else 4.0), "a plan says who works, before the first one all do"
    assert hub.awaits_plan is has_plan, "a first plan is acted on or not as its mode has it"


@pytest.mark.parametrize("is_spent", [False, True])
async def test_where_nobody_is_left_whom_a_plan_chose_and_none_can_be_made_those_work_who_stood_by(
    tmp_path: Path, is_spent: bool
) -> None:
    """Coordinator and learner start again: without a step there is no plan, and without a worker no step. `is_spent`: of a budget
    that was spent then and has been raised since."""
    settings = {"usd_budget": 8.0 if is_spent else math.inf, "planner_mode": "auto"}
    fleet = Fleet(tmp_path, 1.0, 1.0, **settings)
    chosen, other = fleet.everybody
    fleet.hub.adopt_plan(plan([chosen]), fleet.everybody, is_acted_on=True)
    while is_spent and working(fleet.hub):
        fleet.passes(360, BUDGET_TICKS)
    fleet.hub.flush_now()
    fleet.options = options(tmp_path, **{**settings, "usd_budget": 20.0})
    fleet.begin()
    hub, planning = fleet.hub, Planning(fleet.hub)
    hub.board.on_hello(PeerId("learner"), board(10.0).hello, fleet.clock.now())
    member = hub.membership.on_hello(other, hub.membership.members[other].hello, fleet.clock.now())
    await planning._plan_pool()
    assert (member.activation is Activation.ACTIVE) is is_spent, "the chosen one may come back"
    fleet.clock.time += hub.config.coordinator.gone_after
    member.heard_at = fleet.clock.now()
    hub.tick()
    await planning._plan_pool()
    assert member.activation is Activation.ACTIVE
    back = hub.membership.on_hello(chosen, hub.membership.members[chosen].hello, fleet.clock.now())
    back.is_wanted, member.is_wanted = True, False
    hub.set_worker(chosen, OperatorSetting.QUARANTINED, "it is set aside")
    await planning._plan_pool()
    assert member.activation is Activation.ACTIVE, "the one that was chosen does not work"


async def test_a_rented_machine_is_paid_once_and_leaves_the_rest_of_the_cap_to_others(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2.0, 1.0, 0.5, usd_per_hour_cap=3.0)
    hub = fleet.hub
    for member in hub.membership.members.values():
        member.is_wanted = False
        hub.membership.change_of(member, fleet.clock.now())
    token = hub.tokens.create("secret" * 8, "worker", "", 3600.0, 0, fleet.clock.now())
    token.peers.add(PeerId("w0"))
    hub.money.machines["m"] = RentedMachine(
        "m", "gpu", "cloud", "", MachineState.RUNNING, 2.0, fleet.clock.now() - 3600.0, token_id=token.token_id
    )
    hub.adopt_plan(plan(fleet.everybody), fleet.everybody, is_acted_on=True)
    names = [one.peer_id for one in working(hub)]
    assert "w0" in names and len(names) == 2, "2 USD/h for the machine, 1 for one of the others"
    fleet.clock.time += 3600.0
    hub.board = board(10.0)
    hub.membership.on_heartbeat(PeerId("w0"), beat(), None, fleet.clock.now())
    snapshot = await snapshot_of(hub)
    assert snapshot is not None and snapshot.spent_usd == pytest.approx(4.5), "two hours of 2 and one of 0.5"
    token.peers.add(PeerId("w1"))
    bills = [hub.money.bill_of(hub.membership.members[PeerId(name)]) for name in ("w0", "w1")]
    assert bills == pytest.approx([2.0, 2.0]), "they share the machine's bill"


def test_what_the_model_leaves_out_is_learned_by_plans_and_bounded_and_rewards_that_are_due_are_not_it() -> None:
    def trains(made: CurrentPlan, steps: range, wait_s: float, train_s: float, rewards_due: int = 0) -> None:
        for step in steps:
            report = pb.LearnerReport(step=step, train_s=train_s, wait_s=wait_s, rewards_due=rewards_due)
            made.on_step(report, 0.0, step)

    made = CurrentPlan(LearnerBoard())
    for first in range(0, 60, 6):  # it trains half of the time, whatever a plan promises
        made.adopt(plan([PeerId("w")], promised=made.rate_ratio), True, made.rate_ratio)
        trains(made, range(first, first + 6), 1.0, 1.0)
    assert made.rate_ratio == pytest.approx(0.5, abs=0.01) and "50% of the time" in made.reason
    made = CurrentPlan(LearnerBoard())
    made.adopt(plan([PeerId("w")], promised=1.0), True)
    trains(made, range(40), 1.0, 1.0)
    assert made.rate_ratio == pytest.approx(0.5**0.5), "one plan is corrected once, however often it is looked at"
    made.adopt(plan([PeerId("w")], promised=1.0), True, made.rate_ratio)
    trains(made, range(101, 141), 9.9, 0.1)
    assert made.rate_ratio == RATIO_LEAST
    made = CurrentPlan(LearnerBoard())
    made.adopt(plan([PeerId("w")], promised=1.0), True)
    trains(made, range(12), 1.0, 1.0, rewards_due=64)
    assert made.rate_ratio == 1.0


def test_a_plan_that_is_not_carried_out_is_shown_and_told_and_corrects_nothing() -> None:
    kept, advised = CurrentPlan(LearnerBoard()), plan([PeerId("w")], promised=1.0)
    assert kept.message is None and kept.waits_for == "the learner"
    kept.adopt(advised, is_acted_on=False)
    assert (kept.now, kept.carried_out, kept.waits_for) == (advised, None, "")
    for step in range(1, 12):
        kept.on_step(pb.LearnerReport(step=step, train_s=1.0), 0.0, 2.0 * step)
    assert kept.rate_ratio == 1.0 and "usd_per_hour" not in kept.predicted
    assert kept.message is not None and kept.message.in_flight_cap_rollouts == 64


def test_a_prediction_waits_for_three_steps_a_delta_and_a_window_of_heartbeats() -> None:
    """A first step and first rates are those of a start, and before the first delta plans reckon with snapshots: after a resume 4 %
    were predicted where nine tenths were trained."""
    made, members = board(1.0, 1.0), fleet("A100", "A100", "A100")
    workers = [*members.members]

    def has_settled(beats: int = 0) -> bool:
        for peer_id in workers[:2]:
            for _ in range(beats):
                members.on_heartbeat(peer_id, beat(), None, 1.0)
        return telemetry.is_settled(made, [*members.members.values()])

    assert not has_settled(beats=WINDOW)
    made.on_report(pb.LearnerReport(step=3, train_s=1.0), 3.0)
    assert not has_settled()
    made.on_publish(pb.VersionPublished(version=1, parent=0, has_parent=True, artifact_bytes=9), 1.0, workers, 3.0)
    assert has_settled()
    made.delta_size = DeltaSizeEstimator()
    assert not has_settled()
    for version in (2, 3):
        snapshot = pb.VersionPublished(version=version, artifact_bytes=9, full_snapshot_bytes=20)
        made.on_publish(snapshot, 1.0, workers, 3.0)
    assert has_settled() and (made.totals.artifact_bytes, made.totals.full_bytes) == (27, 40), "only snapshots"
    for peer_id in workers:
        members.members[peer_id].measures = fleet_members.WorkerMeasures()
    assert not has_settled(beats=WINDOW - 1)
    assert has_settled(beats=1)


async def test_a_version_is_expected_and_complete_when_all_that_are_not_late_hold_it(tmp_path: Path) -> None:
    hub = Scene(tmp_path, Cloud()).hub
    hub.board, hub.membership = board(10.0), fleet("A100", "A100", "A100", "A100")
    members = hub.membership.members
    for member in members.values():
        member.measures.observe(beat())
    slow = members[PeerId("w2")]
    slow.hello.link.CopyFrom(link(1e5))
    nodes = broadcast_nodes(hub.board, list(members.values()))
    needs = replace(telemetry.needs_of(nodes, members, None), share=0.7, weights=(2.0, 2.0, 1.9, 2.0))
    hub.adopt_broadcast_plan(weighted_plan(nodes, needs, 1, 10**6))
    assert hub.broadcast_plan is not None and hub.broadcast_plan.late == {slow.peer_id}
    assert hub.learner.predicted_broadcast_s(10**7) == pytest.approx(10 * hub.broadcast_plan.predicted_needed_s)
    assert 5 * hub.learner.predicted_broadcast_s(10**6) < hub.broadcast_plan.predicted_all_s
    hub.learner.on_publish(pb.VersionPublished(version=1, has_parent=True, artifact_bytes=10**6))
    for name in ("w0", "w1", "w3"):
        assert hub.board.newest_complete is None
        hub.board.on_live(PeerId(name), Version(1), hub.clock.now() + 2.0)
    complete = hub.board.newest_complete
    assert complete is not None and complete.complete_s == pytest.approx(2.0)
    for member, apply_s in zip(members.values(), (1.0, 1e9, 1.0, 3.0), strict=True):  # one lies
        member.heartbeat.apply_s = apply_s
    wanted_s = 10 * hub.broadcast_plan.predicted_needed_s + 4.0
    assert hub.learner.predicted_broadcast_s(10**7) == pytest.approx(wanted_s), "else a broadcast never looks overdue"


# ---- the money meter against a second bill, kept by the second

OWN, RENTED, DEAR = (PeerId(name) for name in ("own", "rented", "dear"))
USD_PER_S = {OWN: 1.0, RENTED: 3.0, DEAR: 4.0}
MACHINE_USD_PER_S = 2.0
LIMIT = fleet_members.PriceLimit(3600.0, "the dearest offer")
SETTINGS = {one.value: one for one in OperatorSetting}


class Bill:
    """A fleet with its meter, and what each second of it should cost. A worker is charged for a second in which it is there: at
    once while its stream stands; of a broken stream once it is back, and not at all if it turns out to be gone. One whose price
    nobody has agreed to is charged only while it works."""

    def __init__(self) -> None:
        self.fleet, self.now = Membership(3.0, 9.0, 8, WorkerRecords(60.0)), 0.0
        self.tokens = TokenBook(1)
        token = self.tokens.create("s" * 43, "worker", "", 1e6, 0, 0.0)
        token.peers.add(RENTED)
        self.machine = RentedMachine(
            "m", "gpu", "cloud", "", MachineState.RUNNING, 3600 * MACHINE_USD_PER_S, 0.0, token_id=token.token_id
        )
        self.open_s, self.is_rented = 0.0, True
        self.due_s = dict.fromkeys(USD_PER_S, 0.0)
        self.worked, self.stood_by = dict.fromkeys(USD_PER_S, 0.0), dict.fromkeys(USD_PER_S, 0.0)
        self.heard = set(USD_PER_S)

    def happens(self, what: str, peer_id: PeerId) -> None:
        members = self.fleet.members
        if what == "come" and (peer_id not in members or members[peer_id].setting is not OperatorSetting.BANNED):
            price = 3600.0 * USD_PER_S[peer_id]
            member = self.fleet.on_hello(peer_id, pb.WorkerHello(name=peer_id, price_usd_per_hour=price), self.now)
            member.price_limit = LIMIT if peer_id == DEAR else member.price_limit
            self.heard.add(peer_id)
        elif what == "end the machine" and self.is_rented:
            self.machine.state, self.machine.ended_at, self.is_rented = MachineState.GONE, self.now, False
        elif what == "restart":  # the coordinator is away for so long, and nobody was charged for it yet
            self.passes(100.0)
            before, self.fleet = self.fleet, Membership(3.0, 9.0, 8, WorkerRecords(60.0))
            self.fleet.restore(list(before.members.values()), self.now)
        elif peer_id in members:
            match what:
                case "cut":
                    self.fleet.on_disconnect(peer_id, self.now)
                case "leave":
                    self.fleet.on_leave(peer_id, self.now)
                case "fall silent":
                    self.heard.discard(peer_id)
                case "automatic" | "active" | "standby" | "draining" | "quarantined" | "banned":
                    self.fleet.set(peer_id, SETTINGS[what], "")
        if what != "restart":
            self.judge()

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.open_s += seconds * self.is_rented
        for peer_id, member in self.fleet.members.items():
            self.due_s[peer_id] += seconds * (member.last_liveness is not Liveness.GONE)

    def judge(self) -> None:
        for peer_id, member in self.fleet.members.items():
            self.fleet.change_of(member, self.now)
            if member.last_liveness is Liveness.SUSPECT and member.cut_at is not None:
                continue
            due_s, self.due_s[peer_id] = self.due_s[peer_id], 0.0
            if member.last_liveness is not Liveness.GONE:
                works = member.last_activation in (Activation.ACTIVE, Activation.DRAINING)
                if works or peer_id != DEAR or member.price_approved:
                    (self.worked if works else self.stood_by)[peer_id] += due_s * USD_PER_S[peer_id]
        meter(self.fleet.members.values(), self.now)

    def second(self) -> None:
        self.passes(1.0)
        for peer_id in self.heard & set(self.fleet.members):
            self.fleet.members[peer_id].heard_at = self.now
        self.judge()

    def metered(self, standby_before: float = 0.0) -> FleetCosts:
        money = Money(self.fleet, self.tokens, SimpleNamespace(now=lambda: self.now))
        money.machines["m"], money.standby_before = self.machine, standby_before
        return money.sums()

    def expected(self) -> tuple[float, ...]:
        """As `FleetCosts`: what was spent, of which useful, of which chosen, each with what it is an hour."""
        rent, own = self.open_s * MACHINE_USD_PER_S, self.worked[OWN] + self.worked[DEAR]
        living = {peer: one for peer, one in self.fleet.members.items() if one.last_liveness is not Liveness.GONE}
        works = {p for p, one in living.items() if one.last_activation in (Activation.ACTIVE, Activation.DRAINING)}
        there = works | {peer for peer, one in living.items() if peer != DEAR or one.price_approved}
        rent_h = 3600 * MACHINE_USD_PER_S * self.is_rented
        works_h, there_h = (3600 * sum(USD_PER_S[one] for one in peers - {RENTED}) for peers in (works, there))
        return (
            own + self.stood_by[OWN] + self.stood_by[DEAR] + rent, there_h + rent_h,
            own + min(rent, self.worked[RENTED]), works_h + rent_h * (RENTED in works),
            own + rent, works_h + rent_h,
        )  # fmt: skip


WHAT = [*SETTINGS, "come", "come", "cut", "leave", "fall silent", "end the machine", "restart"]


@given(st.lists(st.tuples(st.sampled_from(WHAT), st.sampled_from(sorted(USD_PER_S)), st.integers(0, 12)), max_size=30))
@example(
    [
        ("active", DEAR, 4),
        ("standby", DEAR, 4),
        ("restart", OWN, 2),
        ("come", OWN, 9),
        ("cut", OWN, 2),
        ("come", OWN, 1),
    ]
)
@example([("end the machine", RENTED, 3), ("leave", RENTED, 3), ("come", RENTED, 3), ("draining", OWN, 3)])
def test_the_bill_is_what_each_second_costs(steps: list[tuple[str, PeerId, int]]) -> None:
    bill = Bill()
    for peer_id in USD_PER_S:
        bill.happens("come", peer_id)
    for what, peer_id, seconds in steps:
        bill.happens(what, peer_id)
        for _ in range(seconds):
            bill.second()
        found = bill.metered()
        assert found == bill.metered(), "asking costs nothing"
        assert tuple(getattr(found, name) for name in FleetCosts.__slots__) == pytest.approx(bill.expected())
    earlier = bill.metered(standby_before=100.0)
    assert earlier.usd_spent == pytest.approx(bill.metered().usd_spent + 100), "standby of an earlier process"
    assert earlier.usd_chosen == bill.metered().usd_chosen, "which neither cap nor budget bounds"


def test_a_clock_that_is_set_back_gives_nothing_back_and_charges_no_second_again() -> None:
    bill = Bill()
    bill.happens("come", OWN)
    bill.second()
    bill.second()
    for now, spent in ((1.0, 2), (2.0, 2), (3.0, 3)):
        meter(bill.fleet.members.values(), now)
        assert bill.fleet.members[OWN].usd_spent == spent


async def test_a_cap_that_is_lowered_counts_for_workers_that_are_there_and_one_edited_in_the_config_is_the_last_word(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, 1.0, usd_per_hour_cap=10.0)

    def asks_too_much() -> bool:
        return fleet.hub.membership.members[fleet.everybody[0]].asks_too_much

    for cap, is_beyond in ((0.5, True), (10.0, False), (0.5, True)):
        fleet.commands.change_settings({"usd_per_hour_cap": cap}, {})
        assert asks_too_much() is is_beyond
    fleet.hub.flush_now()
    fleet.begin()
    assert fleet.hub.config.coordinator.usd_per_hour_cap == 0.5, "the config is as it was"
    for number, settings in enumerate(({"usd_per_hour_cap": 0.5}, {"staleness_bound": 1})):
        fleet.commands.change_settings(settings, {})
        fleet.hub.flush_now()
        fleet.options = options(tmp_path, usd_per_hour_cap=20.0 + number)
        fleet.begin()
        assert fleet.hub.config.coordinator.usd_per_hour_cap == 20.0 + number


@pytest.mark.parametrize("mode", ["advise", "approve", "auto"])
async def test_once_the_budget_is_raised_a_plan_says_who_works_in_every_mode_and_after_a_restart(
    tmp_path: Path, mode: str
) -> None:
    fleet = Fleet(tmp_path, 1.0, 1.0, usd_per_hour_cap=math.inf, usd_budget=8.0, planner_mode=mode)
    fleet.hub.adopt_plan(plan(fleet.everybody), fleet.everybody, is_acted_on=mode == "auto")
    while working(fleet.hub):
        fleet.passes(360, BUDGET_TICKS)
    for again in (False, True):
        if again:
            fleet.hub.flush_now()
            fleet.begin()
        hub = fleet.hub
        hub.board.on_hello(PeerId("learner"), board(10.0).hello, fleet.clock.now())
        hub.board.on_report(pb.LearnerReport(step=1, train_s=10.0), fleet.clock.now())
        for peer in fleet.everybody:
            hub.membership.on_hello(peer, hub.membership.members[peer].hello, fleet.clock.now())
            hub.membership.on_heartbeat(peer, beat(), None, fleet.clock.now())
        fleet.passes(0.0, 1)
        assert not working(hub)
    fleet.commands.change_settings({"usd_budget": 1000.0}, {})
    fleet.passes(0.0, BUDGET_TICKS)
    planning = asyncio.create_task(Planning(hub).run())
    while not working(hub):
        await asyncio.sleep(0.02)
    if mode != "auto":  # what the operator has chosen stays, though nobody of it is left
        first, other = fleet.everybody
        hub.adopt_plan(plan((first,)), fleet.everybody, is_acted_on=True)
        hub.part_with(first, "its owner needs it")
        before = hub.plan.now
        while hub.plan.now is before:
            await asyncio.sleep(0.02)
        assert not hub.membership.members[other].is_wanted
    planning.cancel()


async def test_a_spent_budget_stops_whom_the_operator_has_activated_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 1.0, usd_per_hour_cap=math.inf, usd_budget=8.0)
    chosen, _ = fleet.everybody
    fleet.hub.set_worker(chosen, OperatorSetting.ACTIVE, "its price is agreed to")
    for _ in range(60):
        fleet.passes(360, BUDGET_TICKS)
    assert not working(fleet.hub) and fleet.hub.money.sums().usd_chosen <= 8.0 + 0.2 + 1e-9
    assert fleet.hub.membership.members[chosen].activation_reason == "the budget of 8 USD is spent"
    fleet.hub.pause("the power is out")
    fleet.hub.pause("")
    assert not working(fleet.hub), "a pause that ends is no budget"
    fleet.commands.change_settings({"usd_budget": 20.0}, {})
    fleet.passes(0.0, BUDGET_TICKS)
    assert chosen in {member.peer_id for member in working(fleet.hub)}


@pytest.mark.parametrize("is_killed", [False, True])
async def test_what_was_paid_and_delivered_is_known_after_a_stop_and_but_for_half_a_minute_after_a_kill(
    tmp_path: Path, is_killed: bool
) -> None:
    """All but the first to deliver again were put on standby."""
    fleet = Fleet(tmp_path, 36.0, 36.0, 36.0)
    first, second, third = fleet.everybody
    fleet.hub.set_worker(third, OperatorSetting.STANDBY, "")
    fleet.hub.learner.on_publish(pb.VersionPublished(version=1, artifact_bytes=9, full_snapshot_bytes=20))
    fleet.hub.handle(fleet.hub.book.on_delivered, tuple(delivery(peer, 1, 1.0) for peer in (first, second)))
    for _ in range(2 * MEMBERS_KEPT_TICKS):
        fleet.passes(0.5, 1)
        await asyncio.sleep(0)  # its changes are saved
    fleet.passes(0.0 if is_killed else 3600.0)
    paid = fleet.hub.money.sums()
    if not is_killed:
        fleet.hub.close()
    fleet.begin()
    lost_usd = 2 * 0.3 if is_killed else 1e-5  # of 0.01 USD a second and worker
    assert 0 <= paid.usd_spent - fleet.hub.money.sums().usd_spent + 1e-5 <= lost_usd + 2e-5
    assert fleet.hub.money.sums().usd_chosen > 0.5
    assert fleet.hub.board.totals == Totals(9, 20, 1)
    fleet.hub.handle(fleet.hub.book.on_delivered, (delivery(first, 1, 1.0),))
    assert [member.is_newcomer for member in fleet.hub.membership.members.values()] == [False, False, True]


async def test_after_a_long_absence_of_the_coordinator_a_worker_that_comes_back_goes_on_with_its_groups(
    tmp_path: Path,
) -> None:
    run = Scene(tmp_path, Cloud())
    peer = run.join(await run.provisioner.rent("gpu", "", "a test"))
    group = GroupSpec(GroupId("g"), (1,), 1, SamplingParams(max_new_tokens=8), 0)
    run.hub.handle(run.hub.book.offer, (group,))
    run.hub.handle(run.hub.book.request, peer, 1, Version(0))
    run.hub.flush_now()
    run.clock.time += 600
    run.begin()
    assert run.hub.book.leases_of(peer)
    run.hub.tick()
    run.hub.handle(run.hub.book.reconnect, peer, ())
    run.hub.handle(run.hub.book.allow, peer, True)
    run.hub.handle(run.hub.book.request, peer, 1, Version(0))
    assert run.hub.book.leases_of(peer), "no other is there, and it gave up nothing"


async def test_a_bound_that_is_lowered_holds_from_the_next_version_on(tmp_path: Path) -> None:
    """At step 3 version 0 is the newest, as of a period of 4: the version that S = 2 asks for comes only after this step."""
    run = Scene(tmp_path, Cloud())
    peer = run.join(await run.provisioner.rent("gpu", "", "a test"))
    run.hub.change_settings({"staleness_bound": 2})

    def takes(step: int, version: int) -> bool:
        group = GroupSpec(GroupId(f"g{step}"), (1,), 1, SamplingParams(max_new_tokens=8), step)
        run.hub.handle(run.hub.book.offer, (group,))
        run.hub.handle(run.hub.book.request, peer, 8, Version(version))
        return run.hub.book.groups[group.group_id].lease_id is not None

    assert takes(3, 0)
    run.hub.plan.adopt(replace(plan([peer]), kappa=4), is_acted_on=True)
    run.hub.learner.on_publish(pb.VersionPublished(version=0))
    assert takes(4, 0), "this plan publishes too seldom for the lower bound"
    run.hub.plan.adopt(plan([peer]), is_acted_on=True)
    run.hub.learner.on_publish(pb.VersionPublished(version=4))
    assert takes(6, 4) and not takes(7, 4)
    run.hub.change_settings({"staleness_bound": 4})
    assert takes(8, 4), "a higher one holds at once"


async def test_what_a_heartbeat_says_is_known_wherever_it_counts(tmp_path: Path) -> None:
    fleet, one = Fleet(tmp_path, 1.0), PeerId("w0")
    hub, stream = fleet.hub, WorkerStream(fleet.hub, "203.0.113.1")
    hub.board.on_publish(pb.VersionPublished(version=1, has_parent=True), 3.0, [one], fleet.clock.now())
    fleet.passes(5.0)
    told = pb.Heartbeat(has_version=True, version=1, rollouts_per_s=3.0)
    stream.on_message(one, pb.WorkerMessage(heartbeat=told))
    assert hub.book.rates[one] == 3.0 and hub.plan.mean_error("broadcast_s") == pytest.approx(5.0 - 3.0)


async def test_each_change_of_fleet_or_limits_is_planned_for_at_once(tmp_path: Path) -> None:
    """Not at the next interval: whoever joins a run costs money until then, and nobody works after a resume."""
    fleet = Fleet(tmp_path, 1.0, 1.0)
    hub, joining = fleet.hub, WorkerStream(fleet.hub, "203.0.113.1")

    async def joins(**fields: Any) -> None:
        hello = pb.WorkerHello(name="n", price_usd_per_hour=1.0, **fields)
        await joining.on_hello(PeerId("n"), hello, StreamSession(PeerId("n"), lambda refusal: refusal))

    def beats(**fields: Any) -> None:
        joining.on_message(PeerId("n"), pb.WorkerMessage(heartbeat=pb.Heartbeat(**fields)))

    async def learns() -> None:
        hello = pb.LearnerHello(rollouts_per_group=8, rollouts_per_step=8, staleness_bound=4)
        await hub.learner.on_hello(PeerId("l"), hello, StreamSession(PeerId("l"), lambda refusal: refusal))

    changes: list[tuple[Callable[[], object], bool, bool]] = [
        (lambda: hub.part_with(PeerId("w0"), ""), True, True),
        (lambda: fleet.commands.change_settings({"usd_budget": 9.0}, {}), True, False),
        (lambda: fleet.commands.pause(""), True, True), (fleet.commands.resume, True, True),
        (lambda: hub.set_worker(PeerId("w1"), OperatorSetting.STANDBY, ""), True, True),
        (joins, True, True), (lambda: joins(gpu="L4"), True, True), (learns, True, True), (learns, True, True),
        (lambda: beats(link=link(1e6)), False, True), (lambda: beats(link=link(1e6)), False, False),
        (lambda: beats(links={"links": [{"peer_id": "w1"}]}), False, True),
        (beats, False, False), (lambda: beats(reach={"access": {"public_host": "203.0.113.1"}}), False, True),
        (lambda: joining.on_end(PeerId("n"), hub.workers[PeerId("n")]), True, True),
    ]  # fmt: skip
    for number, (change, is_planned, is_broadcast) in enumerate(changes):
        hub.plan_needed.clear(), hub.broadcast_needed.clear()
        if isinstance(made := change(), Coroutine):
            await made
        found = hub.plan_needed.is_set(), hub.broadcast_needed.is_set()
        assert found == (is_planned, is_broadcast), number

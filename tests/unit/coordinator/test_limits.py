"""Cap and budget hold on what is about to be done, whatever plan led there; the learner hears of each; rates are corrected."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from echo2.base.ids import PeerId, RunId, Step, Version
from echo2.coordinator.commands import Commands
from echo2.coordinator.fleet.members import Activation
from echo2.coordinator.hub import BUDGET_TICKS, Hub
from echo2.coordinator.money.provisioning import MachineState, RentedMachine
from echo2.coordinator.planning.board import LearnerBoard
from echo2.coordinator.planning.corrections import RATIO_LEAST, Corrections
from echo2.coordinator.planning.service import snapshot_of
from echo2.coordinator.planning.telemetry import LearnerReport, WorkerHello
from echo2.coordinator.store import SqlStore
from echo2.cost_model.plan import Limit, Plan, Term
from echo2.trust.identity import Identity
from tests.unit.coordinator.test_daemon import RUN, options
from tests.unit.coordinator.test_late_workers import never
from tests.unit.coordinator.test_planner_input import BEAT, board
from tests.unit.coordinator.test_provisioner import Clock


def plan(pool: list[PeerId], cap: int = 64, promised: float = 0.98) -> Plan:
    term = Term(Limit.THROUGHPUT, "mu_pool >= R / T_train", 5.0, 5.0, "rollouts/s", 0.0)
    return Plan(
        2, tuple(pool), (), (), cap, promised, 1, 0.5, 5, 1, 0.1, True, (term,), Limit.THROUGHPUT, "because", ""
    )


def working_usd(hub: Hub) -> float:
    members = hub.membership.members.values()
    return sum(one.hello.price_usd_per_hour for one in members if one.activation is Activation.ACTIVE)


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_spends_beyond_the_cap_and_none_at_all_beyond_the_budget(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    async def scene() -> None:
        store, clock = SqlStore(f"sqlite:///{tmp_path / 'state.sqlite'}", RUN), Clock()
        chosen = options(tmp_path, usd_per_hour_cap=5.0, usd_budget=8.0)
        hub = Hub(chosen, Identity.generate(), store, store.load(), clock, never)
        told: list[Any] = []
        hub.learner.send = lambda order: bool(told.append(order)) or True  # type: ignore[method-assign]
        for number in range(12):
            peer = PeerId(f"w{number}")
            hello = WorkerHello(1, peer, RunId("r"), price_usd_per_hour=round(draw.uniform(0.1, 3.0), 2))
            member = hub.membership.on_hello(peer, hello, clock.now())
            member.is_wanted = False
            hub.membership.change_of(member, clock.now())
        everybody = list(hub.membership.members)
        for turn in range(30):
            clock.time += draw.uniform(1, 1800)
            for member in hub.membership.members.values():
                member.heard_at = clock.now()
            before = len(told)
            known = draw.sample(
                everybody, draw.randrange(13)
            )  # the others came since the plan was begun and keep their state
            pool = draw.sample(known, draw.randrange(len(known) + 1))
            hub.adopt_plan(plan(pool, cap=100 + turn), known, is_acted_on=True)
            assert working_usd(hub) <= 5.0 + 1e-6
            if hub.money.sums().usd_chosen >= 8.0:
                assert not [one for one in known if hub.membership.members[one].activation is Activation.ACTIVE]
            assert any(order.WhichOneof("kind") == "plan" for order in told[before:]), (
                "the learner is told of each change"
            )
        assert hub.money.sums().usd_chosen >= 8.0, "the budget is reached"
        hub.change_settings({"usd_per_hour_cap": 0.3, "usd_budget": 1e6})
        hub.adopt_plan(plan(everybody), everybody, is_acted_on=True)
        assert working_usd(hub) <= 0.3
        store.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("mode", ["advise", "approve", "auto"])
@pytest.mark.parametrize("has_plan", [True, False])
def test_a_spent_budget_stops_all_spending_in_any_mode_and_is_said(tmp_path: Path, mode: str, has_plan: bool) -> None:
    async def scene() -> None:
        store, clock = SqlStore(f"sqlite:///{tmp_path / 'state.sqlite'}", RUN), Clock()
        hub = Hub(
            options(tmp_path, usd_budget=8.0, planner_mode=mode), Identity.generate(), store, store.load(), clock, never
        )
        commands = Commands(hub, "h", 1, [], {})
        peers = [PeerId(f"w{number}") for number in range(4)]
        for peer in peers:
            hub.membership.on_hello(peer, WorkerHello(1, peer, RunId("r"), price_usd_per_hour=1.0), clock.now())
        if has_plan:
            hub.adopt_plan(plan(peers), peers, is_acted_on=True)
        for _ in range(40):
            clock.time += 360
            for member in hub.membership.members.values():
                member.heard_at = clock.now()
            for _ in range(BUDGET_TICKS):
                hub.tick()
            assert working_usd(hub) == (4.0 if hub.money.sums().usd_chosen < 8.0 else 0.0)
        assert 8.0 <= hub.money.sums().usd_chosen <= 8.0 + 0.4 + 1e-9, "what one step of the clock costs"
        assert "budget of 8 USD is spent" in hub.membership.members[peers[0]].activation_reason
        hub.board.on_hello(PeerId("learner"), board(10.0).hello, "", clock.now())
        assert any("budget" in step.text and "spent" in step.text for step in commands.advice().steps)
        commands.change_settings({"usd_budget": 20.0}, {})
        for _ in range(BUDGET_TICKS):
            hub.tick()
        assert working_usd(hub) == (0.0 if has_plan else 4.0), "a plan says who works, before the first one all do"
        store.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_rented_machine_is_paid_once_and_leaves_the_rest_of_the_cap_to_others(tmp_path: Path) -> None:
    async def scene() -> None:
        store, clock = SqlStore(f"sqlite:///{tmp_path / 'state.sqlite'}", RUN), Clock()
        hub = Hub(options(tmp_path, usd_per_hour_cap=3.0), Identity.generate(), store, store.load(), clock, never)
        for number, price in enumerate((2.0, 1.0, 0.5)):
            peer = PeerId(f"w{number}")
            member = hub.membership.on_hello(
                peer, WorkerHello(1, peer, RunId("r"), price_usd_per_hour=price), clock.now()
            )
            member.is_wanted = False
            hub.membership.change_of(member, clock.now())
        token = hub.tokens.create("secret" * 8, "worker", "", 3600.0, 0, clock.now())
        token.peers.add(PeerId("w0"))
        hub.money.machines["m"] = RentedMachine(
            "m", "gpu", "cloud", "", MachineState.RUNNING, 2.0, clock.now() - 3600.0, token_id=token.token_id
        )
        everybody = list(hub.membership.members)
        hub.adopt_plan(plan(everybody), everybody, is_acted_on=True)
        working = {one.peer_id for one in hub.membership.members.values() if one.activation is Activation.ACTIVE}
        assert PeerId("w0") in working and len(working) == 2, "2 USD/h for the machine, 1 for one of the others"
        clock.time += 3600.0
        hub.board = board(10.0)
        hub.membership.on_message(PeerId("w0"), BEAT, clock.now())
        snapshot = await snapshot_of(hub)
        assert snapshot is not None and snapshot.spent_usd == pytest.approx(4.5), "two hours of 2 and one of 0.5"
        store.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def steps(made: Corrections, count: int, step_s: float, train_s: float, start: int = 0, rewards_due: int = 0) -> None:
    for step in range(start + 1, start + count + 1):
        report = LearnerReport(step=Step(step), newest_version=Version(0), train_s=train_s, rewards_due=rewards_due)
        made.on_step(report, 0.0, step * step_s)


def test_what_the_model_leaves_out_is_learned_within_ten_steps_and_bounded() -> None:
    made = Corrections(LearnerBoard())
    made.on_plan(plan([PeerId("w")], promised=1.0), True, 0.0)
    steps(made, 11, step_s=2.0, train_s=1.0)  # it trains half of the time
    assert made.rate_ratio == pytest.approx(0.5, abs=0.01) and "50% of the time" in made.reason
    steps(made, 40, step_s=10.0, train_s=0.1, start=100)
    assert made.rate_ratio == RATIO_LEAST


def test_waiting_for_rewards_corrects_nothing() -> None:
    made = Corrections(LearnerBoard())
    made.on_plan(plan([PeerId("w")], promised=1.0), True, 0.0)
    steps(made, 40, step_s=4.0, train_s=1.0, rewards_due=193)
    assert made.rate_ratio == 1.0 and made.reason == ""

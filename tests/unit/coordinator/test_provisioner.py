"""Machines through the daemon's own parts: nothing that costs money is forgotten, and each paid action has its line."""

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from echo2.base.errors import LimitExceeded, MalformedMessage, ResourceError, Unreachable
from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.coordinator.fleet.members import Activation, Liveness, Member, OperatorSetting
from echo2.coordinator.hub import CoordinatorOptions, Hub
from echo2.coordinator.money import provisioning
from echo2.coordinator.money.market import built_in_catalogue
from echo2.coordinator.money.provisioner import Provisioner
from echo2.coordinator.money.provisioning import JOIN_S_MAX, Budget, MachineOffer, MachineState, ObservedMachine, advise
from echo2.coordinator.operator import Commands
from echo2.coordinator.store import SqlStore, StateChanges
from echo2.cost_model.plan import Limit, Plan
from echo2.trust.identity import Identity, JoinLink
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import RUN, options
from tests.unit.cost_model.fleets import plan_of, plan_of as plan

OFFER = MachineOffer("gpu", "cloud", "H100", usd_per_hour=2.0, machines_max=3)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class Cloud:
    """A provider in memory; what it rents outlives the coordinator. `meets`: what happens at each "rent", "release", "observe" and
    once a machine is made ("answer"), if anything: an error, or an event that it waits for."""

    def __init__(self, **meets: Iterator[Exception | asyncio.Event | None]) -> None:
        self.there: dict[str, ObservedMachine] = {}
        self.links: dict[str, str] = {}
        self.problem: Exception | None = None
        self.answers, self.lists, self.meets = asyncio.Event(), asyncio.Event(), meets
        self.answers.set()
        self.lists.set()

    async def rent(self, machine_id: str, join_link: str, usd_per_hour: float) -> str:
        await self.answers.wait()
        await self._meet("rent")
        self.there[machine_id] = ObservedMachine(MachineState.RUNNING)
        self.links[machine_id] = join_link
        await self._meet("answer")
        return ""

    async def release(self, machine_id: str) -> None:
        await self._meet("release")
        self.there.pop(machine_id, None)

    async def observe(self) -> dict[str, ObservedMachine]:
        """What was there when it was asked, once `lists` lets it say so."""
        await self._meet("observe")
        there = dict(self.there)
        await self.lists.wait()
        return there

    async def _meet(self, what: str) -> None:
        trouble = self.problem or next(self.meets.get(what, iter(())), None)
        if isinstance(trouble, Exception):
            raise trouble
        if trouble is not None:
            await trouble.wait()


class Scene:
    """A hub and its provisioner on a store in a folder; made again as after a kill."""

    def __init__(self, folder: Path, cloud: Cloud, **more: Any) -> None:
        self.clock, self.cloud = Clock(), cloud
        self.options: CoordinatorOptions = options(folder, **{"usd_per_hour_cap": 100.0, **more})
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        store = SqlStore(f"sqlite:///{self.folder / 'state.sqlite'}", RUN)
        self.hub = Hub(self.options, Identity.generate(), store, store.load(), self.clock, self._failed)
        offers, clouds = self.offers()
        self.commands = Commands(
            self.hub, "h", 1, offers, {offer.name: cloud for offer, cloud in zip(offers, clouds, strict=True)}
        )
        self.provisioner: Provisioner = self.commands.provisioner

    def offers(self) -> tuple[list[MachineOffer], list[Any]]:
        """And their clouds."""
        return [OFFER], [self.cloud]

    def _failed(self, error: Exception) -> None:
        raise error

    async def look(self, after_s: float = 0.0) -> None:
        self.clock.time += after_s
        await self.provisioner.look()

    def join(self, machine: provisioning.RentedMachine, name: str = "w1", leases: int = 0) -> PeerId:
        """A worker comes with the machine's token."""
        peer_id = PeerId(name)
        self.hub.tokens.tokens[machine.token_id].peers.add(peer_id)
        hello = pb.WorkerHello(name=name, price_usd_per_hour=2.0)
        self.hub.allow(self.hub.membership.on_hello(peer_id, hello, self.clock.now()))
        groups = tuple(GroupSpec(GroupId(f"g{i}"), (1,), 1, SamplingParams(max_new_tokens=8), 0) for i in range(leases))
        self.hub.book.allow(self.clock.now(), peer_id, True)
        self.hub.book.offer(self.clock.now(), groups)
        self.hub.book.request(self.clock.now(), peer_id, leases, self.hub.board.report.newest_version)
        return peer_id

    def journal(self) -> list[tuple[str, float]]:
        return [(one.action, round(one.usd_spent, 4)) for one in self.hub.state.paid]


async def test_what_costs_money_or_bars_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[StateChanges] = []

    def kinds(changes: StateChanges) -> set[str]:
        return {kind for kind, _ in changes.rows}

    write = SqlStore.write
    monkeypatch.setattr(SqlStore, "write", lambda self, changes: (written.append(changes), write(self, changes)))

    one = Scene(tmp_path, Cloud())
    one.cloud.answers.clear()
    renting = asyncio.create_task(one.commands.provisioner.rent("gpu", "", "a test"))
    await asyncio.sleep(0.05)
    assert not one.cloud.there, "the provider has not been asked to the end"
    asked = [changes for changes in written if kinds(changes) & {"machines", "tokens"}]
    assert asked and all(changes.must_last for changes in asked)
    one.cloud.answers.set()
    machine = await renting
    worker = one.join(machine)
    written.clear()
    one.hub.set_worker(worker, OperatorSetting.BANNED, "it lies")
    assert any(changes.must_last and "members" in kinds(changes) for changes in written)
    others = [one.join(machine, name) for name in ("w3", "w4")]
    for setting in ("standby", "automatic"):
        written.clear()
        await one.commands.act("workers/state", json.dumps({"peer_ids": others, "activation": setting}).encode())
        assert [changes.must_last for changes in written] == [True], "what is set for many is synced once"
        assert {one.hub.membership.members[peer_id].setting.value for peer_id in others} == {setting}
    token, link = one.commands.create_token("worker", "", 60.0, 1)
    one.hub.tokens.redeem(JoinLink.parse(link).token, "worker", PeerId("w2"), one.clock.now())
    one.hub.flush_now()
    assert kinds(written[-1]) >= {"token_peers"}
    one.hub.flush_now()
    assert not written[-1].rows, "what was written is not written again"
    written.clear()
    one.commands.revoke_token(token.token_id)
    assert written[0].must_last
    for key, act in (
        ("settings", lambda: one.commands.change_settings({"usd_budget": 50.0}, {})),
        ("paused", lambda: one.commands.pause("the power is out")),
        ("finished", lambda: one.commands.stop_run("enough")),
        ("finished", one.commands.resume),
    ):
        written.clear()
        act()
        assert any(changes.must_last and ("meta", key) in changes.rows for changes in written), key


async def test_a_lease_that_ends_in_the_turn_of_its_grant_is_told_to_nobody(tmp_path: Path) -> None:
    """After a pause of the coordinator's, a group's offer and its end are heard together."""

    class Listening:
        def __init__(self) -> None:
            self.heard: list[str | None] = []

        def send(self, order: Any) -> None:
            self.heard.append(order.WhichOneof("kind"))

    one, session = Scene(tmp_path, Cloud()), Listening()
    worker = one.join(await one.commands.provisioner.rent("gpu", "", "a test"))
    one.hub.workers[worker] = cast(Any, session)
    group = GroupSpec(GroupId("g"), (1,), 1, SamplingParams(max_new_tokens=8), 0)
    one.hub.handle(one.hub.book.request, worker, 1, Version(0))
    one.hub.handle(one.hub.book.offer, (group,))
    assert one.hub.book.leases
    one.hub.handle(one.hub.book.close, (GroupId("g"),), "complete")
    await asyncio.sleep(0.01)
    assert "lease_grant" not in session.heard
    one.hub.handle(one.hub.book.request, worker, 1, Version(0))
    one.hub.handle(one.hub.book.offer, (replace(group, group_id=GroupId("h")),))
    await asyncio.sleep(0.01)
    assert session.heard.count("lease_grant") == 1


async def test_a_machine_that_was_made_though_its_answer_was_lost_is_given_back(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud(answer=iter([Unreachable("no answer")])))
    with pytest.raises(Unreachable):
        await run.provisioner.rent("gpu", "", "because")
    (machine,) = run.provisioner.machines.values()
    assert not machine.is_open and len(run.cloud.there) == 1
    await run.look(5)
    assert not machine.is_open and run.cloud.there == {}
    assert [action for action, _ in run.journal()] == ["rent", "rent failed", "release", "released"]


async def test_each_paid_action_is_journalled_with_reason_and_cost(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    machine = await run.provisioner.rent("gpu", "", "because")
    assert (machine.state, machine.machine_id[:12]) == (MachineState.STARTING, "e-a-run-gpu-")
    await run.look(1800)
    assert machine.state is MachineState.RUNNING
    assert run.hub.money.sums().usd_spent == pytest.approx(1.0)
    run.join(machine)
    shown = run.commands.view.status()
    assert (shown.open_machines, shown.rented_usd_per_hour) == (1, 2.0)
    assert run.hub.money.sums().usd_per_hour == 2.0, "its worker's price is not charged beside it"
    await run.provisioner.release(machine.machine_id, "enough")
    await run.provisioner.release(machine.machine_id, "again")
    run.clock.time += 1800
    assert run.hub.money.sums().usd_spent == pytest.approx(1.0)
    assert run.journal() == [("rent", 0.0), ("release", 1.0), ("released", 1.0)]
    assert [one.reason for one in run.hub.state.paid] == ["because", "enough", "enough"]
    assert run.hub.tokens.tokens[machine.token_id].is_revoked
    assert run.cloud.there == {}
    run.hub.money.offers = (replace(OFFER, hours_least=3.0),)
    await run.provisioner.release((await run.provisioner.rent("gpu", "", "")).machine_id, "at once")
    assert run.journal()[-1] == ("released", 6.0), "three hours are billed in any case"
    with pytest.raises(MalformedMessage, match="expected one of gpu"):
        await run.provisioner.rent("tpu", "", "")
    with pytest.raises(MalformedMessage, match="expected one of this run"):
        await run.provisioner.release("m", "")


async def test_a_machine_wanted_at_the_moment_of_a_kill_is_found_or_forgotten_and_never_lost(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    run.cloud.answers.clear()
    wishes = [asyncio.create_task(run.provisioner.rent("gpu", label, "because")) for label in ("a", "b")]
    while len(run.provisioner.machines) < 2 or len(run.journal()) < 2:
        await asyncio.sleep(0)
    asked, never = sorted(run.provisioner.machines)
    for wish in wishes:  # the process is killed: the cloud has got one of the two requests
        wish.cancel()
    run.cloud.there[asked] = ObservedMachine(MachineState.STARTING)
    run.begin()
    assert {one.state for one in run.provisioner.machines.values()} == {MachineState.WANTED}
    await run.look(10)
    assert run.provisioner.machines[asked].state is MachineState.STARTING
    assert run.provisioner.machines[never].state is MachineState.GONE
    assert run.journal()[-1] == ("rent undone", 0.0), "there was no machine, so it costs nothing"
    run.cloud.problem = Unreachable("the cloud is away")
    with pytest.raises(Unreachable):
        await run.provisioner.release(asked, "enough")
    run.begin()  # killed while it was being released
    run.cloud.problem = None
    await run.look(10)
    assert run.provisioner.machines[asked].state is MachineState.GONE
    assert run.cloud.there == {}


async def test_what_takes_long_goes_on_and_failures_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.coordinator.money.provisioner.ANSWER_S", 0.01)
    run = Scene(tmp_path, Cloud())
    run.cloud.answers.clear()
    machine = await run.provisioner.rent("gpu", "", "because")
    assert machine.state is MachineState.WANTED
    await run.look(120)
    assert machine.state is MachineState.WANTED, "its provider is still being asked"
    with pytest.raises(LimitExceeded, match="still busy"):
        await run.provisioner.release(machine.machine_id, "")
    preempted = await run.provisioner.rent("gpu", "", "because")
    run.provisioner.preempted(preempted.machine_id, "the spot price rose")
    run.cloud.answers.set()
    while machine.state is MachineState.WANTED or len(run.cloud.there) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert preempted.state is MachineState.ENDING, "it ends, though its rental has only now come to its end"


async def test_a_rent_that_failed_late_owes_nothing_for_the_time_that_it_was_asked_for(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    run.cloud.answers.clear()
    renting = asyncio.create_task(run.provisioner.rent("gpu", "", "because"))
    while not run.journal():
        await asyncio.sleep(0)
    run.clock.time += 1800
    assert run.hub.money.sums().usd_spent == pytest.approx(1.0), "until it is known, it may be running"
    run.cloud.problem = ResourceError("no H100 in any zone")
    run.cloud.answers.set()
    with pytest.raises(ResourceError):
        await renting
    assert run.hub.money.sums().usd_spent == 0
    assert run.journal() == [("rent", 0.0), ("rent failed", 0.0)]
    assert run.hub.state.paid[-1].reason == "no H100 in any zone"
    run.clock.time += 1800
    run.begin()  # and so it is kept
    assert run.hub.money.sums().usd_spent == 0
    (machine,) = run.provisioner.machines.values()
    run.cloud.there[machine.machine_id], run.cloud.problem = ObservedMachine(MachineState.RUNNING), None
    await run.look()
    assert run.hub.money.sums().usd_spent == pytest.approx(2.0), "it was made all the same, and has cost since"


async def test_a_preemption_notice_takes_the_leases_off_its_workers_at_once(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    machine = await run.provisioner.rent("gpu", "", "because")
    peer = run.join(machine, leases=2)
    assert len(run.hub.book.leases_of(peer)) == 2
    run.cloud.there[machine.machine_id] = ObservedMachine(MachineState.ENDING, "spot price rose")
    await run.look(3600)
    member = run.hub.membership.members[peer]
    await run.look(5)  # which is told once
    assert (machine.state, member.setting) == (MachineState.ENDING, OperatorSetting.DRAINING)
    assert all(lease.is_recalled for lease in run.hub.book.leases_of(peer))
    del run.cloud.there[machine.machine_id]
    await run.look()
    assert machine.state is MachineState.GONE
    assert [action for action, _ in run.journal()] == [
        "rent", "preemption notice", "preemption notice", "preempted",
    ]  # fmt: skip
    by_hand = await run.provisioner.rent("gpu", "", "because")
    run.provisioner.preempted(by_hand.machine_id, "the owner said so")
    assert by_hand.state is MachineState.ENDING
    run.provisioner.preempted(peer, "again")
    run.cloud.problem, other = Unreachable("the cloud is away"), run.join(by_hand, "w2")
    with pytest.raises(Unreachable):
        await run.provisioner.release(by_hand.machine_id, "enough")
    assert run.hub.membership.members[other].setting is OperatorSetting.DRAINING, "before its machine ends"
    run.provisioner.preempted(by_hand.machine_id, "again")
    assert by_hand.state is MachineState.RELEASING, "it is given back once the cloud is there again"
    with pytest.raises(MalformedMessage, match="a machine or a worker"):
        run.provisioner.preempted("nobody", "")


async def test_machines_lost_or_unknown_are_told(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    machine = await run.provisioner.rent("gpu", "", "because")
    run.cloud.there = {run.provisioner._name("gpu", "abcdef"): ObservedMachine(MachineState.RUNNING)}
    await run.look(5)
    assert machine.state is MachineState.STARTING, "a provider may be slow to list what it has made"
    await run.look(60)
    assert machine.state is MachineState.GONE
    assert [action for action, _ in run.journal()] == ["rent", "found", "lost"]
    run.cloud.problem = Unreachable("the cloud is away")
    await run.look()
    assert run.provisioner.problems == {"gpu": "the cloud is away"}
    assert "the cloud is away" in run.hub.state.events[-1].text


async def test_advice_waits_for_the_operators_word_or_is_carried_out(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    provisioner, money, run.hub.board.is_connected = run.provisioner, run.hub.money, True
    run.hub.plan.adopt(plan_of(3.0, 9.0), is_acted_on=True)
    money.offers = (replace(OFFER, rollouts_per_s=3.0),)
    assert await provisioner.carry_out("approved by the operator") == 0
    assert provisioner.advice().reason == "nothing has been looked at yet", "asking again does not make it so"
    await run.look()
    with pytest.raises(MalformedMessage, match="look again"):  # an old page has shown one, two are advised
        await run.commands.act("machines/approve", b'{"rent": {"gpu": 1}, "release": []}')
    run.cloud.answers.clear()
    first = asyncio.create_task(run.commands.approve({"rent": {"gpu": 2}, "release": []}))
    await asyncio.sleep(0)
    assert await provisioner.carry_out("approved by the operator") == 0, "once"
    assert provisioner.advice().reason == "being carried out"
    run.cloud.answers.set()
    assert await first == {"count": 2}
    assert await provisioner.carry_out("approved by the operator") == 0, "they are on their way"
    assert run.hub.state.paid[0].reason.startswith("approved by the operator: the pool lacks 6 rollouts/s")
    run.hub.plan.adopt(plan_of(3.0, 12.0), is_acted_on=True)
    money.offers = (replace(money.offers[0], is_automatic=False),)
    assert await provisioner.carry_out("the planner", only_automatic=True) == 0
    run.clock.time += JOIN_S_MAX
    assert await provisioner.carry_out("the planner", only_automatic=True) == 2
    assert {machine.state for machine in provisioner.machines.values()} == {MachineState.GONE}


async def test_while_the_run_is_paused_or_its_learner_is_away_no_machine_is_proposed(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    run.hub.plan.adopt(plan_of(3.0, 9.0), is_acted_on=True)
    for pause, is_connected, why in (
        ("the power is out", True, "the power is out"), ("", False, "the learner is away"), ("", True, "")
    ):  # fmt: skip
        run.hub.pause(pause)
        run.hub.board.is_connected = is_connected
        await run.look()
        advice = run.provisioner.advice()
        assert len(advice.rent) == (not why) and (not why or advice.reason == why)
    machine = await run.provisioner.rent("gpu", "", "because")
    run.hub.membership.members[run.join(machine)].last_activation = Activation.ACTIVE
    run.hub.board.on_disconnect(run.clock.now())
    await run.look(provisioning.AWAY_RELEASE_S - 10)
    assert not run.provisioner.advice().release
    await run.look(10)
    (given_back,) = run.provisioner.advice().release
    assert given_back.reason == "the learner has been away for 30 min", (
        "though its worker is active: nobody trains on what it makes"
    )
    run.begin()
    await run.look()
    told = run.provisioner.advice().release
    assert not any("away" in one.reason for one in told), "a coordinator that has just begun has waited for nobody"


@pytest.mark.parametrize("mode", ["advise", "approve", "auto"])
async def test_a_spent_budget_gives_machines_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("echo2.coordinator.money.provisioner.LOOK_S", 0.0)
    run = Scene(tmp_path, Cloud(), usd_budget=4.0, planner_mode=mode)
    machine = await run.provisioner.rent("gpu", "", "because")
    run.clock.time += 3600
    loop = asyncio.create_task(run.provisioner.run())
    for _ in range(100):
        await asyncio.sleep(0)
    assert machine.is_open == (mode != "auto"), "no worker joined from it: it is proposed to give it back"
    run.clock.time += 3600
    while machine.is_open:
        await asyncio.sleep(0)
    assert run.cloud.there == {} and [action for action, _ in run.journal()] == ["rent", "release", "released"]
    loop.cancel()


async def test_offers_cap_and_budget_bound_every_rent_and_a_quote_says_what_it_would_cost(tmp_path: Path) -> None:
    for name in ("unbounded", "bounded", "capped"):
        (tmp_path / name).mkdir()
    unbounded = Scene(tmp_path / "unbounded", Cloud(), usd_per_hour_cap=math.inf)
    with pytest.raises(LimitExceeded, match="set coordinator.usd_per_hour_cap or coordinator.usd_budget"):
        unbounded.provisioner.quote("gpu")
    with pytest.raises(LimitExceeded, match="nothing that costs money is rented without one"):
        await unbounded.provisioner.rent("gpu", "", "a test")
    bounded = Scene(tmp_path / "bounded", Cloud(), usd_per_hour_cap=math.inf, usd_budget=20.0)
    await bounded.provisioner.rent("gpu", "", "a test")
    told = bounded.provisioner.quote("gpu")
    assert (told["usd_per_hour"], told["usd_per_hour_after"], told["usd_budget"]) == (2.0, 4.0, 20.0)
    assert told["budget_hours_after"] == pytest.approx(5.0, abs=0.1)
    most = bounded.provisioner.offers["gpu"].machines_max
    assert bounded.provisioner.quote("gpu", most - 1)["usd_per_hour"] == 2.0 * (most - 1)
    with pytest.raises(LimitExceeded, match=f"{most} machines at most, {most - 1} of them are left"):
        bounded.provisioner.quote("gpu", most)
    assert len(bounded.provisioner.machines) == 1, "a quote rents nothing"
    assert not unbounded.provisioner.machines
    capped = Scene(tmp_path / "capped", Cloud(), usd_per_hour_cap=3.0)
    await capped.provisioner.rent("gpu", "", "because")
    with pytest.raises(LimitExceeded, match=r"beyond the cap of 3 USD/h$"):
        await capped.provisioner.rent("gpu", "", "because")
    (tmp_path / "poor").mkdir()
    poor = Scene(tmp_path / "poor", Cloud(), usd_per_hour_cap=3.0, usd_budget=1.0)
    with pytest.raises(LimitExceeded, match=r"left of the budget of 1 USD \(0.00 spent\) within 1 h$"):
        await poor.provisioner.rent("gpu", "", "because")


# ---- what to rent and what to give back: by need, price, limits and money

NOW = 10_000.0
SMALL, BIG = MachineOffer("small", "local", "RTX 4090", 0.4), MachineOffer("big", "local", "H100", 2.4)
RICH = Budget(1, 0, usd_per_hour_cap=1000)
RATES = {"RTX 4090": 1.0, "H100": 5.0, "": 1.0}


def machine(
    name: str, offer: MachineOffer, state: MachineState = MachineState.RUNNING, rented_at: float = NOW
) -> provisioning.RentedMachine:
    return provisioning.RentedMachine(name, offer.name, offer.provider, "", state, offer.usd_per_hour, rented_at)


def worker(rate: float = 0.0, activation: Activation = Activation.ACTIVE, since: float = NOW) -> Member:
    hello = pb.WorkerHello(name="w", gpu="H100")
    return Member(
        PeerId("w"), hello, 0.0, NOW, heartbeat=pb.Heartbeat(rollouts_per_s=rate), last_activation=activation,
        activation_since=since,
    )  # fmt: skip


def ask(
    lack: Plan | None,
    machines: list[provisioning.RentedMachine],
    workers: dict[str, list[Member]],
    purse: Budget = RICH,
) -> provisioning.FleetAdvice:
    return advise(lack, [SMALL, BIG], machines, workers, lambda: RATES, purse, NOW)


def test_the_cheapest_rollouts_are_rented_as_many_as_are_missing() -> None:
    assert provisioning.shortage_rollouts_per_s(plan(3, 9)) == 6
    (wish,) = ask(plan(3, 9), [], {}).rent
    assert (wish.offer, wish.count, wish.usd_per_hour) == ("small", provisioning.RENT_AT_ONCE, 4 * 0.4)
    dearer = advise(plan(3, 9), [replace(SMALL, usd_per_hour=0.6), BIG], [], {}, lambda: RATES, RICH, NOW)
    assert [(wish.offer, wish.count) for wish in dearer.rent] == [("big", 2)]
    assert "lacks 6 rollouts/s" in dearer.rent[0].reason


def test_nothing_is_rented_without_need_plan_or_room() -> None:
    assert ask(plan(9, 9), [], {}) == provisioning.FleetAdvice(reason="the pool makes what the learner needs")
    assert "no plan yet" in ask(None, [], {}).reason
    full = [machine(f"m{i}", SMALL) for i in range(8)] + [machine(f"n{i}", BIG) for i in range(8)]
    busy = {one.machine_id: [worker(1.0)] for one in full}
    assert ask(plan(3, 9), full, busy) == provisioning.FleetAdvice(reason="there is no offer with room")


def test_machines_on_their_way_count_as_there() -> None:
    coming = [machine("m", BIG, MachineState.STARTING), machine("n", BIG, MachineState.WANTED)]
    assert "on their way" in ask(plan(3, 9), coming, {}).reason
    (wish,) = ask(plan(3, 9), coming[:1], {}).rent
    assert (wish.offer, wish.count) == ("small", 1)


def test_an_offer_that_nobody_has_measured_is_tried_with_one() -> None:
    (wish,) = advise(plan(3, 9), [SMALL], [], {}, dict, RICH, NOW).rent
    assert (wish.count, "nobody has measured" in wish.reason) == (1, True)
    for state in (MachineState.WANTED, MachineState.RUNNING):
        told = advise(plan(3, 9), [SMALL], [machine("m", SMALL, state)], {"m": [worker(0.0)]}, dict, RICH, NOW)
        assert told == provisioning.FleetAdvice(reason="a machine of small has to be measured first")
    assert provisioning.rates_by_gpu([worker(4.0), worker(6.0), worker(0.0)], ()) == {"H100": 5.0, "": 5.0}
    (other, unnamed), kinds = (worker(6.0), worker(8.0)), built_in_catalogue()
    other.hello.gpu, unnamed.hello.gpu = "NVIDIA H100 80GB HBM3", ""
    assert provisioning.rates_by_gpu([worker(4.0), other, unnamed], kinds) == {"H100": 5.0, "": 6.0}, (
        "spellings of one kind are one"
    )


def test_cap_and_budget_bound_what_is_rented() -> None:
    (wish,) = ask(plan(3, 9), [], {}, Budget(1.0, 0.0, usd_per_hour_cap=1.9)).rent
    assert (wish.offer, wish.count) == ("small", 2)
    assert "cap or the budget" in ask(plan(3, 9), [], {}, Budget(1.0, 0.0, usd_per_hour_cap=1.2)).reason
    assert "cap or the budget" in ask(plan(3, 9), [], {}, Budget(1.0, 8.9, usd_budget=10)).reason
    spent = ask(plan(3, 9), [machine("m", BIG)], {"m": [worker(1.0)]}, Budget(1.0, 10.0, usd_budget=10))
    assert [one.machine_id for one in spent.release] == ["m"]


def test_where_the_budget_keeps_the_pool_small_nothing_dearer_a_rollout_is_rented() -> None:
    poor = replace(plan(3, 9), binding=Limit.USD_BUDGET)
    (wish,) = ask(replace(poor, usd_per_hour=3 * 0.4), [], {}).rent
    assert wish.offer == "small"
    assert "does not pay" in ask(replace(poor, usd_per_hour=3 * 0.39), [], {}).reason
    near = replace(plan(8.5, 9), binding=Limit.USD_BUDGET, usd_per_hour=8.5 * 0.4)
    assert not ask(near, [], {}).rent, "for half its rollouts"
    for activation, wanted in ((Activation.ACTIVE, 1), (Activation.STANDBY, 0)):  # nor one more of what is left idle
        told = ask(replace(poor, usd_per_hour=3 * 0.4), [machine("m", SMALL)], {"m": [worker(1.0, activation)]})
        assert len(told.rent) == wanted


def test_what_is_billed_in_any_case_is_paid_for_by_the_budget_and_used_until_then_and_so_is_one_busy_worker() -> None:
    assert [Budget(0, 0, usd_budget=10).affordable(1.0, hours) for hours in (0, 2.5, 4, 11)] == [4, 4, 2, 0]
    assert Budget(4.0, 0, usd_budget=10).affordable(1.0, 2.5) == 0, "nor what those that are rented cost until then"
    billed, idle = replace(BIG, hours_least=2.0), worker(1.0, Activation.STANDBY, NOW - provisioning.IDLE_RELEASE_S)
    both = [idle, worker(1.0)]
    for rented_h, workers, is_released in ((1.9, [idle], False), (2.1, [idle], True), (2.1, both, False)):
        rented = machine("m", billed, rented_at=NOW - 3600 * rented_h)
        told = advise(plan(9, 9), [billed], [rented], {"m": workers}, lambda: RATES, RICH, NOW)
        assert bool(told.release) is is_released


def test_idle_and_useless_machines_are_given_back_the_dearest_first() -> None:
    idle = worker(1.0, Activation.STANDBY, NOW - provisioning.IDLE_RELEASE_S)
    machines = [machine("a", SMALL, rented_at=NOW - JOIN_S_MAX), *(machine(name, BIG) for name in "bcd")]
    joined = {"b": [idle], "c": [worker(1.0)], "d": [worker(1.0, Activation.STANDBY, NOW - 10)]}
    released = ask(plan(9, 9), machines, joined).release
    assert [one.machine_id for one in released] == ["b", "a"]
    assert ("stood by for 10 min" in released[0].reason, "no worker has joined" in released[1].reason) == (True, True)
    gone = replace(idle, last_liveness=Liveness.GONE, heard_at=NOW - provisioning.IDLE_RELEASE_S)
    assert [one.machine_id for one in ask(plan(9, 9), machines[1:2], {"b": [gone]}).release] == ["b"]
    assert ask(plan(9, 9), machines[1:2], {"b": [worker(1.0)]}).release == ()
    drained = worker(1.0, Activation.DRAINING, NOW - provisioning.IDLE_RELEASE_S)
    assert ask(plan(9, 9), machines[1:2], {"b": [drained]}).release, "a notice of its provider's came to nothing"
    drained.record.held[LeaseId("l")] = 8
    assert not ask(plan(9, 9), machines[1:2], {"b": [drained]}).release, "it still has something to end"

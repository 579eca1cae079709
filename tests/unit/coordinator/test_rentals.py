"""Providers that are sold out, slow, wrong or of another run: what they do costs no more than it must, and keeps no other back."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from echo2.base.errors import LimitExceeded, MalformedMessage, ResourceError
from echo2.base.ids import PeerId, RunId
from echo2.coordinator import coordinator
from echo2.coordinator.fleet.members import Activation, Liveness
from echo2.coordinator.money import provisioning
from echo2.coordinator.money.providers.machine_setup import ManualProvider
from echo2.coordinator.money.provisioner import DEFAULT_OFFERS, LATE_S, LOST_AFTER_S, REST_S, REST_S_MAX
from echo2.coordinator.money.provisioning import JOIN_S_MAX, Budget, MachineOffer, MachineState, ObservedMachine
from echo2.coordinator.operator import Commands
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_provisioner import NOW, OFFER, Clock, Cloud, Scene, ask, plan_of

DEAR = MachineOffer("dear", "cloud", "H200", usd_per_hour=4.0, rollouts_per_s=3.0, machines_max=3)


def sold_out() -> Cloud:
    """Has no machine of the kind, and says so at once."""
    return Cloud(rent=map(ResourceError, repeat("no H100 in any zone")))


class Market(Scene):
    """Two offers, each of a cloud of its own, and a pool that lacks six rollouts a second."""

    def __init__(self, folder: Path, cloud: Cloud, other: Cloud, **more: Any) -> None:
        self.other = other
        super().__init__(folder, cloud, **more)

    def offers(self) -> tuple[list[MachineOffer], list[Any]]:
        return [replace(OFFER, rollouts_per_s=3.0), DEAR], [self.cloud, self.other]

    def begin(self) -> None:
        super().begin()
        self.hub.plan.adopt(plan_of(3.0, 9.0), is_acted_on=True)
        self.hub.board.is_connected = True

    def offered(self) -> list[str]:
        return [wish.offer for wish in self.provisioner.advice().rent]

    async def looks_and_acts(self) -> None:
        await self.look()
        await self.provisioner._act()


async def test_what_is_sold_out_rests_and_the_next_offer_is_taken(tmp_path: Path) -> None:
    run = Market(tmp_path, sold_out(), Cloud())
    await run.look()
    assert run.offered() == ["gpu"]
    await run.looks_and_acts()
    assert run.offered() == ["dear"], "the cheapest one has none"
    await run.looks_and_acts()
    assert [one.offer for one in run.provisioner.machines.values() if one.is_open] == ["dear", "dear"]
    run.hub.plan.adopt(plan_of(3.0, 18.0), is_acted_on=True)
    run.clock.time += REST_S
    assert run.offered() == ["gpu"], "it is tried again"


async def test_a_cheaper_offer_that_needs_the_operators_word_keeps_the_planner_from_no_other(tmp_path: Path) -> None:
    run = Market(tmp_path, Cloud(), Cloud())
    run.hub.money.offers = tuple(replace(one, is_automatic=one.name == "dear") for one in run.hub.money.offers)
    await run.look()
    assert run.offered() == ["gpu"], "which is shown"
    await run.looks_and_acts()
    assert [one.offer for one in run.provisioner.machines.values()] == ["dear", "dear"]


async def test_what_only_a_person_may_rent_at_no_known_price_is_not_proposed(tmp_path: Path) -> None:
    """Without a file of offers: more workers beside the coordinator and the learner are no answer to a shortage."""
    run = Scene(tmp_path, Cloud())
    clouds = {offer.name: Cloud() for offer in DEFAULT_OFFERS}
    provisioner = Commands(run.hub, "h", 1, DEFAULT_OFFERS, clouds).provisioner
    await provisioner.look()
    run.hub.plan.adopt(plan_of(3.0, 9.0), is_acted_on=True)
    run.hub.board.is_connected = True
    assert provisioner.advice().rent == ()
    await provisioner.rent("local", "", "which a person may")


async def test_when_all_workers_have_gone_others_are_rented_though_no_plan_is_made_without_any(tmp_path: Path) -> None:
    run = Market(tmp_path, Cloud(), Cloud())
    await run.look()
    run.hub.plan.adopt(plan_of(9.0, 9.0, pool=("w1",)), is_acted_on=True)
    run.hub.membership.on_hello(PeerId("w1"), pb.WorkerHello(name="w1"), run.clock.now())
    assert not run.offered()
    run.clock.time += 3600.0
    run.hub.tick()
    (wish,) = run.provisioner.advice().rent
    assert (wish.offer, wish.count) == ("gpu", 3)


async def test_an_offer_that_stays_sold_out_is_tried_a_few_times_a_day(tmp_path: Path) -> None:
    """Each try makes a token and a machine's row, which count for the whole run."""
    run = Market(tmp_path, sold_out(), sold_out())
    for _ in range(24 * 60):
        run.clock.time += 60.0
        await run.looks_and_acts()
    tries = len(run.provisioner.machines)
    assert 2 * 24 <= tries <= 2 * (24 * 3600 / REST_S_MAX + 8)
    assert "brought no worker" in run.provisioner.advice().reason


async def test_machines_that_never_join_are_not_rented_one_after_another(tmp_path: Path) -> None:
    run = Market(tmp_path, Cloud(), sold_out())
    for _ in range(24 * 60):
        run.clock.time += 60.0
        await run.looks_and_acts()
    spent = run.hub.money.sums().usd_chosen
    alone = 2 * OFFER.usd_per_hour * JOIN_S_MAX / 3600
    assert spent <= 24 * alone, "half an hour of two machines, and then an hour of none"
    (machine, *_) = [one for one in run.provisioner.machines.values() if one.is_open] or [
        await run.provisioner.rent("gpu", "", "the operator's word, which no rest holds back")
    ]
    run.join(machine)
    await run.provisioner.release(machine.machine_id, "enough")
    assert "gpu" in run.offered(), "one that worked ends the rest"


async def test_a_quote_for_many_machines_is_bounded_by_offer_cap_and_budget_alone(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    run.hub.money.offers = (replace(OFFER, machines_max=50),)
    assert run.provisioner.quote("gpu", 40)["usd_per_hour"] == 80.0
    run.hub.money.offers = (replace(OFFER, machines_max=60),)
    with pytest.raises(LimitExceeded, match=r"beyond the cap of 100 USD/h$"):
        run.provisioner.quote("gpu", 51)
    with pytest.raises(MalformedMessage, match="a request rents one machine"):
        await run.commands.act("machines", b'{"offer": "gpu", "count": 4}')
    assert not run.provisioner.machines


async def until_asked(task: asyncio.Task[Any]) -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()


async def test_a_list_of_before_a_release_does_not_bring_the_machine_back(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    machine = await run.provisioner.rent("gpu", "", "because")
    run.clock.time += 10
    run.cloud.lists.clear()
    looking = asyncio.create_task(run.look())
    await until_asked(looking)
    run.clock.time += 1
    await run.provisioner.release(machine.machine_id, "enough")
    run.cloud.lists.set()
    await looking
    assert [action for action, _ in run.journal()] == ["rent", "release", "released"]
    run.cloud.there[machine.machine_id] = ObservedMachine(MachineState.RUNNING)
    await run.look(5)
    assert run.journal()[-1][0] == "released" and not run.cloud.there, "a list of afterwards does"


async def test_a_machine_that_took_long_to_make_is_not_lost_to_a_list_of_before(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    run.cloud.answers.clear()
    renting = asyncio.create_task(run.provisioner.rent("gpu", "", "because"))
    await until_asked(renting)
    run.clock.time += 10 * LOST_AFTER_S
    run.cloud.lists.clear()
    looking = asyncio.create_task(run.look())
    await until_asked(looking)
    run.cloud.answers.set()
    machine = await renting
    run.cloud.lists.set()
    await looking
    assert machine.state is MachineState.STARTING
    run.cloud.there.clear()
    await run.look(LOST_AFTER_S - 1)
    assert machine.is_open, "its provider may not list it yet"
    await run.look(1)
    assert run.journal()[-1][0] == "lost"


async def test_a_machine_that_is_missing_in_one_list_is_neither_lost_nor_given_back(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    machine = await run.provisioner.rent("gpu", "", "because")
    for is_restarted in (False, True):
        await run.look(3600)
        there, run.cloud.there = run.cloud.there, {}
        if is_restarted:
            run.begin()
        await run.look(5)
        run.cloud.there = there
        await run.look(5)
        assert [action for action, _ in run.journal()] == ["rent"] and there
    (machine,) = run.provisioner.machines.values()
    peer, run.cloud.there = run.join(machine), {}
    await run.look(3600)
    assert machine.is_open, "its worker is heard"
    run.hub.part_with(peer, "its machine was taken away")
    await run.look(LOST_AFTER_S)
    assert not machine.is_open


async def test_all_machines_of_an_action_are_given_back_though_who_asked_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `echo2 ctl` has after 30 s, which many machines take."""
    monkeypatch.setattr("echo2.coordinator.money.provisioner.RELEASES_AT_ONCE", 2)
    run = Scene(tmp_path, Cloud(release=repeat(ends := asyncio.Event())))
    peers = [run.join(await run.provisioner.rent("gpu", "", "because"), f"w{number}") for number in range(3)]
    asking = asyncio.create_task(run.commands.act("workers/release", json.dumps({"peer_ids": peers}).encode()))
    await until_asked(asking)
    states = [one.state.value for one in run.provisioner.machines.values()]
    assert sorted(states) == ["releasing", "releasing", "starting"], "one that is slow keeps the next from nothing"
    asking.cancel()
    await asyncio.wait((asking,))
    ends.set()
    while any(one.is_open for one in run.provisioner.machines.values()):
        await asyncio.sleep(0)


async def test_what_the_operator_approves_twice_is_rented_once_however_long_it_takes(tmp_path: Path) -> None:
    run = Market(tmp_path, Cloud(), sold_out())
    await run.look()
    run.cloud.answers.clear()
    first = asyncio.create_task(run.provisioner.carry_out("approved by the operator"))
    await until_asked(first)
    await run.look(5)
    second = asyncio.create_task(run.provisioner.carry_out("approved by the operator"))
    await asyncio.sleep(0.05)
    run.cloud.answers.set()
    assert (await first, await second) == (2, 0)
    assert len(run.cloud.there) == 2


@pytest.mark.parametrize(
    "observe", [map(TypeError, repeat("a library's bug")), repeat(asyncio.Event())], ids=["breaks", "hangs"]
)
async def test_a_provider_that_breaks_or_hangs_keeps_no_other_machine_on_the_bill(
    tmp_path: Path, observe: Iterator[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.coordinator.money.provisioner.ANSWER_S", 0.01)
    monkeypatch.setattr("echo2.coordinator.money.provisioner.LOOK_S", 0.0)
    run = Market(tmp_path, Cloud(observe=observe), Cloud())
    machine = await run.provisioner.rent("dear", "", "because")
    loop = asyncio.create_task(run.provisioner.run())
    while machine.state is not MachineState.RUNNING:
        await asyncio.sleep(0.01)
    run.hub.ending.finish_run()
    while machine.is_open:
        await asyncio.sleep(0.01)
    run.clock.time += LATE_S
    while "gpu" not in run.provisioner.problems:
        await asyncio.sleep(0.01)
    loop.cancel()
    assert not run.other.there
    shown = {offer["name"]: offer["problem"] for offer in run.commands.view.sections()["machines"]["offers"]}
    assert ("TypeError" in shown["gpu"] or "has not listed its machines for 60 s" in shown["gpu"]) and not shown["dear"]


async def test_a_provider_that_has_hung_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("ANSWER_S", 0.001), ("LOOK_S", 0.0), ("HANGS_S", 0.01)):
        monkeypatch.setattr(f"echo2.coordinator.money.provisioner.{name}", seconds)
    run = Scene(tmp_path, Cloud(**{what: iter([asyncio.Event()]) for what in ("answer", "observe", "release")}))
    loop = asyncio.create_task(run.provisioner.run())
    machine = await run.provisioner.rent("gpu", "", "because")
    while machine.state is not MachineState.RUNNING:
        await asyncio.sleep(0)
    await run.provisioner.release(machine.machine_id, "enough")
    while machine.is_open:
        await asyncio.sleep(0)
    loop.cancel()
    assert not run.cloud.there


async def test_one_machine_that_is_not_released_keeps_no_other(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud(answer=iter([None, None, KeyError("region")]), release=iter([KeyError("zone")])))
    peers = [run.join(await run.provisioner.rent("gpu", "", "because"), f"w{number}") for number in range(2)]
    with pytest.raises(ResourceError, match="KeyError: 'region'"):
        await run.provisioner.rent("gpu", "", "because")
    assert run.journal()[-1] == ("rent failed", 0.0)
    body = f'{{"peer_ids": {list(peers)}}}'.replace("'", '"').encode()
    with pytest.raises(ResourceError, match="KeyError: 'zone'"):
        await run.commands.act("workers/release", body)
    states = sorted(one.state.value for one in run.provisioner.machines.values())
    assert states == ["gone", "gone", "releasing"]


def test_a_machine_that_its_provider_took_away_and_still_lists_is_given_back() -> None:
    """A cluster that a cloud has stopped stays in SkyPilot's list, and on the bill, until somebody deletes it."""
    stopped = provisioning.RentedMachine("m", OFFER.name, "cloud", "", MachineState.ENDING, 2.0, NOW - JOIN_S_MAX)
    for purse in (Budget(1.0, 0.0, usd_per_hour_cap=10), Budget(1.0, 10.0, usd_budget=10)):
        assert [one.machine_id for one in ask(plan_of(9, 9), [stopped], {}, purse).release] == ["m"]
    gone = replace(stopped, state=MachineState.GONE, ended_at=NOW)
    assert not ask(plan_of(9, 9), [gone], {}).release


async def test_machines_of_another_run_whose_name_begins_alike_are_left_alone(tmp_path: Path) -> None:
    one, other = RunId("qwen3-4b-math-a"), RunId("qwen3-4b-math-b")
    first, second = (provisioning.machine_prefix(run_id, "gpu") for run_id in (one, other))
    assert first == second, "clouds take short names"
    cloud = Cloud()  # one account for both
    (tmp_path / "b").mkdir()
    ours, theirs = Scene(tmp_path, cloud), Scene(tmp_path / "b", cloud)
    machine = await ours.provisioner.rent("gpu", "", "because")
    await theirs.look(5)
    assert not theirs.provisioner.machines and theirs.hub.money.sums().usd_per_hour == 0
    theirs.hub.ending.finish_run()
    await theirs.provisioner._act()
    assert set(cloud.there) == {machine.machine_id}
    del ours.provisioner.machines[machine.machine_id]  # as after a backup of its state was restored
    await ours.look(5)
    assert ours.journal()[-1][0] == "found"


@pytest.mark.parametrize("offer", [DEAR, replace(OFFER, provider="another")])
async def test_a_machine_whose_offer_is_not_in_the_file_any_more_is_told(offer: MachineOffer, tmp_path: Path) -> None:
    """It stays on the bill: another provider under its offer's name does not list it."""
    run = Scene(tmp_path, Cloud())
    machine = await run.provisioner.rent("gpu", "", "because")
    run.begin()
    commands = Commands(run.hub, "h", 1, [offer], {offer.name: Cloud()})
    (shown,) = commands.view.sections()["machines"]["machines"]
    assert shown["notice"].startswith("gpu of provider cloud is not in the offers file: nothing watches")
    assert machine.machine_id in run.hub.state.events[-1].text
    for after_s in (5.0, 2 * LOST_AFTER_S):
        run.clock.time += after_s
        await commands.provisioner.look()
    assert commands.provisioner.machines[machine.machine_id].is_open


async def test_a_clock_that_was_set_back_leaves_nothing_unbilled(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    run.clock.time += 10 * 86_400
    machine = await run.provisioner.rent("gpu", "", "because")
    own, hello = PeerId("own"), pb.WorkerHello(name="own", price_usd_per_hour=1.0)
    run.hub.review(run.hub.membership.on_hello(own, hello, run.clock.now()))
    run.hub.flush_now()
    run.clock.time = 1000.0
    run.begin()
    run.hub.review(run.hub.membership.on_hello(own, hello, run.clock.now()))
    run.clock.time += 3600
    run.hub.membership.members[own].heard_at = run.clock.now()
    run.hub.tick()
    assert run.hub.money.sums().usd_spent == pytest.approx(machine.usd_per_hour + 1.0, rel=0.01)


async def test_while_the_coordinator_stands_still_workers_go_on_costing_money_and_keep_their_leases(
    tmp_path: Path,
) -> None:
    run = Scene(tmp_path, Cloud(), usd_budget=20.0)
    machine = await run.provisioner.rent("gpu", "", "because")
    worker = run.join(machine, leases=1)
    own = run.hub.membership.on_hello(PeerId("own"), pb.WorkerHello(price_usd_per_hour=1.0), run.clock.now())
    for member in (own, run.hub.membership.members[worker]):
        run.hub.review(member)
    run.clock.time += 6 * 3600
    run.hub.membership.members[worker].heard_at = run.clock.now()  # its first message came before the look at the clock
    run.hub.stood_still(6 * 3600.0)
    run.hub.tick()
    assert own.last_liveness is Liveness.ALIVE and run.hub.book.leases
    assert run.hub.membership.members[worker].heard_at == run.clock.now(), "not in hours to come"
    assert run.hub.money.sums().usd_spent == pytest.approx(6 * (machine.usd_per_hour + 1.0), rel=0.01)
    stall_s, between_s = 60.0, run.hub.config.coordinator.suspect_after / 2
    for _ in range(8):  # which heard nothing of it in between
        run.clock.time += between_s + stall_s
        run.hub.stood_still(stall_s)
        run.hub.tick()
    assert own.last_liveness is Liveness.GONE
    run.hub.flush_now()
    run.clock.time += 3600
    run.begin()
    run.hub.tick()
    assert "budget" in run.hub.halted, "the first tick after a restart sees that it is spent"


async def test_a_found_machine_and_its_worker_are_billed_once_and_it_is_not_given_back_while_it_works(
    tmp_path: Path,
) -> None:
    """After an older backup of the state was restored, which knows neither the machine nor its token."""
    run = Scene(tmp_path, Cloud())
    name = run.provisioner._name("gpu", "abcdef")
    run.cloud.there = {name: ObservedMachine(MachineState.RUNNING)}
    await run.look(5)
    machine = run.provisioner.machines[name]
    peer, hello = PeerId("back"), pb.WorkerHello(name=name, price_usd_per_hour=5.0)
    run.hub.review(run.hub.membership.on_hello(peer, hello, run.clock.now()))
    await run.look(5)
    assert run.hub.money.sums().usd_per_hour == machine.usd_per_hour
    assert run.hub.membership.members[peer].hello.price_usd_per_hour == machine.usd_per_hour, "as plans and cap have it"
    run.clock.time += JOIN_S_MAX
    run.hub.board.is_connected = True
    run.hub.membership.members[peer].heard_at = run.clock.now()
    assert not run.provisioner.advice().release
    run.hub.flush_now()
    run.begin()
    assert [worker.peer_id for worker in run.hub.money.workers_of(run.provisioner.machines[name])] == [peer]


class ByHand(Scene):
    """A person starts and ends the machines."""

    def offers(self) -> tuple[list[MachineOffer], list[Any]]:
        return [BY_HAND], [ManualProvider(BY_HAND)]


BY_HAND = MachineOffer("hand", "manual", usd_per_hour=1.0, is_automatic=False)


@pytest.mark.parametrize("offer", ["hand", "gpu"])
async def test_a_machine_that_only_a_person_can_end_is_on_the_bill_until_its_worker_is_gone(
    tmp_path: Path, offer: str
) -> None:
    run = (ByHand if offer == "hand" else Scene)(tmp_path, Cloud())
    asked = await run.provisioner.rent(offer, "", "because")
    run.begin()
    await run.look()
    (machine,) = run.provisioner.machines.values()
    assert machine.is_open and machine.command == asked.command, "a person may not have given the command yet"
    peer = run.join(machine)
    worker = run.hub.membership.members[peer]
    run.hub.review(worker)
    listed = dict(run.cloud.there)
    for there in ({}, listed, {}, listed, {}):  # it runs on, and its provider does not always list it
        run.cloud.there = dict(there)
        await run.look()
        assert ("where you rent" in machine.notice) == (offer == "gpu" and not there)
    await run.provisioner.release(machine.machine_id, "enough")
    assert worker.activation is Activation.DRAINING and machine.state is MachineState.RELEASING
    worker.heard_at = run.clock.time = run.clock.time + 3600
    run.hub.membership.on_hello(peer, worker.hello, run.clock.now())
    await run.look()
    assert worker.activation is Activation.DRAINING, "it is given no work once it is back either"
    assert run.hub.money.sums().usd_spent == pytest.approx(machine.usd_per_hour)
    run.hub.part_with(peer, "ended by its owner")
    await run.look(5)
    assert not machine.is_open and run.journal()[-1][0] == "released"
    other = await run.provisioner.rent(offer, "", "because")
    await run.provisioner.release(other.machine_id, "nobody has joined from it")
    assert not other.is_open


async def test_each_tick_says_first_how_long_the_last_one_and_the_loop_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "TICK_S", 0.0)
    monkeypatch.setattr(coordinator, "consolidate", lambda hub: None)
    hub, stood = MagicMock(), list[float]()
    hub.clock, hub.stood_still = Clock(), stood.append

    def passes(seconds: float) -> None:
        hub.clock.time += seconds

    hub.tick = lambda: passes(10.0)
    ticks = asyncio.create_task(coordinator._tick(hub, lambda: passes(7.0)))
    while len(stood) < 2:
        await asyncio.sleep(0)
    ticks.cancel()
    assert stood[:2] == [7.0, 17.0]

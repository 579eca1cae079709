"""Rents, releases and watches the machines of the run, and journals each step.

Guarantees: each request is saved before the provider is called, so a kill at any moment leaves no machine that costs money
without the coordinator knowing: after a restart, requested machines are looked up at the provider, and machines that were being
released are released. A machine that a provider lists and the journal does not know is adopted and reported; one that the
journal has as gone is released. Each paid action is journalled with its reason and its cost. A preemption notice, from a
provider or by hand, recalls the leases of the machine's workers at once. Waits `LOOK_S` between looks at the providers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import tomllib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

from echo2.base.clock import ceiling_s
from echo2.base.errors import (
    ConfigError,
    EchoError,
    LimitExceeded,
    MalformedMessage,
    NotAllowed,
    ResourceError,
    Unreachable,
)
from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import Liveness, OperatorSetting
from echo2.coordinator.fleet.tokens import Token
from echo2.coordinator.hub import CoordinatorOptions, Hub
from echo2.coordinator.money.costs import FleetCosts
from echo2.coordinator.money.market import built_in_catalogue
from echo2.coordinator.money.providers.command import CommandProvider, LocalProvider
from echo2.coordinator.money.providers.machine_setup import ManualProvider
from echo2.coordinator.money.providers.skypilot import SkyPilotProvider
from echo2.coordinator.money.provisioning import (
    AWAY_RELEASE_S,
    BUDGET_HOURS_LEFT,
    NO_BOUND,
    Budget,
    FleetAdvice,
    MachineOffer,
    MachineState,
    ObservedMachine,
    Provider,
    RentedMachine,
    advise,
    kind_text,
    machine_prefix,
    rates_by_gpu,
    releases,
    without_workers,
)
from echo2.coordinator.store import PaidAction
from echo2.cost_model.snapshot import read_as
from echo2.outside import here

LOOK_S = 5.0  # preemption notices come half a minute ahead
LOST_AFTER_S = 60.0
"""Seconds for which a provider may not list a machine: not yet, or once in a while. After that the machine counts as lost."""
ANSWER_S = 3.0
"""Most seconds that a caller waits for a provider's answer. Clouds take minutes, so the request then goes on in the background."""
RELEASES_AT_ONCE = 8  # each may take `ANSWER_S`, and a program
LATE_S = 60.0  # as long as an operator's command may list machines
HANGS_S = 3600.0  # no cloud's answer takes as long: it is given up, and asked for again
REST_S, REST_S_MAX = 60.0, 3600.0
"""Seconds, at first and at most, in which nothing is rented of an offer that is sold out or whose machines do not join."""
NAME_CHARS, CHECK_CHARS = 12, 6  # of a machine's id: what sets it apart, and of that the digest
MACHINES_MAX = 20_000  # as many as workers (hub); those that ended count
REASON_CHARS_MAX = 1000  # an error of a cloud's library
UNLISTED = "its provider did not list it while its worker was connected: see where you rent that it ends"
_UNSEEN = "nothing has been looked at yet"
_Listing = asyncio.Task[dict[str, ObservedMachine]]
_log = logging.getLogger("echo2.coordinator")
T = TypeVar("T")


def _told(error: Exception) -> EchoError:
    """What a provider raised, as an error of ours: a cloud's library may raise anything."""
    return error if isinstance(error, EchoError) else ResourceError(f"{type(error).__name__}: {error}")


async def _unless_it_hangs(call: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(HANGS_S):
        return await call


class Provisioner:
    """Rents and releases machines. `make_link(label)`: makes a worker's token and its join link."""

    def __init__(
        self,
        hub: Hub,
        offers: Sequence[MachineOffer],
        providers: Mapping[str, Provider],
        make_link: Callable[[str], tuple[Token, str]],
    ) -> None:
        self._hub, self._make_link, self._providers = hub, make_link, dict(providers)
        kinds = built_in_catalogue()
        self.machines = hub.money.machines
        hub.money.offers = tuple(replace(offer, gpu=kind_text(offer.gpu, kinds)) for offer in offers)
        hub.money.reprice(hub.settings.get("prices", {}))
        self._why_none = _UNSEEN
        self.problems: dict[str, str] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._listing: dict[str, tuple[float, _Listing]] = {}  # by offer, and since when
        self._known_at: dict[str, float] = {}  # by machine: when its provider had made, last listed or ended it
        self._resting: dict[str, tuple[int, float]] = {}  # by offer: vain rentals in a row, and until when it rests
        for machine in [m for m in self.machines.values() if m.is_open and not self._is_offered(m)]:
            offer = f"{machine.offer} of provider {machine.provider}"
            machine.notice = f"{offer} is not in the offers file: nothing watches or releases this machine"
            hub.note("machine", f"{machine.machine_id} at {machine.usd_per_hour:g} USD/h: {machine.notice}")

    @property
    def offers(self) -> dict[str, MachineOffer]:
        return {offer.name: offer for offer in self._hub.money.offers}

    # ---- commands

    async def rent(self, offer_name: str, label: str, reason: str) -> RentedMachine:
        """Rents one machine of an offer; returns it, perhaps still starting. LimitExceeded beyond the offer's limit, the cap or the
        budget; RunFinished once the run is over."""
        self._hub.ending.check_open()
        offer, now = self._offer(offer_name), self._hub.clock.now()
        self._check_room(offer)
        machine_id = self._name(offer.name, here().rng.randbytes(3).hex())
        token, link = self._make_link(label or machine_id)
        machine = RentedMachine(
            machine_id, offer.name, offer.provider, label, MachineState.WANTED, offer.usd_per_hour, now,
            token_id=token.token_id,
        )  # fmt: skip
        self.machines[machine_id] = machine
        self._journal(machine, "rent", reason)
        await self._in_time(machine, self._rent(machine, link))
        return machine

    def quote(self, offer_name: str, count: int = 1) -> dict[str, float | None]:
        """What `count` machines of an offer would cost in USD/h, alone and together with present costs. Raises what renting the
        last of them would raise. Calls no provider. None: no end, as of a budget of none."""
        self._hub.ending.check_open()
        offer = self._offer(offer_name)
        self._check_room(offer, count)
        budget = self.budget()
        after = budget.usd_per_hour + count * offer.usd_per_hour
        left = (budget.usd_budget - budget.usd_spent) / after if after > 0 else math.inf
        figures = {
            "usd_per_hour": count * offer.usd_per_hour, "usd_per_hour_after": after, "usd_per_hour_cap": budget.usd_per_hour_cap,
            "usd_budget": budget.usd_budget, "usd_spent": budget.usd_spent, "budget_hours_after": left,
        }  # fmt: skip
        return {name: value if value < math.inf else None for name, value in figures.items()}

    async def _rent(self, machine: RentedMachine, link: str) -> None:
        try:
            machine.command = await self._providers[machine.offer].rent(machine.machine_id, link, machine.usd_per_hour)
        except Exception as error:
            self._ended(machine, "rent failed", str(_told(error)), was_there=False)
            raise _told(error) from error
        self._known_at[machine.machine_id] = self._hub.clock.now()
        if machine.state is MachineState.WANTED:
            machine.state = MachineState.STARTING
        self._keep(machine)

    async def release(self, machine_id: str, reason: str) -> None:
        """Releases a machine; its workers' leases are recalled for other workers first."""
        machine = self.machines.get(machine_id)
        if machine is None:
            raise MalformedMessage(f"machine: expected one of this run, got {machine_id[:80]!r}")
        if not machine.is_open:
            return
        if machine_id in self._asking:
            raise LimitExceeded(f"machine {machine_id}: its provider is still busy with it; try again in a moment")
        machine.state = MachineState.RELEASING
        self._journal(machine, "release", reason)
        for worker in self._hub.money.workers_of(machine):
            self._hub.drain(worker.peer_id, f"its machine is given back: {reason}")
        await self._in_time(machine, self._release(machine, reason))

    async def release_each(self, reasons: Mapping[str, str]) -> None:
        """Releases machines, each for its reason. An error of one does not stop the others; the first is raised after them."""
        room = asyncio.Semaphore(RELEASES_AT_ONCE)

        async def release(machine_id: str, reason: str) -> None:
            async with room:
                await self.release(machine_id, reason)

        for ended in await asyncio.gather(*starmap(release, reasons.items()), return_exceptions=True):
            if ended is not None:
                raise ended

    async def _release(self, machine: RentedMachine, reason: str) -> None:
        """A machine that a person has to end stays on the bill until its worker is gone, and each look asks again."""
        try:
            await self._provider(machine).release(machine.machine_id)
        except Exception as error:
            raise _told(error) from error
        is_by_hand = machine.provider == "manual" or machine.notice == UNLISTED
        workers = self._hub.money.workers_of(machine) if is_by_hand else []
        if any(worker.last_liveness is not Liveness.GONE for worker in workers):
            for worker in workers:
                if worker.setting is not OperatorSetting.DRAINING:  # it came back
                    self._hub.drain(worker.peer_id, f"its machine is given back: {reason}")
            return
        self._ended(machine, "released", reason)

    async def _in_time(self, machine: RentedMachine, work: Coroutine[None, None, None]) -> None:
        """Waits up to `ANSWER_S` for a provider; slower work continues in the background, and its end is journalled."""
        task = asyncio.create_task(_unless_it_hangs(work))
        self._asking[machine.machine_id] = task
        task.add_done_callback(lambda done: self._asked(machine, done))
        await asyncio.wait((task,), timeout=ANSWER_S)
        if task.done():
            task.result()

    def _asked(self, machine: RentedMachine, task: asyncio.Task[None]) -> None:
        self._asking.pop(machine.machine_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems[machine.offer] = str(error) or type(error).__name__

    def preempted(self, whom: str, notice: str) -> None:
        """Takes a preemption notice for a machine, or for one worker by its peer id. MalformedMessage if it is neither."""
        machine = self.machines.get(whom)
        if machine is not None:
            self._on_notice(machine, notice)
        elif PeerId(whom) in self._hub.membership.members:
            self._hub.preempt(PeerId(whom), notice)
            self._hub.flush_now()
        else:
            raise MalformedMessage(f"preemption notice: expected a machine or a worker of this run, got {whom[:80]!r}")

    async def carry_out(self, by_whom: str, only_automatic: bool = False) -> int:
        """Carries out the advice, once; returns how many machines were rented or released."""
        advice, count = self.advice(only_automatic=only_automatic), 0
        if not (advice.release or advice.rent):
            return 0
        self._why_none = "being carried out"
        try:
            await self.release_each({each.machine_id: f"{by_whom}: {each.reason}" for each in advice.release})
            count = len(advice.release)
            for rental in advice.rent:
                for _ in range(rental.count):
                    await self.rent(rental.offer, "", f"{by_whom}: {rental.reason}")
                    count += 1
        finally:
            self._why_none = ""
        return count

    def advice(self, money: FleetCosts | None = None, only_automatic: bool = False) -> FleetAdvice:
        """What to rent or give back, by the plan and the journal as they are now. `money`: the sums of now, if they are known."""
        hub = self._hub
        if why_none := hub.ending.text or self._why_none:
            return FleetAdvice(reason=why_none)
        machines = list(self.machines.values())
        workers = {machine.machine_id: hub.money.workers_of(machine) for machine in machines if machine.is_open}
        rates = partial(rates_by_gpu, hub.membership.members.values(), built_in_catalogue())
        budget = self.budget(money)
        now = hub.clock.now()
        resting = {name for name, (_, until) in self._resting.items() if now < until}
        resting |= {offer.name for offer in hub.money.offers if only_automatic and not offer.is_automatic}
        plan = hub.plan.now
        if plan is not None and plan.pool and not any(hub.membership.living()):  # no new one is made without workers
            plan = without_workers(plan)
        away_s = 0.0 if hub.board.is_connected else now - max(hub.board.changed_at, hub.started_at)
        if away_s >= AWAY_RELEASE_S:
            away = f"the learner has been away for {away_s / 60:.0f} min"
            release = tuple(releases(hub.money.offers, machines, workers, now, away))
            return FleetAdvice(release=release, reason="" if release else away)
        advice = advise(plan, hub.money.offers, machines, workers, rates, budget, now, resting)
        stands = hub.paused or ("" if hub.board.is_connected else "the learner is away")
        return FleetAdvice(reason=stands) if stands and advice.rent else advice

    # ---- looking

    def budget(self, money: FleetCosts | None = None) -> Budget:
        section, money = self._hub.config.coordinator, money or self._hub.money.sums()
        return Budget(money.usd_chosen_per_hour, money.usd_chosen, section.usd_per_hour_cap, section.usd_budget)

    async def run(self) -> None:
        """Looks at the providers, and acts if the operator lets the planner act, until cancelled."""
        while True:
            try:
                await self.look()
                await self._act()
            except Exception as error:  # noqa: BLE001 - must not end the run: tried again
                _log.exception("machines: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _act(self) -> None:
        """In mode auto, carries out the advice that needs no approval. In any mode, releases what the advice gives back once the
        budget is spent, and everything once the run is finished."""
        if self._hub.ending.finish is not None:
            await self._give_all_back(self._hub.ending.text)
            return
        if self._hub.config.coordinator.planner_mode == "auto" or self.budget().is_spent:
            with suppress(EchoError):  # its machine's journal says it, and its offer's problem
                await self.carry_out("the planner", only_automatic=True)

    async def _give_all_back(self, reason: str) -> None:
        """Releases all open machines. The next look tries those again whose provider did not answer."""
        there = [m for m in self._hub.money.open_machines if m.state is not MachineState.RELEASING]
        with suppress(EchoError):
            await self.release_each({m.machine_id: reason for m in there if m.machine_id not in self._asking})

    async def look(self) -> None:
        """Asks the provider of each offer and brings the journal up to date. What one provider does keeps no other from being
        asked: one that is slow is listened to again at the next look."""
        for name in self.offers:
            await self._look(name)
        if self._why_none == _UNSEEN:
            self._why_none = ""

    async def _look(self, name: str) -> None:
        try:
            listed = await self._listed(name)
            if listed is None:
                return
            self.problems.pop(name, None)
        except Exception as error:  # noqa: BLE001 - see _told
            if self.problems.get(name) != (text := str(_told(error))):
                self._hub.note("machine", f"offer {name}: {text}")
            self.problems[name] = text
            return
        asked_at, observed = listed
        of_offer = [m for m in self.machines.values() if m.offer == name and self._is_offered(m)]
        for machine in [m for m in of_offer if not m.is_open]:
            self._check_gone(machine, observed.get(machine.machine_id), asked_at)
        for machine in [m for m in of_offer if m.is_open]:
            if machine.machine_id in self._asking:
                continue
            if not (machine.token_id or machine.replaced):
                self._recognise_worker(machine)
            try:
                await self._compare(machine, observed.get(machine.machine_id), asked_at)
            except EchoError as error:
                self.problems[name] = str(error)
        for machine_id in sorted(set(observed) - set(self.machines)):
            if machine_id == self._name(name, machine_id[-NAME_CHARS:-CHECK_CHARS]):
                self._take_in(self.offers[name], machine_id)

    async def _listed(self, name: str) -> tuple[float, dict[str, ObservedMachine]] | None:
        """When an offer's provider was asked for its machines, and its answer; None while it has not answered. Unreachable once it
        has not for `LATE_S`."""
        if name not in self._listing:
            observing = asyncio.create_task(_unless_it_hangs(self._providers[name].observe()))
            self._listing[name] = self._hub.clock.now(), observing
        asked_at, task = self._listing[name]
        await asyncio.wait((task,), timeout=ANSWER_S)
        if task.done():
            del self._listing[name]
            return asked_at, task.result()
        if self._hub.clock.now() - asked_at >= LATE_S:
            raise Unreachable(f"its provider has not listed its machines for {LATE_S:.0f} s")
        return None

    def _name(self, offer: str, number: str) -> str:
        """A machine's id: readable, with a digest of this coordinator, since the names of two runs may begin alike."""
        digest = hashlib.sha256(f"{self._hub.identity.peer_id} {offer} {number}".encode()).hexdigest()
        return machine_prefix(self._hub.options.run_id, offer) + number + digest[:CHECK_CHARS]

    async def _compare(self, machine: RentedMachine, sighting: ObservedMachine | None, asked_at: float) -> None:
        if machine.state is MachineState.RELEASING:  # an earlier process had begun it, or the provider did not answer
            await self._in_time(machine, self._release(machine, "begun before"))
        elif machine.provider == "manual" and machine.command:  # a person starts it: visible only by joins
            self._is_now(
                machine, MachineState.RUNNING if self._hub.money.workers_of(machine) else MachineState.STARTING
            )
        elif sighting is None:
            self._missing(machine, asked_at)
        elif sighting.state is MachineState.ENDING:
            self._on_notice(machine, sighting.notice)
        else:
            self._is_now(machine, sighting.state)
            self._known_at[machine.machine_id] = asked_at

    def _check_gone(self, machine: RentedMachine, sighting: ObservedMachine | None, asked_at: float) -> None:
        """Releases a machine that counts as gone but is still listed, and so still costs money: a request whose answer was lost may
        have made it, or its release may have failed silently."""
        is_there = sighting is not None and sighting.state is not MachineState.ENDING
        is_news = asked_at >= self._known_at.get(machine.machine_id, 0.0)
        if is_there and is_news and machine.machine_id not in self._asking:
            machine.state, machine.ended_at = MachineState.RELEASING, None
            self._journal(machine, "release", "it was taken for gone, and its provider lists it")

    def _is_now(self, machine: RentedMachine, state: MachineState) -> None:
        if machine.state is not state or machine.notice:
            machine.state, machine.notice = state, ""
            self._keep(machine)

    def _missing(self, machine: RentedMachine, asked_at: float) -> None:
        if machine.state is MachineState.WANTED:
            why = "its provider had not done it when the coordinator stopped or gave up"
            self._ended(machine, "rent undone", why, was_there=False)
        elif machine.state is MachineState.ENDING:
            self._ended(machine, "preempted", machine.notice)
        elif any(worker.last_liveness is Liveness.ALIVE for worker in self._hub.money.workers_of(machine)):
            if machine.notice != UNLISTED:  # its provider is wrong
                machine.notice = UNLISTED
                self._hub.note("machine", f"{machine.machine_id}: {UNLISTED}")
                self._keep(machine)
        elif asked_at - self._known_at.get(machine.machine_id, self._hub.started_at) >= LOST_AFTER_S:
            self._ended(machine, "lost", "its provider does not list it any longer")

    def _take_in(self, offer: MachineOffer, machine_id: str) -> None:
        now = self._hub.clock.now()
        machine = RentedMachine(
            machine_id, offer.name, offer.provider, "found", MachineState.STARTING, offer.usd_per_hour, now
        )
        self.machines[machine_id] = machine
        self._journal(machine, "found", "its provider lists it and the journal did not know it")

    def _recognise_worker(self, machine: RentedMachine) -> None:
        """Nobody knows the token of a machine that was found, but its worker has the machine's name."""
        members = self._hub.membership.members.values()
        found = [member for member in members if member.hello.name == machine.machine_id]
        for member in found:
            member.hello.price_usd_per_hour = machine.usd_per_hour
        if found:
            machine.replaced = tuple(member.peer_id for member in found)
            self._keep(machine)

    def _on_notice(self, machine: RentedMachine, notice: str) -> None:
        if machine.state in (MachineState.ENDING, MachineState.RELEASING, MachineState.GONE):
            return
        machine.state, machine.notice = MachineState.ENDING, notice
        for worker in self._hub.money.workers_of(machine):
            self._hub.preempt(worker.peer_id, notice)
        self._journal(machine, "preemption notice", notice)

    # ---- saving

    def _ended(self, machine: RentedMachine, action: str, reason: str, was_there: bool = True) -> None:
        """`was_there`: else it costs nothing, unless its provider lists it later: then it is billed since it was asked for."""
        now, offer = self._hub.clock.now(), self.offers.get(machine.offer)
        billed_until = machine.rented_at + 3600 * (offer.hours_least if offer is not None else 0.0)
        machine.state = MachineState.GONE
        machine.ended_at = max(now, billed_until) if was_there else machine.rented_at
        self._known_at[machine.machine_id] = now
        vain, until = self._resting.get(machine.offer, (0, 0.0))
        if self._hub.money.workers_of(machine):
            self._resting.pop(machine.offer, None)
        elif now >= until:  # of several that fail together one counts
            self._resting[machine.offer] = vain + 1, now + ceiling_s(vain, REST_S, REST_S_MAX)
        token = self._hub.tokens.tokens.get(machine.token_id)
        if token is not None and not token.is_revoked:
            token.is_revoked = True
            self._hub.state.save("tokens", token.token_id, token)
        self._journal(machine, action, reason)

    def _journal(self, machine: RentedMachine, action: str, reason: str) -> None:
        """Saves the machine, the paid action and a line of the log before anything else happens."""
        now = self._hub.clock.now()
        spent = machine.usd_spent(now)
        self._hub.state.paid_action(
            PaidAction(now, action, machine.machine_id, reason[:REASON_CHARS_MAX], machine.usd_per_hour, spent)
        )
        cost = f", {spent:.4f} USD so far" if spent >= 0.0001 else ""
        self._hub.state.require_sync()
        self._hub.note("machine", f"{action}: {machine.machine_id} at {machine.usd_per_hour:g} USD/h{cost}: {reason}")
        self._keep(machine)

    def _keep(self, machine: RentedMachine) -> None:
        self._hub.state.save("machines", machine.machine_id, machine)
        self._hub.flush_now()

    def _offer(self, name: str) -> MachineOffer:
        offer = self.offers.get(name)
        if offer is None:
            raise MalformedMessage(f"offer: expected one of {', '.join(self.offers)}, got {name[:40]!r}")
        return offer

    def _is_offered(self, machine: RentedMachine) -> bool:
        """Whether its provider can be asked: the offers file may have lost its offer since, or have another provider's of that
        name, which does not list it."""
        offer = self.offers.get(machine.offer)
        return offer is not None and offer.provider == machine.provider

    def _provider(self, machine: RentedMachine) -> Provider:
        if not self._is_offered(machine):
            raise NotAllowed(
                f"machine {machine.machine_id}: expected its offer {machine.offer!r} in the offers file, to reach "
                f"its provider {machine.provider}"
            )
        return self._providers[machine.offer]

    def _check_room(self, offer: MachineOffer, count: int = 1) -> None:
        if len(self.machines) + count > MACHINES_MAX:
            raise LimitExceeded(f"machines: expected {MACHINES_MAX} at most in a run's journal")
        rented = sum(machine.is_open and machine.offer == offer.name for machine in self.machines.values())
        if rented + count > offer.machines_max:
            left = max(0, offer.machines_max - rented)
            rest = f"{left} of them are left" if left else "all are rented"
            raise LimitExceeded(f"offer {offer.name}: expected {offer.machines_max} machines at most, {rest}")
        budget = self.budget()
        if offer.usd_per_hour > 0 and not budget.is_bounded:
            raise LimitExceeded(f"offer {offer.name}: {NO_BOUND}")
        if offer.usd_per_hour > 0 and budget.affordable(offer.usd_per_hour, offer.hours_least, count) < count:
            is_capped = count * offer.usd_per_hour + budget.usd_per_hour > budget.usd_per_hour_cap
            raise LimitExceeded(
                f"offer {offer.name}: {count * offer.usd_per_hour:g} USD/h more than the {budget.usd_per_hour:g} USD/h of now "
                + (
                    f"would go beyond the cap of {budget.usd_per_hour_cap:g} USD/h"
                    if is_capped
                    else f"would spend what is left of the budget of {budget.usd_budget:g} USD ({budget.usd_spent:.2f} spent) "
                    f"within {max(offer.hours_least, BUDGET_HOURS_LEFT):g} h"
                )
            )


# ---- the offers file: which machines can be rented, where and at what price. TOML, one `[[offer]]` table per offer. Without a file
# there are two offers, `manual` and `local`, which are never rented automatically.

OFFERS_MAX = 64  # each is asked for its machines every few seconds
DEFAULT_OFFERS = (
    MachineOffer("manual", "manual", is_automatic=False),
    MachineOffer("local", "local", is_automatic=False),
)


def load_offers(path: Path | None) -> tuple[MachineOffer, ...]:
    """The offers in the file, or the default ones without a file. ConfigError names the file, the offer and the field."""
    if path is None:
        return DEFAULT_OFFERS
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"offers: expected a file at {path} from {Path.cwd()}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"offers: {path}: expected TOML: {error}") from None
    tables = document.get("offer")
    if set(document) != {"offer"} or not isinstance(tables, list) or not 1 <= len(tables) <= OFFERS_MAX:
        raise ConfigError(f"offers: {path}: expected 1 to {OFFERS_MAX} tables [[offer]] and nothing else")
    offers = tuple(_offer(table, f"offers: {path}: offer {number}") for number, table in enumerate(tables, 1))
    names = [offer.name for offer in offers]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigError(f"offers: {path}: expected each name once, got {doubled[0]!r} twice")
    return offers


def _offer(table: Mapping[str, Any], where: str) -> MachineOffer:
    offer = read_as(MachineOffer, table, where)
    if offer.provider not in PROVIDERS:
        raise ConfigError(f"{where}: provider: expected one of {', '.join(PROVIDERS)}, got {offer.provider!r}")
    if offer.provider in ("skypilot", "command") and "usd_per_hour" not in table:  # the planner would rent it as free
        raise ConfigError(
            f"{where}: usd_per_hour: expected what a machine of {offer.provider} costs, or 0, got nothing"
        )
    if not all(isinstance(value, str) for value in offer.settings.values()):
        raise ConfigError(f"{where}: settings: expected texts")
    if offer.provider == "manual" and table.get("is_automatic"):
        raise ConfigError(f"{where}: is_automatic: a person has to start machines of the provider manual")
    return replace(offer, is_automatic=offer.is_automatic and offer.provider != "manual")


MakeProvider = Callable[[MachineOffer, CoordinatorOptions], Provider]
PROVIDERS: dict[str, MakeProvider] = {
    "manual": lambda offer, run: ManualProvider(offer, run.config.model.path),
    "local": lambda offer, run: LocalProvider(offer, run.folder / "local-workers", model_path=run.config.model.path),
    "skypilot": lambda offer, run: SkyPilotProvider(offer, run.run_id, model_path=run.config.model.path),
    "command": lambda offer, run: CommandProvider(offer, run.run_id, run.config.model.path),
}
"""To add a provider: write a class with the methods of `Provider` in a file of its own, and add a line here."""


def make_provider(offer: MachineOffer, run: CoordinatorOptions) -> Provider:
    """The provider of one offer. ConfigError for invalid settings or a library that is not installed."""
    return PROVIDERS[offer.provider](offer, run)

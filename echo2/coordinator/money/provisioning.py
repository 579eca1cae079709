"""Machines: offers, those that are rented, one protocol for all providers, and what to rent or give back.

Guarantees of a `Provider`: `rent` makes the machine with the given id or raises. It is idempotent: a second call with the same id
makes no second machine, so a caller that died in between may ask again. `release` ends the machine, at once or at the latest after
the provider's stated grace period; releasing a machine that does not exist is no error. `observe` lists the machines that exist
now, including those that an earlier process rented.

Guarantees of `advise`: never beyond the offers' limits, the price cap or the budget; machines that are still starting count as
present; while the speed of an offer's machines is not known, it rents one to measure it. A machine is given back when all its
workers have been on standby for `IDLE_RELEASE_S`, when no worker joined from it within `JOIN_S_MAX`, when the learner has been away
for `AWAY_RELEASE_S` (`Provisioner.advice`), or when the budget is spent.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from echo2.base.errors import ConfigError
from echo2.base.ids import PeerId, RunId
from echo2.coordinator.fleet.members import Activation, Liveness, Member
from echo2.cost_model.machines import kind_of_name
from echo2.cost_model.plan import Limit, Plan
from echo2.cost_model.snapshot import checked, is_spent


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """A kind of machine that can be rented. `rollouts_per_s` 0: assume the speed of measured workers with this GPU.
    `hours_least`: the provider bills at least so many hours, so a machine is not released before, and the budget must pay for
    them. `is_automatic`: whether the planner may rent it without asking. `settings`: provider-specific."""

    name: str
    provider: str
    gpu: str = ""
    usd_per_hour: float = 0.0
    rollouts_per_s: float = 0.0
    is_spot: bool = False
    machines_max: int = 8
    hours_least: float = 0.0
    is_automatic: bool = True
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (1 <= len(self.name) <= 40 and self.name.replace("-", "").isalnum() and self.name == self.name.lower()):
            raise ConfigError(f"offer: expected a name of up to 40 of a-z, 0-9 and '-', got {self.name[:60]!r}")
        label = f"offer {self.name}"
        checked(label, "usd_per_hour", self.usd_per_hour, 0, 1e5)
        checked(label, "rollouts_per_s", self.rollouts_per_s, 0, 1e6)
        checked(label, "machines_max", self.machines_max, 1, 1000)
        checked(label, "hours_least", self.hours_least, 0, 1000)

    def setting(self, key: str, default: str | None = None) -> str:
        """Returns a provider-specific setting, or `default`. ConfigError if it is missing and there is no default."""
        value = self.settings.get(key, default)
        if value is None:
            raise ConfigError(f"offer {self.name} of {self.provider}: expected a setting {key!r}, it is missing")
        return value

    def allow(self, *keys: str) -> None:
        """Checks that all settings are among `keys`; ConfigError names one that is not."""
        unknown = sorted(set(self.settings) - set(keys))
        if unknown:
            raise ConfigError(
                f"offer {self.name} of {self.provider}: expected settings among {', '.join(keys) or '(none)'}, "
                f"got {unknown[0]!r}"
            )


def machine_prefix(run_id: RunId, offer: str) -> str:
    """The prefix of the ids of an offer's machines, in characters that clouds accept in names."""
    run = re.sub(r"[^a-z0-9]+", "-", f"e-{run_id}".lower())[:16].strip("-")
    return f"{run}-{offer}-"


class MachineState(enum.Enum):
    """Where a machine is in its life. WANTED and RELEASING are saved before the provider is called."""

    WANTED = "wanted"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    RELEASING = "releasing"
    GONE = "gone"


_GIVEN_BACK = (MachineState.STARTING, MachineState.RUNNING, MachineState.ENDING)
"""ENDING: a provider that takes a machine away may list it, and bill it, for as long as nobody deletes it."""


@dataclass(slots=True)
class RentedMachine:
    """`command`: what a person has to run on it; empty if the provider has done so. `replaced`: workers that it had before the
    one of now, each lost with its identity; of a machine that was found, the worker of its name. `ended_at`: until when it is
    billed."""

    machine_id: str
    offer: str
    provider: str
    label: str
    state: MachineState
    usd_per_hour: float
    rented_at: float
    ended_at: float | None = None
    token_id: str = ""
    command: str = ""
    notice: str = ""
    replaced: tuple[PeerId, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.state is not MachineState.GONE

    def usd_spent(self, now: float) -> float:
        """What it has cost at its price since it was requested."""
        until = now if self.ended_at is None else self.ended_at
        return self.usd_per_hour * max(0.0, until - self.rented_at) / 3600.0


@dataclass(frozen=True, slots=True)
class ObservedMachine:
    """A machine as its provider sees it now. `notice`: in state ENDING, why the provider takes it away."""

    state: MachineState
    notice: str = ""


class Provider(Protocol):
    """The provider behind one offer. A machine's join link admits one worker at a time."""

    async def rent(self, machine_id: str, join_link: str, usd_per_hour: float) -> str:
        """Makes the machine, which joins by `join_link`, for the offer's price of now. Returns the command for a person to run,
        or an empty text. ResourceError if no machine is available, Unreachable if the provider does not answer."""
        ...

    async def release(self, machine_id: str) -> None: ...

    async def observe(self) -> dict[str, ObservedMachine]:
        """The machines that exist now, by id. Unreachable if the provider cannot be asked now."""
        ...


# ---- what to rent or give back


IDLE_RELEASE_S = 600.0  # longer than a rental takes: else machines come and go
JOIN_S_MAX = 1800.0  # a slow boot, a large image and a model
AWAY_RELEASE_S = 1800.0  # a learner that is started again is back in minutes, a large one's checkpoint included
RENT_AT_ONCE = 4  # most machines rented at once: the rate of these is measured before more are rented on a guess
NO_BOUND = "set coordinator.usd_per_hour_cap or coordinator.usd_budget: nothing that costs money is rented without one"
BUDGET_HOURS_LEFT = 1.0  # a machine is rented only if the budget lasts at least so many hours with it


@dataclass(frozen=True, slots=True)
class RentProposal:
    offer: str
    count: int
    usd_per_hour: float
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseProposal:
    machine_id: str
    usd_per_hour: float
    reason: str


@dataclass(frozen=True, slots=True)
class FleetAdvice:
    """`reason`: why no change is proposed, if none is."""

    rent: tuple[RentProposal, ...] = ()
    release: tuple[ReleaseProposal, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be spent. An infinite cap or budget means none; with neither, only free machines are rented. `usd_per_hour`: price
    of the workers that work and of the rented machines, including those still starting."""

    usd_per_hour: float
    usd_spent: float
    usd_per_hour_cap: float = math.inf
    usd_budget: float = math.inf

    @property
    def is_bounded(self) -> bool:
        """Whether there is a cap or a budget: without either, nothing that costs money is rented."""
        return self.usd_per_hour_cap < math.inf or self.usd_budget < math.inf

    @property
    def is_spent(self) -> bool:
        return is_spent(self.usd_spent, self.usd_budget)

    def affordable(self, usd_per_hour: float, hours_least: float = 0.0, most: int = RENT_AT_ONCE) -> int:
        """How many more machines may be rented at this price each, for at least so many hours; at most `most`."""
        if usd_per_hour <= 0:
            return 0 if self.is_spent else most
        if not self.is_bounded:
            return 0
        per_hour = (self.usd_budget - self.usd_spent) / max(hours_least, BUDGET_HOURS_LEFT)
        room = min(self.usd_per_hour_cap, per_hour) - self.usd_per_hour
        return int(max(0.0, min(room / usd_per_hour + 1e-9, float(most))))


def kind_text(gpu: str, kinds: Collection[str]) -> str:
    """One name for all spellings of a kind: `2 x NVIDIA L4` becomes `2 x L4`. A name that the catalogue does not know stays as it
    is."""
    kind, count = kind_of_name(gpu, kinds)
    return gpu if not kind else kind if count == 1 else f"{count} x {kind}"


def rates_by_gpu(members: Iterable[Member], kinds: Collection[str]) -> dict[str, float]:
    """Median rollouts per second of measured workers, by `kind_text`; the empty name stands for all workers together. A rate counts
    only as far as the worker's deliveries support it."""
    by_gpu: dict[str, list[float]] = {}
    for member in members:
        rate = member.record.believed_per_s(member.heartbeat.rollouts_per_s)
        if rate > 0 and member.last_liveness is Liveness.ALIVE:
            by_gpu.setdefault(member.hello.gpu, []).append(rate)
    by_kind: dict[str, list[float]] = {}
    for gpu, rates in by_gpu.items():
        for kind in {kind_text(gpu, kinds), ""}:
            by_kind.setdefault(kind, []).extend(rates)
    return {kind: median(rates) for kind, rates in by_kind.items()}


def rate_of(offer: MachineOffer, rates: Mapping[str, float]) -> float:
    """Rollouts per second of one machine of the offer, whose GPU must be spelt as in `rates`; 0 if not known."""
    return offer.rollouts_per_s or (rates.get(offer.gpu, 0.0) if offer.gpu else rates.get("", 0.0))


def shortage_rollouts_per_s(plan: Plan | None) -> float:
    """Rollouts per second that the pool lacks to keep the learner busy, by the plan's throughput term; none if they would not make
    it busier, or if too few rewards are computed for them anyway."""
    if plan is None or plan.binding is Limit.REWARDS or not plan.could_use_more:
        return 0.0
    return sum(
        max(0.0, term.limit - term.value)
        for term in plan.terms
        if term.limit_kind is Limit.THROUGHPUT and not term.is_met
    )


def without_workers(plan: Plan) -> Plan:
    """The same need, of which nobody makes anything."""
    lost = (replace(term, value=0.0, slack=-1.0) for term in plan.terms if term.limit_kind is Limit.THROUGHPUT)
    return replace(plan, terms=tuple(lost), binding=Limit.THROUGHPUT, could_use_more=True)


def advise(
    plan: Plan | None,
    offers: Sequence[MachineOffer],
    machines: Sequence[RentedMachine],
    workers: Mapping[str, Sequence[Member]],
    known_rates: Callable[[], Mapping[str, float]],
    budget: Budget,
    now: float,
    resting: Collection[str] = (),
) -> FleetAdvice:
    """What to rent or release now. `workers`: those that joined from each machine, by its id. `known_rates`: asked only if
    something is short. `resting`: offers of which nothing is rented now. Releases go before rents, never both at once."""
    spent = f"the budget of {budget.usd_budget:g} USD is spent" if budget.is_spent else ""
    release = tuple(releases(offers, machines, workers, now, spent))
    if release:
        return FleetAdvice(release=release)
    if plan is None:
        return FleetAdvice(reason="there is no plan yet: rents follow measurements")
    shortage = shortage_rollouts_per_s(plan)
    if shortage <= 0:
        enough = "the pool makes what the learner needs"
        return FleetAdvice(reason=enough if plan.could_use_more else "more machines would not make the learner busier")
    if spent:
        return FleetAdvice(reason=spent)
    rates, by_name = known_rates(), {offer.name: offer for offer in offers}
    unmeasured = [
        machine.offer
        for machine in machines
        if machine.is_open
        and machine.offer in by_name
        and not any(worker.heartbeat.rollouts_per_s > 0 for worker in workers.get(machine.machine_id, ()))
    ]
    coming = sum(rate_of(by_name[name], rates) for name in unmeasured)
    if coming >= shortage > 0:
        return FleetAdvice(reason=f"machines on their way will make the {shortage:.3g} rollouts/s that are missing")
    shortage -= coming
    if plan.binding is Limit.USD_BUDGET:  # missing rollouts that are dearer than the pool's would make the run dearer
        most = plan.usd_per_hour / max(plan.throughput_rollouts_per_s, 1e-12)
        spared = {m.offer for m in machines if m.is_open and any(map(_stands_by, workers.get(m.machine_id, ())))}
        offers = [
            offer
            for offer in offers
            if offer.usd_per_hour <= most * min(rate_of(offer, rates), shortage) and offer.name not in spared
        ]
        if not offers:
            return FleetAdvice(reason="the budget does not pay for a faster pool")
    return _rents(shortage, offers, machines, unmeasured, rates, budget, resting)


def _rents(
    shortage: float,
    offers: Sequence[MachineOffer],
    machines: Sequence[RentedMachine],
    unmeasured: Collection[str],
    rates: Mapping[str, float],
    budget: Budget,
    resting: Collection[str],
) -> FleetAdvice:
    """Rents from the offer with the lowest price per rollout that has room. If its rate is not known, only one machine, and none
    while one is `unmeasured`."""
    best: tuple[float, str, RentProposal] | None = None
    why_not = "there is no offer with room"
    for offer in offers:
        room = offer.machines_max - sum(m.offer == offer.name and m.is_open for m in machines)
        if room <= 0 or not (offer.is_automatic or offer.usd_per_hour):  # a person alone knows what the latter costs
            continue
        if offer.name in resting:
            why_not = f"renting a machine of {offer.name} brought no worker a while ago; it is tried again later"
            continue
        rate = rate_of(offer, rates)
        if rate <= 0 and offer.name in unmeasured:
            why_not = f"a machine of {offer.name} has to be measured first"
            continue
        needed = max(1, math.ceil(shortage / rate - 1e-9)) if rate > 0 else 1
        count = min(room, budget.affordable(offer.usd_per_hour, offer.hours_least), needed)
        if count <= 0:
            more = f"{offer.usd_per_hour:g} USD/h more for {offer.name}"
            why_not = f"{more} would go beyond the cap or the budget" if budget.is_bounded else NO_BOUND
            continue
        speed = f"of about {rate:.3g} rollouts/s each" if rate > 0 else "of a rate that nobody has measured yet"
        text = f"the pool lacks {shortage:.3g} rollouts/s: {count} {speed} at {offer.usd_per_hour:g} USD/h"
        rental = RentProposal(offer.name, count, count * offer.usd_per_hour, text)
        key = (offer.usd_per_hour / rate if rate > 0 else offer.usd_per_hour * 1e3, offer.name)
        if best is None or key < best[:2]:
            best = (*key, rental)
    return FleetAdvice(rent=(best[2],)) if best is not None else FleetAdvice(reason=why_not)


def releases(
    offers: Sequence[MachineOffer],
    machines: Sequence[RentedMachine],
    workers: Mapping[str, Sequence[Member]],
    now: float,
    why_all: str,
) -> Iterable[ReleaseProposal]:
    """What to give back, the dearest first; nothing in the time that is billed anyway. `why_all`: why all are, if so."""
    hours_least = {offer.name: offer.hours_least for offer in offers}
    for machine in sorted(machines, key=lambda machine: (-machine.usd_per_hour, machine.machine_id)):
        if machine.state not in _GIVEN_BACK or machine.usd_per_hour <= 0:
            continue
        if now - machine.rented_at < 3600 * hours_least.get(machine.offer, 0.0):
            continue  # it is billed until then, so it may as well work
        joined = workers.get(machine.machine_id, ())
        if why_all:
            reason = why_all
        elif not joined and now - machine.rented_at >= JOIN_S_MAX:
            reason = f"no worker has joined from it in {(now - machine.rented_at) / 60:.0f} min"
        elif joined and all(_idle_s(worker, now) >= IDLE_RELEASE_S for worker in joined):
            least = min(_idle_s(worker, now) for worker in joined)
            reason = f"its workers have stood by for {least / 60:.0f} min"
        else:
            continue
        yield ReleaseProposal(machine.machine_id, machine.usd_per_hour, reason)


def _stands_by(worker: Member) -> bool:
    return worker.last_liveness is not Liveness.GONE and worker.last_activation is Activation.STANDBY


def _idle_s(worker: Member, now: float) -> float:
    """Seconds that the worker has been on standby, drained, barred or gone; 0 while it works."""
    if worker.last_liveness is Liveness.GONE:
        return now - worker.heard_at
    is_working = worker.last_activation in (None, Activation.ACTIVE) or bool(worker.record.held)
    return 0.0 if is_working else now - worker.activation_since

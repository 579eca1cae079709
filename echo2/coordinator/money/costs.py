"""Meters money: the whole bill of workers and machines, nothing twice, and the share of it that bought work.

A worker costs its declared price from its first message until it is gone, on standby as well: its owner pays for the machine
either way. A worker whose price needs the operator's approval costs nothing until it has it: a declared price is not a debt. The
useful share is what workers cost while they are active or draining. A worker on a machine rented through a provider is not
charged separately: the machine costs its offer's price from the rental to its end. The cap and the budget bound only what the
run has chosen: rented machines, and workers while they work. Standby prices do not count towards them, so a standby worker
cannot push others out of the pool by declaring a high price.

A worker on a machine that this run rented has the machine's price. Any other declares its own, and the budget is spent at that
price, so it is a claim that needs a limit (`Money.limit_of`): at most the price of the most expensive offer of its GPU or, if none
is offered, `TYPICAL_TIMES` the GPU's typical price. No worker may ask more than the cap of the whole pool, or a price that would
spend the budget in `BUDGET_HOURS`. A worker that asks more stays on standby until the operator activates it, which approves that
price and none above it.

Guarantees: no interval is charged twice or backwards; after a restart of the coordinator, the gap is charged if the worker
comes back within its grace period and not charged if it turns out to be gone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from echo2.base.clock import Clock
from echo2.base.ids import PeerId
from echo2.config.run import CoordinatorSection
from echo2.coordinator.fleet.members import (
    ROUNDING,
    Activation,
    Liveness,
    Member,
    Membership,
    OperatorSetting,
    PriceLimit,
)
from echo2.coordinator.fleet.tokens import TokenBook
from echo2.coordinator.money.market import built_in_catalogue
from echo2.coordinator.money.provisioning import MachineOffer, RentedMachine, kind_text
from echo2.cost_model.machines import CPU, kind_of_name
from echo2.cost_model.snapshot import is_spent

BUDGET_HOURS = 1.0  # a run that lasts less is no run
# Providers' prices of one kind of GPU differ by a factor of about four; beyond ten a price is a mistake or a try.
TYPICAL_TIMES = 10.0
IDLE_S = 30.0  # a worker on standby for less than this may just be between two plans
_WORKING = (Activation.ACTIVE, Activation.DRAINING)
BELIEVED_GPUS_MAX = 8  # of the largest machine that a claim is believed for


def is_there(member: Member) -> bool:
    """Whether the worker is on the bill now."""
    is_agreed = is_working(member) or not member.asks_too_much
    return member.last_liveness is not Liveness.GONE and is_agreed


def is_working(member: Member) -> bool:
    return member.last_activation in _WORKING


def is_useful(member: Member) -> bool:
    """Whether what the worker costs now buys work."""
    return is_working(member) and member.last_liveness is not Liveness.GONE


def meter(members: Iterable[Member], now: float) -> None:
    """Charges every worker up to now. The meter of a disconnected suspect pauses: it may still come back or be gone."""
    for member in members:
        _meter(member, now)


def _meter(member: Member, now: float) -> None:
    if member.cut_at is not None and member.last_liveness is Liveness.SUSPECT:
        return
    passed_s = now - member.metered_until
    if passed_s > 0:
        member.metered_until = now
        if is_there(member):
            cost = member.hello.price_usd_per_hour * passed_s / 3600.0
            if is_working(member):
                member.usd_spent += cost
            else:
                member.usd_standby += cost


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """Costs so far and per hour. `usd_spent`, `usd_per_hour`: the bill for all machines; `usd_useful`: for those that work;
    `usd_chosen`: for workers that work and for rented machines, which is what cap and budget bound."""

    usd_spent: float
    usd_per_hour: float
    usd_useful: float
    usd_useful_per_hour: float
    usd_chosen: float
    usd_chosen_per_hour: float


class Money:
    """`machines`: all machines that were ever rented in this run, by id. `offers`: what may be rented, with GPUs named by
    `kind_text`."""

    def __init__(self, membership: Membership, tokens: TokenBook, clock: Clock) -> None:
        self._membership, self._tokens, self._clock = membership, tokens, clock
        self.machines: dict[str, RentedMachine] = {}
        self.standby_before = 0.0  # USD of own workers on standby, from earlier processes
        self.offers: tuple[MachineOffer, ...] = ()

    @property
    def open_machines(self) -> list[RentedMachine]:
        """Those that are rented and not given back."""
        return [machine for machine in self.machines.values() if machine.is_open]

    def workers_of(self, machine: RentedMachine) -> list[Member]:
        members = self._membership.members
        return [members[peer_id] for peer_id in sorted(self._joined_from(machine)) if peer_id in members]

    def _joined_from(self, machine: RentedMachine) -> Collection[PeerId]:
        token = self._tokens.tokens.get(machine.token_id)
        return token.peers.union(machine.replaced) if token is not None else machine.replaced

    def machine_of(self, peer_id: PeerId) -> RentedMachine | None:
        """The rented machine that the worker is on; None once that is given back."""
        return next((machine for machine in self._machines_with(peer_id) if machine.is_open), None)

    def _machines_with(self, peer_id: PeerId) -> Iterator[RentedMachine]:
        """Those that the worker has joined from, the newest first: of thousands, most of the old ones are gone."""
        tokens = self._tokens.tokens
        for machine in reversed(self.machines.values()):
            token = tokens.get(machine.token_id)
            if peer_id in machine.replaced or (token is not None and peer_id in token.peers):
                yield machine

    def rented_workers(self) -> dict[PeerId, str]:
        machines = self.machines.values()
        return {peer_id: machine.machine_id for machine in machines for peer_id in self._joined_from(machine)}

    def idle_workers(self) -> list[Member]:
        """Workers that have been on standby for `IDLE_S` and are on no rented machine: what they cost buys nothing."""
        now, rented = self._clock.now(), self.rented_workers()
        return [
            member
            for member in self._membership.living()
            if member.last_activation is Activation.STANDBY and member.peer_id not in rented
            and not member.is_newcomer and now - member.activation_since >= IDLE_S
        ]  # fmt: skip

    def standby_usd(self) -> float:
        """What workers on no rented machine have cost on standby over the whole run, in USD."""
        rented = self.rented_workers()
        unrented = (member for member in self._membership.members.values() if member.peer_id not in rented)
        return self.standby_before + sum(member.usd_standby for member in unrented)

    def bill_of(self, member: Member) -> float:
        """What one worker has cost, standby included, in USD: of a rented machine, its part of the machine's bill."""
        machine = next(self._machines_with(member.peer_id), None)
        if machine is None:
            return member.usd_spent + member.usd_standby
        return machine.usd_spent(self._clock.now()) / len(self.workers_of(machine))

    def limit_of(self, member: Member, section: CoordinatorSection) -> PriceLimit:
        """The lowest limit that applies to this worker's price; the module's docstring gives the rule."""
        machine = self.machine_of(member.peer_id)
        gpu = kind_text(member.hello.gpu, built_in_catalogue())
        offered = [offer.usd_per_hour for offer in self.offers if gpu and offer.gpu == gpu and offer.usd_per_hour > 0]
        if machine is not None:
            limit = PriceLimit(machine.usd_per_hour, "its machine's price")
        elif offered:
            limit = PriceLimit(max(offered), f"the dearest offer of {gpu}")
        else:
            limit = _typical_limit(gpu)
        cap = PriceLimit(section.usd_per_hour_cap, "the whole pool's cap")
        spends = PriceLimit(section.usd_budget / BUDGET_HOURS, "what spends the budget in an hour")
        return min(limit, cap, spends, key=lambda price: price.usd_per_hour)

    def reprice(self, prices: Mapping[str, float]) -> None:
        """Takes the operator's prices of offers, by name. ConfigError, before any change, for one out of range."""
        offers = [replace(offer, usd_per_hour=prices.get(offer.name, offer.usd_per_hour)) for offer in self.offers]
        self.offers = tuple(offers)

    def beyond_limits(self, wanted: Sequence[Member], section: CoordinatorSection) -> set[PeerId]:
        """Those of `wanted` that may not work, because all together would cost more than the cap, or the budget is spent. A worker
        on a rented machine costs no more than its machine does in any case. Whom the operator activates comes first; then who is
        cheapest by what it delivers."""
        costs, cap = self.sums(), section.usd_per_hour_cap
        rented, working = self.rented_workers(), {member.peer_id for member in wanted}
        if is_spent(costs.usd_chosen, section.usd_budget):
            return working
        if cap == math.inf:
            return set()
        others = (peer for peer in self._membership.members.values() if peer.peer_id not in working and is_useful(peer))
        room = cap * ROUNDING - sum(machine.usd_per_hour for machine in self.open_machines)
        room -= sum(other.hello.price_usd_per_hour for other in others if other.peer_id not in rented)
        beyond = set()
        for member in sorted(wanted, key=_turn):
            price = 0.0 if member.peer_id in rented else member.hello.price_usd_per_hour
            if price > max(0.0, room):
                beyond.add(member.peer_id)
            else:
                room -= price
        return beyond

    def sums(self) -> FleetCosts:
        """The bill and its useful share, metered up to now."""
        now, rented = self._clock.now(), self.rented_workers()
        spent = there_per_hour = working_per_hour = 0.0  # of workers on no rented machine
        standby = self.standby_before
        worked: dict[str, float] = {}  # by rented machine: what its workers cost while they worked
        busy: set[str] = set()  # rented machines on which one works
        for member in self._membership.members.values():
            _meter(member, now)
            works, machine_id = is_useful(member), rented.get(member.peer_id) if rented else None
            if machine_id is None:
                spent, standby = spent + member.usd_spent, standby + member.usd_standby
                if works or is_there(member):
                    price = member.hello.price_usd_per_hour
                    there_per_hour += price
                    working_per_hour += price * works
                continue
            worked[machine_id] = worked.get(machine_id, 0.0) + member.usd_spent
            if works:
                busy.add(machine_id)
        rent = rent_per_hour = useful = useful_per_hour = 0.0
        for machine in self.machines.values():
            cost = machine.usd_spent(now)
            rent += cost
            useful += min(cost, worked.get(machine.machine_id, 0.0))  # at most what the machine has cost itself
            if machine.is_open:
                rent_per_hour += machine.usd_per_hour
                useful_per_hour += machine.usd_per_hour * (machine.machine_id in busy)
        return FleetCosts(
            spent + standby + rent, there_per_hour + rent_per_hour,
            spent + useful, working_per_hour + useful_per_hour,
            spent + rent, working_per_hour + rent_per_hour,
        )  # fmt: skip


def _turn(member: Member) -> tuple[bool, bool, float, str]:
    """A worker's place in the queue for the cap: the operator's choice, those that work, the cheapest by what they deliver."""
    is_chosen = member.setting is OperatorSetting.ACTIVE
    cost = member.hello.price_usd_per_hour / max(member.record.delivered_per_s or 0.0, 1e-9)
    return not is_chosen, member.is_on_trial, cost, member.peer_id


def _typical_limit(gpu: str) -> PriceLimit:
    """For a GPU that the catalogue does not know: what the dearest machine of the catalogue typically costs."""
    kinds = built_in_catalogue()
    kind, count = kind_of_name(gpu, kinds)
    if kind in ("", CPU):
        dearest = max(gpu_type.usd_per_hour for gpu_type in kinds.values())
        return PriceLimit(BELIEVED_GPUS_MAX * dearest, f"the typical price of {BELIEVED_GPUS_MAX} of the dearest GPUs")
    typical = min(count, BELIEVED_GPUS_MAX) * kinds[kind].usd_per_hour
    return PriceLimit(TYPICAL_TIMES * typical, f"{TYPICAL_TIMES:g} times the typical price of {gpu}")

"""Meters money: the whole bill, and the share of it that bought work.

A worker costs its declared price from its first message until it is gone, on standby as well: its owner pays for the machine
either way. A worker whose price needs the operator's approval costs nothing until it has it: a declared price is not a debt. The
useful share is what workers cost while they are active or draining. A worker on a machine rented through a provider is not
charged separately: the machine costs its offer's price from the rental to its end. The cap and the budget bound only what the
run has chosen: rented machines, and workers while they work. Standby prices do not count towards them, so a standby worker
cannot push others out of the pool by declaring a high price.
Guarantees: no interval is charged twice or backwards; after a restart of the coordinator, the gap is charged if the worker comes
back within its grace period and not charged if it turns out to be gone. Leaves to others: persistence, prices (each worker
declares its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.coordinator.membership import Activation, Liveness, Member
from echo2.coordinator.provisioning import RentedMachine


def is_there(member: Member) -> bool:
    """Whether the worker is on the bill now."""
    is_agreed = is_working(member) or not member.asks_too_much
    return member.last_liveness is not Liveness.GONE and is_agreed


def is_working(member: Member) -> bool:
    return member.last_activation in (Activation.ACTIVE, Activation.DRAINING)


def is_useful(member: Member) -> bool:
    """Whether what the worker costs now buys work."""
    return is_there(member) and is_working(member)


def meter(members: Iterable[Member], now: float) -> None:
    """Charges every worker up to now. The meter of a disconnected suspect pauses: it may still come back or be gone."""
    for member in members:
        if member.cut_at is not None and member.last_liveness is Liveness.SUSPECT:
            continue
        if is_there(member) and now > member.metered_until:
            cost = member.hello.price_usd_per_hour * (now - member.metered_until) / 3600.0
            if is_useful(member):
                member.usd_spent += cost
            else:
                member.usd_standby += cost
        member.metered_until = max(member.metered_until, now)


def usd_per_hour(members: Iterable[Member]) -> float:
    """Price of the workers that are working now."""
    return sum(member.hello.price_usd_per_hour for member in members if is_useful(member))


def usd_spent(members: Iterable[Member]) -> float:
    """What the workers have cost while they worked."""
    return sum(member.usd_spent for member in members)


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


def sums(
    members: Iterable[Member],
    machines: Iterable[RentedMachine],
    rented: Mapping[PeerId, str],
    now: float,
    standby_usd: float,
) -> FleetCosts:
    """Adds up the costs of workers, which must be metered up to `now`, and of machines. `rented`: maps each worker on a machine
    rented through a provider to the machine's id. `standby_usd`: what all other workers have cost on standby."""
    everybody, there = list(members), list(machines)
    own = [member for member in everybody if member.peer_id not in rented]
    on: dict[str, list[Member]] = {}
    for member in everybody:
        if member.peer_id in rented:
            on.setdefault(rented[member.peer_id], []).append(member)
    useful = sum(_useful_of(machine, on.get(machine.machine_id, ()), now) for machine in there)
    useful_per_hour = sum(
        one.usd_per_hour for one in there if one.is_open and any(map(is_useful, on.get(one.machine_id, ())))
    )
    spent, per_hour = usd_spent(own), usd_per_hour(own)
    rent = sum(machine.usd_spent(now) for machine in there)
    rent_per_hour = sum(machine.usd_per_hour for machine in there if machine.is_open)
    all_per_hour = sum(member.hello.price_usd_per_hour for member in own if is_there(member))
    return FleetCosts(
        spent + standby_usd + rent, all_per_hour + rent_per_hour,
        spent + useful, per_hour + useful_per_hour,
        spent + rent, per_hour + rent_per_hour,
    )  # fmt: skip


def _useful_of(machine: RentedMachine, workers: Sequence[Member], now: float) -> float:
    """The useful part of a machine's cost: what its workers have cost while they worked, at most the machine's own cost."""
    return min(machine.usd_spent(now), usd_spent(workers))

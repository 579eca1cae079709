"""The money meter: what each worker has cost.

A worker costs its declared price while it is active or draining, and not gone; one on a machine that a provider rented
is part of that machine, which costs its offer's price from the rent to its end, idle or not.
Guarantees: no interval is charged twice and
none backwards; after a restart of the coordinator the gap is charged when the worker comes back within its grace, and
not when it turns out to be gone. Leaves to others: keeping it on disk, prices (the worker declares its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.coordinator.membership import Activation, Liveness, Member
from echo2.coordinator.provisioning import RentedMachine


def is_charged(member: Member) -> bool:
    """Whether it costs money now."""
    return member.last_liveness is not Liveness.GONE and member.last_activation in (
        Activation.ACTIVE,
        Activation.DRAINING,
    )


def meter(members: Iterable[Member], now: float) -> None:
    """Charges everybody up to now. While a worker is away nothing is decided yet, so its meter stands."""
    for member in members:
        if member.cut_at is not None and member.last_liveness is Liveness.SUSPECT:
            continue
        if is_charged(member) and now > member.metered_until:
            member.usd_spent += member.hello.price_usd_per_hour * (now - member.metered_until) / 3600.0
        member.metered_until = max(member.metered_until, now)


def usd_per_hour(members: Iterable[Member]) -> float:
    return sum(member.hello.price_usd_per_hour for member in members if is_charged(member))


def usd_spent(members: Iterable[Member]) -> float:
    return sum(member.usd_spent for member in members)


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """What the whole fleet has cost, and costs an hour."""

    usd_spent: float
    usd_per_hour: float


def sums(members: Iterable[Member], machines: Iterable[RentedMachine], rented: Set[PeerId], now: float) -> FleetCosts:
    """Workers that are metered up to now, and machines. `rented`: workers on machines that a provider rented."""
    own, there = [member for member in members if member.peer_id not in rented], list(machines)
    return FleetCosts(
        usd_spent(own) + sum(machine.usd_spent(now) for machine in there),
        usd_per_hour(own) + sum(machine.usd_per_hour for machine in there if machine.is_open),
    )

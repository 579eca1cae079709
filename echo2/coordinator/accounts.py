"""The money meter: the bill, and the share of it that bought work.

A worker costs its declared price from its first word until it is gone, on standby as well: its owner pays for the machine
either way. One whose price the operator has not agreed to costs nothing until he does: a claim is no debt. The useful share is
what workers cost while they are active or draining. One on a machine that a provider rented is part of that machine, which
costs its offer's price from the rent to its end. Cap and budget bound what the run has chosen: machines that it rented, and
workers while they work; no price of a worker that only stands by, which anybody may name, sends the others home.
Guarantees: no interval is charged twice and
none backwards; after a restart of the coordinator the gap is charged when the worker comes back within its grace, and
not when it turns out to be gone. Leaves to others: keeping it on disk, prices (the worker declares its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.coordinator.membership import Activation, Liveness, Member
from echo2.coordinator.provisioning import RentedMachine


def is_there(member: Member) -> bool:
    """Whether it is on the bill now."""
    is_agreed = is_working(member) or not member.asks_too_much
    return member.last_liveness is not Liveness.GONE and is_agreed


def is_working(member: Member) -> bool:
    return member.last_activation in (Activation.ACTIVE, Activation.DRAINING)


def is_useful(member: Member) -> bool:
    """Whether what it costs now buys work."""
    return is_there(member) and is_working(member)


def meter(members: Iterable[Member], now: float) -> None:
    """Charges everybody up to now. While a worker is away nothing is decided yet, so its meter stands."""
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
    """Of those that work."""
    return sum(member.hello.price_usd_per_hour for member in members if is_useful(member))


def usd_spent(members: Iterable[Member]) -> float:
    """On work."""
    return sum(member.usd_spent for member in members)


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """Each so far and an hour: the bill of all machines; `usd_useful`: of those that work; `usd_chosen`: of workers that work
    and of rented machines, which cap and budget bound."""

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
    """Workers that are metered up to now, and machines. `rented`: workers on machines that a provider rented, with the
    machine's id. `standby_usd`: what own workers have cost on standby."""
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
    """As much of a machine's cost as its workers have worked of the time that they were there."""
    return min(machine.usd_spent(now), usd_spent(workers))

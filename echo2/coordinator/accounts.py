"""The money meter: what each worker has cost.

A machine costs its price while it is active or draining, and not gone. Guarantees: no interval is charged twice and
none backwards; after a restart of the coordinator the gap is charged when the worker comes back within its grace, and
not when it turns out to be gone. Leaves to others: keeping it on disk, prices (the worker declares its own).
"""

from __future__ import annotations

from collections.abc import Iterable

from echo2.coordinator.membership import Activation, Liveness, Member


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

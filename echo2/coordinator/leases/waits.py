"""Says in words why groups wait, for the stall panel. Pure. Guarantees: whatever waits in the lease book is reported."""

from __future__ import annotations

from collections.abc import Callable

from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import Activation, Liveness, Member
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.lease import Lease, OpenGroup


def slowest(book: LeaseBook, now: float, name_of: Callable[[PeerId], str] = str) -> str:
    """The workers whose leases have stood still longest (up to three); empty if every lease makes progress."""
    return ", ".join(f"{_leases(leases)} on {name_of(worker)}" for worker, leases in _slow(book, now)[:3])


def waits(book: LeaseBook, now: float, name_of: Callable[[PeerId], str] = str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    first = book.first_queued
    if first is not None:
        found.append((f"{book.queued} groups wait for a worker: {_why(book, first, now)}", first.since))
    for worker_id, leases in _slow(book, now)[:8]:
        text = (
            f"{_leases(leases)} on {name_of(worker_id)} without progress at {sum(one.tokens for one in leases)} tokens"
        )
        found.append((text, leases[0].progress_at))
    for worker_id, record in book.records.barred(now)[:8]:
        if text := bar_text(book, worker_id, now):
            found.append((f"{name_of(worker_id)} is {text}", record.barred_at))
    return found


def bar_text(book: LeaseBook, worker_id: PeerId, now: float) -> str:
    """For how long the worker is barred by what it failed, and why; empty if it is not."""
    record = book.records.of(worker_id)
    if now >= record.barred_until or not book.records.is_barred(worker_id, book.requests.allowed, now):
        return ""
    return f"given no leases for {record.barred_until - record.barred_at:.0f} s: {record.why}"


def why_no_lease(book: LeaseBook, member: Member, now: float) -> str:
    """Why the worker is given no lease now, in one sentence; empty if it can be given one, or has gone. The only place that
    decides what is said: its liveness; what operator, price and plan say (`Member.activation_reason`); what it failed (`bar_text`);
    what it may hold (`LeaseRequests.limit_of`); what waits."""
    worker_id = member.peer_id
    if member.last_liveness is Liveness.GONE:
        return ""
    if member.last_liveness is Liveness.SUSPECT:
        return "nothing is heard of it"
    if member.activation is not Activation.ACTIVE:
        return f"{member.activation.value}: {member.activation_reason}"
    if barred := bar_text(book, worker_id, now):
        return barred
    request = book.requests.wanting.get(worker_id)
    if request is None:
        held = book.lease_count(worker_id)
        return f"it asks for none: it is full with {_count(held, 'lease')}" if held else "it does not ask for any yet"
    if limit := book.requests.limit_of(worker_id):
        return limit
    if not book.queued:
        return "no group waits for a worker"
    if not book.has_work_for([worker_id]):
        return f"no group that waits may be sampled at version {request.version}, which it has"
    return ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _leases(leases: list[Lease]) -> str:
    return f"{len(leases)} leases" if len(leases) > 1 else f"lease {leases[0].lease_id}"


def _slow(book: LeaseBook, now: float) -> list[tuple[PeerId, list[Lease]]]:
    """Leases without progress for more than a quarter of the timeout, by worker, longest first."""
    found: dict[PeerId, list[Lease]] = {}
    for lease in sorted(book.leases.values(), key=lambda lease: lease.progress_at):
        if now - lease.progress_at <= book.rules.lease_timeout_s / 4:
            break
        found.setdefault(lease.worker_id, []).append(lease)
    return list(found.items())


def _why(book: LeaseBook, group: OpenGroup, now: float) -> str:
    active = book.requests.allowed
    allowed = [(worker, request) for worker, request in book.requests.wanting.items() if worker in active]
    need = group.spec.consume_step - book.rules.staleness_bound
    if now < group.not_before:
        return f"the learner refused the last attempt at {group.spec.group_id}"
    if not active:
        return "no worker is active"
    if not allowed:
        return f"all {len(active)} active workers are full"
    exact = group.spec.exact_version
    if exact is not None and all(request.version != exact for _, request in allowed):
        return f"it is an evaluation of version {exact}, at which none of {len(allowed)} willing workers is"
    newest = max(request.version for _, request in allowed)
    if exact is None and newest < need:
        return f"it takes version {need} or newer, the newest of {len(allowed)} willing workers is {newest}"
    if not book.requests.open():
        return f"{len(allowed)} willing workers must deliver what they hold before they are given more"
    return f"{len(allowed)} willing workers lost or refused the group at its front a moment ago"

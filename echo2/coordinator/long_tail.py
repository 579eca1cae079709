"""Near the end of a step's demand: which stragglers go on faster elsewhere. Pure.

The model. A lease's rollouts have `left` tokens to go: what is expected of them less what they have, and for one that is
past its expectation half of what it has (who has lasted long lasts longer), never beyond its limit. Where it is, the lease
makes `v` tokens a second and sequence, as this very lease has until its last word; elsewhere, and before it is measured,
the worker's own mean counts. (A lease that stands still altogether is the lease timeout's business.) Moving costs
the hand-over (tokens are reported, the lease travels, the prompt and the tokens held are prefilled again):

    stay = left / v_here        move = hand_over_s + held / (PREFILL * v_there) + left / v_there

It pays when `move` is below `stay` by `GAIN_SHARE` and `GAIN_S_MIN`. Guarantees: nothing is moved while a queued group
could use the room (that one would be faster served), nothing that is recalled already, no group more than
`MOVES_PER_GROUP_MAX` times, no more than there is room for. With over-provisioning, stragglers of a step that has begun
without them are stopped as soon as moving gains anything at all. Leaves to others: carrying it out (lease_book.Recall).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo2.base.ids import LeaseId, PeerId, Step
from echo2.base.rollout import Work
from echo2.coordinator.lease_book import LeaseBook
from echo2.coordinator.lease_events import Lease
from echo2.coordinator.lease_queue import may_take
from echo2.coordinator.membership import Member

PREFILL = 20.0
"""Tokens are prefilled so many times faster than they are sampled, at least."""
GAIN_SHARE = 0.3
GAIN_S_MIN = 2.0
MOVES_PER_GROUP_MAX = 2
QUIET_S = 2.0
"""Offers come in bursts; in the middle of one nothing is near its end."""
MEASURED_S_MIN = 1.0
"""Before that a lease's own speed says nothing, and its worker's mean counts."""


@dataclass(frozen=True, slots=True)
class TailRule:
    """`hand_over_s`: a report interval and a heartbeat's worth of travel. `recycles`: over-provisioning is on."""

    hand_over_s: float
    recycles: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Recall a lease for another worker."""

    lease_id: LeaseId
    to: PeerId
    gain_s: float
    reason: str


def speed_of(member: Member) -> float:
    """Tokens per second of one sequence, from the worker's means; 0 while not measured, or nothing was delivered."""
    beat = member.heartbeat
    if beat.rollouts_per_s <= 0 or beat.rollout_s_mean <= 0 or member.is_newcomer:
        return 0.0
    return beat.tokens_per_s / beat.rollouts_per_s / beat.rollout_s_mean


def is_quiet(book: LeaseBook, now: float) -> bool:
    """Whether the learner has offered all that it wants for now, workers have room, and no queued group could use it."""
    idle = book.seekers.open()
    is_over = bool(book.leases and idle) and now - book.offered_at >= QUIET_S
    return is_over and not book.has_work_for(idle)


def moves(
    book: LeaseBook, speeds: Mapping[PeerId, float], step: Step, rule: TailRule, names: Mapping[PeerId, str]
) -> list[Move]:
    """The moves that pay, the slowest stragglers first, each to the fastest worker that has room for it."""
    room = {worker: seeker.free_rollouts for worker, seeker in book.seekers.open().items() if speeds.get(worker, 0) > 0}
    if not room or book.has_work_for(room):
        return []
    found: list[Move] = []
    waits = [(_left_s(book, lease, speeds), lease) for lease in book.leases.values() if _may_move(book, lease)]
    for (stay_s, left, held), lease in sorted(waits, key=lambda one: -one[0][0]):
        spec = book.groups[lease.group_id].spec
        fit = [
            worker for worker, free in room.items()
            if free >= spec.rollout_count and worker != lease.worker_id
            and may_take(spec, book.seekers.wanting[worker].version, book.rules.staleness_bound)
        ]  # fmt: skip
        if not fit:
            continue
        to = max(fit, key=lambda worker: (speeds[worker], worker))
        move_s = rule.hand_over_s + held / (PREFILL * speeds[to]) + left / speeds[to]
        is_overdue = rule.recycles and spec.work is Work.TRAIN and spec.consume_step < step
        least_gain_s = 0.0 if is_overdue else max(GAIN_S_MIN, GAIN_SHARE * stay_s)
        if stay_s - move_s <= least_gain_s:
            continue
        room[to] -= spec.rollout_count
        why = "its step has begun without it" if is_overdue else "it is among the last of its step"
        reason = (
            f"{why}: about {stay_s:.1f} s more on {names.get(lease.worker_id, lease.worker_id)}, "
            f"{move_s:.1f} s on {names.get(to, to)}"
        )
        found.append(Move(lease.lease_id, to, stay_s - move_s, reason))
    return found


def _may_move(book: LeaseBook, lease: Lease) -> bool:
    return not lease.is_recalled and book.groups[lease.group_id].moves < MOVES_PER_GROUP_MAX


def _left_s(book: LeaseBook, lease: Lease, speeds: Mapping[PeerId, float]) -> tuple[float, float, float]:
    """Seconds to the end where it is, tokens to go of its longest rollout, and tokens held by each."""
    spec = book.groups[lease.group_id].spec
    held = lease.tokens / spec.rollout_count
    left = book.lengths.rest(spec, lease.tokens, spec.rollout_count - 1)
    made, for_s = lease.tokens - lease.tokens_before, lease.progress_at - (lease.measured_from or lease.granted_at)
    is_measured = made > 0 and for_s >= MEASURED_S_MIN
    speed = made / spec.rollout_count / for_s if is_measured else speeds.get(lease.worker_id, 0.0)
    return (max(0.0, left) / speed if speed > 0 else 0.0, max(0.0, left), held)

"""Chooses which stragglers would finish faster on another worker, near the end of a step's demand. Pure.

A lease's longest rollout has `left` tokens to go: its expected length minus what it has (`ExpectedLength.rest`). On its present
worker it makes `v_here` tokens per second and sequence, measured on this lease up to its last report. For another worker, and
before the lease is measured, the worker's own mean counts. (A lease that makes no progress at all is left to the lease timeout.) A
move costs the hand-over (tokens are reported, the lease travels) and a prefill of the prompt and of all tokens of its rollouts:

    stay = left / v_here        move = hand_over_s + (prompt + all held) / p_there + left / v_there

A move pays if it is faster than staying by more than both `GAIN_SHARE` and `GAIN_S_MIN`. Guarantees: no lease moves while a queued
group could use the room (which needs no hand-over), a recalled lease does not move again, an evaluation does not move
(another worker may swap to a newer version before the lease reaches it), no group moves more than `MOVES_PER_GROUP_MAX` times, and
no worker gets more than it has room for. Leaves to others: carrying out the moves (`LeaseBook.recall`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo2.base.ids import LeaseId, PeerId
from echo2.coordinator.fleet.members import Member
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.lease import Lease
from echo2.coordinator.leases.queue import may_take

PREFILL_FACTOR = 2.5
"""A worker prefills at least so many times the tokens/s that all its sequences sample together: a little less than the lowest ratio
in the catalogue of machines with Qwen3-8B."""
GAIN_SHARE = 0.3  # guesses of lengths are that wrong
GAIN_S_MIN = 2.0  # a report interval: a smaller gain is noise
MOVES_PER_GROUP_MAX = 2  # each costs a prefill
QUIET_S = 2.0
"""Offers come in bursts. Only after so long without one is the step's demand near its end."""
MEASURED_S_MIN = 1.0
"""A lease's own speed counts only if it was measured over at least so long; before that its worker's mean counts."""


@dataclass(frozen=True, slots=True)
class Move:
    """Recall a lease for another worker."""

    lease_id: LeaseId
    to: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerPace:
    """A worker's speeds. `tokens_per_s`: sampled by one sequence; 0: not known. `prefill_tokens_per_s`: prefilled by one engine."""

    tokens_per_s: float
    prefill_tokens_per_s: float


def pace_of(member: Member) -> WorkerPace:
    """From the worker's means; no speed if not measured, or if the worker has delivered nothing."""
    beat = member.heartbeat
    if beat.rollouts_per_s <= 0 or beat.rollout_s_mean <= 0 or member.is_newcomer:
        return WorkerPace(0.0, 0.0)
    return WorkerPace(beat.tokens_per_s / beat.rollouts_per_s / beat.rollout_s_mean, PREFILL_FACTOR * beat.tokens_per_s)


def is_quiet(book: LeaseBook, now: float) -> bool:
    """Whether the learner has offered all that it wants for now, workers have room, and no queued group could use that room."""
    idle = book.requests.open()
    is_over = bool(book.leases and idle) and now - book.offered_at >= QUIET_S
    return is_over and not book.has_work_for(idle)


def moves(
    book: LeaseBook, paces: Mapping[PeerId, WorkerPace], hand_over_s: float, names: Mapping[PeerId, str]
) -> list[Move]:
    """The moves that pay, slowest stragglers first, each to the worker with room that would finish it first."""
    speeds = {worker: pace.tokens_per_s for worker, pace in paces.items()}
    room = {
        worker: request.free_rollouts for worker, request in book.requests.open().items() if speeds.get(worker, 0) > 0
    }
    if not room or book.has_work_for(room):
        return []
    found: list[Move] = []
    waits = [(_left_s(book, lease, speeds), lease) for lease in book.leases.values() if _may_move(book, lease)]
    for (stay_s, left), lease in sorted(waits, key=lambda one: -one[0][0]):
        spec = book.groups[lease.group_id].spec
        fit = [
            worker for worker, free in room.items()
            if free >= spec.rollout_count and worker != lease.worker_id
            and may_take(spec, book.requests.wanting[worker].version, book.rules.staleness_bound)
        ]  # fmt: skip
        if not fit:
            continue
        held = len(spec.prompt_token_ids) + lease.tokens
        move_s, to = min((hand_over_s + _there_s(held, left, paces[worker]), worker) for worker in fit)
        if stay_s - move_s <= max(GAIN_S_MIN, GAIN_SHARE * stay_s):
            continue
        room[to] -= spec.rollout_count
        reason = (
            f"it is among the last of its step: about {stay_s:.1f} s more on {names.get(lease.worker_id, lease.worker_id)}, "
            f"{move_s:.1f} s on {names.get(to, to)}"
        )
        found.append(Move(lease.lease_id, to, reason))
    return found


def _may_move(book: LeaseBook, lease: Lease) -> bool:
    group = book.groups[lease.group_id]
    return not lease.is_recalled and group.spec.exact_version is None and group.moves < MOVES_PER_GROUP_MAX


def _there_s(held: float, left: float, pace: WorkerPace) -> float:
    """Seconds to prefill all that a lease holds and to sample the rest of its longest rollout."""
    return held / pace.prefill_tokens_per_s + left / pace.tokens_per_s


def _left_s(book: LeaseBook, lease: Lease, speeds: Mapping[PeerId, float]) -> tuple[float, float]:
    """Seconds until the lease finishes on its present worker, and tokens that its longest rollout still needs."""
    spec = book.groups[lease.group_id].spec
    # All rollouts but one count as finished: the result is what the longest one still needs.
    left = book.lengths.rest(spec, lease.tokens, spec.rollout_count - 1)
    made, for_s = lease.tokens - lease.tokens_before, lease.progress_at - (lease.measured_from or lease.granted_at)
    is_measured = made > 0 and for_s >= MEASURED_S_MIN
    speed = made / spec.rollout_count / for_s if is_measured else speeds.get(lease.worker_id, 0.0)
    return (max(0.0, left) / speed if speed > 0 else 0.0, max(0.0, left))

"""Judges a worker by what the learner reports that it has delivered, never by what it says about itself.

A worker is *proven* once one of its rollouts was admitted. Its rate is the rollouts admitted per second in which it held a lease.
Its claimed rate counts up to `CLAIM_MARGIN` times that, because a worker that sometimes waits for work is faster than it could
show. How much a worker may hold at once is at most `GROWTH` times the number of its rollouts that the learner received tokens of
at once: so a worker that delivers doubles its share every second or so, and one that only asks gets no more than one group.
Workers that are not proven hold `TRIAL_SHARE` of the groups together while any proven worker may be given leases; while none may
(the start of a run), each holds a fair share.

A worker that holds leases while nothing of them reaches the learner loses them, and is given none for a time that doubles
each time.

Guarantees: a new identity costs others at most one group for `first_word_s` at a time; until the learner's first report of
deliveries, nothing is held back. Memory is bounded by the fleet. Leaves to others: leases (lease_book), the pool
(planner_input, trials), which tokens are admitted (learner).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from echo2.base.ids import LeaseId, PeerId
from echo2.control.backoff import ceiling_s
from echo2.coordinator.lease_events import Action, DropLease, Grant, WorkerDelivered

CLAIM_MARGIN = 2.0
GROWTH = 2.0
TRIAL_SHARE = 0.25
UNPROVEN_GROUPS_MAX = 4
SETTLE_S = 5.0
"""Added to the measured seconds with a lease, so that the first few rollouts do not give too high a rate."""
ROLLOUTS_KEPT, LEASED_S_KEPT, WINDOWS_MAX = 32.0, 30.0, 128
"""A rate covers at least this many of the newest rollouts and at least this many seconds, in at most so many windows."""
PEAK_HALF_LIFE_S = 600.0
TELLING_S_MAX = 5.0
"""The learner reports every second; a longer silence is the learner's own fault and counts against no worker."""
FIRST_WORD_S_MIN, FIRST_WORD_TIMEOUTS = 10.0, 0.25
PAUSE_S_MAX = 1800.0


@dataclass(slots=True)
class WorthRecord:
    """What is known of one worker's deliveries. `held`: rollouts by lease; `unconfirmed`: rollouts of leases that it claims to have
    finished although the learner has not reported anything of them; `quiet_s`: how long the learner has received nothing while
    it held leases; `peak_rollouts`: most rollouts that tokens arrived of at once, with a half-life."""

    held: dict[LeaseId, int] = field(default_factory=dict)
    held_rollouts: int = 0
    unconfirmed: int = 0
    quiet_s: float = 0.0
    peak_rollouts: float = 0.0
    failures: int = 0
    paused_until: float = 0.0
    windows: deque[tuple[float, float]] = field(default_factory=deque)  # seconds with a lease, rollouts admitted
    seconds: float = 0.0
    rollouts: float = 0.0

    @property
    def used(self) -> int:
        return self.held_rollouts + self.unconfirmed

    def took(self, leased_s: float, admitted: float) -> None:
        """Adds an interval with leases; forgets windows that the newest `ROLLOUTS_KEPT` rollouts and `LEASED_S_KEPT` seconds do
        not need."""
        self.windows.append((leased_s, admitted))
        self.seconds, self.rollouts = self.seconds + leased_s, self.rollouts + admitted
        while len(self.windows) > 1:
            first_s, first = self.windows[0]
            if self.rollouts - first >= ROLLOUTS_KEPT and self.seconds - first_s >= LEASED_S_KEPT:
                self.windows.popleft()
                self.seconds, self.rollouts = self.seconds - first_s, self.rollouts - first
                continue
            if len(self.windows) > WINDOWS_MAX:  # merge the oldest two
                (first_s, first), (second_s, second) = self.windows.popleft(), self.windows.popleft()
                self.windows.appendleft((first_s + second_s, first + second))
            return

    @property
    def rollouts_per_s(self) -> float:
        return max(0.0, self.rollouts) / (max(0.0, self.seconds) + SETTLE_S)


@dataclass(slots=True)
class Worth:
    """The records of all workers. `told_at`: when the learner last reported deliveries; None: never."""

    lease_timeout_s: float
    told_at: float | None = None
    proven: set[PeerId] = field(default_factory=set)
    records: dict[PeerId, WorthRecord] = field(default_factory=dict)
    _worker_of: dict[LeaseId, PeerId] = field(default_factory=dict)
    _ending: LeaseId | None = None
    _trial_leases: int = 0

    # ---- what happens

    def follow(self, action: Action) -> None:
        """Takes an action of the lease book."""
        match action:
            case Grant() if not action.is_renewal:
                self.granted(action.worker_id, action.lease_id, action.group.rollout_count)
            case DropLease(lease_id):
                self._returned(lease_id)
            case _:
                pass

    def granted(self, worker_id: PeerId, lease_id: LeaseId, rollouts: int) -> None:
        record = self.records.setdefault(worker_id, WorthRecord())
        record.held[lease_id] = rollouts
        record.held_rollouts += rollouts
        self._worker_of[lease_id] = worker_id
        self._trial_leases += worker_id not in self.proven

    def ends(self, lease_id: LeaseId) -> None:
        """The worker claims to have finished this lease, which is dropped next; the learner has yet to confirm it."""
        self._ending = lease_id

    def _returned(self, lease_id: LeaseId) -> None:
        worker_id = self._worker_of.pop(lease_id, None)
        if worker_id is None:
            return
        record = self.records[worker_id]
        rollouts = record.held.pop(lease_id)
        record.held_rollouts -= rollouts
        is_claimed, self._ending = lease_id == self._ending, None
        if is_claimed and (record.quiet_s > 0 or worker_id not in self.proven):
            record.unconfirmed += rollouts
        elif not record.used:
            record.quiet_s = 0.0
        self._trial_leases -= worker_id not in self.proven

    def told(self, delivered: Iterable[WorkerDelivered], now: float) -> list[PeerId]:
        """Takes the learner's report of deliveries. Returns the workers whose leases must be taken back because nothing arrived."""
        passed_s = 0.0 if self.told_at is None else max(0.0, now - self.told_at)
        self.told_at = now
        told = {one.worker_id: one for one in delivered}
        for worker_id in told:
            self.records.setdefault(worker_id, WorthRecord())
        return [
            worker_id
            for worker_id, record in self.records.items()
            if self._told_of(worker_id, record, told.get(worker_id), passed_s, now)
        ]

    def _told_of(
        self, worker_id: PeerId, record: WorthRecord, one: WorkerDelivered | None, passed_s: float, now: float
    ) -> bool:
        is_at_work = bool(record.used)
        admitted = one.admitted_rollouts if one else 0.0
        if is_at_work:
            record.peak_rollouts *= 0.5 ** (passed_s / PEAK_HALF_LIFE_S)
        if is_at_work or admitted > 0:
            record.took(passed_s, admitted)
        if one is not None:
            record.peak_rollouts = max(record.peak_rollouts, float(one.heard_rollouts))
            record.quiet_s, record.unconfirmed = 0.0, 0
            if admitted > 0 and worker_id not in self.proven:
                self.proven.add(worker_id)
                self._trial_leases -= len(record.held)
            if admitted > 0:
                record.failures = 0
        elif is_at_work and passed_s <= TELLING_S_MAX:
            record.quiet_s += passed_s
            if record.quiet_s >= self.patience_s(worker_id):
                self.failed(worker_id, now)
                return True
        return False

    def failed(self, worker_id: PeerId, now: float) -> float:
        """The worker held leases and delivered nothing: pauses it and returns for how many seconds. Its room for leases starts over
        at one group."""
        record = self.records.setdefault(worker_id, WorthRecord())
        pause_s = ceiling_s(record.failures, self.first_word_s, PAUSE_S_MAX)
        record.failures += 1
        record.paused_until = now + pause_s
        record.peak_rollouts, record.unconfirmed, record.quiet_s = 0.0, 0, 0.0
        return pause_s

    # ---- what follows from it

    @property
    def first_word_s(self) -> float:
        """How long the first tokens of a worker's first leases may take to reach the learner."""
        return min(self.lease_timeout_s, max(FIRST_WORD_S_MIN, FIRST_WORD_TIMEOUTS * self.lease_timeout_s))

    def patience_s(self, worker_id: PeerId) -> float:
        return self.lease_timeout_s if worker_id in self.proven else self.first_word_s

    def is_paused(self, worker_id: PeerId, now: float) -> bool:
        record = self.records.get(worker_id)
        return record is not None and now < record.paused_until

    def has_room(self, worker_id: PeerId, open_groups: int, allowed: Collection[PeerId], now: float) -> bool:
        """Whether the worker may be given one more group. `allowed`: all workers that may be given leases."""
        if self.told_at is None:
            return True
        record = self.records.get(worker_id)
        if record is None:
            record = self.records[worker_id] = WorthRecord()
        if now < record.paused_until:
            return False
        used, earned = record.used, GROWTH * record.peak_rollouts
        if worker_id in self.proven:
            return used == 0 or used < earned
        leases = len(record.held)
        if self.proven.isdisjoint(allowed):
            fair_groups = open_groups / max(1, len(allowed))
            return used == 0 or (leases < fair_groups and not record.unconfirmed) or used < earned
        if self.are_trials_full(open_groups):
            return False
        return used == 0 or (used < earned and leases < UNPROVEN_GROUPS_MAX)

    def are_trials_full(self, open_groups: int) -> bool:
        """Whether workers that are not proven already hold their whole share of the groups."""
        return self.told_at is not None and self._trial_leases >= max(1.0, TRIAL_SHARE * open_groups)

    def believed_per_s(self, worker_id: PeerId, claimed_per_s: float) -> float:
        """The part of the worker's claimed rate that its deliveries support, in rollouts per second."""
        delivered = self.delivered_per_s(worker_id)
        return claimed_per_s if delivered is None else min(claimed_per_s, CLAIM_MARGIN * delivered)

    def delivered_per_s(self, worker_id: PeerId) -> float | None:
        """Rollouts admitted per second with a lease; 0 before the first; None until the learner's first report."""
        if self.told_at is None:
            return None
        record = self.records.get(worker_id)
        return record.rollouts_per_s if record is not None and worker_id in self.proven else 0.0

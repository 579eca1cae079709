"""Decides which worker makes which group: leases and their deadlines, as one state machine.

    a group:   offered --> QUEUED --granted--> LEASED --its worker says FINISHED--> PRODUCED --the learner closes it--> gone
                             ^                   |  '-- renewed by progress            |
                             |                   |  '-- recalled: a few seconds for its tokens to come back
                             '---- handed back, refused, expired, worker lost or silent; offered again: it was not whole
    from any of them: closed by the learner, or not on its list --> gone

    a worker: silent --wants some, and is allowed--> open --is full, wants none, reconnected, lost--> silent
                                              '-- no room for now: it holds all that it may, or it is barred (fleet/record)

A requeued group goes on as a continuation: tokens that the learner holds are not sampled again, so each of these paths costs
little.

Each public method that takes the time is one call from outside and returns the actions that follow, in order. Guarantees: a
group has at most one lease, and each lease of a group has a higher attempt number than the one before, so the learner can tell
a late worker from the present one; a worker never gets a group that its version does not allow; a lease without progress for
`lease_timeout_s` goes to another worker as a continuation, and so does one whose claimed progress does not reach the learner;
how much a worker may hold depends on what it has delivered and failed (fleet/record); a group that the learner does not list is
not leased; among the workers that may have a group, the one that will finish its leases soonest gets it; of equals, the one that
has waited longest; every change that must outlive the process is saved (`Save`) before its consequences are sent, in the order of
the actions. `lease_waits` (planning/advice) reports why groups wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Concatenate

from echo2.base.clock import ceiling_s
from echo2.base.errors import LimitExceeded
from echo2.base.ids import GroupId, LeaseId, PeerId, Version, warm_groups
from echo2.base.rollout import EndReason, GroupSpec, Ticket
from echo2.coordinator.fleet.members import Member
from echo2.coordinator.fleet.record import EXPIRED, HANDED_BACK, LOST, MISSING, REFUSED, UNFINISHED, WorkerRecords
from echo2.coordinator.leases import lease as le
from echo2.coordinator.leases.lease import (
    Action,
    Evaluators,
    ExpectedLength,
    GroupPhase,
    Lease,
    LeaseQueue,
    LeaseRequest,
    LeaseRules,
    Note,
    OpenGroup,
    P,
    Ranking,
    may_be_adopted,
    may_take,
)
from echo2.staleness.rule import may_begin
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

REFUSAL_PAUSE_S, REFUSAL_PAUSE_S_MAX = 0.25, 30.0  # a learner that is full again and again is asked less often
WARM_WAIT_S = 1.0
"""How long a later turn waits for the worker that has the previous turn in its KV cache: about what prefilling a long prompt
elsewhere costs, and less than an agent notices."""


def _from_outside(
    method: Callable[Concatenate[LeaseBook, float, P], Iterator[Action]],
) -> Callable[Concatenate[LeaseBook, float, P], list[Action]]:
    """The method with the book's time set, and run to its end before it returns the actions to carry out, in order."""

    @wraps(method)
    def call(self: LeaseBook, now: float, /, *args: P.args, **kwargs: P.kwargs) -> list[Action]:
        self.now = now
        return list(method(self, now, *args, **kwargs))

    return call


@dataclass(slots=True)
class LeaseBook:
    rules: LeaseRules
    groups: dict[GroupId, OpenGroup] = field(default_factory=dict)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    counts: le.LeaseCounts = field(default_factory=le.LeaseCounts)
    wanting: OrderedDict[PeerId, LeaseRequest] = field(default_factory=OrderedDict)
    allowed: set[PeerId] = field(default_factory=set)
    rates: dict[PeerId, float] = field(default_factory=dict)
    now: float = 0.0
    lengths: ExpectedLength = field(default_factory=ExpectedLength)
    offered_at: float = 0.0
    _queue: LeaseQueue = field(default_factory=LeaseQueue)
    _evaluators: Evaluators = field(init=False)
    records: WorkerRecords = field(init=False)

    def __post_init__(self) -> None:
        self._evaluators = Evaluators(self.rules.lease_timeout_s)
        self.records = WorkerRecords(self.rules.lease_timeout_s)

    def restore(self, groups: Iterable[OpenGroup], leases: Iterable[Lease]) -> None:
        """Takes over what an earlier process saved. Call it before anything else."""
        self.leases = {lease.lease_id: lease for lease in leases}
        for group in sorted(groups, key=lambda group: group.since):  # as they were granted: the evaluators look so
            if group.phase is GroupPhase.LEASED and (group.lease_id is None or group.lease_id not in self.leases):
                group.phase, group.lease_id = GroupPhase.QUEUED, None
            self.groups[group.spec.group_id] = group
            if group.phase is GroupPhase.QUEUED:
                self._queue.add(group)
            elif group.phase is GroupPhase.LEASED and group.lease_id is not None:
                lease = self.leases[group.lease_id]
                self.records.on_grant(lease.worker_id, lease.lease_id, group.spec.rollout_count)
                self._evaluators.on_grant(lease, group.spec)

    # ---- the learner's side

    @_from_outside
    def offer(self, now: float, groups: tuple[GroupSpec, ...], held_tokens: tuple[int, ...] = ()) -> Iterator[Action]:
        """The learner offers groups. `held_tokens`, in a reminder: how many tokens of each group have reached the learner; else
        empty."""
        yield from self._offer(groups, now)
        for spec, tokens in zip(groups, held_tokens, strict=False):
            yield from self._check_held(self.groups[spec.group_id], tokens, now)
        yield from self._match(now)

    @_from_outside
    def sync(
        self, now: float, groups: tuple[GroupSpec, ...], later: frozenset[GroupId] = frozenset()
    ) -> Iterator[Action]:
        """Adopts the learner's full list of groups that still need a worker, of which `later` are offered in the messages that
        follow."""
        wanted = later.union(spec.group_id for spec in groups)
        for group_id in [group_id for group_id in self.groups if group_id not in wanted]:
            yield from self._close(group_id, "the learner does not list it")
        for group in self.groups.values():  # a restarted learner has lost the tokens of unfinished rollouts
            group.confirmed = group.made_by = None
        yield from self._offer(groups, now)
        yield from self._match(now)

    @_from_outside
    def close(self, now: float, group_ids: Iterable[GroupId], reason: str) -> Iterator[Action]:
        for group_id in group_ids:
            yield from self._close(group_id, reason)

    @_from_outside
    def on_delivered(self, now: float, workers: Iterable[pb.WorkerDelivered]) -> Iterator[Action]:
        """The learner reports all workers that it received anything from; from all others it received nothing."""
        for worker_id in self.records.on_delivered(workers, now):
            yield from self._take_back_all(worker_id, now)
        yield from self._match(now)

    def _offer(self, groups: Iterable[GroupSpec], now: float) -> Iterator[Action]:
        for spec in groups:
            known, attempts = self.groups.get(spec.group_id), 0
            if known is not None and replace(known.spec, consume_step=spec.consume_step) != spec:
                # The learner has a new folder, or an older one and other options; tickets of before are older than the next.
                yield from self._close(spec.group_id, "the learner has another group of that name")
                attempts, known = known.attempts, None
            if known is not None:
                if known.spec.consume_step != spec.consume_step:  # those before it are gone
                    yield from self._take_turn(known, spec)
                if known.phase is GroupPhase.PRODUCED:  # offered again, so the learner lacks some of it
                    if (maker := known.made_by) is not None:
                        known.avoid[maker] = now + self.rules.lease_timeout_s
                        self.records.give_up(UNFINISHED, maker, known, known.since, now)
                    yield from self._requeue(known, now)
                continue
            if len(self.groups) >= self.rules.groups_max:
                raise LimitExceeded(f"open groups: expected {self.rules.groups_max} at most, the learner offers more")
            opened = OpenGroup(spec, GroupPhase.QUEUED, now, attempts, expected_tokens=self.lengths.guess(spec))
            self._prefer_warm(opened, now)
            self.groups[spec.group_id] = opened
            self.offered_at = now
            self._queue.add(opened)
            yield le.Save("groups", spec.group_id)

    def _prefer_warm(self, opened: OpenGroup, now: float) -> None:
        """A later turn waits a while for the worker that sampled the previous turn and has it in its KV cache."""
        for group_id in warm_groups(opened.spec.group_id):
            before = self.groups.get(group_id)
            if before is not None and before.last_worker is not None:
                opened.preferred, opened.waits_until = before.last_worker, now + WARM_WAIT_S
                return

    def _check_held(self, group: OpenGroup, tokens: int, now: float) -> Iterator[Action]:
        """The learner says that it lacks the group and holds `tokens` of it. Leases past their deadline are left to `_expire`."""
        lease = self.leases.get(group.lease_id) if group.lease_id is not None else None
        if lease is None or now >= lease.deadline:
            return
        quiet_s = self.records.unheard_s(group, lease.lease_id, tokens, now)
        if not quiet_s:
            return
        self.counts.expired += 1
        text = f"nothing of it reached the learner for {quiet_s:.0f} s"
        why = f"it claims {lease.tokens} tokens of group {lease.group_id}, but {text}"
        bar_s = self.records.bar(lease.worker_id, why, self.rules.lease_timeout_s, now)
        yield Note(
            "lease",
            f"group {lease.group_id} leaves {lease.worker_id}, which claims {lease.tokens} tokens, but {text}; "
            f"that worker is given nothing for {bar_s:.0f} s",
        )
        yield from self._take_back(lease, now, bar_s)
        yield le.Revoke(lease.worker_id, lease.lease_id, text)

    def _take_turn(self, group: OpenGroup, spec: GroupSpec) -> Iterator[Action]:
        """Moves the group to the consume step of the new `spec`."""
        is_queued = group.phase is GroupPhase.QUEUED
        if is_queued:
            self._queue.remove(group)
        group.spec = spec
        if is_queued:
            self._queue.add(group)
        yield le.Save("groups", spec.group_id)

    def _close(self, group_id: GroupId, reason: str) -> Iterator[Action]:
        group = self.groups.pop(group_id, None)
        if group is None:
            return
        self.records.on_close(group, reason)
        if group.phase is GroupPhase.QUEUED:
            self._queue.remove(group)
        lease = self.leases.get(group.lease_id) if group.lease_id else None
        if lease is not None:
            yield from self._drop_lease(lease)
        yield le.Save("groups", group_id)
        if lease is not None:
            self.counts.revoked += 1
            yield le.Revoke(lease.worker_id, lease.lease_id, f"group closed: {reason}")

    # ---- the workers' side

    @_from_outside
    def reconnect(
        self, now: float, worker_id: PeerId, held: tuple[Ticket, ...], is_active: bool = True
    ) -> Iterator[Action]:
        """A worker's session began. `held`: tickets of the leases that it still holds; `is_active`: it will be allowed new ones."""
        self.wanting.pop(worker_id, None)  # which it has to make anew
        still = {hold.lease_id for hold in held}
        for lease in [lease for lease in self.leases_of(worker_id) if lease.lease_id not in still]:
            yield Note(
                "lease", f"{worker_id} came back without lease {lease.lease_id}; its group {lease.group_id} is queued"
            )
            yield from self._take_back(lease, now, 0.0, MISSING)
        for hold in held:
            known = self.leases.get(hold.lease_id)
            if known is not None and known.worker_id == worker_id:
                is_recalled, known.is_recalled = known.is_recalled, False
                yield from self._renew(known, now)
                # The stream that has ended may have lost the word: it is said again to who gets nothing new, else it is void.
                if is_recalled and not is_active:
                    yield from self.recall(now, known.lease_id, "asked again: hand back what you hold")
            elif known is None and may_be_adopted(
                hold, self.groups.get(hold.group_id), now, self.rules.lease_timeout_s
            ):
                yield from self._adopt(worker_id, hold, now)
            else:
                yield le.Revoke(worker_id, hold.lease_id, "the lease has gone to another worker or its group is closed")

    @_from_outside
    def allow(self, now: float, worker_id: PeerId, is_allowed: bool) -> Iterator[Action]:
        """Whether a worker may be given new leases. The leases that it holds continue either way."""
        (self.allowed.add if is_allowed else self.allowed.discard)(worker_id)
        yield from self._match(now)

    @_from_outside
    def request(self, now: float, worker_id: PeerId, free_rollouts: int, version: Version) -> Iterator[Action]:
        """How many more rollouts a worker wants to hold now: a level, not an addition. The time since when it has been waiting
        stays: otherwise a worker that repeats its request often would never be first."""
        known = self.wanting.get(worker_id)
        if free_rollouts <= 0:
            self.wanting.pop(worker_id, None)
        else:
            self.wanting[worker_id] = LeaseRequest(free_rollouts, version, known.since if known else now)
        yield from self._overtake(now)
        # Only this worker may take more than before. Groups that became free by time alone wait for the next tick.
        yield from self._match(now, worker_id)

    def rate(self, worker_id: PeerId, rollouts_per_s: float) -> None:
        self.rates[worker_id] = rollouts_per_s

    def _adopt(self, worker_id: PeerId, held: Ticket, now: float) -> Iterator[Action]:
        group = self.groups[held.group_id]
        self._queue.remove(group)
        yield Note("lease", f"lease {held.lease_id} of {worker_id} was not in the book and is taken in")
        yield from self._open_lease(group, worker_id, held.lease_id, held.attempt, now, is_held=True)

    @_from_outside
    def on_progress(
        self, now: float, worker_id: PeerId, lease_id: LeaseId, finished_rollouts: int, tokens: int
    ) -> Iterator[Action]:
        lease = self.leases.get(lease_id)
        if lease is None or lease.worker_id != worker_id:
            yield le.Revoke(worker_id, lease_id, "the lease has gone to another worker or its group is closed")
            return
        if (finished_rollouts, tokens) <= (lease.finished_rollouts, lease.tokens):
            return
        if finished_rollouts != lease.finished_rollouts or (lease.attempt > 1 and lease.tokens == 0):
            lease.tokens_before, lease.measured_from = tokens, now
        lease.finished_rollouts, lease.tokens = finished_rollouts, tokens
        lease.progress_at = now
        if not lease.is_recalled and lease.deadline - now < self.rules.lease_timeout_s / 2:
            yield from self._renew(lease, now)

    @_from_outside
    def end(
        self, now: float, worker_id: PeerId, lease_id: LeaseId, reason: EndReason, message: str
    ) -> Iterator[Action]:
        lease = self.leases.get(lease_id)
        if lease is not None and lease.worker_id == worker_id:  # else closed, expired or superseded before
            yield from self._end(lease, reason, message, now)
        yield from self._match(now)

    def _end(self, lease: Lease, reason: EndReason, message: str, now: float) -> Iterator[Action]:
        group = self.groups[lease.group_id]
        match reason:
            case EndReason.FINISHED:
                self.counts.finished += 1
                if lease.worker_id in self.records.proven:
                    self._evaluators.on_finish(now - lease.granted_at)
                self.lengths.learn(group.spec, lease.tokens, lease.finished_rollouts)
                group.phase, group.lease_id, group.since = GroupPhase.PRODUCED, None, now
                group.made_by = lease.worker_id
                yield from self._drop_lease(lease, is_finished=True)
                yield le.Save("groups", group.spec.group_id)
            case EndReason.HANDED_BACK:
                self.counts.handed_back += 1
                yield Note("lease", f"{lease.worker_id} hands back group {lease.group_id}: {message}")
                pause_s = self.rules.lease_timeout_s if lease.is_recalled else 0.0
                yield from self._take_back(lease, now, pause_s, HANDED_BACK)
            case EndReason.REFUSED:
                self.counts.refused += 1
                group.refusals += 1
                pause_s = ceiling_s(group.refusals, REFUSAL_PAUSE_S, REFUSAL_PAUSE_S_MAX)
                group.not_before = now + pause_s
                yield Note("lease", f"group {lease.group_id} was refused of {lease.worker_id}: {message}")
                yield from self._take_back(lease, now, pause_s, REFUSED)

    @_from_outside
    def lose(self, now: float, worker_id: PeerId, reason: str) -> Iterator[Action]:
        """The worker is gone or banned: its leases go to others."""
        self.wanting.pop(worker_id, None)
        self.allowed.discard(worker_id)
        for lease in self.leases_of(worker_id):
            yield Note("lease", f"group {lease.group_id} leaves {worker_id} ({reason}) after {lease.tokens} tokens")
            yield from self._take_back(lease, now, 0.0, LOST)  # back before another took it, it may have it
        yield from self._match(now)

    def _take_back_all(self, worker_id: PeerId, now: float) -> Iterator[Action]:
        """The worker holds leases of which nothing has reached the learner for too long: takes all of them back."""
        pause_s = self.records.of(worker_id).barred_until - now
        yield Note(
            "lease", f"nothing of {worker_id}'s leases reached the learner: it is given none for {pause_s:.0f} s"
        )
        for lease in self.leases_of(worker_id):
            yield from self._take_back(lease, now, self.rules.lease_timeout_s)
            yield le.Revoke(worker_id, lease.lease_id, "nothing of it reached the learner")

    @_from_outside
    def recall(self, now: float, lease_id: LeaseId, reason: str, to: PeerId | None = None) -> Iterator[Action]:
        """Asks a worker to hand back a lease with all its tokens so that another worker can continue: `to`, or any if None."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.is_recalled:
            return
        lease.is_recalled = True
        lease.deadline = min(lease.deadline, now + self.rules.recall_s)
        if to is not None:
            group = self.groups[lease.group_id]
            group.preferred, group.moves = to, group.moves + 1
            self.counts.moved += 1
        yield le.Save("leases", lease_id)
        yield le.Revoke(lease.worker_id, lease_id, reason)

    @_from_outside
    def tick(self, now: float) -> Iterator[Action]:
        yield from self._expire(now)
        yield from self._overtake(now)
        yield from (Note("lease", text) for text in self.records.judge(now))
        yield from self._match(now)

    def _expire(self, now: float) -> Iterator[Action]:
        for lease in [lease for lease in self.leases.values() if now >= lease.deadline]:
            self.counts.expired += 1
            idle_s = now - lease.progress_at
            yield Note(
                "lease",
                f"lease {lease.lease_id} of {lease.worker_id} expired: group {lease.group_id} has stood at "
                f"{lease.tokens} tokens for {idle_s:.1f} s and goes to another worker",
            )
            yield from self._take_back(lease, now, self.rules.lease_timeout_s, EXPIRED)
            yield le.Revoke(lease.worker_id, lease.lease_id, f"no progress for {idle_s:.1f} s")

    def _overtake(self, now: float) -> Iterator[Action]:
        """Takes evaluation leases that are overdue from their workers, if another worker at their version wants some."""
        for lease, version in self._evaluators.overdue(self.leases, now):
            if self._has_another(lease.worker_id, version):
                text = f"it had the question for {now - lease.granted_at:.0f} s, far longer than leases usually take"
                yield Note("lease", f"evaluation group {lease.group_id} leaves {lease.worker_id}: {text}")
                self.counts.moved += 1
                self._evaluators.on_overtake(lease.worker_id, version)
                yield from self._take_back(lease, now, self.rules.lease_timeout_s)
                yield le.Revoke(lease.worker_id, lease.lease_id, text)

    # ---- matching

    def _match(self, now: float, only: PeerId | None = None) -> Iterator[Action]:
        """Hands queued groups to workers that want some, the most urgent group first. `only`: match this worker alone."""
        if not len(self._queue):
            return
        requests = self.open_requests(only)
        if not requests:
            return
        # With no training work, queued or leased, every willing worker may evaluate.
        trains = self._queue.paced_count or len(self.leases) > len(self._evaluators)
        for version in self._queue.exact_versions({request.version for request in requests.values()}):
            willing = sorted((w for w, r in requests.items() if r.version == version), key=self._backlog_s)
            chosen = self._evaluators.chosen(version, willing, self.allowed, self._rate) if trains else willing
            examining = self._ranked({worker_id: requests.pop(worker_id) for worker_id in chosen})
            for group_id in self._queue.exact(version):
                yield from self._hand_out(self.groups[group_id], examining, now)
            requests |= examining.members
        request_count, newest = len(requests), max((r.version for r in requests.values()), default=Version(0))
        ranking = self._ranked(requests)
        for step, group_id in self._queue.paced():
            if not requests or not may_begin(newest, step, self.rules.staleness_bound):
                return  # the queue is sorted by consume_step: all groups behind need the same or a newer version
            yield from self._hand_out(self.groups[group_id], ranking, now)
            if len(requests) != request_count:
                request_count, newest = len(requests), max((r.version for r in requests.values()), default=newest)

    def _hand_out(self, group: OpenGroup, requests: Ranking, now: float) -> Iterator[Action]:
        """Leases the group to the best of `requests`, if any may have it. Drops workers from `requests` that can hold no more."""
        if now < group.not_before:
            return
        worker_id = self._best(group, requests)
        if worker_id is None:
            return
        self._queue.remove(group)
        yield from self._open_lease(group, worker_id, None, group.attempts + 1, now)
        request = self.wanting[worker_id]
        request.free_rollouts -= group.spec.rollout_count
        if request.free_rollouts <= 0:
            del self.wanting[worker_id]
        if worker_id in self.wanting and self._has_room(worker_id):
            requests.place_again(worker_id)
        else:
            requests.drop(worker_id)
        if self.records.are_trials_full(self.open_groups):  # newcomers hold their share: the others have to wait
            for full in [w for w in requests.members if not self._has_room(w)]:
                requests.drop(full)

    # ---- who is next

    def open_requests(self, only: PeerId | None = None) -> dict[PeerId, LeaseRequest]:
        """Workers that may be given a lease now. `only`: consider this worker alone."""
        wanting = self.wanting if only is None else {only: self.wanting[only]} if only in self.wanting else {}
        return {w: request for w, request in wanting.items() if w in self.allowed and self._has_room(w)}

    def _has_another(self, worker_id: PeerId, version: Version) -> bool:
        """Whether another worker than this may be given an evaluation of `version` now."""
        return any(
            request.version == version and other != worker_id and self.records.may_evaluate(other, version, self.now)
            for other, request in self.open_requests().items()
        )

    def _ranked(self, requests: dict[PeerId, LeaseRequest]) -> Ranking:
        return Ranking(requests, lambda w: (self._backlog_s(w), requests[w].since, w))

    def _best(self, group: OpenGroup, requests: Ranking) -> PeerId | None:
        """The worker in `requests` that gets the group; None if none may have it now."""
        group.avoid = {worker_id: until for worker_id, until in group.avoid.items() if until > self.now}
        warm = group.preferred
        waits = self.now < group.waits_until and warm in self.allowed and warm not in group.avoid
        if warm in requests.members and self._may_have(group, warm, requests.members[warm]):
            return warm
        if waits:
            return None
        return next((w for w in requests if self._may_have(group, w, requests.members[w])), None)

    def _may_have(self, group: OpenGroup, worker_id: PeerId, request: LeaseRequest) -> bool:
        exact = group.spec.exact_version
        return (
            worker_id not in group.avoid and self._has_room(worker_id)
            and may_take(group.spec, request.version, self.rules.staleness_bound)
            and (exact is None or self.records.may_evaluate(worker_id, exact, self.now))
        )  # fmt: skip

    def _backlog_s(self, worker_id: PeerId) -> float:
        return self.lease_count(worker_id) / (self._rate(worker_id) or 1.0)

    def _rate(self, worker_id: PeerId) -> float:
        """The rate that the worker claims, as far as its deliveries support it: otherwise a lie would attract all groups."""
        return self.records.of(worker_id).believed_per_s(self.rates.get(worker_id, 0.0))

    def _has_room(self, worker_id: PeerId) -> bool:
        return not self.limit_of(worker_id)

    def limit_of(self, worker_id: PeerId) -> str:
        """What keeps the worker from one more group, in words; empty if nothing does."""
        if self.lease_count(worker_id) >= self.rules.leases_per_worker_max:
            return f"it holds {self.rules.leases_per_worker_max} leases, the most that a worker may"
        return self.records.limit_of(worker_id, self.open_groups, self.allowed, self.now)

    # ---- state changes

    def _open_lease(
        self, group: OpenGroup, worker_id: PeerId, lease_id: LeaseId | None, attempt: int, now: float,
        is_held: bool = False,
    ) -> Iterator[Action]:  # fmt: skip
        is_continuation = group.is_continuation
        lease_id = lease_id or le.lease_id_of(group.spec.group_id, attempt)
        deadline = now + self.rules.lease_timeout_s
        lease = self.leases[lease_id] = Lease(lease_id, group.spec.group_id, worker_id, attempt, now, deadline, now)
        group.phase, group.lease_id, group.attempts, group.since = GroupPhase.LEASED, lease_id, attempt, now
        group.preferred, group.last_worker = None, worker_id
        self.records.on_grant(worker_id, lease_id, group.spec.rollout_count)
        self._evaluators.on_grant(lease, group.spec)
        self.counts.granted += 1
        self.counts.continued += is_continuation
        yield le.Save("groups", group.spec.group_id)
        yield le.Save("leases", lease_id)
        yield le.Grant(worker_id, lease_id, attempt, deadline, group.spec, is_continuation, is_held)

    def _renew(self, lease: Lease, now: float) -> Iterator[Action]:
        lease.deadline = now + self.rules.lease_timeout_s
        group = self.groups[lease.group_id]
        yield le.Save("leases", lease.lease_id)
        yield le.Grant(
            lease.worker_id, lease.lease_id, lease.attempt, lease.deadline, group.spec, lease.attempt > 1,
            is_renewal=True,
        )  # fmt: skip

    def _drop_lease(self, lease: Lease, is_finished: bool = False) -> Iterator[Action]:
        del self.leases[lease.lease_id]
        self.records.on_return(lease.worker_id, lease.lease_id, is_finished)
        self._evaluators.on_return(lease.lease_id)
        yield le.Save("leases", lease.lease_id)

    def _take_back(self, lease: Lease, now: float, avoid_s: float, way: str = "") -> Iterator[Action]:
        """Ends the lease and requeues its group, which avoids this worker for `avoid_s`. `way`: how the worker gave it up; empty:
        it did not."""
        yield from self._drop_lease(lease)
        group, worker_id = self.groups[lease.group_id], lease.worker_id
        if way and not lease.is_recalled:
            self.records.give_up(way, worker_id, group, lease.progress_at, now)
        group.expected_tokens = self.lengths.rest(group.spec, lease.tokens, lease.finished_rollouts)
        if avoid_s > 0:
            group.avoid[lease.worker_id] = now + avoid_s
        yield from self._requeue(group, now)

    def _requeue(self, group: OpenGroup, now: float) -> Iterator[Action]:
        group.phase, group.lease_id, group.since = GroupPhase.QUEUED, None, now
        self._queue.add(group)
        yield le.Save("groups", group.spec.group_id)

    def set_staleness_bound(self, bound: int) -> None:
        self.rules = replace(self.rules, staleness_bound=bound)

    # ---- questions

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def open_groups(self) -> int:
        return len(self._queue) + len(self.leases)

    @property
    def first_queued(self) -> OpenGroup | None:
        return None if (first := self._queue.first) is None else self.groups[first]

    def has_work_for(self, workers: Iterable[PeerId]) -> bool:
        versions = {self.wanting[worker_id].version for worker_id in workers}
        return self._queue.has_work_for(versions, self.rules.staleness_bound)

    def leases_of(self, worker_id: PeerId) -> list[Lease]:
        record = self.records.workers.get(worker_id)
        return [self.leases[lease_id] for lease_id in sorted(record.held)] if record is not None else []

    def lease_count(self, worker_id: PeerId) -> int:
        record = self.records.workers.get(worker_id)
        return len(record.held) if record is not None else 0


# Chooses which stragglers would finish faster on another worker, near the end of a step's demand. Pure.
#
# A lease's longest rollout has `left` tokens to go: its expected length minus what it has (`ExpectedLength.rest`). On its present
# worker it makes `v_here` tokens per second and sequence, measured on this lease from when a rollout last ended to its last report.
# For another worker, and before the lease is measured, the worker's own mean counts. (A lease that makes no progress at all is left
# to the lease timeout.) A move costs the hand-over (tokens are reported, the lease travels) and a prefill of the prompt and of all
# tokens of its rollouts:
#
#     stay = left / v_here        move = hand_over_s + (prompt + all held) / p_there + left / v_there
#
# A move pays if it is faster than staying by more than both `GAIN_SHARE` and `GAIN_S_MIN`. Guarantees: no lease moves while a
# queued group could use the room (which needs no hand-over), a recalled lease does not move again, an evaluation does not move
# (another worker may swap to a newer version before the lease reaches it), no group moves more than `MOVES_PER_GROUP_MAX` times,
# and no worker gets more than it has room for.

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
    idle = book.open_requests()
    is_over = bool(book.leases and idle) and now - book.offered_at >= QUIET_S
    return is_over and not book.has_work_for(idle)


def moves(
    book: LeaseBook, paces: Mapping[PeerId, WorkerPace], hand_over_s: float, names: Mapping[PeerId, str]
) -> list[tuple[LeaseId, PeerId, str]]:
    """The moves that pay: the lease, the worker that gets it, and the reason. Slowest stragglers first, each to the worker with
    room that would finish it first."""
    speeds = {worker: pace.tokens_per_s for worker, pace in paces.items()}
    room = {
        worker: request.free_rollouts for worker, request in book.open_requests().items() if speeds.get(worker, 0) > 0
    }
    if not room or book.has_work_for(room):
        return []
    recalls = []
    waits = [(_left_s(book, lease, speeds), lease) for lease in book.leases.values() if not lease.is_recalled]
    for (stay_s, left), lease in sorted(waits, key=lambda wait: -wait[0][0]):
        spec = book.groups[lease.group_id].spec
        if spec.exact_version is not None or book.groups[lease.group_id].moves >= MOVES_PER_GROUP_MAX:
            continue
        fit = [
            worker for worker, free in room.items()
            if free >= spec.rollout_count and worker != lease.worker_id
            and may_take(spec, book.wanting[worker].version, book.rules.staleness_bound)
        ]  # fmt: skip
        if not fit:
            continue
        held = len(spec.prompt_token_ids) + lease.tokens
        there_s = {w: held / paces[w].prefill_tokens_per_s + left / paces[w].tokens_per_s for w in fit}
        move_s, to = min((hand_over_s + there_s[worker], worker) for worker in fit)
        if stay_s - move_s <= max(GAIN_S_MIN, GAIN_SHARE * stay_s):
            continue
        room[to] -= spec.rollout_count
        reason = (
            f"it is among the last of its step: about {stay_s:.1f} s more on {names.get(lease.worker_id, lease.worker_id)}, "
            f"{move_s:.1f} s on {names.get(to, to)}"
        )
        recalls.append((lease.lease_id, to, reason))
    return recalls


def _left_s(book: LeaseBook, lease: Lease, speeds: Mapping[PeerId, float]) -> tuple[float, float]:
    """Seconds until the lease finishes on its present worker, and tokens that its longest rollout still needs."""
    spec = book.groups[lease.group_id].spec
    # All rollouts but one count as finished: the result is what the longest one still needs.
    left = book.lengths.rest(spec, lease.tokens, spec.rollout_count - 1)
    tokens, for_s = lease.tokens - lease.tokens_before, lease.progress_at - (lease.measured_from or lease.granted_at)
    is_measured = tokens > 0 and for_s >= MEASURED_S_MIN
    going = max(1, spec.rollout_count - lease.finished_rollouts)
    speed = tokens / going / for_s if is_measured else speeds.get(lease.worker_id, 0.0)
    return (max(0.0, left) / speed if speed > 0 else 0.0, max(0.0, left))

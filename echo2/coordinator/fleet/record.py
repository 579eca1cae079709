"""One record per worker: what it has delivered, what it has failed, whether it is barred, and why it gets no lease now.

*Delivered* is what the learner reports, never what a worker claims. A worker is proven once one of its rollouts was admitted. Its
claimed rate counts up to `CLAIM_MARGIN` times its delivered one. It may hold `GROWTH` times the rollouts that the learner received
tokens of at once, so a worker that delivers doubles its share every second or so. Workers that are not proven hold `TRIAL_SHARE` of
the groups together; while no allowed worker is proven (a run's start), each holds a fair share.

*Failed*: a worker that holds leases while nothing of them reaches the learner; that claims tokens which the learner lacks; or that
gives up more leases than honest workers do, because giving up would let it pick its prompts. One by one, while it keeps others, it
may give up `PICKS_MAX` and one more for each `FINISHED_PER_PICK` that the learner closes as complete (an honest worker that gives
up one in a hundred exceeds this less than once in a million leases); all at once (preemption, crash, a lost link) `STOPS_MAX` times
and once more every `STOP_EVERY_S`. A prompt that `PROMPT_WORKERS` workers gave up is itself at fault until one finishes it. Nothing
counts while the learner is silent. Handing back an evaluation, as a worker that moves to a newer version does, costs nothing, but
for `MOVING_S` it gets no other of that version.

*Barred*: each failure bars the worker for a time that doubles; `FORGIVEN_AFTER` finished leases undo one doubling. A bar holds only
while another worker that may be given leases is not barred. Memory is bounded by the fleet and `PROMPTS_MAX`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from echo2.base.clock import ceiling_s
from echo2.base.ids import LeaseId, PeerId, Version
from echo2.coordinator.leases.lease import ConfirmedTokens, GroupPhase, OpenGroup, prompt_digest
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

CLAIM_MARGIN = 2.0  # a worker that sometimes waits for work is faster than it could show
GROWTH = 2.0  # as in slow start of TCP
TRIAL_SHARE, UNPROVEN_GROUPS_MAX = 0.25, 4  # what liars may hold up of a step
SETTLE_S = 5.0
"""Added to the seconds of a rate, so that a worker's first rollouts do not give too high a one. It is longer than a drain and its
last reports take, so what a worker gives up within it counts as one event."""
ROLLOUTS_KEPT, LEASED_S_KEPT, WINDOWS_MAX = 32.0, 30.0, 128
"""A rate covers at least this many of the newest rollouts and at least this many seconds, in at most so many windows."""
PEAK_HALF_LIFE_S = 600.0  # longer than one rollout takes
TELLING_S_MAX = 5.0
"""The learner reports every second; a longer silence is the learner's own fault and counts against no worker."""
PICKS_MAX, FINISHED_PER_PICK = 4.0, 16  # see above: false once in a million leases
STOPS_MAX, STOP_EVERY_S = 4.0, 900.0  # preemptions come by time, not by leases
PROMPT_WORKERS, PROMPTS_MAX = 3, 1024  # three liars at once are unlikely; 64 KiB of digests
MOVING_S = 60.0  # loading a newer version takes seconds, longer on large models
BAR_S_MIN, BAR_S_MAX, FORGIVEN_AFTER = 30.0, 1800.0, 64  # a hiccup costs little, a liar works an hour in a day
UNHEARD_TIMEOUTS = 2.0  # lease timeouts without a new token at the learner after which a lease is taken back
NO_VERSION = Version(-1)  # older than any
COMPLETE = "complete"  # the reason with which the learner closes a group that it holds completely
HANDED_BACK, REFUSED, EXPIRED, MISSING, UNFINISHED, LOST = (
    "handed back", "said to be refused", "left to expire", "missing when it came back", "said to be finished and not",
    "lost with it",
)  # fmt: skip
"""The ways to give up a lease."""


@dataclass(slots=True)
class WorkerRecord:
    """What is known of one worker. Delivered: `delivered_per_s`, rollouts admitted per second with a lease (None: the learner has
    not reported yet); `held`: rollouts by lease; `unconfirmed`: rollouts of leases that it says to have finished and of which the
    learner has reported nothing; `quiet_s`: how long the learner has received nothing of its leases; `peak_rollouts`: most rollouts
    that tokens arrived of at once, with a half-life. Failed: `ways` counts what it gave up; `picks`, `stops`: what counts against
    it now; `episode`: digests of the prompts given up since `episode_at`. Barred: until `barred_until`, because of `why`. On trial
    since `trial_since`, as the members' module says."""

    is_proven: bool = False
    delivered_per_s: float | None = None
    admitted: float = 0.0  # over the whole run
    held: dict[LeaseId, int] = field(default_factory=dict)
    used: int = 0  # rollouts held, and unconfirmed
    unconfirmed: int = 0
    quiet_s: float = 0.0
    peak_rollouts: float = 0.0
    windows: deque[tuple[float, float]] = field(default_factory=deque)  # seconds with a lease, rollouts admitted
    seconds: float = 0.0
    rollouts: float = 0.0

    granted: int = 0
    finished: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    picks: float = 0.0
    stops: float = 0.0
    stopped_at: float = 0.0
    episode: list[str] = field(default_factory=list)
    episode_at: float = 0.0
    is_stop: bool = False
    evaluations_left: Version = NO_VERSION  # the newest version of which it handed back evaluations
    evaluations_left_at: float = 0.0

    bars: int = 0
    barred_at: float = 0.0
    barred_until: float = 0.0
    finished_since: int = 0
    why: str = ""

    trial_since: float | None = None
    trials_failed: int = 0
    trial_not_before: float = 0.0

    def add_window(self, leased_s: float, admitted: float) -> None:
        """Adds an interval with leases; forgets those that the newest `ROLLOUTS_KEPT` rollouts and `LEASED_S_KEPT` seconds do not
        need."""
        self.admitted += admitted
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

    def believed_per_s(self, claimed_per_s: float) -> float:
        """The part of the worker's claimed rate that its deliveries support, in rollouts per second."""
        delivered = self.delivered_per_s
        return claimed_per_s if delivered is None else min(claimed_per_s, CLAIM_MARGIN * delivered)

    def confirm(self) -> None:
        self.used, self.unconfirmed, self.quiet_s = self.used - self.unconfirmed, 0, 0.0


@dataclass(slots=True)
class Prompt:
    """How often each worker gave up a prompt. `is_at_fault`: no worker is charged for it."""

    charges: Counter[PeerId] = field(default_factory=Counter)
    is_at_fault: bool = False


@dataclass(slots=True)
class WorkerRecords:
    """The records of all workers. `told_at`: when the learner last reported deliveries (None: never); `heard_since`: since when it
    has done so without a gap."""

    lease_timeout_s: float
    workers: dict[PeerId, WorkerRecord] = field(default_factory=dict)
    proven: set[PeerId] = field(default_factory=set)
    told_at: float | None = None
    heard_since: float = 0.0
    admitted: float = 0.0  # rollouts, of all workers, over the whole run
    prompts: OrderedDict[str, Prompt] = field(default_factory=OrderedDict)
    _settling: set[PeerId] = field(default_factory=set)
    _unproven_leases: int = 0

    def of(self, worker_id: PeerId) -> WorkerRecord:
        record = self.workers.get(worker_id)
        if record is None:
            record = self.workers[worker_id] = WorkerRecord(delivered_per_s=None if self.told_at is None else 0.0)
        return record

    def restore(self, admitted: Mapping[PeerId, float]) -> None:
        """Takes over how many rollouts of each worker were admitted before a restart."""
        for worker_id, rollouts in admitted.items():
            self.of(worker_id).admitted = rollouts
            if rollouts > 0:
                self.of(worker_id).is_proven = True
                self.proven.add(worker_id)
        self.admitted = sum(admitted.values())

    # ---- delivered

    def on_grant(self, worker_id: PeerId, lease_id: LeaseId, rollouts: int) -> None:
        record = self.of(worker_id)
        record.granted += 1
        record.held[lease_id] = rollouts
        record.used += rollouts
        self._unproven_leases += not record.is_proven

    def on_return(self, worker_id: PeerId, lease_id: LeaseId, is_finished: bool) -> None:
        """A lease is over. `is_finished`: the worker says that it has finished it; the learner has yet to confirm that."""
        record = self.of(worker_id)
        if (rollouts := record.held.pop(lease_id, None)) is None:
            return
        self._unproven_leases -= not record.is_proven
        if is_finished and (record.quiet_s > 0 or not record.is_proven):
            record.unconfirmed += rollouts
            return
        record.used -= rollouts
        if not record.used:
            record.quiet_s = 0.0

    def on_delivered(self, workers: Iterable[pb.WorkerDelivered], now: float) -> list[PeerId]:
        """Takes the learner's report of deliveries. Returns the workers whose leases must be taken back because nothing arrived."""
        passed_s = 0.0 if self.told_at is None else max(0.0, now - self.told_at)
        if self.told_at is None or passed_s > TELLING_S_MAX:
            self.heard_since = now
        self.told_at = now
        delivered = {PeerId(delivery.peer_id): delivery for delivery in workers}
        for worker_id in delivered:
            self.of(worker_id)
        silent = []
        for worker_id, record in self.workers.items():
            delivery = delivered.get(worker_id)
            self._meter(worker_id, record, delivery.admitted_rollouts if delivery is not None else 0.0, passed_s)
            if delivery is not None:
                record.peak_rollouts = max(record.peak_rollouts, float(delivery.heard_rollouts))
                record.confirm()
            elif record.used and passed_s <= TELLING_S_MAX:
                record.quiet_s += passed_s
                if record.quiet_s >= (self.lease_timeout_s if record.is_proven else self.first_word_s):
                    self.bar(worker_id, "nothing of its leases reached the learner", self.first_word_s, now)
                    record.confirm()
                    record.peak_rollouts = 0.0  # its room starts over at one group
                    silent.append(worker_id)
        return silent

    def _meter(self, worker_id: PeerId, record: WorkerRecord, admitted: float, passed_s: float) -> None:
        """Takes the rollouts admitted of a worker into its rates, the first of which prove it."""
        if record.used:
            record.peak_rollouts *= 0.5 ** (passed_s / PEAK_HALF_LIFE_S)
        if record.used or admitted > 0:
            record.add_window(passed_s, admitted)
        self.admitted += admitted
        if admitted > 0 and not record.is_proven:
            record.is_proven = True
            self.proven.add(worker_id)
            self._unproven_leases -= len(record.held)
        if record.is_proven:
            record.delivered_per_s = max(0.0, record.rollouts) / (max(0.0, record.seconds) + SETTLE_S)
        else:
            record.delivered_per_s = 0.0

    @property
    def first_word_s(self) -> float:
        """How long the first tokens of a worker's first leases may take to reach the learner."""
        return min(self.lease_timeout_s, max(10.0, self.lease_timeout_s / 4))

    # ---- failed

    def unheard_s(self, group: OpenGroup, lease_id: LeaseId, tokens: int, now: float) -> float:
        """The learner holds `tokens` of a leased group and lacks the rest. Returns for how many seconds nothing has arrived; 0
        while that is below the limit. An honest worker claims tokens only after the learner has taken them."""
        confirmed = group.confirmed
        if confirmed is None or confirmed.lease_id != lease_id or tokens > confirmed.tokens:
            group.confirmed = ConfirmedTokens(lease_id, tokens, now)
            return 0.0
        quiet_s = now - confirmed.since
        return quiet_s if quiet_s >= UNHEARD_TIMEOUTS * self.lease_timeout_s else 0.0

    def give_up(self, way: str, worker_id: PeerId, group: OpenGroup, since: float, now: float) -> None:
        """A worker gave up a lease, which is over. `since`: time of the lease's last progress."""
        record = self.of(worker_id)
        record.ways[way] += 1
        is_heard = self.told_at is not None and now - self.told_at <= TELLING_S_MAX
        if not is_heard or since < self.heard_since:
            return
        exact = group.spec.exact_version
        if exact is not None and way == HANDED_BACK:
            record.evaluations_left, record.evaluations_left_at = max(record.evaluations_left, exact), now
            return
        if not record.episode:
            record.episode_at, record.is_stop = now, False
        record.episode.append(prompt_digest(group.spec))
        record.is_stop |= not record.held
        self._settling.add(worker_id)

    def on_close(self, group: OpenGroup, reason: str) -> None:
        """The learner closed a group. It counts as finished only if the learner holds it completely."""
        if reason != COMPLETE:
            return
        digest = prompt_digest(group.spec)
        if (prompt := self.prompts.pop(digest, None)) and prompt.is_at_fault:
            for giver, count in prompt.charges.items():  # it can be finished after all
                self.of(giver).picks += count
        if group.last_worker is None:
            return
        record = self.of(group.last_worker)
        if group.phase is GroupPhase.QUEUED and digest in record.episode:
            record.episode.remove(digest)  # it handed back a whole group
        record.finished += 1
        record.finished_since += 1
        record.picks = max(0.0, record.picks - 1 / FINISHED_PER_PICK)
        if record.finished_since >= FORGIVEN_AFTER:
            record.bars, record.finished_since = max(0, record.bars - 1), 0

    def judge(self, now: float) -> Iterator[str]:
        """Counts what workers gave up in episodes that are over. Yields messages for the operator."""
        for worker_id in sorted(self._settling):
            record = self.workers[worker_id]
            if record.episode and now - record.episode_at < SETTLE_S:
                continue
            self._settling.discard(worker_id)
            episode, record.episode = record.episode, []
            if record.is_stop and len(episode) > 1:
                record.stops = max(0.0, record.stops - (now - record.stopped_at) / STOP_EVERY_S) + 1
                record.stopped_at = now
            else:
                for digest in episode:
                    yield from self._charge(worker_id, record, digest)
            if record.picks > PICKS_MAX or record.stops > STOPS_MAX:
                yield self._bar_for_giving_up(worker_id, record, now)

    def _charge(self, worker_id: PeerId, record: WorkerRecord, digest: str) -> Iterator[str]:
        prompt = self.prompts.setdefault(digest, Prompt())
        self.prompts.move_to_end(digest)
        while len(self.prompts) > PROMPTS_MAX:
            self.prompts.popitem(last=False)
        prompt.charges[worker_id] += 1
        if prompt.is_at_fault:
            return
        record.picks += 1
        if len(prompt.charges) >= PROMPT_WORKERS:
            prompt.is_at_fault = True
            for giver, count in prompt.charges.items():
                self.of(giver).picks = max(0.0, self.of(giver).picks - count)
            yield f"{len(prompt.charges)} workers gave up prompt {digest}: held against none of them"

    def _bar_for_giving_up(self, worker_id: PeerId, record: WorkerRecord, now: float) -> str:
        how, bound = "all at once, again and again", f"all in {STOP_EVERY_S / 60:.0f} minutes"
        if record.picks > PICKS_MAX:
            how, bound = "one by one while it goes on with others", f"one in {FINISHED_PER_PICK}"
        record.picks, record.stops = min(record.picks, PICKS_MAX), min(record.stops, STOPS_MAX)
        ways = ", ".join(f"{count} {way}" for way, count in record.ways.most_common())
        counts = f"{record.finished} finished of {record.granted} granted"
        why = f"it gives up leases {how} ({ways}; {counts}), more than {bound}"
        bar_s = self.bar(worker_id, why, BAR_S_MIN, now)
        return f"{worker_id} is given no leases for {bar_s:.0f} s: {why}"

    # ---- barred

    def bar(self, worker_id: PeerId, why: str, least_s: float, now: float) -> float:
        """Bars the worker for at least `least_s`, twice as long each time, and returns for how many seconds from now. Several
        failures during one bar count as one."""
        record = self.of(worker_id)
        if now < record.barred_until:
            return record.barred_until - now
        bar_s = ceiling_s(record.bars, least_s, BAR_S_MAX)
        record.bars += 1
        record.barred_at, record.barred_until, record.why = now, now + bar_s, why
        return bar_s

    def barred(self, now: float) -> list[tuple[PeerId, WorkerRecord]]:
        barred = ((peer, record) for peer, record in self.workers.items() if now < record.barred_until)
        return sorted(barred, key=lambda pair: pair[0])

    def is_barred(self, worker_id: PeerId, among: Collection[PeerId], now: float) -> bool:
        """Whether the worker is given nothing now. `among`: those that could get its leases; if all are barred, none is."""
        record = self.workers.get(worker_id)
        if record is None or not (now < record.barred_until or len(record.episode) > PICKS_MAX):
            return False
        return any(
            other != worker_id and not (other in self.workers and now < self.workers[other].barred_until)
            for other in among
        )

    # ---- what follows from it

    def may_evaluate(self, worker_id: PeerId, version: Version, now: float) -> bool:
        """Whether the worker may evaluate this version: not if it handed back evaluations of it a moment ago."""
        record = self.workers.get(worker_id)
        return record is None or version > record.evaluations_left or now - record.evaluations_left_at >= MOVING_S

    def are_trials_full(self, open_groups: int) -> bool:
        """Whether workers that are not proven already hold their whole share of the groups."""
        return self.told_at is not None and self._unproven_leases >= max(1.0, TRIAL_SHARE * open_groups)

    def limit_of(self, worker_id: PeerId, open_groups: int, allowed: Set[PeerId], now: float) -> str:
        """What keeps the worker from one more group, in words; empty if nothing does. `allowed`: all workers that may be given
        leases."""
        record = self.of(worker_id)
        if self.is_barred(worker_id, allowed, now):
            return record.why or "it gave up several leases a moment ago"
        if self.told_at is None:
            return ""
        used, has_earned = record.used, record.used < GROWTH * record.peak_rollouts
        if record.is_proven:
            return "" if used == 0 or has_earned else "it must deliver what it holds first"
        if self.proven.isdisjoint(allowed):
            is_fair = len(record.held) < open_groups / max(1, len(allowed)) and not record.unconfirmed
            return "" if used == 0 or is_fair or has_earned else "it must deliver a first rollout before it gets more"
        if self.are_trials_full(open_groups):
            return "it has delivered nothing yet, and newcomers hold their share of the groups"
        if used == 0 or (has_earned and len(record.held) < UNPROVEN_GROUPS_MAX):
            return ""
        return "it has delivered nothing yet: the learner must admit one of its rollouts before it gets more"

"""Queues the groups that wait for a worker, tracks the workers that want rollouts, and chooses which of them gets a group.

    exact (evaluation)   by the version that each needs: only for workers at exactly that version, before all training
    paced (training)     by consume step: only for workers that `staleness.may_begin`; within a step, continuations come first,
                         then the groups with the most expected tokens

    silent --wants some, and is allowed--> open --is full, wants none, reconnected, lost--> silent
                                            '-- no room for now: it holds all that it may, or it is barred (fleet/record)

Guarantees: matching skips whole ranges of the queue that no worker may take, without a look at each group; among the workers
that may have a group, the one that will finish its leases soonest gets it; of equals, the one that has waited longest.

Evaluations go to as few workers as make up `EVALUATION_SHARE` of the fleet's rate, so that the others keep training: a worker
that evaluates a version does not switch to the next one until it is done, so all of them would delay it. Guarantees: a worker
that evaluates a version keeps evaluating it; if no training group is open, every worker may evaluate; a question that its
worker holds `SLOW_TIMES` as long as the fleet usually needs for a lease goes to another as soon as one wants it, even if tokens
still come.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import GroupSpec
from echo2.coordinator.fleet.record import WorkerRecords, prompt_digest
from echo2.coordinator.leases.lease import Lease, LeaseRequest, OpenGroup
from echo2.staleness.rule import may_begin

_Key = tuple[int, bool, float, GroupId]


def may_take(spec: GroupSpec, version: Version, staleness_bound: int) -> bool:
    """Whether a worker at `version` may be given the group."""
    if spec.exact_version is not None:
        return version == spec.exact_version
    return may_begin(version, spec.consume_step, staleness_bound)


@dataclass(slots=True)
class LeaseQueue:
    """A group's sort key is computed when it is added, so the fields that make up the key may change only while the group is not
    queued."""

    staleness_bound: int
    _paced: list[_Key] = field(default_factory=list)
    _exact: dict[Version, list[_Key]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: OpenGroup) -> None:
        exact = group.spec.exact_version
        insort(self._paced if exact is None else self._exact.setdefault(exact, []), _key(group))
        self._count += 1

    def remove(self, group: OpenGroup) -> None:
        exact, key = group.spec.exact_version, _key(group)
        keys = self._paced if exact is None else self._exact[exact]
        at = bisect_left(keys, key)
        assert keys[at] == key, f"group {key[3]} is queued under another key"
        del keys[at]
        self._count -= 1
        if exact is not None and not keys:
            del self._exact[exact]

    @property
    def paced_count(self) -> int:
        return len(self._paced)

    @property
    def has_exact(self) -> bool:
        return bool(self._exact)

    @property
    def first(self) -> GroupId | None:
        """The group at the front, for reports on why groups wait: training first, because evaluations may have to wait for their
        version anyway."""
        if self._paced:
            return self._paced[0][3]
        return min(self._exact.items())[1][0][3] if self._exact else None

    def exact_versions(self, versions: Collection[Version]) -> list[Version]:
        """The versions among `versions` that exact groups wait for, in order."""
        return sorted(self._exact.keys() & set(versions)) if self._exact else []

    def exact(self, version: Version) -> list[GroupId]:
        """Groups for workers at exactly this version, in order. They may be removed during the iteration."""
        return [key[3] for key in self._exact.get(version, ())]

    def paced(self) -> Iterator[tuple[int, GroupId]]:
        """Training groups with their consume steps, in order. They may be removed during the iteration."""
        for key in list(self._paced):
            yield key[0], key[3]

    def has_work_for(self, versions: Collection[Version]) -> bool:
        """Whether any queued group could be given to a worker at one of these versions."""
        if self._exact and not self._exact.keys().isdisjoint(versions):
            return True
        if not self._paced or not versions:
            return False
        return may_begin(max(versions), self._paced[0][0], self.staleness_bound)


def _key(group: OpenGroup) -> _Key:
    return (group.spec.consume_step, not group.is_continuation, -group.expected_tokens, group.spec.group_id)


PROMPTS_MAX = 20_000  # two megabytes; of larger data sets a prompt seldom comes twice
BLEND = 0.3  # the last five groups of a prompt make up five sixths of its average


@dataclass(slots=True)
class ExpectedLength:
    """Guesses how many tokens a group will take. Longest first keeps the end of a step short, so the queue is ordered by this
    guess.

    Moving averages (exponential) of tokens per rollout, by prompt; the least recently used prompts are forgotten first."""

    _by_prompt: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _overall: float = 0.0

    def learn(self, spec: GroupSpec, tokens: int, rollouts: int) -> None:
        """Notes that `rollouts` finished completions of the prompt took `tokens` together. The numbers are a worker's claim, so the
        token limit bounds them."""
        if rollouts <= 0:
            return
        each = min(tokens / rollouts, float(spec.sampling.max_new_tokens))
        key = prompt_digest(spec)
        before = self._by_prompt.pop(key, each)
        self._by_prompt[key] = before + BLEND * (each - before)
        self._overall = self._overall + BLEND * (each - self._overall) if self._overall else each
        while len(self._by_prompt) > PROMPTS_MAX:
            self._by_prompt.popitem(last=False)

    def guess(self, spec: GroupSpec) -> float:
        """Expected tokens of the whole group, bounded by the token limit."""
        each = self._by_prompt.get(prompt_digest(spec), self._overall)
        return min(each, float(spec.sampling.max_new_tokens)) * spec.rollout_count

    def rest(self, spec: GroupSpec, tokens: int, finished_rollouts: int) -> float:
        """Expected tokens still to come in a group that holds `tokens`. An unfinished rollout is expected to reach the expected
        length; past that, to grow by half of what it has. The token limit bounds both."""
        unfinished = max(0, spec.rollout_count - finished_rollouts)
        held, each = tokens / spec.rollout_count, self.guess(spec) / spec.rollout_count
        left = each - held if held < each else held / 2
        return unfinished * max(0.0, min(left, spec.sampling.max_new_tokens - held))


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Limits for leases. `recall_s`: how long a worker may take to hand back the tokens of a recalled lease."""

    staleness_bound: int
    lease_timeout_s: float
    recall_s: float = 5.0
    groups_max: int = 65_536
    leases_per_worker_max: int = 1024


_Place = tuple[float, float, PeerId]


class Ranking:
    """Requests, iterated in the order in which they get groups. `place_of`: a worker's sort key, which changes only when the worker
    is given a lease.

    Sorting once serves many groups: a learner offers a hundred groups a second to a fleet of thousands.
    """

    def __init__(self, members: dict[PeerId, LeaseRequest], place_of: Callable[[PeerId], _Place]) -> None:
        self.members = members
        self._place_of = place_of
        self._places: dict[PeerId, _Place] = {}
        self._order: list[_Place] = []
        self._is_sorted = False

    def __iter__(self) -> Iterator[PeerId]:
        if not self._is_sorted:
            self._places = {worker_id: self._place_of(worker_id) for worker_id in self.members}
            self._order, self._is_sorted = sorted(self._places.values()), True
        for place in self._order:
            yield place[2]

    def place_again(self, worker_id: PeerId) -> None:
        """Places the worker anew after it was given a lease and can take more."""
        if self._is_sorted:
            self._forget(worker_id)
            self._places[worker_id] = place = self._place_of(worker_id)
            insort(self._order, place)

    def drop(self, worker_id: PeerId) -> None:
        del self.members[worker_id]
        if self._is_sorted:
            self._forget(worker_id)

    def _forget(self, worker_id: PeerId) -> None:
        del self._order[bisect_left(self._order, self._places.pop(worker_id))]


@dataclass(slots=True)
class LeaseRequests:
    """`lease_count`: counts the leases of a worker. `open_groups`: counts the groups that wait or are leased. `now`: time of the
    lease book's last event."""

    rules: LeaseRules
    records: WorkerRecords
    lease_count: Callable[[PeerId], int]
    open_groups: Callable[[], int]
    wanting: OrderedDict[PeerId, LeaseRequest] = field(default_factory=OrderedDict)
    allowed: set[PeerId] = field(default_factory=set)
    now: float = 0.0
    rates: dict[PeerId, float] = field(default_factory=dict)

    # ---- what workers report

    def on_request(self, worker_id: PeerId, free_rollouts: int, version: Version) -> None:
        """Replaces the worker's earlier request. The time since when it has been waiting stays: otherwise a worker that repeats
        its request often would never be first."""
        known = self.wanting.get(worker_id)
        if free_rollouts <= 0:
            self.wanting.pop(worker_id, None)
        else:
            self.wanting[worker_id] = LeaseRequest(free_rollouts, version, known.since if known else self.now)

    def on_loss(self, worker_id: PeerId) -> None:
        self.wanting.pop(worker_id, None)
        self.allowed.discard(worker_id)
        self.rates.pop(worker_id, None)

    def take(self, worker_id: PeerId, rollouts: int) -> None:
        self.wanting[worker_id].free_rollouts -= rollouts
        if self.wanting[worker_id].free_rollouts <= 0:
            del self.wanting[worker_id]

    # ---- who is next

    def open(self, only: PeerId | None = None) -> dict[PeerId, LeaseRequest]:
        """Workers that may be given a lease now. `only`: consider this worker alone."""
        wanting = self.wanting if only is None else {only: self.wanting[only]} if only in self.wanting else {}
        return {w: request for w, request in wanting.items() if w in self.allowed and self.has_room(w)}

    def has_another(self, worker_id: PeerId, version: Version) -> bool:
        """Whether another worker than this may be given an evaluation of `version` now."""
        return any(
            request.version == version and other != worker_id and self.records.may_evaluate(other, version, self.now)
            for other, request in self.open().items()
        )

    def ranked(self, requests: dict[PeerId, LeaseRequest]) -> Ranking:
        return Ranking(requests, lambda w: (self.backlog_s(w), requests[w].since, w))

    def best(self, group: OpenGroup, requests: Ranking) -> PeerId | None:
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
            worker_id not in group.avoid and self.has_room(worker_id)
            and may_take(group.spec, request.version, self.rules.staleness_bound)
            and (exact is None or self.records.may_evaluate(worker_id, exact, self.now))
        )  # fmt: skip

    def backlog_s(self, worker_id: PeerId) -> float:
        return self.lease_count(worker_id) / (self.rate(worker_id) or 1.0)

    def rate(self, worker_id: PeerId) -> float:
        """The rate that the worker claims, as far as its deliveries support it: otherwise a lie would attract all groups."""
        return self.records.of(worker_id).believed_per_s(self.rates.get(worker_id, 0.0))

    def has_room(self, worker_id: PeerId) -> bool:
        return not self.limit_of(worker_id)

    def limit_of(self, worker_id: PeerId) -> str:
        """What keeps the worker from one more group, in words; empty if nothing does."""
        if self.lease_count(worker_id) >= self.rules.leases_per_worker_max:
            return f"it holds {self.rules.leases_per_worker_max} leases, the most that a worker may"
        return self.records.limit_of(worker_id, self.open_groups(), self.allowed, self.now)


# ---- evaluations


EVALUATION_SHARE = 0.3  # of the fleet: what delays the next version by little and ends an evaluation soon
SLOW_TIMES = 4.0
"""A multiple of the usual time that honest machines of one fleet stay below: their speeds differ less."""
LEASES_KEPT, LEASES_MIN = 64, 4
"""The usual time is the median of the newest finished leases, once there are so many."""


@dataclass(slots=True)
class Evaluators:
    """Which workers hold leases that are tied to an exact version (evaluations). `at_least_s`: how long a question may always
    take."""

    at_least_s: float = 0.0
    _holders: dict[LeaseId, tuple[PeerId, Version]] = field(default_factory=dict)
    _finished_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEASES_KEPT))
    _limit_s: float | None = None
    _slow: set[tuple[PeerId, Version]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._holders)

    def on_grant(self, lease: Lease, spec: GroupSpec) -> None:
        if spec.exact_version is not None:
            self._holders[lease.lease_id] = lease.worker_id, spec.exact_version

    def on_return(self, lease_id: LeaseId) -> None:
        self._holders.pop(lease_id, None)

    def on_finish(self, lease_s: float) -> None:
        """A worker that has delivered before finished a lease, of either kind, after `lease_s`."""
        self._finished_s.append(lease_s)
        if len(self._finished_s) >= LEASES_MIN:
            self._limit_s = max(self.at_least_s, SLOW_TIMES * statistics.median(self._finished_s))

    def overdue(self, leases: Mapping[LeaseId, Lease], now: float) -> Iterator[tuple[Lease, Version]]:
        """The evaluation leases that have taken too long by the fleet's speed, and their versions, oldest first."""
        if self._limit_s is None:
            return
        for lease_id, (_, version) in list(self._holders.items()):  # in the order in which they were granted
            if now - leases[lease_id].granted_at < self._limit_s:
                return
            yield leases[lease_id], version

    def on_overtake(self, worker_id: PeerId, version: Version) -> None:
        """A question of this version was taken from the worker: others come first with the rest."""
        self._slow = {(slow, at) for slow, at in self._slow if at >= version} | {(worker_id, version)}

    def chosen(
        self, version: Version, willing: Sequence[PeerId], fleet: Collection[PeerId], rate: Callable[[PeerId], float]
    ) -> list[PeerId]:
        """Chooses from `willing` (best first) those that already evaluate this version, and others until the share is reached.

        `fleet`: all active workers. `rate`: a worker's rollouts per second; if no rate is known, all workers count the same.
        """
        rates = {worker_id: rate(worker_id) for worker_id in fleet}
        if not any(rates.values()):
            rates = dict.fromkeys(rates, 1.0)
        wanted = EVALUATION_SHARE * sum(rates.values())
        at_it = {w for w, at in self._holders.values() if at == version and (w, version) not in self._slow}
        reached = sum(rates.get(worker_id, 0.0) for worker_id in at_it)
        found: list[PeerId] = []
        for worker_id in sorted(willing, key=lambda worker_id: (worker_id, version) in self._slow):
            if worker_id not in at_it:
                if reached >= wanted:
                    continue
                reached += rates.get(worker_id, 0.0)
            found.append(worker_id)
        return found

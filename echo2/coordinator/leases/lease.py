"""Leases and groups, what the lease book (book.py) wants done, and the order in which they come. Times
are unix seconds that never go back within a process."""

from __future__ import annotations

import enum
import hashlib
import statistics
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, Literal, NamedTuple, ParamSpec

from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import GroupSpec, Ticket
from echo2.staleness.rule import may_begin


def lease_id_of(group_id: GroupId, attempt: int) -> LeaseId:
    """The lease's id: a function of group and attempt, so that a replayed decision names the same lease."""
    return LeaseId("l-" + hashlib.sha256(f"{group_id}/{attempt}".encode()).hexdigest()[:20])


class GroupPhase(enum.Enum):
    """Where a group is: waiting for a worker, with one, or sampled and waiting for the learner to close it."""

    QUEUED = "queued"
    LEASED = "leased"
    PRODUCED = "produced"


@dataclass(slots=True)
class Lease:
    """One attempt at a group. `deadline` moves on while there is progress. `tokens_before`: tokens in a continuation's first
    report, which earlier attempts had sampled, or when a rollout last ended, at `measured_from`. Neither is saved."""

    lease_id: LeaseId
    group_id: GroupId
    worker_id: PeerId
    attempt: int
    granted_at: float
    deadline: float
    progress_at: float
    finished_rollouts: int = 0
    tokens: int = 0
    is_recalled: bool = False
    tokens_before: int = 0
    measured_from: float = 0.0


class ConfirmedTokens(NamedTuple):
    """So many tokens of a lease the learner holds, and has reported no more since then."""

    lease_id: LeaseId
    tokens: int
    since: float


@dataclass(slots=True)
class OpenGroup:
    """A group that the learner wants and has not closed. `avoid`: maps workers that must not get it to the time until which
    that holds. `preferred`: the worker for which it was recalled, or that has the previous turn in its KV cache; `waits_until`:
    until then no other worker gets it. `moves`: how often it was recalled for another worker; `made_by`: the worker that claims
    to have finished it; `last_worker`: holder of its newest lease. These are not saved, nor are `not_before` and `confirmed`."""

    spec: GroupSpec
    phase: GroupPhase
    since: float
    attempts: int = 0
    refusals: int = 0
    lease_id: LeaseId | None = None
    not_before: float = 0.0
    expected_tokens: float = 0.0
    avoid: dict[PeerId, float] = field(default_factory=dict)
    preferred: PeerId | None = None
    waits_until: float = 0.0
    moves: int = 0
    made_by: PeerId | None = None
    last_worker: PeerId | None = None
    confirmed: ConfirmedTokens | None = None

    @property
    def is_continuation(self) -> bool:
        return self.attempts > 0


@dataclass(slots=True)
class LeaseRequest:
    free_rollouts: int
    version: Version
    since: float


@dataclass(slots=True)
class LeaseCounts:
    """Counts since the process began."""

    granted: int = 0
    continued: int = 0
    finished: int = 0
    expired: int = 0
    handed_back: int = 0
    refused: int = 0
    revoked: int = 0
    moved: int = 0


# ---- actions


@dataclass(frozen=True, slots=True)
class Grant:
    """Send the lease with a signed ticket. `is_renewal`: the worker has it already and gets a new deadline."""

    worker_id: PeerId
    lease_id: LeaseId
    attempt: int
    deadline: float
    group: GroupSpec
    is_continuation: bool
    is_renewal: bool


@dataclass(frozen=True, slots=True)
class Revoke:
    worker_id: PeerId
    lease_id: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class Save:
    """The group or the lease with this id changed or is gone: save that before anything is sent."""

    kind: Literal["groups", "leases"]
    key: str


@dataclass(frozen=True, slots=True)
class Note:
    kind: str
    text: str


Action = Grant | Revoke | Save | Note

P = ParamSpec("P")
BookMethod = Callable[Concatenate[float, P], list[Action]]
"""A method of the lease book: it takes the time first and returns what is to be done, in order."""


# ---- the queue of groups that wait for a worker
#
#     exact (evaluation)   by the version that each needs: only for workers at exactly that version, before all training
#     paced (training)     by consume step: only for workers that `staleness.may_begin`; within a step, continuations come first,
#                          then the groups with the most expected tokens
#
# Guarantee: matching skips whole ranges of the queue that no worker may take, without a look at each group.

_Key = tuple[int, bool, float, GroupId]


def prompt_digest(spec: GroupSpec) -> str:
    """A digest of the prompt, the same in every group."""
    return hashlib.sha256(array("Q", spec.prompt_token_ids).tobytes()).hexdigest()[:12]


def may_be_adopted(ticket: Ticket, group: OpenGroup | None, now: float, lease_timeout_s: float) -> bool:
    """Whether to adopt a lease that a worker still holds and that is missing from the book, because an earlier process granted it
    just before it died. The group must be queued and have had no attempt as late as this one. An old ticket does not win a group
    back: the lease is not adopted once a whole lease timeout has passed since its deadline."""
    is_open = group is not None and group.phase is GroupPhase.QUEUED and ticket.attempt > group.attempts
    is_granted = ticket.lease_id == lease_id_of(ticket.group_id, ticket.attempt)
    return is_open and is_granted and now < ticket.deadline_unix_s + lease_timeout_s


def may_take(spec: GroupSpec, version: Version, staleness_bound: int) -> bool:
    """Whether a worker at `version` may be given the group."""
    if spec.exact_version is not None:
        return version == spec.exact_version
    return may_begin(version, spec.consume_step, staleness_bound)


@dataclass(slots=True)
class LeaseQueue:
    """A group's sort key is computed when it is added, so the fields that make up the key may change only while the group is not
    queued."""

    _paced: list[_Key] = field(default_factory=list)
    _exact: dict[Version, list[_Key]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._paced) + sum(map(len, self._exact.values()))

    def add(self, group: OpenGroup) -> None:
        exact = group.spec.exact_version
        insort(self._paced if exact is None else self._exact.setdefault(exact, []), _key(group))

    def remove(self, group: OpenGroup) -> None:
        exact, key = group.spec.exact_version, _key(group)
        keys = self._paced if exact is None else self._exact[exact]
        at = bisect_left(keys, key)
        assert keys[at] == key, f"group {key[3]} is queued under another key"
        del keys[at]
        if exact is not None and not keys:
            del self._exact[exact]

    @property
    def paced_count(self) -> int:
        return len(self._paced)

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

    def has_work_for(self, versions: Collection[Version], staleness_bound: int) -> bool:
        """Whether any queued group could be given to a worker at one of these versions."""
        if self._exact and not self._exact.keys().isdisjoint(versions):
            return True
        if not self._paced or not versions:
            return False
        return may_begin(max(versions), self._paced[0][0], staleness_bound)


def _key(group: OpenGroup) -> _Key:
    return (group.spec.consume_step, not group.is_continuation, -group.expected_tokens, group.spec.group_id)


PROMPTS_MAX = 20_000  # two megabytes; of larger data sets a prompt seldom comes twice
BLEND = 0.3  # the last five groups of a prompt make up five sixths of its average


@dataclass(slots=True)
class ExpectedLength:
    """Guesses how many tokens a group will take. Longest first keeps the end of a step short, so the queue is ordered by this
    guess. Moving averages (exponential) of tokens per rollout, by prompt; the least recently used prompts are forgotten
    first."""

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
    """Requests, iterated in the order in which they get groups. `place_of`: a worker's sort key, which changes only when the
    worker is given a lease. Sorting once serves many groups: a learner offers a hundred groups a second to a fleet of
    thousands."""

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


# ---- evaluations


EVALUATION_SHARE = 0.3  # of the fleet: what delays the next version by little and ends an evaluation soon
SLOW_TIMES = 4.0  # a multiple of the usual time that honest machines of one fleet stay below: their speeds differ less
LEASES_KEPT, LEASES_MIN = 64, 4  # the usual time is the median of the newest finished leases, once there are so many


@dataclass(slots=True)
class Evaluators:
    """Which workers hold leases that are tied to an exact version (evaluations): as few as make up `EVALUATION_SHARE` of the
    fleet's rate, so that the others keep training: one that evaluates a version does not switch to the next until it is done.
    Guarantees: a worker that evaluates a version keeps evaluating it; a question that its worker holds `SLOW_TIMES` as long as
    the fleet usually needs for a lease goes to another as soon as one wants it, even if tokens still come. `at_least_s`: how long
    a question may always take."""

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
        `fleet`: all active workers. `rate`: a worker's rollouts per second; if no rate is known, all workers count the same."""
        rates = {worker_id: rate(worker_id) for worker_id in fleet}
        if not any(rates.values()):
            rates = dict.fromkeys(rates, 1.0)
        wanted = EVALUATION_SHARE * sum(rates.values())
        at_it = {w for w, at in self._holders.values() if at == version and (w, version) not in self._slow}
        reached = sum(rates.get(worker_id, 0.0) for worker_id in at_it)
        evaluators: list[PeerId] = []
        for worker_id in sorted(willing, key=lambda worker_id: (worker_id, version) in self._slow):
            if worker_id not in at_it:
                if reached >= wanted:
                    continue
                reached += rates.get(worker_id, 0.0)
            evaluators.append(worker_id)
        return evaluators

"""Tracks the workers that want rollouts, and chooses which of them gets a group.

    silent --wants some, and is allowed--> open --is full, wants none, reconnected, lost--> silent
                                            '-- no room for now: it holds all that it may, or it is barred (fleet/record)

Guarantees: among the workers that may have a group, the one that will finish its leases soonest gets it; of equals, the one that
has waited longest. Leaves to others: which group is next (queue), leases (book).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from echo2.base.ids import PeerId, Version
from echo2.coordinator.fleet.record import WorkerRecords
from echo2.coordinator.leases.lease import LeaseRequest, OpenGroup
from echo2.coordinator.leases.queue import may_take


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
    _rates: dict[PeerId, float] = field(default_factory=dict)

    # ---- what workers report

    def on_request(self, worker_id: PeerId, free_rollouts: int, version: Version) -> None:
        """Replaces the worker's earlier request. The time since when it has been waiting stays: otherwise a worker that repeats
        its request often would never be first."""
        known = self.wanting.get(worker_id)
        if free_rollouts <= 0:
            self.wanting.pop(worker_id, None)
        else:
            self.wanting[worker_id] = LeaseRequest(free_rollouts, version, known.since if known else self.now)

    def on_reconnect(self, worker_id: PeerId) -> None:
        """The worker reconnected: forgets its request, which it has to make anew."""
        self.wanting.pop(worker_id, None)

    def on_loss(self, worker_id: PeerId) -> None:
        self.wanting.pop(worker_id, None)
        self.allowed.discard(worker_id)
        self._rates.pop(worker_id, None)

    def allow(self, worker_id: PeerId, is_allowed: bool) -> None:
        (self.allowed.add if is_allowed else self.allowed.discard)(worker_id)

    def on_rate(self, worker_id: PeerId, rollouts_per_s: float) -> None:
        self._rates[worker_id] = rollouts_per_s

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

    def can_hold_more(self, worker_id: PeerId) -> bool:
        """Whether the worker still wants rollouts and may hold more."""
        return worker_id in self.wanting and self.has_room(worker_id)

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
        return self.records.of(worker_id).believed_per_s(self._rates.get(worker_id, 0.0))

    def has_room(self, worker_id: PeerId) -> bool:
        return not self.limit_of(worker_id)

    def limit_of(self, worker_id: PeerId) -> str:
        """What keeps the worker from one more group, in words; empty if nothing does."""
        if self.lease_count(worker_id) >= self.rules.leases_per_worker_max:
            return f"it holds {self.rules.leases_per_worker_max} leases, the most that a worker may"
        return self.records.limit_of(worker_id, self.open_groups(), self.allowed, self.now)

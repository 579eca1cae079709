"""The machines of a simulated fleet and their work. Plain state; the rules are in fleet, fleet_leases and fleet_links."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from benchmarks.fleet_model.scenario import WorkerTruth
from echo2.base.ids import GroupId, LeaseId, PeerId, Version

NO_VERSION = Version(-1)
NO_LEASE = LeaseId("")


@dataclass(slots=True)
class SimGroup:
    """One prompt's rollouts. `oldest`: the oldest version under which any of them was started; None before the first."""

    group_id: GroupId
    runs: list[RolloutRun] = field(default_factory=list)
    lease_id: LeaseId = NO_LEASE
    oldest: Version | None = None
    tokens: float = 0.0

    @property
    def open_count(self) -> int:
        return sum(not run.is_done for run in self.runs)


@dataclass(slots=True)
class RolloutRun:
    """One rollout in progress. `tokens_left`: tokens still to generate."""

    group: SimGroup
    tokens_left: float
    began_s: float = 0.0
    stalled_s: float = 0.0  # its worker's `stalled_s` when it started
    is_begun: bool = False  # started under the present lease
    is_done: bool = False


@dataclass(slots=True)
class SimWorker:
    """A machine of the fleet. `is_wanted`: in the planned pool; `is_active`: in the pool and joined; `paid_since_s`: None while
    it costs nothing; `stalled_s`: total pause so far."""

    truth: WorkerTruth
    index: int
    price: float
    version: Version = NO_VERSION
    is_wanted: bool = False
    is_active: bool = False
    is_lost: bool = False
    state_since_s: float = -1e9
    paid_since_s: float | None = None
    usd: float = 0.0
    paid_s: float = 0.0
    stalled_s: float = 0.0
    stands_until_s: float = 0.0
    life: int = 0  # incremented at each loss, so that events of an earlier life are ignored
    running: dict[int, RolloutRun] = field(default_factory=dict)
    waiting: deque[RolloutRun] = field(default_factory=deque)

    @property
    def peer_id(self) -> PeerId:
        return PeerId(self.truth.name)

    @property
    def free_slots(self) -> int:
        return self.truth.slots - len(self.running) - len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def pay(self, now: float) -> None:
        """Adds the cost since the last call, up to `now`."""
        if self.paid_since_s is not None:
            self.usd += self.price * (now - self.paid_since_s) / 3600
            self.paid_s += now - self.paid_since_s
            self.paid_since_s = now

    def stand_still(self, now: float, seconds: float) -> None:
        """Pauses the worker: running rollouts finish that much later, new ones start after the pause."""
        self.stalled_s += seconds
        self.stands_until_s = max(self.stands_until_s, now + seconds)

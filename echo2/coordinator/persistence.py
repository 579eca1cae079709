"""The coordinator's persistent state, the changes to it, and the one place where changes wait for the store.

Guarantees: `StateWriter.flush` returns only once everything noted before it is saved, in one transaction, each object in its state
at that time. A `StateStore` writes all of a transaction or nothing, and what it wrote survives a crash of the process once `write`
returns; one contract suite checks that for every implementation. When to flush is the hub's: before any order that follows from a
change is sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import Member
from echo2.coordinator.fleet.tokens import Token, TokenBook
from echo2.coordinator.leases.events import Lease, OpenGroup
from echo2.coordinator.money.provisioning import RentedMachine

# Samples of the run's curves in memory and in the store: a step a minute for three days.
SAMPLES_MAX = 4_000
# Transactions between two deletions of old log lines: each deletion scans the log, which may grow by this many lines in between.
PRUNE_EVERY_FLUSHES = 2_000

RowKind = Literal["groups", "leases", "members", "tokens", "token_peers", "machines", "meta"]
LogKind = Literal["events", "samples", "paid"]


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One line of the event log."""

    unix_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the run's curves. `eval_reward` None: not evaluated yet; `reward_mean` None: no step since the learner
    started."""

    unix_s: float
    step: int
    reward_mean: float | None
    eval_reward: float | None
    utilisation: float
    predicted_utilisation: float
    usd_spent: float
    usd_per_hour: float

    @property
    def measures(self) -> tuple[object, ...]:
        return self.step, self.reward_mean, self.eval_reward, self.utilisation


@dataclass(frozen=True, slots=True)
class PaidAction:
    """An action that costs or saves money and was done or requested, with its reason. `usd_per_hour`: the price at stake;
    `usd_spent`: what it has cost."""

    unix_s: float
    action: str
    whom: str
    reason: str
    usd_per_hour: float
    usd_spent: float


@dataclass(frozen=True, slots=True)
class TokenPeer:
    """A peer that used a token: a row of its own, so that an enrolment does not rewrite all earlier ones. `silent_since`: None once
    it has said hello, or where none is expected."""

    token_id: str
    peer_id: PeerId
    silent_since: float | None = None


Row = OpenGroup | Lease | Member | Token | TokenPeer | RentedMachine | str
LogLine = LoggedEvent | CurvePoint | PaidAction


@dataclass(slots=True)
class StateChanges:
    """What to write in one transaction. `rows`: by kind and key; None deletes. `must_last`: it must survive a power cut too,
    because no node would report it again (a ban, a revoked token, a machine that costs money)."""

    rows: dict[tuple[RowKind, str], Row | None] = field(default_factory=dict)
    log: list[tuple[LogKind, LogLine]] = field(default_factory=list)
    must_last: bool = False

    def is_empty(self) -> bool:
        return not (self.rows or self.log)


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """Everything that was written. Of events, samples and paid actions only the newest, oldest first."""

    groups: tuple[OpenGroup, ...] = ()
    leases: tuple[Lease, ...] = ()
    members: tuple[Member, ...] = ()
    tokens: tuple[Token, ...] = ()
    machines: tuple[RentedMachine, ...] = ()
    events: tuple[LoggedEvent, ...] = ()
    samples: tuple[CurvePoint, ...] = ()
    paid: tuple[PaidAction, ...] = ()
    meta: dict[str, str] = field(default_factory=dict)


class StateStore(Protocol):
    def load(self) -> StateSnapshot: ...

    def write(self, changes: StateChanges) -> None:
        """Writes all changes or none. DiskFull or StateError if they cannot be written."""
        ...

    def prune(self, events_max: int, samples_max: int) -> None:
        """Deletes all but the newest events and samples."""
        ...

    def checkpoint(self) -> str:
        """Syncs what was written to disk; called in another thread than the event loop's. Says what it had to restore."""
        ...

    def close(self) -> None: ...


class StateWriter:
    """Collects changes until `flush`. Rows are noted by reference, so an object that changes again is written as it is then."""

    def __init__(self, store: StateStore, tokens: TokenBook, events_max: int) -> None:
        self.store, self._tokens, self._events_max = store, tokens, events_max
        self._changes = StateChanges()
        self._flushes = 0
        self.events: deque[LoggedEvent] = deque(maxlen=events_max)
        self.samples: deque[CurvePoint] = deque(maxlen=SAMPLES_MAX)
        self.paid: deque[PaidAction] = deque(maxlen=events_max)

    def restore(self, saved: StateSnapshot) -> None:
        """Takes over what an earlier process wrote."""
        self.events.extend(saved.events)
        self.paid.extend(saved.paid)
        for sample in saved.samples:
            self._add_point(sample)

    def save(self, kind: RowKind, key: str, row: Row | None) -> None:
        """Notes a row; None deletes it."""
        self._changes.rows[kind, key] = row

    def meta(self, key: str, value: str) -> None:
        self.save("meta", key, value)

    def require_sync(self) -> None:
        """Makes the next flush sync to disk before it returns. Only for rare changes, because it waits for the disk."""
        self._changes.must_last = True

    def event(self, event: LoggedEvent) -> None:
        self.events.append(event)
        self._changes.log.append(("events", event))

    def paid_action(self, action: PaidAction) -> None:
        self.paid.append(action)
        self._changes.log.append(("paid", action))

    def sample(self, sample: CurvePoint) -> None:
        """Adds a point of the curves; one of the same step takes the place of the last."""
        self._add_point(sample)
        self._changes.log.append(("samples", sample))

    def _add_point(self, sample: CurvePoint) -> None:
        if self.samples and self.samples[-1].step == sample.step:
            self.samples.pop()
        self.samples.append(sample)

    def flush(self) -> None:
        """Writes all noted changes. DiskFull or StateError if they cannot be written."""
        changes, self._changes = self._changes, StateChanges()
        for token_id, peer_id in sorted(self._tokens.changed_peers):
            token = self._tokens.tokens[token_id]
            use = TokenPeer(token_id, peer_id, token.silent.get(peer_id)) if peer_id in token.peers else None
            changes.rows["token_peers", f"{token_id} {peer_id}"] = use
        self._tokens.changed_peers.clear()
        self.store.write(changes)
        self._flushes += 1
        if self._flushes % PRUNE_EVERY_FLUSHES == 0:
            self.store.prune(self._events_max, SAMPLES_MAX)

"""The coordinator's persistent state as one value, the changes to it, and the protocol of the store.

Guarantees of a `StateStore`, checked by one contract suite on every implementation: `write` is atomic, and what it wrote survives
a crash of the process once it returns; `load` returns what was written. Leaves to others: which changes to write (runtime/hub).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from echo2.coordinator.lease_events import Lease, OpenGroup
from echo2.coordinator.membership import Member
from echo2.coordinator.provisioning import RentedMachine
from echo2.coordinator.tokens import Token


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


@dataclass(slots=True)
class StoreChanges:
    """What to write in one transaction. Removals are carried out after the writes.

    `must_last`: it must survive a power cut too, because no node would report it again (a ban, a revoked token, a machine that
    costs money).
    """

    groups: list[OpenGroup] = field(default_factory=list)
    groups_dropped: list[str] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    leases_dropped: list[str] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    events: list[LoggedEvent] = field(default_factory=list)
    samples: list[CurvePoint] = field(default_factory=list)
    paid: list[PaidAction] = field(default_factory=list)
    machines: list[RentedMachine] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    must_last: bool = False

    def is_empty(self) -> bool:
        return not (
            self.groups or self.groups_dropped or self.leases or self.leases_dropped or self.members or self.tokens
            or self.events or self.samples or self.paid or self.machines or self.meta
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedState:
    """Everything that was written. Of events, samples and paid actions only the newest, oldest first."""

    groups: tuple[OpenGroup, ...] = ()
    leases: tuple[Lease, ...] = ()
    members: tuple[Member, ...] = ()
    tokens: tuple[Token, ...] = ()
    events: tuple[LoggedEvent, ...] = ()
    samples: tuple[CurvePoint, ...] = ()
    paid: tuple[PaidAction, ...] = ()
    machines: tuple[RentedMachine, ...] = ()
    meta: dict[str, str] = field(default_factory=dict)


class StateStore(Protocol):
    def load(self) -> SavedState: ...

    def write(self, changes: StoreChanges) -> None:
        """Writes all changes or none. DiskFull or StateError if they cannot be written."""
        ...

    def prune(self, events_kept: int, samples_kept: int) -> None:
        """Deletes all but the newest events and samples."""
        ...

    def close(self) -> None: ...

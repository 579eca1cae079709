"""The coordinator's persistent state, and the changes to it, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import Member
from echo2.coordinator.fleet.tokens import Token
from echo2.coordinator.leases.lease import Lease, OpenGroup
from echo2.coordinator.money.provisioning import RentedMachine

# Samples of the run's curves in memory and in the store: a step a minute for three days.
SAMPLES_MAX = 4_000

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

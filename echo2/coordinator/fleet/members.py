"""Tracks which workers are in the fleet, which are alive, and which work.

A worker is alive if its stream is open and its last message came less than
`suspect_after_s` ago. Without a stream, or after a longer silence, it is suspect: it keeps its leases and gets no new ones. It is
gone, and its leases go to others, when it has had no stream for `suspect_after_s`, has been silent for `gone_after_s`, or has
disconnected cleanly. After a restart of the coordinator, all workers count as heard at that moment and have `gone_after_s` to
come back.

Activation: an operator setting (active, standby, draining, quarantined, banned) overrides the planner; `automatic` leaves the
choice to the planner. Guarantees: a gone worker that returns under its identity is the same member; a quarantined one may stay,
gets no lease, and nothing that it made is trained on; a banned one is refused until the ban is lifted.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from echo2.base.errors import LimitExceeded, NotAllowed
from echo2.base.ids import PeerId, Version
from echo2.broadcast.reachability import Access
from echo2.coordinator.fleet.record import WorkerRecord, WorkerRecords
from echo2.cost_model.relations import RobustEstimator
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

TRIAL_S = 60.0  # long enough for a first rollout of a few thousand tokens
TRIAL_DOUBLINGS_MAX = 6  # an hour between two trials of who brings nothing
ROUNDING = 1 + 1e-6  # prices cross the wire as floats
ON_TRIAL = "on trial, until the learner has had rollouts of it"  # the reason that the page shows


class Liveness(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    GONE = "gone"


class OperatorSetting(enum.Enum):
    AUTOMATIC = "automatic"
    ACTIVE = "active"
    STANDBY = "standby"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    BANNED = "banned"


class Activation(enum.Enum):
    """The state that a worker is in now, from the operator's setting, the plan and its price."""

    ACTIVE = "active"
    STANDBY = "standby"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    BANNED = "banned"

    @property
    def is_barred(self) -> bool:
        """Whether the learner must not train on what the worker makes."""
        return self in (Activation.QUARANTINED, Activation.BANNED)


@dataclass(frozen=True, slots=True)
class PriceLimit:
    """A limit in USD per hour. `what`: where it comes from, in words."""

    usd_per_hour: float = math.inf
    what: str = "any price"


NO_LIMIT = PriceLimit()  # until one is set (costs)


WINDOW = 7  # heartbeats: a median of these ignores three outliers
OF_BEAT = (
    "rollouts_per_s", "tokens_per_s", "rollout_s_mean", "rollout_s_p95", "apply_s", "swap_s", "running_sequences",
)  # fmt: skip
OF_LINK = ("uplink_bytes_per_s", "downlink_bytes_per_s", "rtt_s")


@dataclass(slots=True)
class WorkerMeasures:
    """Measurements of one worker. Membership starts a new object when the worker comes back with other hardware or settings."""

    _estimators: dict[str, RobustEstimator] = field(default_factory=dict)
    _values: dict[str, float] = field(default_factory=dict)

    def observe(self, beat: pb.Heartbeat) -> None:
        """Adds the heartbeat's values; a 0 means not known yet and is skipped."""
        for message, names in ((beat, OF_BEAT), (beat.link, OF_LINK)):
            for name in names:
                if (value := getattr(message, name)) > 0:
                    estimator = self._estimators.setdefault(name, RobustEstimator(WINDOW))
                    estimator.observe(value)
                    self._values[name] = estimator.value_or(value)

    def value(self, name: str) -> float:
        """The estimate of a quantity in `OF_BEAT` or `OF_LINK`; 0 if it was not measured."""
        return self._values.get(name, 0.0)

    def count(self, name: str) -> int:
        """Of how many heartbeats the estimate is made, up to `WINDOW`."""
        return len(self._estimators[name].values) if name in self._estimators else 0


@dataclass(slots=True)
class Member:
    """One worker, as last heard. `hello`: without the tickets of leases. `reach`: how to reach it, as it found out; None: as in its
    hello. `record`: what it has delivered and failed. `cut_at`: when its stream broke; None while it is open.
    `is_barred_by_record`: the last plan was made without it. `price_approved`: USD/h that the operator has approved; None: never
    one. `usd_spent`: cost while it worked; `usd_standby`: cost on standby since this process began."""

    peer_id: PeerId
    hello: pb.WorkerHello
    joined_at: float
    heard_at: float
    record: WorkerRecord = field(default_factory=WorkerRecord, compare=False)
    cut_at: float | None = None
    has_left: bool = False
    is_restored: bool = False
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)
    heartbeat_at: float = 0.0
    reach: Access | None = None
    measures: WorkerMeasures = field(default_factory=WorkerMeasures, compare=False)
    setting: OperatorSetting = OperatorSetting.AUTOMATIC
    setting_reason: str = ""
    is_wanted: bool = True
    wanted_reason: str = ""
    is_barred_by_record: bool = False
    paused: str = ""  # why no worker of the run works now; empty while it goes on
    price_limit: PriceLimit = NO_LIMIT
    price_approved: float | None = None
    activation_since: float = 0.0
    usd_spent: float = 0.0
    usd_standby: float = 0.0
    metered_until: float = 0.0
    last_liveness: Liveness = Liveness.ALIVE
    last_activation: Activation | None = None

    @property
    def name(self) -> str:
        return self.hello.name or self.peer_id[-8:]

    @property
    def link(self) -> pb.Link:
        """The link: each number measured if possible, else as declared."""
        return pb.Link(**{name: self.link_of(name) for name in OF_LINK})

    def link_of(self, name: str) -> float:
        return self.measures.value(name) or float(getattr(self.hello.link, name))

    @property
    def version(self) -> Version | None:
        """The version that is live on its engine; None before the first."""
        return Version(self.heartbeat.version) if self.heartbeat.has_version else None

    @property
    def access(self) -> Access:
        """How to reach the worker: as it found out, else as its hello declared."""
        return self.reach or Access(addresses=tuple(self.hello.addresses))

    @property
    def is_newcomer(self) -> bool:
        """Whether the learner, which reports deliveries, has not admitted anything of it yet."""
        return self.record.delivered_per_s is not None and not self.record.is_proven

    @property
    def is_on_trial(self) -> bool:
        return self.record.trial_since is not None

    @property
    def may_lease(self) -> bool:
        """Whether it may be given leases, as it was last judged."""
        return self.last_liveness is Liveness.ALIVE and self.last_activation is Activation.ACTIVE

    @property
    def asks_too_much(self) -> bool:
        """Whether its price is beyond its limit and beyond what the operator has approved."""
        price = self.hello.price_usd_per_hour
        return price > max(self.price_limit.usd_per_hour, self.price_approved or 0.0) * ROUNDING

    @property
    def _may_work(self) -> bool:
        return self.setting in (OperatorSetting.ACTIVE, OperatorSetting.AUTOMATIC)

    @property
    def activation(self) -> Activation:
        if not self._may_work:
            return Activation(self.setting.value)
        is_chosen = self.is_wanted or self.setting is OperatorSetting.ACTIVE
        return Activation.STANDBY if self.paused or self.asks_too_much or not is_chosen else Activation.ACTIVE

    @property
    def activation_reason(self) -> str:
        if self.paused and self._may_work:
            return self.paused
        if self._may_work and self.asks_too_much:
            price, limit = self.hello.price_usd_per_hour, self.price_limit
            return f"it asks {price:g} USD/h, {limit.what} is {limit.usd_per_hour:g}: the operator may activate it"
        if self.setting is OperatorSetting.AUTOMATIC:
            return self.wanted_reason or "the plan"
        return self.setting_reason or "the operator's word"


def _machine(hello: pb.WorkerHello) -> tuple[str, str, str, int]:
    """Hardware and settings for which a worker's measurements are valid."""
    return hello.gpu, hello.engine, hello.quantisation, hello.slot_count


@dataclass(slots=True)
class Membership:
    suspect_after_s: float
    gone_after_s: float
    workers_max: int
    records: WorkerRecords
    members: dict[PeerId, Member] = field(default_factory=dict)
    banned: dict[PeerId, None] = field(default_factory=dict)
    """Banned peers, in the order of their bans. An index, because every worker that connects is told of them: a search through the
    fleet per worker would be quadratic when a large fleet comes back."""

    def restore(self, members: list[Member], now: float) -> None:
        """Takes over what an earlier process saved: all members count as heard now, and none has a stream."""
        for member in members:
            member.record = self.records.of(member.peer_id)
            member.measures.observe(member.heartbeat)
            if member.last_liveness is not Liveness.GONE:
                member.heard_at, member.cut_at, member.is_restored = now, now, True
                member.last_liveness = Liveness.SUSPECT
            else:
                member.has_left = True  # until it reconnects
            if member.setting is OperatorSetting.ACTIVE and member.price_approved is None:
                member.price_approved = member.hello.price_usd_per_hour  # an earlier release did not save it
            for at in ("heard_at", "metered_until", "activation_since"):  # the clock may have been set back
                setattr(member, at, min(getattr(member, at), now))
            self.members[member.peer_id] = member
            self._bar(member)

    def on_hello(self, peer_id: PeerId, hello: pb.WorkerHello, now: float) -> Member:
        """A session began. NotAllowed for a banned peer, LimitExceeded when the fleet is full."""
        member = self.members.get(peer_id)
        if member is None:
            if sum(1 for _ in self.living()) >= self.workers_max:  # a run of weeks has had thousands that are gone
                raise LimitExceeded(f"fleet: expected {self.workers_max} workers at most, {peer_id} is one more")
            record = self.records.of(peer_id)
            member = Member(peer_id, hello, now, now, record, activation_since=now, metered_until=now)
            self.members[peer_id] = member
        self.check_not_banned(peer_id)
        if member.last_liveness is Liveness.GONE:
            member.metered_until = now
        if member.setting is OperatorSetting.DRAINING:
            member.setting, member.setting_reason = OperatorSetting.AUTOMATIC, ""  # it ends when the worker reconnects
        if _machine(member.hello) != _machine(hello):
            member.measures = WorkerMeasures()
        member.hello, member.heard_at, member.cut_at = hello, now, None
        member.reach = None  # this and its links belong to its last session
        member.heartbeat.ClearField("links")
        member.is_restored = member.has_left = False
        return member

    def check_not_banned(self, peer_id: PeerId) -> None:
        if peer_id in self.banned:
            member = self.members[peer_id]
            reason = member.setting_reason or "no reason given"
            raise NotAllowed(f"worker {member.name} ({peer_id}) is banned: {reason}")

    def on_heartbeat(self, peer_id: PeerId, heartbeat: pb.Heartbeat, reach: Access | None, now: float) -> None:
        """Keeps the heartbeat, with the links and the log of an earlier one where it has none."""
        member = self.members[peer_id]
        if not heartbeat.HasField("links"):
            heartbeat.links.CopyFrom(member.heartbeat.links)
        if not heartbeat.HasField("log"):
            heartbeat.log.CopyFrom(member.heartbeat.log)
        member.heartbeat, member.reach, member.heard_at, member.heartbeat_at = heartbeat, reach, now, now
        member.measures.observe(heartbeat)

    def on_disconnect(self, peer_id: PeerId, now: float) -> None:
        member = self.members.get(peer_id)
        if member is not None and member.cut_at is None:
            member.cut_at = now

    def on_leave(self, peer_id: PeerId, now: float) -> None:
        member = self.members[peer_id]
        member.has_left, member.cut_at = True, now

    def set(self, peer_id: PeerId, setting: OperatorSetting, reason: str) -> Member:
        """Applies an operator setting. NotAllowed for a peer that never joined."""
        member = self.members.get(peer_id)
        if member is None:
            raise NotAllowed(f"expected a worker of this run, got {peer_id[:80]!r}")
        member.setting, member.setting_reason = setting, reason
        self._bar(member)
        if setting is OperatorSetting.ACTIVE:
            member.price_approved = member.hello.price_usd_per_hour
        return member

    def _bar(self, member: Member) -> None:
        if member.setting is OperatorSetting.BANNED:
            self.banned[member.peer_id] = None
        else:
            self.banned.pop(member.peer_id, None)

    def change_of(self, member: Member, now: float) -> tuple[Liveness, Activation | None] | None:
        """The worker's liveness and activation before, if either has changed since the last call for it; else None."""
        before = member.last_liveness, member.last_activation
        member.last_liveness, member.last_activation = self._liveness(member, now), member.activation
        if member.last_activation is not before[1]:
            member.activation_since = now
        return None if before == (member.last_liveness, member.last_activation) else before

    def _liveness(self, member: Member, now: float) -> Liveness:
        if member.has_left:
            return Liveness.GONE
        silent_s = now - member.heard_at
        patience_s = self.gone_after_s if member.cut_at is None or member.is_restored else self.suspect_after_s
        absent_since = member.heard_at if member.cut_at is None else max(member.cut_at, member.heard_at)
        if now - absent_since >= patience_s or silent_s >= self.gone_after_s:
            return Liveness.GONE
        return Liveness.SUSPECT if member.cut_at is not None or silent_s >= self.suspect_after_s else Liveness.ALIVE

    def name_of(self, peer_id: str) -> str:
        """A worker's name; of a peer that is none, the end of its id."""
        member = self.members.get(PeerId(peer_id))
        return member.name if member is not None else peer_id[-8:]

    def living(self) -> Iterator[Member]:
        return (member for member in self.members.values() if member.last_liveness is not Liveness.GONE)

    def pool(self) -> Iterator[Member]:
        return (member for member in self.members.values() if member.may_lease)


def try_newcomers(members: Sequence[Member], usd_per_hour_cap: float, now: float, is_spent: bool = False) -> None:
    """Chooses which newcomers are on trial: at most as many at once as there are proven workers (a fleet may double in one trial),
    within what the proven workers leave of the price cap, first come first served. A trial that brings nothing within `TRIAL_S`
    ends, and the next one waits for a time that doubles each time. While no worker is proven (a run's start), all newcomers are on
    trial that the cap allows. `is_spent`: the budget is spent, so there are no trials."""
    alive = [m for m in members if m.last_liveness is Liveness.ALIVE]
    proven = [m for m in alive if m.record.is_proven]
    newcomers = {m.peer_id: m for m in alive if m.is_newcomer and (not proven or _may_be_tried(m, now))}
    for member in members:
        if member.peer_id not in newcomers:
            member.record.trial_since = None
    places = 0 if is_spent else len(proven) or len(newcomers)
    room = usd_per_hour_cap * ROUNDING - sum(m.hello.price_usd_per_hour for m in proven if m.is_wanted)
    for record in (member.record for member in newcomers.values()):
        if record.trial_since is not None and now - record.trial_since >= TRIAL_S:  # it has brought nothing
            record.trial_since = None
            record.trials_failed += 1
            record.trial_not_before = now + TRIAL_S * 2.0 ** min(record.trials_failed, TRIAL_DOUBLINGS_MAX)
    for member in sorted(newcomers.values(), key=_turn):
        record, price = member.record, member.hello.price_usd_per_hour
        is_due = record.trial_since is not None or not proven or record.trial_not_before <= now
        if not (places and is_due and price <= room):
            record.trial_since = None
            continue
        record.trial_since = now if record.trial_since is None else record.trial_since
        places, room = places - 1, room - price


def _turn(member: Member) -> tuple[float, int, float, str]:
    """A newcomer's place in the queue for trials: running ones come first."""
    record = member.record
    began = math.inf if record.trial_since is None else record.trial_since
    return began, record.trials_failed, member.joined_at, member.peer_id


def _may_be_tried(member: Member, now: float) -> bool:
    """Whether a newcomer may be tried beside proven workers: it has weights, and nothing holds it back."""
    is_free = (
        member.setting is OperatorSetting.AUTOMATIC and not member.asks_too_much and now >= member.record.barred_until
    )
    return is_free and member.heartbeat.has_version

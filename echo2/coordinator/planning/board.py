"""Keeps what is known of the learner and of its published versions: which workers hold which version, and since when.

Guarantees: bounded memory. A version's measured broadcast time runs from the moment the coordinator hears of its publication
until every worker that was in the pool then, and still is, has reported it live. The broadcast efficiency starts from a prior
and then follows the measured times of deltas against their predictions.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2.base.errors import NotAllowed, VersionMismatch
from echo2.base.ids import PeerId, Version
from echo2.cost_model.plan import Plan
from echo2.cost_model.relations import DELTA_PERIODS_MAX, DeltaSizeEstimator, RobustEstimator
from echo2.cost_model.snapshot import BROADCAST_EFFICIENCY
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

VERSIONS_KEPT = 64  # as many as S admits
# Below a quarter it is not the links that are slow; the median of 15 ignores 7 outliers.
EFFICIENCY_LEAST, EFFICIENCY_WINDOW = 0.25, 15
EFFICIENCY_PRIOR = (BROADCAST_EFFICIENCY,) * 2  # outweighed as soon as three broadcasts were measured


@dataclass(slots=True)
class VersionRow:
    """One published version and its broadcast. `waiting`: workers of the pool that have not reported it live yet."""

    published: pb.VersionPublished
    published_at: float
    predicted_s: float
    pool_size: int
    waiting: set[PeerId]
    has_links_alone: bool = True  # no earlier version was still being sent when this one was published
    live_after_s: dict[PeerId, float] = field(default_factory=dict)
    complete_s: float | None = None


@dataclass(slots=True)
class Totals:
    """Totals over the whole run; saved on disk."""

    artifact_bytes: int = 0
    full_bytes: int = 0
    versions: int = 0


@dataclass(slots=True)
class LearnerBoard:
    """`hello`: without the open groups. `pipe_address`: of a relay's byte pipes; set if the learner cannot be reached at its own
    address."""

    peer_id: PeerId | None = None
    hello: pb.LearnerHello | None = None
    report: pb.LearnerReport = field(default_factory=lambda: pb.LearnerReport(eval_reward=-1))
    train_time: RobustEstimator = field(default_factory=lambda: RobustEstimator("train_s"))
    discarded: RobustEstimator = field(default_factory=lambda: RobustEstimator("discarded_rollouts"))
    delta_size: DeltaSizeEstimator = field(default_factory=DeltaSizeEstimator)
    reached: RobustEstimator = field(
        default_factory=lambda: RobustEstimator("broadcast efficiency", EFFICIENCY_WINDOW, [*EFFICIENCY_PRIOR])
    )
    pipe_address: str = ""
    is_connected: bool = False
    heard_at: float = 0.0
    changed_at: float = 0.0
    versions: OrderedDict[Version, VersionRow] = field(default_factory=OrderedDict)
    totals: Totals = field(default_factory=Totals)
    newest_complete: VersionRow | None = None

    def on_hello(self, peer_id: PeerId, hello: pb.LearnerHello, now: float) -> bool:
        """A session began. Returns whether the learner's identity, address or model has changed. NotAllowed for a second learner
        while the first is connected; VersionMismatch for another model."""
        if self.is_connected and self.peer_id != peer_id:
            raise NotAllowed(f"learner {peer_id}: this run has a learner already, {self.peer_id}, and it is connected")
        old, digest = self.hello, self.model_digest
        if digest and hello.model_digest != digest:
            raise VersionMismatch(
                f"learner {peer_id}: run {hello.run_id} trains the model {digest[:16]}…, "
                f"expected that digest, got {hello.model_digest[:16]}…"
            )
        is_news = old is None or self.peer_id != peer_id or (
            old.address, old.chunk_address, old.relay_address, old.model_digest,
        ) != (
            hello.address, hello.chunk_address, hello.relay_address, hello.model_digest,
        )  # fmt: skip
        self.peer_id, self.hello, self.is_connected = peer_id, hello, True
        self.heard_at = self.changed_at = now
        return is_news

    def on_report(self, report: pb.LearnerReport, now: float) -> bool:
        """Takes a report; returns whether a step was made since the last one."""
        is_step = report.step != self.report.step
        if report.train_s > 0 and (is_step or not self.train_time.seen):
            self.train_time.observe(report.train_s)
        steps, discarded = report.step - self.report.step, report.discarded_rollouts - self.report.discarded_rollouts
        if steps > 0 and discarded >= 0:  # fewer than before: another process
            self.discarded.observe(discarded / steps)
        self.report, self.heard_at = report, now
        return is_step

    def on_disconnect(self, now: float) -> None:
        self.is_connected, self.changed_at = False, now

    def on_publish(self, version: pb.VersionPublished, predicted_s: float, pool: Iterable[PeerId], now: float) -> None:
        """A version was published. Idempotent, because a reconnect repeats it."""
        number = Version(version.version)
        if number in self.versions:
            return
        if version.has_parent and 1 <= version.version - version.parent <= DELTA_PERIODS_MAX:
            self.delta_size.observe(version.artifact_bytes, version.version - version.parent)
        waiting, is_alone = set(pool), not any(row.waiting for row in self.versions.values())
        self.versions[number] = VersionRow(version, now, predicted_s, len(waiting), waiting, is_alone)
        self.totals.artifact_bytes += version.artifact_bytes
        self.totals.full_bytes += version.full_snapshot_bytes
        self.totals.versions += 1
        while len(self.versions) > VERSIONS_KEPT:
            self.versions.popitem(last=False)

    def on_live(self, peer_id: PeerId, version: Version | None, now: float) -> None:
        if version is None:
            return
        for row in self.versions.values():
            if row.published.version <= version and peer_id in row.waiting:
                row.waiting.discard(peer_id)
                row.live_after_s[peer_id] = now - row.published_at
                self._complete(row, now)

    def on_leave(self, peer_id: PeerId, now: float) -> None:
        """A worker left the pool: versions no longer wait for it."""
        for row in self.versions.values():
            if peer_id in row.waiting:
                row.waiting.discard(peer_id)
                self._complete(row, now)

    def _complete(self, row: VersionRow, now: float) -> None:
        if row.waiting or row.complete_s is not None or not row.live_after_s:
            return
        row.complete_s = now - row.published_at
        if row.published.has_parent and row.has_links_alone and row.predicted_s > 0 and row.complete_s > 0:
            self.reached.observe(min(1.0, row.predicted_s / row.complete_s))
        newest = self.newest_complete
        if newest is None or newest.published.version < row.published.version:
            self.newest_complete = row

    @property
    def model_digest(self) -> str:
        """Of the base model that the run trains; empty before the first learner."""
        return self.hello.model_digest if self.hello is not None else ""

    @property
    def address(self) -> str:
        return self.pipe_address or (self.hello.address if self.hello is not None else "")

    @property
    def chunk_address(self) -> str:
        return self.pipe_address or (self.hello.chunk_address if self.hello is not None else "")

    @property
    def train_s(self) -> float:
        """T_train in seconds: the median of the newest steps; 0 before the first."""
        return self.train_time.value_or(0.0)

    @property
    def broadcast_efficiency(self) -> float:
        """The share of the planned rate that broadcasts reach: a prior at first, then the median of the newest; at least
        `EFFICIENCY_LEAST`."""
        return max(EFFICIENCY_LEAST, self.reached.value_or(0.0))

    @property
    def eval_reward(self) -> float | None:
        """The newest held-out evaluation; None before the first."""
        return None if self.report.eval_reward == -1 else self.report.eval_reward

    @property
    def newest(self) -> VersionRow | None:
        return next(reversed(self.versions.values()), None)

    @property
    def newest_version(self) -> Version:
        return Version(max(self.report.newest_version, self.hello.newest_version if self.hello else 0))

    @property
    def delta_kappa(self) -> int:
        """Steps between the newest delta and its parent."""
        for row in reversed(self.versions.values()):
            if row.published.has_parent:
                return max(1, row.published.version - row.published.parent)
        return 1

    @property
    def delta_bytes(self) -> int:
        """Bytes of a delta over `delta_kappa` steps, estimated from the published ones; 0 before the first."""
        return round(self.delta_size.at(self.delta_kappa))


# The pool's plan, what happened against what it predicted, and the correction of the estimates that follows. It ends with the run.
#
# Every `STEPS_A_LOOK` steps of one plan, the share of the wall clock's time in which the learner trained is compared with what the
# plan promised. The workers' rates that plans are made of are multiplied by `rate_ratio`, which moves half of the way (in the
# logarithm) at each look, within `RATIO_LEAST` and `RATIO_MOST`: what the model leaves out is so learned within some ten steps, and
# one bad stretch moves it by little. Waiting for rewards or prompts is no fault of the workers and corrects nothing. Guarantees:
# bounded memory.

STEPS_A_LOOK = 5  # ten steps are two looks
RATIO_LEAST, RATIO_MOST = 0.5, 1.1  # rates are too high rather than too low: nothing is added twice
CLOSE = 0.01
"""A utilisation this near to the promised one says that the estimates are right."""


ERRORS_KEPT = 512  # the newest, of which the page shows the mean
PREDICTED = ("utilisation", "broadcast_s", "usd_per_hour")  # as metrics are named


@dataclass(slots=True)
class CurrentPlan:
    """The one keeper of the pool's plan. `now`: the newest; `carried_out`: the newest that workers were activated by; `waits_for`:
    what a plan lacks. `reason`: why the rates are corrected, in words; empty while they are not."""

    board: LearnerBoard
    now: Plan | None = None
    carried_out: Plan | None = None
    waits_for: str = "the learner"
    predicted: dict[str, float] = field(default_factory=dict)  # the newest prediction of each of `PREDICTED`
    errors: dict[str, deque[float]] = field(default_factory=dict)  # measured minus predicted, the newest
    rate_ratio: float = 1.0
    reason: str = ""
    _began: tuple[int, float] | None = None  # step and time since which it has been looked at
    _busy_s: float = 0.0
    _spent: tuple[float, float] | None = None  # when a step was last reported, and the USD spent by then
    _compared: VersionRow | None = None

    def _measure(self, what: str, value: float) -> None:
        """Compares a measurement with the newest prediction, if there is one."""
        if what in self.predicted:
            self.errors.setdefault(what, deque(maxlen=ERRORS_KEPT)).append(value - self.predicted[what])

    def mean_error(self, what: str) -> float:
        """Mean distance of measured from predicted; 0 before the first comparison."""
        return statistics.fmean(map(abs, self.errors[what])) if what in self.errors else 0.0

    @property
    def message(self) -> pb.PlanUpdate | None:
        """The plan as the learner is told it; None before the first."""
        if (plan := self.now) is None:
            return None
        return pb.PlanUpdate(
            kappa=plan.kappa, in_flight_cap_rollouts=min(plan.in_flight_cap_rollouts, (1 << 31) - 1),
            predicted_utilisation=plan.predicted_utilisation, predicted_broadcast_s=plan.broadcast_s,
            usd_per_hour=plan.usd_per_hour, reason=plan.reason,
        )  # fmt: skip

    def adopt(self, plan: Plan, is_acted_on: bool) -> None:
        """The same pool and period as before leave the comparison as it is."""
        self.now, self.waits_for = plan, ""
        self.predicted["utilisation"] = plan.predicted_utilisation
        if not is_acted_on:
            return
        # The meter counts machines only: no provider reports here what the traffic costs.
        self.predicted["usd_per_hour"] = plan.usd_per_hour - plan.egress_usd_per_hour
        before, self.carried_out = self.carried_out, plan
        if before is None or (before.kappa, before.pool) != (plan.kappa, plan.pool):
            self._began = None

    def on_step(self, report: pb.LearnerReport, spent_usd: float, now: float) -> None:
        """The learner made a step. `spent_usd`: spent on all workers so far."""
        if report.utilisation > 0:
            self._measure("utilisation", report.utilisation)
        if self._spent is not None and now > self._spent[0]:
            per_hour = max(0.0, spent_usd - self._spent[1]) / (now - self._spent[0]) * 3600
            self._measure("usd_per_hour", per_hour)
        self._spent = now, spent_usd
        if self.carried_out is None:
            return
        if self._began is None or report.rewards_due or report.prompts_exhausted or report.step < self._began[0]:
            self._began, self._busy_s = (report.step, now), 0.0
            return
        self._busy_s += report.train_s
        if report.step - self._began[0] >= STEPS_A_LOOK and now > self._began[1]:
            self._correct(min(1.0, self._busy_s / (now - self._began[1])), self.carried_out.predicted_utilisation)
            self._began, self._busy_s = (report.step, now), 0.0

    def _correct(self, measured: float, promised: float) -> None:
        if promised <= 0 or abs(measured - promised) <= CLOSE:
            return
        ratio = self.rate_ratio * math.sqrt(max(measured, 1e-3) / promised)
        self.rate_ratio = min(RATIO_MOST, max(RATIO_LEAST, ratio))
        self.reason = (
            f"workers' rates are taken {self.rate_ratio:.2f} times as measured, because the learner trained {measured:.0%} of "
            f"the time where {promised:.0%} was promised"
        )

    def on_spread(self, row: VersionRow | None) -> None:
        """A version is live on its whole pool. `row`: the newest such version. Idempotent."""
        if row is None or row is self._compared:
            return
        self._compared = row
        if row.complete_s is not None and row.predicted_s > 0:
            self.predicted["broadcast_s"] = row.predicted_s
            self._measure("broadcast_s", row.complete_s)

"""What happened against what was predicted, and the correction of the estimates that follows from it. It ends with the run.

Every `STEPS_A_LOOK` steps of one plan, the share of the wall clock's time in which the learner trained is compared with what the
plan promised. The workers' rates that plans are made of are multiplied by `rate_ratio`, which moves half of the way (in the
logarithm) at each look, within `RATIO_LEAST` and `RATIO_MOST`: what the model leaves out is so learned within some ten steps, and
one bad stretch moves it by little. Waiting for rewards or prompts is no fault of the workers and corrects nothing. Guarantees:
bounded memory.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from echo2.coordinator.planning.board import LearnerBoard, VersionRow
from echo2.cost_model.plan import Plan
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

STEPS_A_LOOK = 5  # ten steps are two looks
RATIO_LEAST, RATIO_MOST = 0.5, 1.1  # rates are too high rather than too low: nothing is added twice
CLOSE = 0.01
"""A utilisation this near to the promised one says that the estimates are right."""


ERRORS_KEPT = 512  # the newest, of which the page shows the mean


class PredictedQuantity(enum.Enum):
    """The predicted quantity; its value is the metric's name."""

    UTILISATION = "utilisation"
    BROADCAST_S = "broadcast_s"
    USD_PER_HOUR = "usd_per_hour"


@dataclass(slots=True)
class PredictionLog:
    """The newest prediction of each kind, and by how much the measurements since were above it."""

    _newest: dict[PredictedQuantity, float] = field(default_factory=dict)
    _errors: dict[PredictedQuantity, deque[float]] = field(default_factory=dict)

    def predict(self, what: PredictedQuantity, value: float) -> None:
        self._newest[what] = value

    def measure(self, what: PredictedQuantity, value: float) -> None:
        """Compares a measurement with the newest prediction, if there is one."""
        if what in self._newest:
            self._errors.setdefault(what, deque(maxlen=ERRORS_KEPT)).append(value - self._newest[what])

    def count(self, what: PredictedQuantity) -> int:
        return len(self._errors.get(what, ()))

    def mean_absolute_error(self, what: PredictedQuantity) -> float | None:
        errors = self._errors.get(what)
        return statistics.fmean(map(abs, errors)) if errors else None

    def bias(self, what: PredictedQuantity) -> float | None:
        """Mean of measured minus predicted."""
        errors = self._errors.get(what)
        return statistics.fmean(errors) if errors else None


@dataclass(slots=True)
class Corrections:
    """`reason`: why the rates are corrected, in words; empty while they are not. One method for each thing that happens."""

    board: LearnerBoard
    log: PredictionLog = field(default_factory=PredictionLog)
    rate_ratio: float = 1.0
    reason: str = ""
    _plan: Plan | None = None  # carried out
    _began: tuple[int, float] | None = None  # step and time since which the plan has been looked at
    _busy_s: float = 0.0
    _spent: tuple[float, float] | None = None  # when a step was last reported, and the USD spent by then
    _compared: VersionRow | None = None

    def on_plan(self, plan: Plan, is_acted_on: bool) -> None:
        """A plan was adopted. The same pool and period as before change nothing."""
        self.log.predict(PredictedQuantity.UTILISATION, plan.predicted_utilisation)
        if not is_acted_on:
            return
        # The meter counts machines only: no provider reports here what the traffic costs.
        self.log.predict(PredictedQuantity.USD_PER_HOUR, plan.usd_per_hour - plan.egress_usd_per_hour)
        if self._plan is None or (self._plan.kappa, self._plan.pool) != (plan.kappa, plan.pool):
            self._began = None
        self._plan = plan

    def on_step(self, report: pb.LearnerReport, spent_usd: float, now: float) -> None:
        """The learner made a step. `spent_usd`: spent on all workers so far."""
        if report.utilisation > 0:
            self.log.measure(PredictedQuantity.UTILISATION, report.utilisation)
        if self._spent is not None and now > self._spent[0]:
            per_hour = max(0.0, spent_usd - self._spent[1]) / (now - self._spent[0]) * 3600
            self.log.measure(PredictedQuantity.USD_PER_HOUR, per_hour)
        self._spent = now, spent_usd
        if self._plan is None:
            return
        if self._began is None or report.rewards_due or report.prompts_exhausted or report.step < self._began[0]:
            self._began, self._busy_s = (report.step, now), 0.0
            return
        self._busy_s += report.train_s
        if report.step - self._began[0] >= STEPS_A_LOOK and now > self._began[1]:
            self._correct(min(1.0, self._busy_s / (now - self._began[1])), self._plan.predicted_utilisation)
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
            self.log.predict(PredictedQuantity.BROADCAST_S, row.predicted_s)
            self.log.measure(PredictedQuantity.BROADCAST_S, row.complete_s)

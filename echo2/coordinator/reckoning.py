"""Compares the planners' predictions with what happened: utilisation, T_bcast, money; and plans that were acted on (track_record).

Guarantees: bounded memory; a broadcast is compared with the prediction made when that same version was published; money is
compared only while plans are carried out. Leaves to others: measuring, showing (runtime).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.coordinator.board import LearnerBoard, VersionRow
from echo2.coordinator.telemetry import LearnerReport
from echo2.coordinator.track_record import TrackRecord
from echo2.cost_model.plan import Plan
from echo2.cost_model.prediction import Predicted, PredictionLog


@dataclass(slots=True)
class Reckoning:
    """The log of predictions; one method for each thing that happens."""

    board: LearnerBoard
    log: PredictionLog = field(default_factory=PredictionLog)
    track: TrackRecord = field(default_factory=TrackRecord)
    _spent: tuple[float, float] | None = None  # when a step was last reported, and the USD spent by then
    _compared: VersionRow | None = None

    def planned(self, plan: Plan, is_acted_on: bool, now: float) -> None:
        """A plan was adopted."""
        self.log.predict(Predicted.UTILISATION, plan.predicted_utilisation, now)
        hello, step = self.board.hello, self.board.report.step
        self.track.planned(plan, is_acted_on, max(0, hello.step_limit - step) if hello is not None else 0, now)
        if is_acted_on:
            # The meter counts machines only: no provider reports here what the traffic costs.
            self.log.predict(Predicted.USD_PER_HOUR, plan.usd_per_hour - plan.egress_usd_per_hour, now)

    def expected(self, plan: Plan | None) -> float:
        """The utilisation to expect by the wall clock: the plan's, corrected by the track record; 0 without a plan."""
        return self.track.expected(plan.predicted_utilisation).expected if plan is not None else 0.0

    def step_made(self, report: LearnerReport, spent_usd: float, now: float) -> None:
        """The learner made a step. `spent_usd`: spent on all workers so far."""
        self.track.step_made(report.step, report.train_s, self.board.train_s, now)
        hello = self.board.hello
        if hello is not None and 0 < hello.step_limit <= report.step:
            self.track.finished(now)
        if report.utilisation > 0:
            self.log.measure(Predicted.UTILISATION, report.utilisation, now)
        if self._spent is not None and now > self._spent[0]:
            per_hour = max(0.0, spent_usd - self._spent[1]) / (now - self._spent[0]) * 3600
            self.log.measure(Predicted.USD_PER_HOUR, per_hour, now)
        self._spent = now, spent_usd

    def spread(self, row: VersionRow | None, now: float) -> None:
        """A version is live on its whole pool. `row`: the newest such version. Idempotent."""
        if row is None or row is self._compared:
            return
        self._compared = row
        if row.complete_s is not None and row.predicted_s > 0:
            self.log.predict(Predicted.BROADCAST_S, row.predicted_s, row.published_at)
            self.log.measure(Predicted.BROADCAST_S, row.complete_s, now)

"""Robust estimates from a worker's heartbeats: medians of the newest values, each with its uncertainty.

Guarantees: bounded memory; a single outlier does not move an estimate; a quantity that was not measured is 0. A heartbeat's
rates are the worker's own averages over some seconds, so a short window is enough. Leaves to others: priors for workers that
have not been measured (planner_input), range checks of received numbers (wire).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.coordinator.telemetry import Heartbeat, LinkReport
from echo2.cost_model.calibration import Estimate, RobustEstimator

WINDOW = 7
OF_BEAT = (
    "rollouts_per_s",
    "tokens_per_s",
    "rollout_s_mean",
    "rollout_s_p95",
    "apply_s",
    "swap_s",
    "running_sequences",
)
OF_LINK = ("uplink_bytes_per_s", "downlink_bytes_per_s", "rtt_s")


@dataclass(slots=True)
class WorkerMeasures:
    """Measurements of one worker. Membership starts a new object when the worker comes back with other hardware or settings."""

    _estimators: dict[str, RobustEstimator] = field(default_factory=dict)
    _values: dict[str, float] = field(default_factory=dict)

    def observe(self, beat: Heartbeat, now: float) -> None:
        """Adds the heartbeat's values; a 0 means not known yet and is skipped."""
        for name in OF_BEAT:
            self._take(name, getattr(beat, name), now)
        for name in OF_LINK:
            self._take(name, getattr(beat.link, name), now)

    def _take(self, name: str, value: float, now: float) -> None:
        if value <= 0:
            return
        estimator = self._estimators.get(name)
        if estimator is None:
            estimator = self._estimators[name] = RobustEstimator(name, window=WINDOW)
        estimator.observe(value, now)
        self._values[name] = estimator.value_or(value)

    def value(self, name: str) -> float:
        """The estimate of a quantity in `OF_BEAT` or `OF_LINK`; 0 if it was not measured."""
        return self._values.get(name, 0.0)

    def estimate(self, name: str) -> Estimate | None:
        """The estimate with its uncertainty; None if it was not measured."""
        estimator = self._estimators.get(name)
        return None if estimator is None else estimator.estimate()

    @property
    def link(self) -> LinkReport:
        return LinkReport(*(self.value(name) for name in OF_LINK))

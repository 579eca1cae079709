"""Compares predictions with measurements: utilisation, T_bcast, USD/h. The error is a metric and appears on the dashboard.

Guarantees: bounded memory; a measurement is compared with the newest prediction made before it. Leaves to others:
displaying it.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from dataclasses import dataclass, field

from echo2.cost_model.calibration import checked_observation

COMPARISONS_KEPT = 512


class Predicted(enum.Enum):
    """The predicted quantity; its value is the metric's name."""

    UTILISATION = "utilisation"
    BROADCAST_S = "broadcast_s"
    USD_PER_HOUR = "usd_per_hour"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prediction and the measurement that followed."""

    predicted: float
    measured: float
    predicted_at: float
    measured_at: float

    @property
    def error(self) -> float:
        """Measured minus predicted."""
        return self.measured - self.predicted


@dataclass(slots=True)
class PredictionLog:
    """The newest prediction of each kind and the last comparisons."""

    _open: dict[Predicted, tuple[float, float]] = field(default_factory=dict)
    _made: dict[Predicted, deque[Comparison]] = field(default_factory=dict)

    def predict(self, what: Predicted, value: float, now: float) -> None:
        """Records a prediction; it replaces the previous one of its kind."""
        self._open[what] = (checked_observation(f"predicted {what.value}", value), now)

    def measure(self, what: Predicted, value: float, now: float) -> Comparison | None:
        """Compares a measurement with the newest prediction; None if there is none."""
        checked_observation(f"measured {what.value}", value)
        if what not in self._open:
            return None
        predicted, at = self._open[what]
        comparison = Comparison(predicted, value, at, now)
        self._made.setdefault(what, deque(maxlen=COMPARISONS_KEPT)).append(comparison)
        return comparison

    def comparisons(self, what: Predicted) -> tuple[Comparison, ...]:
        return tuple(self._made.get(what, ()))

    def mean_absolute_error(self, what: Predicted) -> float | None:
        made = self._made.get(what)
        return statistics.fmean(abs(one.error) for one in made) if made else None

    def bias(self, what: Predicted) -> float | None:
        """Mean of measured minus predicted."""
        made = self._made.get(what)
        return statistics.fmean(one.error for one in made) if made else None

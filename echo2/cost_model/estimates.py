"""Online estimates from telemetry, robust against outliers, with their uncertainty.

Each estimator keeps a bounded window and uses the median and the median absolute deviation (MAD) as centre and spread,
so one frozen machine or one wrong clock does not move the estimate. `CHANGE_OBSERVATIONS` in a row far on one side are a change,
and what came before them is forgotten. A prior counts as `PRIOR_WEIGHT` observations, so
its weight fades. Guarantees: pure state, bounded memory; a value that is not finite or out of range raises
`MalformedMessage` naming the field, and leaves the estimate unchanged. Leaves to others: priors by GPU (catalogue), use
of the numbers (planner).
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from echo2.base.errors import MalformedMessage

WINDOW = 31  # odd, so the median is an observation; its error is a fifth of one observation's
PRIOR_WEIGHT = 2.0  # observations that outweigh it as soon as three have come
MAD_TO_SIGMA = 1.4826  # of a normal distribution
CHANGE_OBSERVATIONS, CHANGE_SIGMAS, CHANGE_SHARE = 3, 4.0, 0.15
"""So many observations in a row, further from the median than so many standard deviations and than this share of it: one outlier is
none, two are rare, three by chance happen once in 30,000 observations."""
MEDIAN_EFFICIENCY = 1.2533  # standard error of a median over that of a mean, for a normal distribution
PRIOR_SPREAD = 0.5  # priors from data sheets are good to a factor of 1.5
DELTA_GROWTH_PRIOR = 0.75  # measured: bytes of a delta grow so with the steps it spans
DELTA_PERIODS_MAX = 64  # kappa is at most S, which is at most 64


@dataclass(frozen=True, slots=True)
class Estimate:
    """`value` plus or minus `error` (one standard error of the centre); `spread`: standard deviation of one observation."""

    value: float
    error: float
    spread: float
    count: int


def checked_observation(field_name: str, value: float, least: float = 0.0) -> float:
    """Returns `value`, or raises `MalformedMessage` naming the field, the value and the range."""
    if not (math.isfinite(value) and value >= least):
        raise MalformedMessage(f"telemetry {field_name}: expected a finite number of at least {least:g}, got {value}")
    return value


@dataclass(slots=True)
class RobustEstimator:
    """Estimates one quantity from the newest `window` observations. Drops those older than `age_max_s`, except the last."""

    field_name: str
    prior: float | None = None
    age_max_s: float = math.inf
    window: int = WINDOW
    _seen: deque[tuple[float, float]] = field(default_factory=deque)

    def observe(self, value: float, now: float) -> None:
        """Adds one measurement."""
        self._seen.append((now, checked_observation(self.field_name, value)))
        while len(self._seen) > self.window:
            self._seen.popleft()
        while len(self._seen) > 1 and now - self._seen[0][0] > self.age_max_s:
            self._seen.popleft()
        if self._has_changed():
            while len(self._seen) > CHANGE_OBSERVATIONS:
                self._seen.popleft()

    def _has_changed(self) -> bool:
        values = [value for _, value in self._seen]
        before, newest = values[:-CHANGE_OBSERVATIONS], values[-CHANGE_OBSERVATIONS:]
        if len(before) < CHANGE_OBSERVATIONS:
            return False
        centre = statistics.median(before)
        spread = MAD_TO_SIGMA * statistics.median(abs(value - centre) for value in before)
        far = max(CHANGE_SIGMAS * spread, CHANGE_SHARE * abs(centre))
        return all(value > centre + far for value in newest) or all(value < centre - far for value in newest)

    @property
    def is_measured(self) -> bool:
        return bool(self._seen)

    def estimate(self) -> Estimate | None:
        """The current estimate; None if there is neither a prior nor an observation."""
        if not self._seen:
            if self.prior is None:
                return None
            return Estimate(self.prior, PRIOR_SPREAD * self.prior, PRIOR_SPREAD * self.prior, 0)
        values = [value for _, value in self._seen]
        centre, count = statistics.median(values), len(values)
        spread = MAD_TO_SIGMA * statistics.median(abs(value - centre) for value in values)
        if self.prior is None:
            if count == 1:
                spread = PRIOR_SPREAD * centre
            return Estimate(centre, MEDIAN_EFFICIENCY * spread / math.sqrt(count), spread, count)
        weight = PRIOR_WEIGHT / (PRIOR_WEIGHT + count)
        value = weight * self.prior + (1 - weight) * centre
        error = MEDIAN_EFFICIENCY * spread / math.sqrt(count) + weight * PRIOR_SPREAD * self.prior
        return Estimate(value, error, spread, count)

    def value_or(self, default: float) -> float:
        """The estimate's value, or `default` if there is none."""
        found = self.estimate()
        return default if found is None else found.value


@dataclass(slots=True)
class DeltaSizeEstimator:
    """Artifact bytes as a function of the steps covered; fits the growth exponent once two periods have been observed."""

    prior_bytes: float | None = None
    _by_steps: dict[int, RobustEstimator] = field(default_factory=dict)

    def observe(self, artifact_bytes: float, steps: int, now: float) -> None:
        """Adds the size of a version that covers `steps` steps since its parent."""
        if not 1 <= steps <= DELTA_PERIODS_MAX:
            raise MalformedMessage(f"telemetry delta steps: expected 1 to {DELTA_PERIODS_MAX}, got {steps}")
        checked_observation("artifact_bytes", artifact_bytes)
        self._by_steps.setdefault(steps, RobustEstimator("artifact_bytes")).observe(artifact_bytes, now)

    @property
    def growth(self) -> float:
        """Exponent g of bytes ~ steps ** g, between 0 and 1."""
        points = [
            (math.log(steps), math.log(found.value))
            for steps, one in self._by_steps.items()
            if (found := one.estimate()) is not None and found.value > 0
        ]
        if len(points) < 2:
            return DELTA_GROWTH_PRIOR
        slope = statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
        return min(1.0, max(0.0, slope))

    def at(self, steps: int) -> Estimate | None:
        """Estimated bytes of a version that covers `steps` steps, scaled from the nearest measured period; None without
        a measurement or prior."""
        if not self._by_steps:
            if self.prior_bytes is None:
                return None
            grown = self.prior_bytes * steps**DELTA_GROWTH_PRIOR
            return Estimate(grown, PRIOR_SPREAD * grown, PRIOR_SPREAD * grown, 0)
        nearest = min(self._by_steps, key=lambda known: (abs(math.log(known / steps)), known))
        found = self._by_steps[nearest].estimate()
        assert found is not None, "an observed period has an estimate"
        factor = (steps / nearest) ** self.growth
        return Estimate(found.value * factor, found.error * factor, found.spread * factor, found.count)


COMPARISONS_KEPT = 512  # the newest, of which errors are the mean


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

"""Online estimates from telemetry, robust against outliers, with their uncertainty.

Each estimator keeps a bounded window and uses the median and the median absolute deviation (MAD) as centre and spread,
so one frozen machine or one wrong clock does not move the estimate. `CHANGE_OBSERVATIONS` in a row far on one side are a change,
and what came before them is forgotten. A prior counts as `PRIOR_WEIGHT` observations, so its weight fades. Guarantees: pure state,
bounded memory. Leaves to others: priors by GPU (machines), use of the numbers (planner).
"""

from __future__ import annotations

import math
import statistics
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


@dataclass(slots=True)
class RobustEstimator:
    """Estimates one quantity from the newest `window` observations."""

    field_name: str
    prior: float | None = None
    window: int = WINDOW
    _seen: list[float] = field(default_factory=list)

    def observe(self, value: float) -> None:
        """Adds one measurement. `MalformedMessage` for one that is no number or negative, which then changes nothing."""
        if not (math.isfinite(value) and value >= 0.0):
            raise MalformedMessage(f"telemetry {self.field_name}: expected a finite number of at least 0, got {value}")
        self._seen = [*self._seen, value][-self.window :]
        if self._has_changed():
            self._seen = self._seen[-CHANGE_OBSERVATIONS:]

    def _has_changed(self) -> bool:
        before, newest = self._seen[:-CHANGE_OBSERVATIONS], self._seen[-CHANGE_OBSERVATIONS:]
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
        centre, count = statistics.median(self._seen), len(self._seen)
        spread = MAD_TO_SIGMA * statistics.median(abs(value - centre) for value in self._seen)
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

    _by_steps: dict[int, RobustEstimator] = field(default_factory=dict)

    def observe(self, artifact_bytes: float, steps: int) -> None:
        """Adds the size of a version that covers `steps` steps since its parent."""
        if not 1 <= steps <= DELTA_PERIODS_MAX:
            raise MalformedMessage(f"telemetry delta steps: expected 1 to {DELTA_PERIODS_MAX}, got {steps}")
        sizes = self._by_steps.get(steps, RobustEstimator("artifact_bytes"))
        sizes.observe(artifact_bytes)
        self._by_steps[steps] = sizes

    @property
    def growth(self) -> float:
        """Exponent g of bytes ~ steps ** g, between 0 and 1."""
        points = [
            (math.log(steps), math.log(size))
            for steps, sizes in self._by_steps.items()
            if (size := sizes.value_or(0.0)) > 0
        ]
        if len(points) < 2:
            return DELTA_GROWTH_PRIOR
        slope = statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
        return min(1.0, max(0.0, slope))

    def at(self, steps: int) -> float:
        """Estimated bytes of a version that covers `steps` steps, scaled from the nearest measured period; 0 before the first."""
        if not self._by_steps:
            return 0.0
        nearest = min(self._by_steps, key=lambda known: (abs(math.log(known / steps)), known))
        return self._by_steps[nearest].value_or(0.0) * math.pow(steps / nearest, self.growth)

"""Rollout lengths in tokens: log-normal with a heavy tail, clipped at the limit; or drawn from a trace.

Guarantees: seeded and bounded. Leaves to others: how fast a worker generates tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from echo2.base.errors import ConfigError

TRACE_MAX = 10_000_000
QUANTILE_POINTS = 2000
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """`median_tokens * exp(sigma * normal)`, clamped to 1..`max_tokens`; or a random entry of `trace` if it is not empty."""

    median_tokens: float = 1000.0
    sigma: float = 0.8
    max_tokens: int = 8192
    trace: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median_tokens) and self.median_tokens >= 1):
            raise ConfigError(f"lengths: median_tokens: expected at least 1, got {self.median_tokens}")
        if not 0 <= self.sigma <= 4:
            raise ConfigError(f"lengths: sigma: expected 0 to 4, got {self.sigma}")
        if not 1 <= self.max_tokens <= 1 << 20:
            raise ConfigError(f"lengths: max_tokens: expected 1 to {1 << 20}, got {self.max_tokens}")
        if len(self.trace) > TRACE_MAX or any(one < 1 for one in self.trace):
            raise ConfigError(f"lengths: trace: expected up to {TRACE_MAX} lengths of at least 1 token")

    def draw(self, rng: random.Random) -> float:
        """Draws one length in tokens."""
        if self.trace:
            return float(self.trace[rng.randrange(len(self.trace))])
        return min(float(self.max_tokens), max(1.0, self.median_tokens * math.exp(self.sigma * rng.gauss(0.0, 1.0))))

    def quantiles(self, points: int = QUANTILE_POINTS) -> list[float]:
        """Lengths at the mid-points of `points` equal shares, ascending."""
        if self.trace:
            ordered = sorted(self.trace)
            return [float(ordered[int((i + 0.5) / points * len(ordered))]) for i in range(points)]
        normal = _NORMAL.inv_cdf
        return [
            min(
                float(self.max_tokens), max(1.0, self.median_tokens * math.exp(self.sigma * normal((i + 0.5) / points)))
            )
            for i in range(points)
        ]

    @property
    def mean_tokens(self) -> float:
        values = self.quantiles()
        return sum(values) / len(values)

    def at(self, share: float) -> float:
        """The quantile at `share`: the length that this share of all rollouts does not exceed."""
        values = self.quantiles()
        return values[min(len(values) - 1, int(share * len(values)))]

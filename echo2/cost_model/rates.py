"""By how much machines of a kind differ from the roofline, learned from what they delivered, with an interval.

The logarithm of delivered over predicted tokens/s is taken as normal within a kind, its mean and variance unknown: the
conjugate normal-inverse-gamma model (Murphy, "Conjugate Bayesian analysis of the Gaussian distribution", 2007), whose
prediction for the next machine is Student's t. One machine tells a little, ten of a kind nearly all.
Guarantees: pure; a ratio out of `RATIOS` is refused; each machine counts once, however often it was measured. Leaves to others: the
roofline (roofline), the file (runtime).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from echo2.base.errors import ConfigError

PRIOR_MACHINES = 0.25
"""The prior mean weighs as much as so many machines: kinds differ from the roofline by about twice what machines of a kind do."""
PRIOR_SHAPE, PRIOR_SCALE = 2.0, 0.04
"""Of the variance within a kind: mean 0.04, a spread of about a fifth."""
COVERAGE = 0.9
RATIOS = (0.01, 10.0)
"""Delivered over predicted; what lies outside is a mistake of measuring."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Of a kind: ratio of delivered to predicted tokens/s, and the interval in which the next machine's lies 9 times of 10."""

    ratio: float
    low: float
    high: float
    machines: int


def checked_ratio(whose: str, ratio: float) -> float:
    if not (math.isfinite(ratio) and RATIOS[0] <= ratio <= RATIOS[1]):
        raise ConfigError(
            f"{whose}: expected delivered over predicted tokens/s from {RATIOS[0]} to {RATIOS[1]}, got {ratio}"
        )
    return ratio


def belief(ratios: Iterable[float], coverage: float = COVERAGE) -> Belief:
    """From one ratio a machine."""
    logs = [math.log(checked_ratio("rates", one)) for one in ratios]
    count = len(logs)
    mean = sum(logs) / count if count else 0.0
    weight = PRIOR_MACHINES + count
    centre = count * mean / weight
    shape = PRIOR_SHAPE + count / 2
    scale = PRIOR_SCALE + sum((one - mean) ** 2 for one in logs) / 2
    scale += PRIOR_MACHINES * count * mean**2 / (2 * weight)
    spread = math.sqrt(scale * (weight + 1) / (shape * weight))
    reach = spread * t_quantile((1 + coverage) / 2, 2 * shape)
    return Belief(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach), count)


@lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: float) -> float:
    """Of Student's t."""
    from scipy.special import stdtrit  # scipy.stats loads for a second

    return float(stdtrit(freedom, probability))

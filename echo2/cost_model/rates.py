"""How machines of a kind compare with the roofline, learned from delivered rates, with an interval.

Within a kind, the logarithm of delivered over predicted tokens/s is assumed normal with unknown mean and variance: the
conjugate normal-inverse-gamma model (Murphy, "Conjugate Bayesian analysis of the Gaussian distribution", 2007), whose
prediction for the next machine is Student's t. One machine narrows the interval a little; after ten, more add hardly anything.
Guarantees: pure; a ratio outside `RATIOS` is refused; each machine counts once, however often it was measured. Leaves to others:
the roofline (roofline), the file (runtime).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from echo2.base.errors import ConfigError

PRIOR_MACHINES = 0.25
"""Weight of the prior mean, in machines: kinds deviate from the roofline about twice as much as machines of a kind differ from
each other."""
PRIOR_SHAPE, PRIOR_SCALE = 2.0, 0.04
"""Prior of the variance within a kind (inverse gamma): mean 0.04, that is a spread of about 20 %."""
COVERAGE = 0.9
RATIOS = (0.01, 10.0)
"""Allowed range of delivered over predicted tokens/s; anything outside is a measurement error."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Delivered over predicted tokens/s of a kind, with the interval that contains the next machine's ratio 9 times out of 10."""

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
    """The belief that follows from one ratio per machine; the prior if there are none."""
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
    """Quantile of Student's t distribution with `freedom` degrees of freedom."""
    from scipy.special import stdtrit  # importing scipy.stats takes a second

    return float(stdtrit(freedom, probability))

"""Which training prompts to prefer, given earlier rewards on them: a hook between the cursor and the task.

Guarantees: a pure function of positions and recorded rewards, so that a restart from saved state continues identically; memory is
bounded. Leaves to others: the order of prompts (split), dropping groups with equal rewards (learner/selection).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2.base.errors import ConfigError
from echo2.base.rng import derived_rng


class Curriculum(Protocol):
    """Asked before each draw, told after each scored group."""

    def wants(self, position: int, index: int) -> bool:
        """Whether the instance at `index`, due at `position` of the order, is worth a group now."""
        ...

    def record(self, index: int, rewards: Sequence[float]) -> None:
        """Records the rewards of a group on the instance at `index`."""
        ...

    def state(self) -> Mapping[str, float]:
        """Returns the state for a checkpoint, as JSON-compatible values; `make_curriculum` restores it."""
        ...


class InOrder:
    """Takes every prompt as it comes."""

    def wants(self, position: int, index: int) -> bool:
        return True

    def record(self, index: int, rewards: Sequence[float]) -> None:
        pass

    def state(self) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True, slots=True)
class BandConfig:
    """Instances whose last mean reward lay outside `low` to `high` come back only with probability `revisit`."""

    low: float = 0.05
    high: float = 0.95
    revisit: float = 0.2
    seed: int = 0
    remembered_max: int = 1_000_000

    def __post_init__(self) -> None:
        if not (self.low <= self.high and 0 < self.revisit <= 1 and self.remembered_max >= 1):
            raise ConfigError(
                "curriculum: expected low <= high, a revisit probability above 0 and at most 1 and room for at least "
                f"one instance, got {self}"
            )


class SuccessBand:
    """Prefers instances that are neither mastered nor hopeless: there a group's rewards differ, so it has a gradient.

    Instances not seen yet are always wanted. `revisit` above 0 makes every instance return some day, and bounds the search for a
    wanted one to 1 / revisit draws on average.
    """

    def __init__(self, config: BandConfig, state: Mapping[str, float] | None = None):
        self._config = config
        self._means: OrderedDict[int, float] = OrderedDict((int(k), float(v)) for k, v in (state or {}).items())

    def wants(self, position: int, index: int) -> bool:
        mean = self._means.get(index)
        if mean is None or self._config.low <= mean <= self._config.high:
            return True
        return derived_rng(self._config.seed, "curriculum", position).random() < self._config.revisit

    def record(self, index: int, rewards: Sequence[float]) -> None:
        if not rewards:
            return
        self._means[index] = sum(rewards) / len(rewards)
        self._means.move_to_end(index)
        if len(self._means) > self._config.remembered_max:
            self._means.popitem(last=False)

    def state(self) -> Mapping[str, float]:
        return {str(index): mean for index, mean in self._means.items()}


def make_curriculum(name: str, seed: int, state: Mapping[str, float] | None = None) -> Curriculum:
    """Makes the curriculum called `name`, new or restored from `state`."""
    match name:
        case "in_order":
            return InOrder()
        case "success_band":
            return SuccessBand(BandConfig(seed=seed), state)
    raise ConfigError(f"curriculum: expected in_order or success_band, got {name!r}")

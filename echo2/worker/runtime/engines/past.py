"""Versions that were live before, as the weights that each changed: an engine goes back to one for the length of a scoring.

Guarantees: going back and forth leaves every bit as it was; at most `VERSIONS_MAX` versions and `BYTES_MAX_OF_MODEL` times
the published bytes of changes are held, the oldest go first. Costs 6 bytes for each weight of bf16 that a version changed: at
8 billion weights of which 2 in a hundred change, 1 GB a version. Leaves to others: when to go back (loop), the live weights
(weights).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from echo2.base.errors import EngineError
from echo2.base.ids import Version
from echo2.cost_model.sizing import FORMER_SHARE
from echo2.worker.runtime.engines.live import Scatter

VERSIONS_MAX = 16
"""As far back as audits compare."""
BYTES_MAX_OF_MODEL = FORMER_SHARE


class LiveBits(Protocol):
    """Live weights whose published bits can be read and written at places."""

    def bits_at(self, name: str, places: np.ndarray | None) -> np.ndarray:
        """The published bits of a tensor, at flat positions or all of them; a copy."""
        ...

    def apply(self, scatters: Sequence[Scatter]) -> None: ...

    @property
    def published_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _BitChange:
    """Of one tensor: the bits that differ between two versions. Works in both directions."""

    name: str
    dtype: str
    places: np.ndarray
    bits: np.ndarray

    def turned(self, weights: LiveBits) -> Scatter:
        return Scatter(self.name, self.dtype, self.places, weights.bits_at(self.name, self.places) ^ self.bits)


@dataclass(frozen=True, slots=True)
class _StepBack:
    """From `version` to the one that was live behind it."""

    version: Version
    changes: tuple[_BitChange, ...]

    @property
    def nbytes(self) -> int:
        return sum(change.places.nbytes + change.bits.nbytes for change in self.changes)


@dataclass(slots=True)
class PastVersions:
    """Of one engine, oldest first."""

    _steps: deque[_StepBack] = field(default_factory=deque)

    @property
    def versions(self) -> list[Version]:
        return [step.version for step in self._steps]

    def before_swap(self, live: Version | None, weights: LiveBits, scatters: Sequence[Scatter]) -> _StepBack | None:
        """What a swap is about to change; to be `added` once it has. None where there is nothing to go back to."""
        if live is None:
            return None
        changes = (_change_of(weights, scatter) for scatter in scatters)
        return _StepBack(live, tuple(change for change in changes if len(change.places)))

    def added(self, step: _StepBack | None, weights: LiveBits) -> None:
        """The swap has taken place."""
        if step is None:
            return
        limit = BYTES_MAX_OF_MODEL * weights.published_bytes
        self._steps.append(step)
        while self._steps and (len(self._steps) > VERSIONS_MAX or sum(one.nbytes for one in self._steps) > limit):
            self._steps.popleft()

    @contextmanager
    def as_of(self, version: Version, live: Version | None, weights: LiveBits) -> Iterator[None]:
        """The weights are those of `version` meanwhile."""
        versions = self.versions
        if version != live and version not in versions:
            raise EngineError(f"version {version}: expected one that is kept, {[*versions, live]}, got another")
        # Of a version that was put on twice, the last time: before it some bits may have been wrong.
        back = 0 if version == live else 1 + versions[::-1].index(version)
        steps = list(self._steps)[len(versions) - back :]
        turned: list[_StepBack] = []
        try:
            for step in reversed(steps):
                weights.apply([change.turned(weights) for change in step.changes])
                turned.append(step)
            yield
        finally:
            for step in reversed(turned):
                weights.apply([change.turned(weights) for change in step.changes])


def _change_of(weights: LiveBits, scatter: Scatter) -> _BitChange:
    old = weights.bits_at(scatter.name, scatter.positions)
    differing = (old ^ scatter.bits.astype(old.dtype, copy=False)).reshape(-1)
    among = np.flatnonzero(differing)
    places = among if scatter.positions is None else scatter.positions[among]
    small = np.uint32 if not len(places) or int(places[-1]) < 1 << 32 else np.int64
    return _BitChange(scatter.name, scatter.dtype, places.astype(small), differing[among])

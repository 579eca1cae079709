"""Keeps former versions as the bits that each swap changed, so that an engine can go back to one while it scores.

Guarantees: going back and forth leaves every bit as it was; holds at most `VERSIONS_MAX` versions and `BYTES_MAX_OF_MODEL` times
the published bytes, and drops the oldest first. Costs 6 bytes for each bf16 weight that a version changed: with 8 billion weights
of which 2% change, 1 GB per version. Leaves to others: when to go back (loop), the live weights (weights).
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
"""Former versions kept: as far back as audits compare."""
BYTES_MAX_OF_MODEL = FORMER_SHARE


class LiveBits(Protocol):
    """Live weights whose published bits can be read and written at given positions."""

    def bits_at(self, name: str, places: np.ndarray | None) -> np.ndarray:
        """The published bits of a tensor, at flat positions or all of them; a copy."""
        ...

    def apply(self, scatters: Sequence[Scatter]) -> None: ...

    @property
    def published_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _BitChange:
    """The XOR of one tensor's bits between two versions, at the `places` where they differ. Works in both directions."""

    name: str
    dtype: str
    places: np.ndarray
    bits: np.ndarray

    def turned(self, weights: LiveBits) -> Scatter:
        return Scatter(self.name, self.dtype, self.places, weights.bits_at(self.name, self.places) ^ self.bits)


@dataclass(frozen=True, slots=True)
class _StepBack:
    """The changes between `version` and the version that was live after it."""

    version: Version
    changes: tuple[_BitChange, ...]

    @property
    def nbytes(self) -> int:
        return sum(change.places.nbytes + change.bits.nbytes for change in self.changes)


@dataclass(slots=True)
class PastVersions:
    """Former versions of one engine, oldest first."""

    _steps: deque[_StepBack] = field(default_factory=deque)

    @property
    def versions(self) -> list[Version]:
        return [step.version for step in self._steps]

    def before_swap(self, live: Version | None, weights: LiveBits, scatters: Sequence[Scatter]) -> _StepBack | None:
        """Computes what a swap is about to change; pass it to `added` after the swap. None if no version is live."""
        if live is None:
            return None
        changes = (_change_of(weights, scatter) for scatter in scatters)
        return _StepBack(live, tuple(change for change in changes if len(change.places)))

    def added(self, step: _StepBack | None, weights: LiveBits) -> None:
        """Keeps `step` after its swap has taken place; drops the oldest ones beyond the limits."""
        if step is None:
            return
        limit = BYTES_MAX_OF_MODEL * weights.published_bytes
        self._steps.append(step)
        while self._steps and (len(self._steps) > VERSIONS_MAX or sum(one.nbytes for one in self._steps) > limit):
            self._steps.popleft()

    @contextmanager
    def as_of(self, version: Version, live: Version | None, weights: LiveBits) -> Iterator[None]:
        """Within the context, the weights are those of `version`. EngineError if that is not kept."""
        versions = self.versions
        if version != live and version not in versions:
            raise EngineError(f"version {version}: expected one that is kept, {[*versions, live]}, got another")
        # A version may have been swapped in twice, the first time with wrong bits: use the last time.
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

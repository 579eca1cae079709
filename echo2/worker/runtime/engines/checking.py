"""Checks a staged version against a model before any weight is touched.

Guarantees: a version that passes has only known names, the model's shapes, the dtypes published before, and ascending positions
within each tensor; each name occurs once or, for a large tensor of a delta, in several parts with ascending positions; a keyframe
is complete. Leaves to others: writing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from echo2.base.errors import EngineError
from echo2.base.staged import StagedVersion, TensorUpdate

BITS_DTYPES = {"bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.uint32)}


@dataclass(slots=True)
class UpdateCheck:
    """Checks against the live tensors: their `shapes`, and their `dtypes` as published (empty before the first keyframe)."""

    model_type: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: dict[str, str] = field(default_factory=dict)

    def checked(self, staged: StagedVersion) -> Iterator[TensorUpdate]:
        """Yields the updates of a version, each after its check. EngineError names the first wrong update or, at the end, a missing
        tensor."""
        reached: dict[str, int] = {}  # the last position seen of each tensor
        for update in staged.updates():
            self._check(update, staged)
            first, last = _reach(update)
            if first <= reached.get(update.name, -1):
                raise EngineError(f"version {staged.version}: tensor {update.name} comes twice")
            reached[update.name] = last
            yield update
        missing = self.shapes.keys() - reached.keys()
        if staged.parent is None and missing:
            raise EngineError(
                f"version {staged.version}: a keyframe holds every tensor, got none for {min(missing)} "
                f"({len(missing)} missing of {len(self.shapes)})"
            )

    def applied(self, updates: Iterable[TensorUpdate]) -> None:
        """Records the dtypes of updates that are live now."""
        self.dtypes.update((update.name, update.dtype) for update in updates)

    def _check(self, update: TensorUpdate, staged: StagedVersion) -> None:
        whose = f"version {staged.version}, tensor {update.name}"
        shape = self.shapes.get(update.name)
        if shape is None:
            raise EngineError(f"{whose}: expected a tensor of this {self.model_type} model, got an unknown name")
        if tuple(update.shape) != shape:
            raise EngineError(f"{whose}: expected shape {shape}, got {tuple(update.shape)}")
        known = update.dtype if staged.parent is None else self.dtypes.get(update.name)
        if update.dtype not in BITS_DTYPES or update.dtype != known:
            expected = " or ".join(BITS_DTYPES) if known in (None, update.dtype) else known
            raise EngineError(f"{whose}: expected dtype {expected}, got {update.dtype}")
        if update.bits.dtype != BITS_DTYPES[update.dtype] or update.bits.ndim != 1:
            raise EngineError(f"{whose}: expected 1-D {BITS_DTYPES[update.dtype]} bits, got {update.bits.dtype}")
        _check_positions(update, int(np.prod(shape, dtype=np.int64)), staged.parent is None, whose)


def _reach(update: TensorUpdate) -> tuple[int, int]:
    """First and last position that an update touches; 0 and 0 if it touches none."""
    if update.indices is None or not len(update.indices):
        return 0, max(0, math.prod(update.shape) - 1 if update.indices is None else 0)
    return int(update.indices[0]), int(update.indices[-1])


def _check_positions(update: TensorUpdate, element_count: int, is_keyframe: bool, whose: str) -> None:
    indices = update.indices
    count = element_count if indices is None else len(indices)
    if len(update.bits) != count:
        raise EngineError(f"{whose}: expected {count} values, got {len(update.bits)}")
    if indices is None:
        return
    if is_keyframe:
        raise EngineError(f"{whose}: a keyframe holds whole tensors, got {count} positions")
    if indices.dtype != np.int64 or indices.ndim != 1:
        raise EngineError(f"{whose}: expected 1-D int64 positions, got {indices.ndim}-D {indices.dtype}")
    if count and (indices[0] < 0 or indices[-1] >= element_count or bool(np.any(indices[1:] <= indices[:-1]))):
        raise EngineError(f"{whose}: expected rising positions from 0 to {element_count - 1}, got others")

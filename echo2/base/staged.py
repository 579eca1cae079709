"""What a decoded version looks like to those who apply it: raw bits per tensor, whole or at positions.

Guarantees asked of an implementation: its updates were verified against the version's fingerprint before it is
handed out. Leaves to others: when and where the bits go (worker engines).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echo2.base.ids import Version


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """New raw bits of one tensor, by its Hugging Face name.

    `indices`: flat int64 positions, strictly rising; None when `bits` is the whole tensor.
    `bits` is the little-endian bit pattern as unsigned integers of the element's width (bf16 -> uint16), 1-D.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: np.ndarray | None
    bits: np.ndarray


class StagedVersion(Protocol):
    """A version that is verified and waits in host memory. `parent` None: `updates` holds every tensor whole."""

    @property
    def version(self) -> Version: ...

    @property
    def parent(self) -> Version | None: ...

    def updates(self) -> Iterator[TensorUpdate]: ...

"""A decoded version as those who apply it see it: raw bits per tensor, whole or at positions.

Every implementation guarantees: its updates were verified against the version's fingerprint before it is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echo2.base.ids import Version

FORMAT_VERSION = 4
"""Of the containers that versions travel in. If you raise it, raise PROTOCOL_VERSION too (trust/tls), so that a worker that cannot
read it is refused at once."""


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """New raw bits of one tensor, by its Hugging Face name. `indices`: flat int64 positions, strictly ascending; None if `bits`
    is the whole tensor. `bits` is the little-endian bit pattern as unsigned integers of the element's width (bf16 -> uint16),
    1-D."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: np.ndarray | None
    bits: np.ndarray


class StagedVersion(Protocol):
    """A verified version in host memory. `parent` None: `updates` yields every tensor whole."""

    @property
    def version(self) -> Version: ...

    @property
    def parent(self) -> Version | None: ...

    def updates(self) -> Iterator[TensorUpdate]: ...

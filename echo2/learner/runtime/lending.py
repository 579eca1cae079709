"""Tensors of the training that a checkpoint is written from where they lie, while the next step already computes.

Guarantees: what is written is what the tensors held as they were lent: whoever is about to change them calls `keep`, which copies
those that are not written yet. Masters and moments change at the end of a step, so that a disk which takes a checkpoint within
a step costs no copy at all. Waits: the writer for `keep`, `keep` for one tensor's way to the disk. Leaves to others: which
tensors (checkpoint), when they change (trainer).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor


class LentTensors:
    """By name. The writer takes each once, in any order; `keep` is called from another thread."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._lock = threading.Lock()
        self._are_own = False

    @contextmanager
    def taken(self, name: str) -> Iterator[Tensor | None]:
        """As it was when it was lent; nobody changes it meanwhile. None if it is not among them."""
        with self._lock:
            yield self._tensors.pop(name, None)

    def keep(self) -> None:
        """Before they change: what is not written yet is copied. Idempotent."""
        with self._lock:
            if not self._are_own:
                self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
            self._are_own = True

"""Lends the trainer's tensors to the checkpoint writer, which writes them in place while the next step already computes.

Guarantees: the checkpoint gets the values at the time of lending: before the trainer changes the tensors it calls `keep`, which
copies those not written yet. Masters and moments change only at the end of a step, so if the disk takes the checkpoint within one
step, nothing is copied. Waits for: the writer, while `keep` copies; `keep`, while one tensor is written. Leaves to others: which
tensors (checkpoint), when they change (trainer).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor


class LentTensors:
    """Lent tensors by name. The writer takes each once, in any order; the trainer calls `keep` from another thread."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._lock = threading.Lock()
        self._are_own = False

    @contextmanager
    def taken(self, name: str) -> Iterator[Tensor | None]:
        """Yields the tensor with its value at the time of lending; `keep` waits meanwhile. None if `name` was not lent."""
        with self._lock:
            yield self._tensors.pop(name, None)

    def keep(self) -> None:
        """Copies the tensors that are not written yet. Call it before they change. Idempotent."""
        with self._lock:
            if not self._are_own:
                self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
            self._are_own = True

"""Keeps, on the host, values that updates replaced in live parameters: to undo an update, and to go back to former versions.

Guarantees: exchanging twice leaves every bit as it was; keeps at most `VERSIONS_MAX` versions and `BYTES_MAX_OF_MODEL` times the
bytes of the parameters, and drops the oldest first; a version costs 6 bytes for each bf16 weight that its successor changed. Leaves
to others: where published tensors are (weight_map), when to go back (vllm_extension).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from echo2.base.errors import EngineError
from echo2.worker.runtime.engines.past import BYTES_MAX_OF_MODEL, VERSIONS_MAX

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Replaced:
    """Old `values` for the `places` of the parameter `flat`; values and places are on the host."""

    flat: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor

    def exchange(self) -> None:
        """Swaps the live values with the kept ones."""
        device = self.flat.device
        places = self.places.to(device).long()
        live = self.flat[places].cpu()
        self.flat.index_copy_(0, places, self.values.to(device))
        self.values = live

    @property
    def nbytes(self) -> int:
        return int(self.places.nbytes + self.values.nbytes)


def replaced_at(flat: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> Replaced:
    """A `Replaced` with 4-byte positions if those suffice, else 8-byte ones."""
    small = torch.int32 if flat.numel() <= 1 << 31 else torch.int64
    return Replaced(flat, places.to("cpu", small), values)


def differing(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Flat positions, ascending, where the bits of two tensors of one shape and dtype differ."""
    raw = _RAW[old.element_size()]
    return torch.nonzero((old.contiguous().view(raw) != new.contiguous().view(raw)).reshape(-1)).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Behind:
    """The values of `version` that the next version replaced."""

    version: int
    replaced: Sequence[Replaced]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.replaced)


@dataclass(slots=True)
class FormerVersions:
    """Former versions of one process's parameters, oldest first."""

    _steps: deque[_Behind] = field(default_factory=deque)

    @property
    def versions(self) -> list[int]:
        return [step.version for step in self._steps]

    def added(self, version: int, replaced: Sequence[Replaced], parameter_bytes: int) -> None:
        """Keeps the values of `version` that an update replaced; drops the oldest versions beyond the limits."""
        self._steps.append(_Behind(version, replaced))
        limit = BYTES_MAX_OF_MODEL * parameter_bytes
        while self._steps and (len(self._steps) > VERSIONS_MAX or sum(one.nbytes for one in self._steps) > limit):
            self._steps.popleft()

    @contextmanager
    def walking(self, live: int) -> Iterator[Callable[[int], None]]:
        """Yields a function that takes the parameters step by step to a given version. On exit they are those of `live` again."""
        back = list(reversed(self._steps))
        ends: list[int] = []  # for each step taken back, the length of `turned` after it
        turned: list[Replaced] = []

        def turn_back(count: int) -> None:
            while len(turned) > count:
                turned[-1].exchange()
                turned.pop()

        def go_to(version: int) -> None:
            versions = [step.version for step in back]
            if version != live and version not in versions:
                raise EngineError(
                    f"version {version}: expected one that is kept, {[*self.versions, live]}, got another"
                )
            # A version may have been swapped in twice, the first time with wrong bits: use the last time.
            far = 0 if version == live else 1 + versions.index(version)
            while len(ends) > far:
                ends.pop()
                turn_back(ends[-1] if ends else 0)
            while len(ends) < far:
                for one in reversed(back[len(ends)].replaced):
                    one.exchange()
                    turned.append(one)
                ends.append(len(turned))

        try:
            yield go_to
        finally:
            turn_back(0)

"""Values that updates replaced in live parameters, on the host: to undo an update, and to go back to versions that were live.

Guarantees: an exchange and its repetition leave every bit as it was; of versions, at most `VERSIONS_MAX` are kept and
`BYTES_MAX_OF_MODEL` times the bytes of the parameters, the oldest go first; a version costs 6 bytes for each bf16 weight that
changed behind it. Leaves to others: where published tensors lie (weight_map), when to go back (vllm_extension).
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
    """`values` belong to `places` of the parameter `flat`; both on the host."""

    flat: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor

    def exchange(self) -> None:
        """What is live there comes here, what is here goes live."""
        device = self.flat.device
        places = self.places.to(device).long()
        live = self.flat[places].cpu()
        self.flat.index_copy_(0, places, self.values.to(device))
        self.values = live

    @property
    def nbytes(self) -> int:
        return int(self.places.nbytes + self.values.nbytes)


def replaced_at(flat: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> Replaced:
    """With positions of 4 bytes where they suffice."""
    small = torch.int32 if flat.numel() <= 1 << 31 else torch.int64
    return Replaced(flat, places.to("cpu", small), values)


def differing(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Flat positions, ascending, where the bits of two tensors of one shape and dtype differ."""
    raw = _RAW[old.element_size()]
    return torch.nonzero((old.contiguous().view(raw) != new.contiguous().view(raw)).reshape(-1)).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Behind:
    """What was replaced when the weights of `version` were."""

    version: int
    replaced: Sequence[Replaced]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.replaced)


@dataclass(slots=True)
class FormerVersions:
    """Of one process's parameters, oldest first."""

    _steps: deque[_Behind] = field(default_factory=deque)

    @property
    def versions(self) -> list[int]:
        return [step.version for step in self._steps]

    def added(self, version: int, replaced: Sequence[Replaced], parameter_bytes: int) -> None:
        """An update took the place of `version`."""
        self._steps.append(_Behind(version, replaced))
        limit = BYTES_MAX_OF_MODEL * parameter_bytes
        while self._steps and (len(self._steps) > VERSIONS_MAX or sum(one.nbytes for one in self._steps) > limit):
            self._steps.popleft()

    @contextmanager
    def walking(self, live: int) -> Iterator[Callable[[int], None]]:
        """A call takes the parameters from the version that they are of to another, one step after the other; at the end they are
        those of `live` again."""
        back = list(reversed(self._steps))
        ends: list[int] = []  # of each step that was taken back, so many of `turned`
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
            # Of a version that was put on twice, the last time: before it some bits may have been wrong.
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

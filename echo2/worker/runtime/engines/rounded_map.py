"""A weight map in which some matrices are live as codes and scales, with the published values as masters on the host.

Guarantees: updates are written into the masters bit for bit; every layer that an update touches is rounded again from its whole
master, by the same function as at loading, so that it equals a fresh rounding; the fingerprint is that of the masters, and is valid
only while all live values equal, bit for bit, what the masters give; undoing an update restores the masters and rounds them again.
Which layers are rounded again depends only on an update's names: if several processes hold parts of a layer, all of them round it,
in the same order, so that they can agree on scales. Leaves to others: which layers are rounded and how (vllm_rounding), where
published tensors are in the masters (weight_map).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from echo2.worker.runtime.engines.weight_map import Patch, WeightMap


@dataclass(frozen=True, slots=True)
class RoundedLayer:
    """`live`: the tensors that the layer computes with, by parameter name; `rounded`: computes the same tensors from a master."""

    name: str
    master: torch.Tensor
    live: Mapping[str, torch.Tensor]
    rounded: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]

    def put(self) -> None:
        """Rounds the master and writes the result over the live values."""
        for name, values in self.rounded(self.master).items():
            self.live[name].copy_(values)

    def follows(self) -> bool:
        """Whether the live values equal, bit for bit, what `put` would write."""
        made = self.rounded(self.master)
        return all(torch.equal(_raw(self.live[name]), _raw(values)) for name, values in made.items())


class RoundedMap:
    """`weights` maps published names to the masters of `layers`, and to the parameters that are not rounded."""

    def __init__(self, weights: WeightMap, layers: Sequence[RoundedLayer]) -> None:
        self._weights = weights
        self._layers = {_storage(layer.master): layer for layer in layers}
        self._touched: set[int] = set()
        self._rounded: list[RoundedLayer] = []

    def covers(self) -> list[tuple[str, int, str]]:
        """As for the weight map."""
        return self._weights.covers()

    def apply(self, patches: Iterable[Patch], *, goes_on: bool = False) -> None:
        """Writes checked patches into masters and unrounded parameters. Rounded values stay as they are until `follow`."""
        if not goes_on:
            self._touched, self._rounded = set(), []
        self._weights.apply(self._noted(patches), goes_on=goes_on)

    def _noted(self, patches: Iterable[Patch]) -> Iterator[Patch]:
        for patch in patches:
            if len(patch.bits):
                self._touched |= self._weights.storages_of(patch.name)
            yield patch

    def follow(self) -> None:
        """Rounds again the layers that the update touched. Call `settle` afterwards, whether or not this succeeds."""
        self._rounded = [layer for storage, layer in self._layers.items() if storage in self._touched]
        for layer in self._rounded:
            layer.put()

    def settle(self, *, is_kept: bool, replaced: int | None = None) -> None:
        """Ends the last update: keeps or undoes it. Former versions are not kept, so `replaced` is ignored."""
        self._weights.settle(is_kept=is_kept)
        rounded, self._rounded = self._rounded, []
        for layer in () if is_kept else rounded:
            layer.put()

    @property
    def former_versions(self) -> list[int]:
        """Always empty: going back would have to round every touched layer twice for each scoring."""
        return []

    def sums(self, key: int) -> list[tuple[int, int]]:
        """As for the weight map, but with wrong sums for the tensors of a layer whose live values do not follow from its master."""
        is_off = {storage for storage, layer in self._layers.items() if not layer.follows()}
        return [
            (header, total + bool(is_off & self._weights.storages_of(name)))
            for name, (header, total) in zip(self._weights.shapes, self._weights.sums(key), strict=True)
        ]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _raw(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)

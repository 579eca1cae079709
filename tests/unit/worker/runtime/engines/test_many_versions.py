"""Fifty versions by deltas leave what fresh weights would: merged, split, padded and tied as in vLLM, and rounded to int8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.weights.fingerprint import fingerprint
from echo2.worker.runtime.engines.ranks import joined
from echo2.worker.runtime.engines.rounded import Rounded
from echo2.worker.runtime.engines.rounded_weights import RoundedWeights
from echo2.worker.runtime.engines.shape import read_shape
from echo2.worker.runtime.engines.weight_map import Patch, record_map
from tests.contract.engine_rig import Staged, tiny_config

VERSIONS, KEY, HEAD = 50, 11, 4
SHAPES = {
    "embed": (10, 16), "q": (4 * HEAD, 16), "k": (2 * HEAD, 16), "v": (2 * HEAD, 16), "o": (16, 4 * HEAD),
    "gate": (24, 16), "up": (24, 16), "down": (16, 24), "norm": (16,),
}  # fmt: skip
"""Four heads of queries and two of keys and values, so that of four ranks two each hold the same keys."""
Weights = dict[str, torch.Tensor]


class Vocabulary(torch.nn.Module):
    """A rank's rows of the embedding, rounded up so that all ranks have equally many."""

    num_embeddings_padded = 12

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(12 // count, 16, dtype=dtype))


class ParallelLayer(torch.nn.Module):
    """One of `count` tensor parallel ranks: q/k/v and gate/up merged and split by rows, o and down split by columns, the
    vocabulary split and padded; the head is the embedding itself."""

    def __init__(self, rank: int, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self.count = rank, count
        kv_rows = max(HEAD, 2 * HEAD // count)
        self.rows = {"q": 4 * HEAD // count, "k": kv_rows, "v": kv_rows, "gate": 24 // count, "up": 24 // count}
        self.embed = Vocabulary(count, dtype)
        self.head = Vocabulary(count, dtype)
        self.head.weight = self.embed.weight
        self.qkv = torch.nn.Parameter(torch.zeros(self.rows["q"] + 2 * kv_rows, 16, dtype=dtype))
        self.gate_up = torch.nn.Parameter(torch.zeros(2 * self.rows["gate"], 16, dtype=dtype))
        self.o = torch.nn.Parameter(torch.zeros(16, 4 * HEAD // count, dtype=dtype))
        self.down = torch.nn.Parameter(torch.zeros(16, 24 // count, dtype=dtype))
        self.norm = torch.nn.Parameter(torch.zeros(16, dtype=dtype))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "q" | "k" | "v":
                    self._merge(self.qkv.data, ("q", "k", "v"), name, tensor)
                case "gate" | "up":
                    self._merge(self.gate_up.data, ("gate", "up"), name, tensor)
                case "o" | "down":
                    own = self.o.data if name == "o" else self.down.data
                    own.copy_(tensor.narrow(1, self.rank * own.shape[1], own.shape[1]))
                case "embed":
                    held = self.embed.weight.data
                    first = self.rank * held.shape[0]
                    rows = max(0, min(held.shape[0], tensor.shape[0] - first))
                    held[:rows].copy_(tensor.narrow(0, first, rows))
                case _:
                    self.norm.data.copy_(tensor)

    def _merge(self, merged: torch.Tensor, names: tuple[str, ...], name: str, tensor: torch.Tensor) -> None:
        rows = self.rows[name]
        first = sum(self.rows[before] for before in names[: names.index(name)])
        parts = tensor.shape[0] // rows  # fewer than ranks where several hold the same heads
        merged.narrow(0, first, rows).copy_(tensor.narrow(0, self.rank * parts // self.count * rows, rows))


def random_weights(generator: torch.Generator, shapes: dict[str, tuple[int, ...]]) -> Weights:
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.int16)


def changes(generator: torch.Generator, tensors: Weights) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Changes `tensors` in place, and says where: at a few places of each, and all of one of them."""
    whole = sorted(tensors)[int(torch.randint(len(tensors), (1,), generator=generator))]
    for name, tensor in tensors.items():
        flat = tensor.view(-1)
        is_changed = torch.rand(flat.shape, generator=generator) < (1.0 if name == whole else 0.05)
        places = is_changed.nonzero()[:, 0]
        flat[places] = (flat[places].float() * 1.5 + torch.randn(len(places), generator=generator)).bfloat16()
        yield name, None if name == whole else places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_vllm_merges_splits_and_ties_is_what_its_loader_would_put_there(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    tensors = random_weights(generator, SHAPES)
    models = [ParallelLayer(rank, count, dtype) for rank in range(count)]
    maps = [record_map(model.load_weights, SHAPES, model) for model in models]
    ranks = joined(SHAPES, [each.covers() for each in maps])
    for each in maps:
        each.apply([Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in tensors.items()])
    for version in range(1, VERSIONS + 1):
        patches = [
            Patch(name, "bfloat16", places, bits(tensors[name]) if places is None else bits(tensors[name])[places])
            for name, places in changes(generator, tensors)
        ]
        for each in maps:
            each.apply(patches)
            each.settle(is_kept=True, replaced=version - 1)
        assert ranks.fingerprint([each.sums(KEY) for each in maps]) == fingerprint(tensors, KEY), version
    for rank, model in enumerate(models):
        fresh = ParallelLayer(rank, count, dtype)
        fresh.load_weights((name, tensor.to(dtype)) for name, tensor in tensors.items())
        assert model.head.weight is model.embed.weight
        for (name, got), expected in zip(model.named_parameters(), fresh.parameters(), strict=True):
            assert torch.equal(got, expected), (rank, name)


def test_rounded_weights_are_those_that_a_keyframe_of_the_newest_version_gives() -> None:
    shape = read_shape(tiny_config("qwen3"))
    weights, fresh = RoundedWeights(shape), RoundedWeights(shape)
    generator = torch.Generator().manual_seed(1)
    masters = dict(weights._masters.published())
    tensors = random_weights(generator, {name: tuple(tensor.shape) for name, tensor in masters.items()})
    weights.apply(weights.checked(staged(tensors, dict.fromkeys(tensors), 0)))
    for version in range(1, VERSIONS + 1):
        weights.apply(weights.checked(staged(tensors, dict(changes(generator, tensors)), version)))
    fresh.apply(fresh.checked(staged(tensors, dict.fromkeys(tensors), 0)))
    assert weights.fingerprint(KEY) == fresh.fingerprint(KEY) == fingerprint(tensors, KEY)
    for one, other in zip(matrices(weights), matrices(fresh), strict=True):
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


def staged(tensors: Weights, places: dict[str, torch.Tensor | None], version: int) -> Staged:
    updates = []
    for name, at in places.items():
        raw = bits(tensors[name]).numpy().view(np.uint16)
        shape = tuple(tensors[name].shape)
        positions = None if at is None else at.numpy()
        updates.append(TensorUpdate(name, "bfloat16", shape, positions, raw if positions is None else raw[positions]))
    return Staged(Version(version), Version(version - 1) if version else None, updates)


def matrices(weights: RoundedWeights) -> list[Rounded]:
    found = [weights.head]
    for layer in weights.layers:
        found += [layer.qkv, layer.output, layer.gate_up, layer.down]
    assert all(isinstance(matrix, Rounded) for matrix in found)
    return [matrix for matrix in found if isinstance(matrix, Rounded)]

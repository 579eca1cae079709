"""The weight map over a model that fuses, slices and transposes what it loads, as vLLM's models do."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import EngineError
from echo2.broadcast.delta.fingerprint import fingerprint
from echo2.worker.runtime.engines.weight_map import Patch, WeightMap, record_map

SHAPES = {"q": (6, 4), "k": (2, 4), "wide": (3, 10), "turned": (5, 3), "norm": (4,), "vocab": (5, 4)}


class Padded(torch.nn.Module):
    """A vocabulary with rows beyond the published ones."""

    num_embeddings_padded = 8

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 4))


class Fusing(torch.nn.Module):
    """q and k in one matrix, `wide` cut by columns over two parameters, `turned` transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(8, 4))
        self.left = torch.nn.Parameter(torch.zeros(3, 6))
        self.right = torch.nn.Parameter(torch.zeros(3, 4))
        self.turned = torch.nn.Parameter(torch.zeros(3, 5))
        self.norm = torch.nn.Parameter(torch.zeros(4))
        self.vocab = Padded()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "q":
                    self.qk.data.narrow(0, 0, 6).copy_(tensor)
                case "k":
                    self.qk.data[6:].copy_(tensor)
                case "wide":
                    self.left.data.copy_(tensor[:, :6])
                    self.right.data.copy_(tensor.narrow(1, 6, 4))
                case "turned":
                    self.turned.data.copy_(tensor.t())
                case "norm":
                    self.norm.data.copy_(tensor)
                case "vocab":
                    self.vocab.weight.data[:5].copy_(tensor)
                case "lossy":
                    self.norm.data.copy_(tensor[:4])
                case "summed":
                    self.norm.data.copy_(tensor + 1)
                case _:
                    raise KeyError(name)


def published(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.int16)


def loaded(tensors: dict[str, torch.Tensor]) -> tuple[Fusing, WeightMap]:
    model = Fusing()
    weight_map = record_map(model.load_weights, SHAPES, model)
    weight_map.apply([Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in tensors.items()])
    return model, weight_map


def test_a_keyframe_lands_where_the_loader_would_put_it() -> None:
    tensors = published(0)
    model, weight_map = loaded(tensors)
    expected = Fusing()
    expected.load_weights((name, tensor.float()) for name, tensor in tensors.items())
    for (name, got), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, want), name
    assert weight_map.fingerprint(3) == fingerprint(tensors, 3)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_delta_lands_where_the_loader_would_put_it(data: st.DataObject, seed: int) -> None:
    tensors = published(seed)
    model, weight_map = loaded(tensors)
    patches = []
    for name, shape in SHAPES.items():
        count = int(np.prod(shape))
        places = sorted(data.draw(st.sets(st.integers(0, count - 1)), label=name))
        new = torch.randn(len(places)).bfloat16()
        tensors[name].reshape(-1)[places] = new
        patches.append(Patch(name, "bfloat16", torch.tensor(places, dtype=torch.int64), bits(new)))
    weight_map.apply(patches)
    expected = Fusing()
    expected.load_weights((name, tensor.float()) for name, tensor in tensors.items())
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, want)
    assert weight_map.fingerprint(3) == fingerprint(tensors, 3)


def test_a_failure_in_the_middle_is_undone() -> None:
    tensors = published(1)
    _, weight_map = loaded(tensors)
    whole = [Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in published(2).items()]
    some = Patch("q", "bfloat16", torch.tensor([0, 5]), bits(torch.ones(2).bfloat16()))
    broken = Patch("norm", "bfloat16", None, torch.zeros(2, dtype=torch.int16))
    with pytest.raises(EngineError, match="norm"):
        weight_map.apply([some, *whole[:-2], broken])
    assert weight_map.fingerprint(9) == fingerprint(tensors, 9)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_parameter_that_a_kernel_reorders_is_written_in_the_kernels_order(data: st.DataObject, seed: int) -> None:
    model, tensors = Fusing(), published(seed)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(seed))
    orders = {model.qk.untyped_storage().data_ptr(): order}
    weight_map = record_map(model.load_weights, SHAPES, model, orders)
    weight_map.apply([Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in tensors.items()])
    places = sorted(data.draw(st.sets(st.integers(0, 7)), label="k"))
    new = torch.randn(len(places)).bfloat16()
    tensors["k"].reshape(-1)[places] = new
    weight_map.apply([Patch("k", "bfloat16", torch.tensor(places, dtype=torch.int64), bits(new))])
    as_loaded = torch.cat([tensors["q"], tensors["k"]]).float().reshape(-1)
    assert torch.equal(model.qk.detach().reshape(-1)[order], as_loaded)
    assert weight_map.fingerprint(3) == fingerprint(tensors, 3)
    broken = Patch("norm", "bfloat16", None, torch.zeros(2, dtype=torch.int16))
    with pytest.raises(EngineError, match="norm"):
        weight_map.apply([Patch("q", "bfloat16", None, bits(torch.ones(24).bfloat16())), broken])
    assert weight_map.fingerprint(3) == fingerprint(tensors, 3)


@pytest.mark.parametrize(("name", "shape"), [("lossy", (6,)), ("summed", (4,)), ("unheard_of", (4,))], ids=str)
def test_what_the_loader_does_not_place_whole_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    model = Fusing()
    with pytest.raises(EngineError, match=f"tensor {name}"):
        record_map(model.load_weights, SHAPES | {name: shape}, model)


def test_a_parameter_that_nothing_fills_is_refused_by_name() -> None:
    model = Fusing()
    with pytest.raises(EngineError, match=r"parameter qk: .* 24 of 32"):
        record_map(model.load_weights, {name: shape for name, shape in SHAPES.items() if name != "k"}, model)
    assert torch.Tensor.copy_(torch.zeros(2), torch.ones(2)).sum() == 2, "copies work again afterwards"

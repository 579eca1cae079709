"""The weight map over a model that fuses, slices and transposes what it loads, as vLLM's models do."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import EngineError
from echo2.weights.fingerprint import fingerprint
from echo2.worker.runtime.engines.derived import Scaled
from echo2.worker.runtime.engines.past import VERSIONS_MAX
from echo2.worker.runtime.engines.ranks import joined
from echo2.worker.runtime.engines.replaced import Replaced
from echo2.worker.runtime.engines.weight_map import Patch, WeightMap, record_map
from tests.unit.worker.runtime.engines.halves import Half

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
                    self.vocab.weight.data[7].copy_(tensor[:4])
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


@pytest.mark.parametrize("reorders", [False, True])
def test_weights_are_those_of_a_former_version_for_a_while(reorders: bool) -> None:
    """Over a change of some weights and one that brings all, in whatever order a kernel keeps them."""
    model = Fusing()
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    weight_map = record_map(
        model.load_weights, SHAPES, model, {model.qk.untyped_storage().data_ptr(): order} if reorders else {}
    )
    versions = [published(0)]
    weight_map.apply([Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in versions[0].items()])
    weight_map.settle(is_kept=True)
    changed = {name: tensor.clone() for name, tensor in versions[0].items()}
    places = torch.tensor([0, 5, 11])
    for name in ("q", "wide", "turned"):
        changed[name].reshape(-1)[places] = torch.tensor([float("nan"), -0.0, 7.0]).bfloat16()
    patches = [Patch(name, "bfloat16", places, bits(changed[name])[places]) for name in ("q", "wide", "turned")]
    weight_map.apply(patches)
    weight_map.settle(is_kept=True, replaced=0)
    whole = {name: tensor.clone() for name, tensor in changed.items()}
    whole["turned"][2, 1], whole["q"][4, 2], whole["vocab"][0, 0] = 3.0, -0.0, 9.0
    weight_map.apply([Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in whole.items()])
    weight_map.settle(is_kept=True, replaced=1)
    versions += [changed, whole]
    assert weight_map.former_versions == [0, 1]
    for _ in range(2):
        for version, tensors in enumerate(versions):
            with weight_map.walking(2) as go_to:
                go_to(version)
                assert weight_map.fingerprint(3) == fingerprint(tensors, 3), version
            assert weight_map.fingerprint(3) == fingerprint(whole, 3), "back to the bit"
    for path in ((2, 1, 0), (0, 2, 1, 1), (1, 0, 1, 2, 0)):
        with weight_map.walking(2) as go_to:
            for version in path:
                go_to(version)
                assert weight_map.fingerprint(3) == fingerprint(versions[version], 3), path
        assert weight_map.fingerprint(3) == fingerprint(whole, 3), "back to the bit"
    with (
        pytest.raises(EngineError, match=r"version 7: expected one that is kept, \[0, 1, 2\]"),
        weight_map.walking(2) as go_to,
    ):
        go_to(0)
        go_to(7)
    assert weight_map.fingerprint(3) == fingerprint(whole, 3), "also where one is not kept"


def test_a_walk_over_several_versions_crosses_each_change_once_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight_map = loaded(published(0))
    for version in range(8):
        weight_map.apply([Patch("q", "bfloat16", torch.tensor([version]), torch.tensor([version + 1]).short())])
        weight_map.settle(is_kept=True, replaced=version)
    crossed: list[Replaced] = []
    exchange = Replaced.exchange
    monkeypatch.setattr(Replaced, "exchange", lambda one: (crossed.append(one), exchange(one)))
    with weight_map.walking(8) as go_to:
        for version in (8, 6, 6, 5, 3, 2):
            go_to(version)
    assert len(crossed) == 2 * 6 and len({id(one) for one in crossed}) == 6


def test_former_versions_are_bounded_by_number_and_bytes() -> None:
    tensors = published(0)
    _, weight_map = loaded(tensors)
    for version in range(40):
        weight_map.apply([Patch("q", "bfloat16", torch.tensor([version % 24]), torch.tensor([version + 1]).short())])
        weight_map.settle(is_kept=True, replaced=version)
    assert len(weight_map.former_versions) == VERSIONS_MAX and weight_map.former_versions[-1] == 39
    for version in range(40, 43):
        whole = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
        weight_map.apply([Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in whole.items()])
        weight_map.settle(is_kept=True, replaced=version)
    assert weight_map.former_versions == [], "all weights changed: a version takes more than is kept"


@pytest.mark.parametrize(("name", "shape"), [("lossy", (6,)), ("summed", (4,)), ("unheard_of", (4,))], ids=str)
def test_what_the_loader_does_not_place_whole_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    model = Fusing()
    shapes = SHAPES | {name: shape}
    with pytest.raises(EngineError, match=f"tensor {name}"):
        joined(shapes, [record_map(model.load_weights, shapes, model).covers()])


def test_a_parameter_that_nothing_fills_is_refused_by_name() -> None:
    model = Fusing()
    with pytest.raises(EngineError, match=r"parameter qk: .* 24 of 32"):
        record_map(model.load_weights, {name: shape for name, shape in SHAPES.items() if name != "k"}, model)
    assert torch.Tensor.copy_(torch.zeros(2), torch.ones(2)).sum() == 2, "copies work again afterwards"


def scaled(factor: float) -> tuple[torch.Tensor, WeightMap]:
    """`q` times a number, the lower rows of it, in a live tensor."""
    live = torch.zeros(3, 4)
    return live, WeightMap({"q": (6, 4)}, {"q": []}, {"q": [Scaled(12, (4, 1), live, factor)]})


def test_what_is_derived_follows_the_published_values_and_proves_them() -> None:
    values = torch.randn(6, 4).bfloat16()
    live, weight_map = scaled(0.3)
    weight_map.apply([Patch("q", "bfloat16", None, bits(values).clone())])
    assert torch.equal(live, values.float()[3:] * 0.3)
    changed = values.clone()
    changed[0, 1], changed[5, 3] = 7.0, float("nan")
    weight_map.apply([Patch("q", "bfloat16", torch.tensor([1, 23]), bits(changed).reshape(6, 4)[[0, 5], [1, 3]])])
    assert weight_map.fingerprint(3) == fingerprint({"q": changed}, 3)
    live[0, 0] += 1
    assert weight_map.fingerprint(3) != fingerprint({"q": changed}, 3), "what is live no longer follows"


def test_an_update_can_be_taken_back_until_it_is_settled() -> None:
    tensors = published(1)
    model, weight_map = loaded(tensors)
    before = [parameter.clone() for parameter in model.parameters()]
    weight_map.settle(is_kept=True)
    weight_map.apply([Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in published(2).items()])
    weight_map.settle(is_kept=False)
    assert all(torch.equal(old, now) for old, now in zip(before, model.parameters(), strict=True))
    live, derived = scaled(2.0)
    values = torch.randn(6, 4).bfloat16()
    derived.apply([Patch("q", "bfloat16", None, bits(values).clone())])
    derived.settle(is_kept=True)
    derived.apply([Patch("q", "bfloat16", torch.tensor([20]), bits(torch.ones(1).bfloat16()))])
    derived.settle(is_kept=False)
    assert torch.equal(live, values.float()[3:] * 2.0) and derived.fingerprint(5) == fingerprint({"q": values}, 5)


def test_ranks_that_hold_parts_have_the_fingerprint_of_the_whole() -> None:
    shapes = {"q": (6, 4), "norm": (4,)}
    tensors = {name: published(4)[name] for name in shapes}
    models = [Half(rank) for rank in range(2)]
    maps = [record_map(model.load_weights, shapes, model) for model in models]
    ranks = joined(shapes, [each.covers() for each in maps])
    for each in maps:
        each.apply([Patch(name, "bfloat16", None, bits(tensor)) for name, tensor in tensors.items()])
    assert ranks.fingerprint([each.sums(3) for each in maps]) == fingerprint(tensors, 3)
    tensors["q"].view(-1)[[1, 20]] = torch.ones(2).bfloat16()
    for each in maps:
        each.apply([Patch("q", "bfloat16", torch.tensor([1, 20]), bits(torch.ones(2).bfloat16()))])
    assert ranks.fingerprint([each.sums(3) for each in maps]) == fingerprint(tensors, 3)
    models[1].norm.data[0] += 1
    assert ranks.fingerprint([each.sums(3) for each in maps]) is None, "the ranks differ in what they share"
    with pytest.raises(EngineError, match="tensor q: the model's loader places 12 of its 24 elements"):
        joined(shapes, [maps[0].covers()])

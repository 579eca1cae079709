"""Rounded layers fed by changes equal fresh rounding: merged, split over ranks that agree on scales, beside what is not rounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from echo2.base.errors import EngineError
from echo2.weights.fingerprint import fingerprint
from echo2.worker.runtime.engines.ranks import joined
from echo2.worker.runtime.engines.rounded import rounded_rows
from echo2.worker.runtime.engines.rounded_map import RoundedLayer, RoundedMap
from echo2.worker.runtime.engines.weight_map import Patch, record_map
from tests.contract.engine_rig import fp8_rows
from tests.unit.worker.runtime.engines.test_many_versions import (
    KEY,
    SHAPES,
    VERSIONS,
    ParallelLayer,
    Weights,
    bits,
    changes,
    random_weights,
)

ROUNDED = ("qkv", "gate_up", "o", "down")
"""Of the layer, as it is served; embedding, the head tied to it and the norm stay as published."""
Rounding = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


def to_fp8(master: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """A scale a row; codes lie turned, as vLLM keeps them."""
    codes, scales = fp8_rows(master)
    return {"weight": codes.t(), "weight_scale": scales}


def to_fp8_whole(master: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """One scale for a matrix: one weight moves every code."""
    scale = (master.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max).reshape(1)
    return {"weight": (master.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def to_int8(master: torch.Tensor) -> Mapping[str, torch.Tensor]:
    codes, scales = rounded_rows(master)
    return {"weight": codes, "weight_scale": scales}


ROUNDINGS = [to_fp8, to_fp8_whole, to_int8]


class Served:
    """One rank: a layer whose matrices are masters for the loader, and codes and scales for what it computes."""

    def __init__(self, rounding: Rounding, rank: int = 0, count: int = 1) -> None:
        self.model = ParallelLayer(rank, count, torch.bfloat16)
        self.made: list[str] = []
        self.fails_at = ""
        self.layers = [self._layer(name, rounding) for name in ROUNDED]
        self.map = RoundedMap(record_map(self.model.load_weights, SHAPES, self.model), self.layers)

    def _layer(self, name: str, rounding: Rounding) -> RoundedLayer:
        master = getattr(self.model, name).data
        live = {key: values.clone() for key, values in rounding(master).items()}

        def counted(values: torch.Tensor) -> Mapping[str, torch.Tensor]:
            if name == self.fails_at:
                raise RuntimeError("memory is short")
            self.made.append(name)
            return rounding(values)

        return RoundedLayer(name, master, live, counted)

    def take(self, patches: Sequence[Patch]) -> None:
        self.map.apply(patches)
        self.map.follow()
        self.map.settle(is_kept=True, replaced=1)

    def live(self) -> dict[str, torch.Tensor]:
        """Bits of all that is live."""
        codes = {f"{layer.name}.{key}": raw(value) for layer in self.layers for key, value in layer.live.items()}
        return (
            codes
            | {name: raw(getattr(self.model, name).data) for name in ("norm",)}
            | {"embed": raw(self.model.embed.weight.data)}
        )


def raw(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).clone()


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def whole(tensors: Weights) -> list[Patch]:
    return [Patch(name, "bfloat16", None, bits(tensor).clone()) for name, tensor in tensors.items()]


def part(tensors: Weights, name: str, places: torch.Tensor | None) -> Patch:
    return Patch(
        name, "bfloat16", places, (bits(tensors[name]) if places is None else bits(tensors[name])[places]).clone()
    )


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_after_fifty_changes_codes_and_scales_are_those_of_fresh_rounding(count: int, rounding: Rounding) -> None:
    generator = torch.Generator().manual_seed(count)
    tensors = random_weights(generator, SHAPES)
    served = [Served(rounding, rank, count) for rank in range(count)]
    ranks = joined(SHAPES, [each.map.covers() for each in served])
    for each in served:
        each.take(whole(tensors))
    for version in range(1, VERSIONS + 1):
        patches = [part(tensors, name, places) for name, places in changes(generator, tensors)]
        fresh = [Served(rounding, rank, count) for rank in range(count)]
        for each, anew in zip(served, fresh, strict=True):
            each.take(patches)
            anew.take(whole(tensors))
            assert is_equal(each.live(), anew.live()), version
        assert ranks.fingerprint([each.map.sums(KEY) for each in served]) == fingerprint(tensors, KEY), version
    assert all(each.model.head.weight is each.model.embed.weight for each in served)


@pytest.mark.parametrize(
    ("name", "layer"), [("k", "qkv"), ("up", "gate_up"), ("o", "o"), ("down", "down"), ("norm", ""), ("embed", "")]
)
def test_only_the_layers_that_a_change_touches_are_rounded_again(name: str, layer: str) -> None:
    tensors = random_weights(torch.Generator().manual_seed(5), SHAPES)
    served = Served(to_fp8)
    served.take(whole(tensors))
    before, served.made[:] = served.live(), []
    tensors[name].view(-1)[1] = 3.0
    untouched = [part(tensors, other, torch.zeros(0, dtype=torch.int64)) for other in SHAPES if other != name]
    served.take([part(tensors, name, torch.tensor([1])), *untouched])
    assert served.made == ([layer] if layer else [])
    after = served.live()
    moved = {key.partition(".")[0] for key in before if not torch.equal(before[key], after[key])}
    assert moved == {layer or name}
    assert sum(map(sum, served.map.sums(KEY))) % (1 << 64) == fingerprint(tensors, KEY)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_what_is_taken_back_leaves_masters_codes_and_scales(rounding: Rounding) -> None:
    """Before it was rounded, half rounded, and after, as where another process failed; also of a whole keyframe."""
    generator = torch.Generator().manual_seed(6)
    tensors = random_weights(generator, SHAPES)
    served = Served(rounding)
    served.take(whole(tensors))
    before = served.live()
    other = random_weights(generator, SHAPES)
    places = torch.arange(0, 16, 3)
    for patches, stage in itertools.product(
        ([part(other, name, places) for name in SHAPES], whole(other)), ("before", "half", "after")
    ):
        served.map.apply(patches[:4])
        served.map.apply(patches[4:], goes_on=True)
        if stage == "half":
            served.fails_at = "o"
            with pytest.raises(RuntimeError, match="memory is short"):
                served.map.follow()
            served.fails_at = ""
            assert not is_equal(served.live(), before)
        elif stage == "after":
            served.map.follow()
            assert not is_equal(served.live(), before)
        served.map.settle(is_kept=False)
        assert is_equal(served.live(), before), stage
        assert sum(map(sum, served.map.sums(KEY))) % (1 << 64) == fingerprint(tensors, KEY)
    assert served.map.former_versions == []


def test_an_update_that_does_not_apply_rounds_nothing() -> None:
    tensors = random_weights(torch.Generator().manual_seed(7), SHAPES)
    served = Served(to_fp8)
    served.take(whole(tensors))
    before, served.made[:] = served.live(), []
    wrong = Patch("norm", "float32", None, torch.zeros(16, dtype=torch.int32))
    with pytest.raises(EngineError, match="tensor norm: .* old weights are back"):
        served.map.apply([part(tensors, "q", torch.tensor([0])), wrong])
    served.map.settle(is_kept=False)
    assert served.made == [] and is_equal(served.live(), before)


def test_the_fingerprint_counts_only_while_codes_and_scales_follow() -> None:
    tensors = random_weights(torch.Generator().manual_seed(8), SHAPES)
    served = Served(to_fp8)
    served.take(whole(tensors))
    for layer, key in itertools.product(served.layers, ("weight", "weight_scale")):
        kept = layer.live[key].clone()
        layer.live[key].view(torch.uint8)[0] ^= 1
        sums = served.map.sums(KEY)
        assert sum(map(sum, sums)) % (1 << 64) != fingerprint(tensors, KEY)
        layer.live[key].copy_(kept)
    assert sum(map(sum, served.map.sums(KEY))) % (1 << 64) == fingerprint(tensors, KEY)


def test_the_reference_keeps_zeros_and_the_largest_of_a_row() -> None:
    rows = torch.tensor([[0.0, 0.0], [-3.0, 1.5], [1e-30, 0.0]]).bfloat16()
    codes, scales = fp8_rows(rows)
    assert codes.float()[:2].tolist() == [[0.0, 0.0], [-448.0, 224.0]]
    assert (codes.float() * scales)[1].tolist() == [-3.0, 1.5]
    assert float(scales[0, 0]) > 0 and float(codes.float()[2, 0]) == 0.0

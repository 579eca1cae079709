"""The weight map over a model that merges, splits and transposes what it loads, as vLLM's models do."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo2.base.errors import EngineError, ResourceError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.weights.fingerprint import MODULUS, fingerprint
from echo2.worker.engines.vllm import vllm_weights
from echo2.worker.engines.vllm.vllm_weights import NO_FINGERPRINT, VllmWeights, joined, read_patches
from echo2.worker.engines.vllm.weight_map import Patch, RoundedLayer, TensorPiece, WeightMap, record_map
from tests.contract.engine_rig import Staged, bits_of, fp8_rows, keyframe_of

VERSIONS, KEY, HEAD = 12, 11, 4
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
    """One of `count` tensor parallel ranks: q/k/v and gate/up merged and split by rows, o and down split by columns, o
    also transposed, the vocabulary split and padded; the head is the embedding itself."""

    def __init__(self, rank: int = 0, count: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.count = rank, count
        kv_rows = max(HEAD, 2 * HEAD // count)
        self.rows = {"q": 4 * HEAD // count, "k": kv_rows, "v": kv_rows, "gate": 24 // count, "up": 24 // count}
        self.embed = Vocabulary(count, dtype)
        self.head = Vocabulary(count, dtype)
        self.head.weight = self.embed.weight
        self.qkv = torch.nn.Parameter(torch.zeros(self.rows["q"] + 2 * kv_rows, 16, dtype=dtype))
        self.gate_up = torch.nn.Parameter(torch.zeros(2 * self.rows["gate"], 16, dtype=dtype))
        self.o = torch.nn.Parameter(torch.zeros(4 * HEAD // count, 16, dtype=dtype))
        self.down = torch.nn.Parameter(torch.zeros(16, 24 // count, dtype=dtype))
        self.norm = torch.nn.Parameter(torch.zeros(16, dtype=dtype))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "q" | "k" | "v":
                    self._merge(self.qkv.data, ("q", "k", "v"), name, tensor)
                case "gate" | "up":
                    self._merge(self.gate_up.data, ("gate", "up"), name, tensor)
                case "o":
                    own = self.o.data
                    own.copy_(tensor.narrow(1, self.rank * own.shape[0], own.shape[0]).t())
                case "down":
                    own = self.down.data
                    own.copy_(tensor.narrow(1, self.rank * own.shape[1], own.shape[1]))
                case "embed":
                    held = self.embed.weight.data
                    first = self.rank * held.shape[0]
                    rows = max(0, min(held.shape[0], tensor.shape[0] - first))
                    held[:rows].copy_(tensor.narrow(0, first, rows))
                case "norm":
                    self.norm.data[:] = tensor  # as vLLM's loader of convolutions does
                case "lossy":
                    self.embed.weight.data[11].copy_(tensor[:16])
                case "derived":  # as vLLM reads the A of a state space
                    self.norm.data.copy_(tensor)
                    self.norm.data.copy_(-self.norm.exp())
                case "summed":
                    self.norm.data.copy_(tensor + 1)
                case "doubled":
                    self.norm.data[:] = 2 * tensor
                case "scattered":  # no view of what it fills
                    self.norm.data[torch.arange(16)] = tensor
                case _:
                    raise KeyError(name)

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


def whole(tensors: Weights) -> list[Patch]:
    return [Patch(name, "bfloat16", None, bits(tensor).clone()) for name, tensor in tensors.items()]


def part(tensors: Weights, name: str, places: torch.Tensor | None) -> Patch:
    found = bits(tensors[name]) if places is None else bits(tensors[name])[places]
    return Patch(name, "bfloat16", places, found.clone())


def mapped(
    model: ParallelLayer, shapes: dict[str, tuple[int, ...]] = SHAPES, layers: Sequence[RoundedLayer] = ()
) -> WeightMap:
    return record_map(model.load_weights, shapes, model, layers=layers)


def summed(weight_map: WeightMap, key: int = KEY) -> int:
    """The fingerprint of a map that holds everything."""
    return sum(map(sum, weight_map.sums(key))) % MODULUS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_vllm_merges_splits_and_ties_is_what_its_loader_would_put_there(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    tensors = random_weights(generator, SHAPES)
    models = [ParallelLayer(rank, count, dtype) for rank in range(count)]
    maps = [mapped(model) for model in models]
    ranks = joined(SHAPES, [each.covers() for each in maps])
    for each in maps:
        each.apply(whole(tensors))
    for version in range(1, VERSIONS + 1):
        patches = [part(tensors, name, places) for name, places in changes(generator, tensors)]
        for each in maps:
            each.apply(patches)
            each.settle(is_kept=True)
        assert ranks.fingerprint([each.sums(KEY) for each in maps]) == fingerprint(tensors, KEY), version
    for rank, model in enumerate(models):
        fresh = ParallelLayer(rank, count, dtype)
        fresh.load_weights((name, tensor.to(dtype)) for name, tensor in tensors.items())
        assert model.head.weight is model.embed.weight
        for (name, got), expected in zip(model.named_parameters(), fresh.parameters(), strict=True):
            assert torch.equal(got, expected), (rank, name)
    if count > 1:
        models[1].norm.data[0] += 1
        assert ranks.fingerprint([each.sums(KEY) for each in maps]) is None, "the ranks differ in what they share"
        with pytest.raises(EngineError, match="tensor embed: the model's loader places"):
            joined(SHAPES, [maps[0].covers()])


@pytest.mark.parametrize(
    ("name", "count"),
    [("lossy", 18), ("derived", 16), ("summed", 16), ("doubled", 16), ("scattered", 16), ("unheard_of", 4)],
)
def test_what_the_loader_does_not_place_whole_is_refused_by_name(name: str, count: int) -> None:
    shapes = SHAPES | {name: (count,)}
    with pytest.raises(EngineError, match=f"tensor {name}"):
        joined(shapes, [mapped(ParallelLayer(), shapes).covers()])
    with pytest.raises(EngineError, match=r"parameter qkv: .* 384 of 512"):
        mapped(ParallelLayer(), {name: shape for name, shape in SHAPES.items() if name != "k"})
    plain = torch.zeros(2)
    plain[:1] = torch.Tensor.copy_(torch.zeros(1), torch.ones(1))
    assert plain.sum() == 1, "copies work again afterwards"


def test_what_is_derived_follows_the_published_values_and_proves_them() -> None:
    """The lower rows of q times a number, in a live tensor."""
    values, live = torch.randn(6, 4).bfloat16(), torch.zeros(3, 4)
    weight_map = WeightMap({"q": (6, 4)}, {"q": [TensorPiece(12, (4, 1), live, 0.3)]})
    weight_map.apply(whole({"q": values}))
    assert torch.equal(live, values.float()[3:] * 0.3)
    changed = values.clone()
    changed[0, 1], changed[5, 3] = 7.0, float("nan")
    weight_map.apply([part({"q": changed}, "q", torch.tensor([1, 23]))])
    assert summed(weight_map, 3) == fingerprint({"q": changed}, 3)
    weight_map.settle(is_kept=False)
    assert torch.equal(live, values.float()[3:] * 0.3) and summed(weight_map, 3) == fingerprint({"q": values}, 3)
    live[0, 0] += 1
    assert summed(weight_map, 3) != fingerprint({"q": values}, 3), "what is live no longer follows"


def test_a_failure_in_the_middle_is_undone_and_any_update_until_it_is_settled() -> None:
    tensors, other = (random_weights(torch.Generator().manual_seed(seed), SHAPES) for seed in (1, 2))
    model = ParallelLayer()
    weight_map = mapped(model)
    weight_map.apply(whole(tensors))
    weight_map.settle(is_kept=True)
    before = [parameter.clone() for parameter in model.parameters()]
    broken = Patch("norm", "float32", None, torch.zeros(16, dtype=torch.int32))
    with pytest.raises(EngineError, match="tensor norm: .* old weights are back"):
        weight_map.apply([part(other, "q", torch.tensor([0, 5])), *whole(other)[:-1], broken])
    assert all(torch.equal(old, now) for old, now in zip(before, model.parameters(), strict=True))
    weight_map.apply(whole(other))
    weight_map.settle(is_kept=False)
    assert all(torch.equal(old, now) for old, now in zip(before, model.parameters(), strict=True))
    assert summed(weight_map, 9) == fingerprint(tensors, 9)


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


class Served:
    """One rank: a layer whose matrices are masters for the loader, and codes and scales for what it computes."""

    def __init__(self, rounding: Rounding, rank: int = 0, count: int = 1) -> None:
        self.model = ParallelLayer(rank, count, torch.bfloat16)
        self.made: list[str] = []
        self.fails_at = ""
        self.layers = [self._layer(name, rounding) for name in ROUNDED]
        self.map = mapped(self.model, SHAPES, self.layers)

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
        self.map.settle(is_kept=True)

    def live(self) -> dict[str, torch.Tensor]:
        codes = {f"{layer.name}.{key}": raw(value) for layer in self.layers for key, value in layer.live.items()}
        return codes | {"norm": raw(self.model.norm.data), "embed": raw(self.model.embed.weight.data)}


def raw(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).clone()


def are_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize(("count", "rounding"), [(1, to_fp8), (2, to_fp8_whole), (4, to_fp8)])
def test_after_many_changes_codes_and_scales_are_those_of_fresh_rounding(count: int, rounding: Rounding) -> None:
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
            assert are_equal(each.live(), anew.live()), version
        assert ranks.fingerprint([each.map.sums(KEY) for each in served]) == fingerprint(tensors, KEY), version


@pytest.mark.parametrize("rounding", [to_fp8, to_fp8_whole])
def test_only_what_a_change_touches_is_rounded_and_what_is_taken_back_leaves_no_trace(rounding: Rounding) -> None:
    """Taken back before it was rounded, half rounded, and after, as where another process failed; also a whole keyframe."""
    served, tensors = Served(rounding), random_weights(torch.Generator().manual_seed(5), SHAPES)
    served.take(whole(tensors))
    for name, layer in (("k", "qkv"), ("up", "gate_up"), ("o", "o"), ("down", "down"), ("norm", ""), ("embed", "")):
        served.made.clear()
        tensors[name].view(-1)[1] = 3.0
        untouched = [part(tensors, other, torch.zeros(0, dtype=torch.int64)) for other in SHAPES if other != name]
        served.take([part(tensors, name, torch.tensor([1])), *untouched])
        assert served.made == ([layer] if layer else []) and summed(served.map) == fingerprint(tensors, KEY)
    before, places = served.live(), torch.arange(0, 16, 3)
    other = random_weights(torch.Generator().manual_seed(7), SHAPES)
    partly = [part(other, name, places) for name in SHAPES]
    for patches, stage in itertools.product((partly, whole(other)), ("before", "half", "after")):
        served.map.apply(patches[:4])
        served.map.apply(patches[4:], goes_on=True)
        served.fails_at = "o" if stage == "half" else ""
        with pytest.raises(RuntimeError, match="memory is short") if stage == "half" else contextlib.nullcontext():
            if stage != "before":
                served.map.follow()
        served.fails_at = ""
        assert stage == "before" or not are_equal(served.live(), before)
        served.map.settle(is_kept=False)
        assert are_equal(served.live(), before) and summed(served.map) == fingerprint(tensors, KEY), stage
    wrong = Patch("norm", "float32", None, torch.zeros(16, dtype=torch.int32))
    with pytest.raises(EngineError, match="tensor norm: .* old weights are back"):
        served.map.apply([part(other, "q", torch.tensor([0])), wrong])
    served.map.settle(is_kept=False)
    assert are_equal(served.live(), before)
    for layer, key in itertools.product(served.layers, ("weight", "weight_scale")):
        kept = layer.live[key].clone()
        layer.live[key].view(torch.uint8)[0] ^= 1
        assert summed(served.map) != fingerprint(tensors, KEY), "it counts only while codes follow"
        layer.live[key].copy_(kept)


# ---- an update over the ranks of an engine


class Rank(ParallelLayer):
    """It answers what the extension answers. `sizes`: of the files that it read."""

    def __init__(self, number: int) -> None:
        super().__init__(number, 2)
        self.sizes: list[int] = []

    def answer(self, method: str, *arguments: Any) -> Any:
        match method:
            case "echo2_map":
                self.map = record_map(self.load_weights, {name: tuple(shape) for name, shape in arguments[0]}, self)
                return self.map.covers()
            case "echo2_apply":
                try:
                    self.sizes.append(Path(arguments[0]).stat().st_size)
                    self.map.apply(read_patches(Path(arguments[0]), arguments[1]), goes_on=arguments[3])
                except EngineError as error:
                    return f"error: {error}"
                return ""
            case "echo2_settle":
                self.map.settle(is_kept=arguments[0])
                return None
            case _:
                return self.map.sums(arguments[0])

    def fail(self) -> None:
        """Writes of the norm fail from now on."""
        self.norm.data = self.norm.data.double()
        self.map = record_map(self.load_weights, SHAPES, self)


def published(seed: int) -> Weights:
    return random_weights(torch.Generator().manual_seed(seed), SHAPES)


async def put(weights: VllmWeights, staged: Staged) -> None:
    await weights.stage(staged)
    await weights.apply()
    await weights.settle(is_kept=True)


@contextlib.contextmanager
def served_by_two() -> Iterator[tuple[list[Rank], VllmWeights]]:
    ranks = [Rank(0), Rank(1)]

    async def rpc(method: str, *arguments: object) -> list[Any]:
        return [rank.answer(method, *arguments) for rank in ranks]

    weights = VllmWeights(rpc, "layer", None)
    yield ranks, weights
    weights.close()


async def test_an_update_reaches_every_rank_or_none_and_ranks_that_differ_have_no_fingerprint() -> None:
    with served_by_two() as (ranks, weights):
        with pytest.raises(EngineError, match="expected a keyframe first"):
            await weights.stage(Staged(Version(1), Version(0), []))
        tensors = published(0)
        await put(weights, keyframe_of(tensors, 0))
        assert await weights.fingerprint(5) == fingerprint(tensors, 5)
        tensors["q"].view(-1)[[2, 200]] = torch.ones(2).bfloat16()
        update = TensorUpdate("q", "bfloat16", SHAPES["q"], np.array([2, 200]), bits_of(torch.ones(2)))
        await put(weights, Staged(Version(1), Version(0), [update]))
        assert await weights.fingerprint(5) == fingerprint(tensors, 5)
        kept = ranks[0].norm.data.clone()
        ranks[0].norm.data[1] += 1
        assert await weights.fingerprint(5) == NO_FINGERPRINT
        ranks[0].norm.data.copy_(kept)
        ranks[1].fail()
        before = ranks[0].qkv.clone()
        await weights.stage(keyframe_of(published(2), 0))
        with pytest.raises(EngineError, match=r"rank 1 of 2: tensor norm: .* expected an engine of dtype bfloat16"):
            await weights.apply()
        assert torch.equal(ranks[0].qkv, before), "the rank that had written has its old values back"


async def test_a_keyframe_goes_through_shared_memory_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "ROUND_BYTES", 600)
    with served_by_two() as (ranks, weights):
        tensors = published(0)
        await put(weights, keyframe_of(tensors, 0))
        whole = sum(tensor.nbytes for tensor in tensors.values())
        assert all(max(rank.sizes) <= 768 and sum(rank.sizes) == whole for rank in ranks), "never the whole of it"
        assert await weights.fingerprint(5) == fingerprint(tensors, 5)
        ranks[1].fail()  # in its last round
        before = [parameter.clone() for parameter in ranks[0].parameters()]
        await weights.stage(keyframe_of(published(2), 0))
        with pytest.raises(EngineError, match="tensor norm"):
            await weights.apply()
        now = ranks[0].parameters()
        assert all(torch.equal(old, new) for old, new in zip(before, now, strict=True)), "all rounds are undone"


async def test_full_shared_memory_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with served_by_two() as (_, weights):
        weights._path = Path("/dev/full")  # a file to which nothing more can be written
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", lambda *_, **__: None)
            with pytest.raises(ResourceError, match=r"expected room for .* got: No space left on device; .*--shm-size"):
                await weights.stage(keyframe_of(published(0), 0))

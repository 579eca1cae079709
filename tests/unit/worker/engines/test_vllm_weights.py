"""What the engine sends to vLLM's processes, with two ranks in this process that hold real weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo2.base.errors import EngineError, ResourceError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engines.vllm import vllm_weights
from echo2.worker.engines.vllm.vllm_weights import NO_FINGERPRINT, VllmWeights, read_patches
from echo2.worker.engines.vllm.weight_map import record_map
from tests.contract.engine_rig import Staged, bits_of, keyframe_of
from tests.unit.worker.engines.test_weight_map import SHAPES, ParallelLayer, Weights, random_weights


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


def play(scene: Callable[[list[Rank], VllmWeights], Awaitable[None]]) -> None:
    ranks = [Rank(0), Rank(1)]

    async def rpc(method: str, *arguments: object) -> list[Any]:
        return [rank.answer(method, *arguments) for rank in ranks]

    async def body() -> None:
        weights = VllmWeights(rpc, "layer", None)
        await scene(ranks, weights)
        weights.close()

    asyncio.run(body())


def test_an_update_reaches_every_rank_or_none_and_ranks_that_differ_have_no_fingerprint() -> None:
    async def scene(ranks: list[Rank], weights: VllmWeights) -> None:
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

    play(scene)


def test_a_keyframe_goes_through_shared_memory_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "ROUND_BYTES", 600)

    async def scene(ranks: list[Rank], weights: VllmWeights) -> None:
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

    play(scene)


def test_full_shared_memory_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(ranks: list[Rank], weights: VllmWeights) -> None:
        weights._path = Path("/dev/full")  # a file to which nothing more can be written
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", lambda *_, **__: None)
            with pytest.raises(ResourceError, match=r"expected room for .* got: No space left on device; .*--shm-size"):
                await weights.stage(keyframe_of(published(0), 0))

    play(scene)

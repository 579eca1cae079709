"""What the engine sends to vLLM's processes, with two ranks in this process that hold real weights."""

from __future__ import annotations

import asyncio
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
from tests.contract.engine_rig import Staged, bits_of
from tests.unit.worker.engines.halves import Half

SHAPES = {"q": (6, 4), "norm": (4,)}


class Rank(Half):
    """It answers what the extension answers. `sizes`: of the files that it read."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
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


def published(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def keyframe(tensors: dict[str, torch.Tensor]) -> Staged:
    updates = [TensorUpdate(n, "bfloat16", tuple(t.shape), None, bits_of(t)) for n, t in tensors.items()]
    return Staged(Version(0), None, updates)


def test_an_update_reaches_every_rank_or_none() -> None:
    ranks = [Rank(0), Rank(1)]

    async def rpc(method: str, *arguments: object) -> list[Any]:
        return [rank.answer(method, *arguments) for rank in ranks]

    async def body() -> None:
        weights = VllmWeights(rpc, "halves", None)
        first = published(0)
        await weights.stage(keyframe(first))
        await weights.apply()
        await weights.settle(is_kept=True)
        assert await weights.fingerprint(5) == fingerprint(first, 5)

        changed = {name: tensor.clone() for name, tensor in first.items()}
        changed["q"].view(-1)[[2, 19]] = torch.ones(2).bfloat16()
        update = TensorUpdate("q", "bfloat16", (6, 4), np.array([2, 19]), bits_of(torch.ones(2)))
        await weights.stage(Staged(Version(1), Version(0), [update]))
        await weights.apply()
        await weights.settle(is_kept=True)
        assert await weights.fingerprint(5) == fingerprint(changed, 5)

        ranks[1].q.data = ranks[1].q.data.double()  # writes of this rank fail from now on
        ranks[1].map = record_map(ranks[1].load_weights, SHAPES, ranks[1])
        before = ranks[0].q.clone()
        await weights.stage(keyframe(published(2)))
        with pytest.raises(EngineError, match=r"rank 1 of 2: tensor q: .* expected an engine of dtype bfloat16"):
            await weights.apply()
        assert torch.equal(ranks[0].q, before), "the rank that had written has its old values back"
        weights.close()

    asyncio.run(body())


def test_ranks_that_differ_in_what_they_share_have_no_fingerprint() -> None:
    ranks = [Rank(0), Rank(1)]

    async def rpc(method: str, *arguments: object) -> list[Any]:
        return [rank.answer(method, *arguments) for rank in ranks]

    async def body() -> None:
        weights = VllmWeights(rpc, "halves", None)
        with pytest.raises(EngineError, match="expected a keyframe first"):
            await weights.stage(Staged(Version(1), Version(0), []))
        await weights.stage(keyframe(published(0)))
        await weights.apply()
        await weights.settle(is_kept=True)
        ranks[0].norm.data[1] += 1
        assert await weights.fingerprint(5) == NO_FINGERPRINT
        weights.close()

    asyncio.run(body())


def test_a_keyframe_goes_through_shared_memory_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "ROUND_BYTES", 16)
    ranks = [Rank(0), Rank(1)]

    async def rpc(method: str, *arguments: object) -> list[Any]:
        return [rank.answer(method, *arguments) for rank in ranks]

    async def body() -> None:
        weights = VllmWeights(rpc, "halves", None)
        first = published(0)
        await weights.stage(keyframe(first))
        await weights.apply()
        assert all(sorted(rank.sizes) == [8, 48] for rank in ranks), "never the whole of it"
        assert all(not rank.map._undo for rank in ranks), "nothing is kept of weights that were no version"
        await weights.settle(is_kept=True)
        assert await weights.fingerprint(5) == fingerprint(first, 5)

        ranks[1].norm.data = ranks[1].norm.data.double()  # its second round fails
        ranks[1].map = record_map(ranks[1].load_weights, SHAPES, ranks[1])
        before = [ranks[0].q.clone(), ranks[0].norm.clone()]
        await weights.stage(keyframe(published(2)))
        with pytest.raises(EngineError, match="tensor norm"):
            await weights.apply()
        assert torch.equal(ranks[0].q, before[0]) and torch.equal(ranks[0].norm, before[1]), "both rounds are undone"
        weights.close()

    asyncio.run(body())


def test_full_shared_memory_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(0), Rank(1)]

    async def rpc(method: str, *arguments: object) -> list[Any]:
        return [rank.answer(method, *arguments) for rank in ranks]

    async def body() -> None:
        weights = VllmWeights(rpc, "halves", None)
        weights._path = Path("/dev/full")  # a file to which nothing more can be written
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(ResourceError, match=r"expected room for 56 .* got: No space left on device; .*--shm-size"):
            await weights.stage(keyframe(published(0)))
        monkeypatch.undo()
        weights.close()

    asyncio.run(body())

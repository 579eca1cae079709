"""The embedded engine in bf16: as near to float64 as bf16 rounds, live weights bit for bit, half the memory.

What the contract in test_engine.py asks to the fifth decimal is bound to float32; the code is the same.
"""

import dataclasses
import statistics
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from echo2.base.errors import EngineError
from echo2.base.staged import TensorUpdate
from echo2.cost_model.sizing import Quantisation
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.embedded.live_weights import LiveWeights, read_shape
from echo2.worker.engines.engine import SwapMode
from tests.contract.engine_rig import Collected, Rig, Staged, refused, tiny_config
from tests.contract.test_engine import LONG, prompts

CONFIG = tiny_config("qwen3", max_position_embeddings=1024)
pytestmark = pytest.mark.skipif(
    not (torch.cpu.get_capabilities().get("amx_bf16") or torch.cpu.get_capabilities().get("avx512_bf16")),
    reason="this processor does not multiply bf16",
)
MEAN_NATS, WORST_NATS = 0.01, 0.1
"""Off the float64 pass: a product's result is rounded to 8 bits, a relative error of 0.2 % at logits of up to 5."""


@pytest.fixture(scope="module")
def rigs() -> Iterator[list[Rig]]:
    def make(config: dict[str, object]) -> EmbeddedEngine:
        return EmbeddedEngine(config, slot_count=8, quantisation=Quantisation.BF16)

    made = [Rig("embedded-bf16", CONFIG, make) for _ in range(2)]
    yield made
    for rig in made:
        rig.close()


def errors(rig: Rig, prompt: tuple[int, ...], sequence: Collected, version: int) -> list[float]:
    judged = rig.raw_logprobs(version, prompt, sequence.token_ids)
    pairs = zip(sequence.token_ids, sequence.raw_logprobs, strict=True)
    return [abs(float(judged[at, token]) - said) for at, (token, said) in enumerate(pairs)]


def test_log_probabilities_are_as_near_as_bf16_rounds_and_a_swap_makes_the_new_weights_live(rigs: list[Rig]) -> None:
    rig, fresh = rigs
    long = tuple(np.random.default_rng(1).integers(0, 96, 700).tolist())  # longer than our own kernel's attention takes
    asked = [*prompts(3, seed=2), (1, 2, 3, 4), (1, 2, 3, 4), long]

    async def body() -> list[Collected]:
        requests = [rig.request(p, dataclasses.replace(LONG, seed=n), prefix=str(p)) for n, p in enumerate(asked)]
        off = []
        for prompt, sequence in zip(asked, await rig.generate(*requests), strict=True):
            assert set(sequence.versions) == {0} and len(sequence.token_ids) == LONG.max_new_tokens
            off += errors(rig, prompt, sequence, 0)
        assert statistics.fmean(off) < MEAN_NATS and max(off) < WORST_NATS
        assert statistics.fmean(off) > 1e-5, "it computes in bf16"
        await rig.engine.swap(rig.delta(1), SwapMode.RECOMPUTE_KV)
        assert await rig.engine.fingerprint(5) == fingerprint(rig.published(1), 5)
        return await rig.generate(*(rig.request(p, LONG, prefix=f"new {p}") for p in asked))

    async def at_once() -> list[Collected]:
        await fresh.engine.swap(fresh.keyframe(1), SwapMode.RECOMPUTE_KV)
        return await fresh.generate(*(fresh.request(p, LONG, prefix=f"new {p}") for p in asked))

    later, expected = rig.run(body), fresh.run(at_once)
    for prompt, sequence, same in zip(asked, later, expected, strict=True):
        assert set(sequence.versions) == {1}
        assert statistics.fmean(errors(rig, prompt, sequence, 1)) < MEAN_NATS
        assert sequence.token_ids[:8] == same.token_ids[:8], "as an engine that never had another version"


def test_a_version_in_float32_is_refused_by_name_and_weights_take_half_the_memory(rigs: list[Rig]) -> None:
    rig, shape = rigs[0], read_shape(CONFIG)
    half, whole = (LiveWeights(shape, None, dtype).tensors.values() for dtype in (torch.bfloat16, torch.float32))
    assert 2 * sum(tensor.nbytes for tensor in half) == sum(tensor.nbytes for tensor in whole)

    async def body() -> None:
        before = await rig.engine.fingerprint(3)
        wide = rig.keyframe(1).tensors
        name, tensor = next(iter(rig.models[1].named_parameters()))
        bits = tensor.detach().contiguous().numpy().view(np.uint32).reshape(-1)
        staged = Staged(
            rig.keyframe(1).version, None, [TensorUpdate(name, "float32", tuple(tensor.shape), None, bits), *wide[1:]]
        )
        said = await refused(rig.engine.swap(staged, SwapMode.RECOMPUTE_KV), EngineError)
        assert name in said and "bfloat16 (model.weights_dtype)" in said and "worker.quantisation none" in said
        assert rig.engine.version == 0 and await rig.engine.fingerprint(3) == before

    rig.run(body)

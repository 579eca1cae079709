"""What vLLM tells of a mixture of experts: which experts computed each token, as transformers' routers choose them, and the learner
computes with."""

from pathlib import Path

import numpy as np
import pytest
import torch

from echo2.base.errors import ConfigError
from echo2.base.rollout import ROUTING_KEY, RoutingShape, SamplingParams, unpacked
from echo2.weights.routers import Routers
from echo2.worker.engines.engine import GenerateRequest, SwapMode, TokenChunk
from echo2.worker.engines.vllm.vllm_engine import VllmEngine
from tests.contract.engine_rig import delta_of, generated, keyframe_of, make_versions, tiny_config
from tests.unit.learner.made import new_trainer
from tests.unit.learner.test_routing import off, sampled, save_undecided, without_routing

pytestmark = pytest.mark.vllm
CONFIG = tiny_config("qwen3_moe") | {ROUTING_KEY: True}
SHAPE = RoutingShape(2, 2, 6)
PROMPT = tuple((7 * place + 3) % 96 for place in range(90))  # several blocks of the cache


def chosen_by(model: torch.nn.Module, tokens: tuple[int, ...]) -> np.ndarray:
    """The experts of transformers' routers at each position [positions, L, K], in ascending order."""
    routers = Routers(model, "judge")
    with torch.no_grad(), routers.recording() as found_LTK:
        model(torch.tensor([tokens]))
    assert routers.shape == SHAPE
    return np.sort(torch.stack(found_LTK, 1).numpy(), axis=-1)


def rows_of(raw: bytes) -> np.ndarray:
    return np.sort(unpacked(raw, SHAPE), axis=-1)


def tokens_of(chunks: list[TokenChunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def request(name: str, prompt: tuple[int, ...], seed: int, token_ids: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        name, prompt, token_ids, SamplingParams(max_new_tokens=30, seed=seed), name.partition("/")[0]
    )


async def test_each_token_and_a_prompt_found_in_the_cache_tell_the_experts_that_computed_them() -> None:
    old, new, _ = make_versions(CONFIG)
    engine = VllmEngine(CONFIG, slot_count=4)
    await engine.start()
    try:
        await engine.swap(keyframe_of(old, 0), SwapMode.RECOMPUTE_KV)
        group = await generated(engine, [request(f"a/{seed}", PROMPT, seed) for seed in range(6)])
        longer = PROMPT + tokens_of(group["a/0"])
        turn = await generated(engine, [request("b/0", longer, 1), request("c/0", (5,), 2)])
        await engine.swap(delta_of(old, new, 0, 1), SwapMode.RECOMPUTE_KV)
        begun = tokens_of(group["a/1"])[:10]
        after = await generated(engine, [request("d/0", PROMPT, 3), request("e/0", PROMPT, 4, begun)])
    finally:
        await engine.stop()
    prompts = {"b/0": longer, "c/0": (5,)}
    for judge, told in ((old, group | turn), (new, after)):
        for name, chunks in told.items():
            prompt = prompts.get(name, PROMPT)
            before = prompt + (begun if name == "e/0" else ())
            expected = chosen_by(judge, before + tokens_of(chunks))
            found = rows_of(b"".join(chunk.routing.tokens for chunk in chunks))
            assert np.array_equal(found, expected[len(before) - 1 : -1]), name
            told_prompt = b"".join(chunk.routing.prompt for chunk in chunks)
            if name in ("a/0", "b/0", "d/0"):  # one of a group tells its prompt's
                assert np.array_equal(rows_of(told_prompt), expected[: len(prompt) - 1]), name
            else:
                assert not told_prompt, name


def test_the_learner_computes_each_token_with_the_experts_that_sampled_it(tmp_path: Path) -> None:
    trainer = new_trainer(save_undecided(tmp_path), replay_routing=True, row_tokens=100)
    group = sampled(trainer, 4, noise=0.0, make=VllmEngine)
    assert [len(r.routing.tokens) // SHAPE.row_bytes for r in group.rollouts] == [40] * 4
    assert [len(r.routing.prompt) // SHAPE.row_bytes for r in group.rollouts] == [36, 0, 0, 0]
    assert off(trainer, group) <= 1e-5
    with torch.no_grad():
        for name, parameter in trainer.model.hf_model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.add_(1e-6 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    assert off(trainer, group) <= 1e-4
    assert off(trainer, without_routing(group)) > 1e-2, "its own routers would choose otherwise"


def test_drafts_with_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft_tokens: expected 0"):
        VllmEngine(CONFIG, draft_tokens=2)

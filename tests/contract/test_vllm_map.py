"""What vLLM's own loader lets us map: a mixture of experts, and models that are refused by name."""

import json
from pathlib import Path

import pytest
import torch

from echo2.base.errors import EngineError
from echo2.base.rollout import SamplingParams
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engines.engine import GenerateRequest, SwapMode
from echo2.worker.engines.vllm.vllm_engine import VllmEngine
from tests.contract.engine_rig import delta_of, generated, keyframe_of, refused, tiny_config
from tests.contract.families import FAMILIES, RATIO_OFF_MAX, outcome_of

pytestmark = pytest.mark.vllm
EXPERTS = 4
CONFIG = tiny_config(
    "qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    norm_topk_prob=True,
    tie_word_embeddings=False,
    num_hidden_layers=2,
)


def checkpoint() -> dict[str, torch.Tensor]:
    """Tensors under the names of a Qwen3-MoE checkpoint."""
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (96, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (96, 64),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"{at}{name}.weight"] = (64,)
        attention = {"q_proj": (128, 64), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (64, 128)}
        for name, size in (attention | {"q_norm": (32,), "k_norm": (32,)}).items():
            sizes[f"{at}self_attn.{name}.weight"] = size
        sizes[f"{at}mlp.gate.weight"] = (EXPERTS, 64)
        for expert in range(EXPERTS):
            for name, size in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items():
                sizes[f"{at}mlp.experts.{expert}.{name}.weight"] = size
    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.randn(size, generator=generator) * 0.1 + ("norm" in name)).bfloat16()
        for name, size in sizes.items()
    }


def judge(folder: Path, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The Hugging Face model with these weights, in float32 (its experts refuse float64)."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    save_file({name: tensor.float() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_on_a_gpu_vllm_takes_the_samplers_and_experts_that_the_extension_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig, vllm as config
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import map_unquantized_backend

    from echo2.worker.engines.vllm import vllm_engine
    from echo2.worker.engines.vllm.extension import _BACKENDS_AS_LOADED

    monkeypatch.setattr(vllm_engine, "is_cpu", lambda: False)
    monkeypatch.setattr(config, "HAS_TRITON", True)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert VllmConfig().use_v2_model_runner, "whose samplers are others"
    for name, value in vllm_engine.environment().items():
        monkeypatch.setenv(name, value)
    assert not VllmConfig().use_v2_model_runner
    backend = vllm_engine.VllmEngine(CONFIG)._arguments()["moe_backend"]
    assert map_unquantized_backend(backend).name in _BACKENDS_AS_LOADED


@pytest.mark.parametrize("family", ["DeepSeek-V3, Kimi-K2", "GLM-4.7-Flash", "LFM2"])
def test_latent_attention_and_convolutions_are_the_learners_at_lag_0(family: str) -> None:
    found = outcome_of(*FAMILIES[family], VllmEngine).ratio_off
    assert isinstance(found, float) and found <= RATIO_OFF_MAX, found


def test_what_vllm_derives_at_loading_is_refused_by_name() -> None:
    from echo2.worker.engines.vllm.extension import _refuse_detached

    model = torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 4)})
    _refuse_detached(model)
    model["gate"].register_buffer("_bf16x3_weight", torch.zeros(4), persistent=False)
    with pytest.raises(EngineError, match="gate: expected a router"):
        _refuse_detached(model)


async def test_a_mixture_of_experts_is_mapped_changed_and_refused_by_name(tmp_path: Path) -> None:
    tensors = checkpoint()
    changed = {n: (t + 0.05 * (torch.rand_like(t.float()) < 0.1)).bfloat16() for n, t in tensors.items()}
    engine = VllmEngine(CONFIG, slot_count=2)
    await engine.start()
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    without = {name: tensor for name, tensor in tensors.items() if name != expert}
    message = await refused(engine.swap(keyframe_of(without, 0), SwapMode.RECOMPUTE_KV), EngineError)
    assert "experts" in message and "model.layers.1" in message
    unknown = tensors | {"model.layers.0.mlp.shared_expert.weight": torch.zeros(4, 4)}
    message = await refused(engine.swap(keyframe_of(unknown, 0), SwapMode.RECOMPUTE_KV), EngineError)
    assert "model.layers.0.mlp.shared_expert.weight" in message
    assert engine.version is None

    await engine.swap(keyframe_of(tensors, 0), SwapMode.RECOMPUTE_KV)
    assert await engine.fingerprint(5) == fingerprint(tensors, 5)
    await engine.swap(delta_of(tensors, changed, 0, 1), SwapMode.RECOMPUTE_KV)
    assert await engine.fingerprint(5) == fingerprint(changed, 5)

    request = GenerateRequest("r", (1, 2, 3), (), SamplingParams(max_new_tokens=16), "r")
    chunks = (await generated(engine, [request]))["r"]
    await engine.stop()
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    raw = [logprob for chunk in chunks for logprob in chunk.raw_logprobs]
    with torch.no_grad():
        logits = judge(tmp_path, changed)(torch.tensor([[1, 2, 3, *token_ids]])).logits[0]
    expected = torch.log_softmax(logits[2:-1], dim=-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    assert (expected - torch.tensor(raw)).abs().max() < 1e-4

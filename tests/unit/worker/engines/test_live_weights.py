"""Reading a model's config: what is supported is read as transformers reads it, the rest is refused by name."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import ConfigError, EngineError
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.base.staged import TensorUpdate
from echo2.learner.training.loading import config_json_of, size_of
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.embedded.forward import CachedDecoder
from echo2.worker.engines.embedded.live_weights import LiveWeights, read_shape
from echo2.worker.engines.embedded.slots import Fill
from echo2.worker.engines.engine import GenerateRequest, SwapMode
from tests.contract.engine_rig import Staged, delta_of, full_blocks, keyframe_of, make_versions, tiny_config

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("qwen3"),
        tiny_config("qwen3", num_key_value_heads=4, head_dim=16),
        tiny_config("llama", rope_parameters=LLAMA3_ROPE),
        tiny_config("llama", rope_parameters=YARN_ROPE),
        tiny_config("llama", attention_bias=True, mlp_bias=True),
        tiny_config("qwen2"),
        tiny_config("mistral", sliding_window=None, rope_theta=500.0),
    ],
    ids=["qwen3", "qwen3-mha", "llama3-rope", "yarn-rope", "biases", "qwen2", "mistral"],
)
def test_forward_agrees_with_transformers(config: dict[str, object]) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    weights = LiveWeights(read_shape(config))
    for name, parameter in model.named_parameters():
        weights.tensors[name].copy_(parameter.detach())
    decoder = CachedDecoder(weights, full_blocks(3, 128))
    token_ids = torch.randint(0, 96, (100,)).tolist()
    with torch.no_grad():
        expected = torch.log_softmax(model.double()(torch.tensor([token_ids])).logits[0], dim=-1)
        decoder.fill([Fill(2, 0, tuple(token_ids[:50])), Fill(0, 0, tuple(token_ids[:7]))])
        decoder.fill([Fill(0, 7, tuple(token_ids[7:60])), Fill(2, 50, tuple(token_ids[50:60]))])
        for at in range(60, 100):
            got = torch.log_softmax(decoder.decode([token_ids[at]] * 2, [0, 2], [at, at]), dim=-1)
            assert (got - expected[at]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_shape(tiny_config("qwen3") | change)


def test_config_is_read_from_a_folder_and_a_missing_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    assert read_shape(tmp_path).model_type == "llama"
    with pytest.raises(ConfigError, match="nowhere"):
        read_shape(tmp_path / "nowhere")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_config_that_transformers_wrote_is_read_without_it(model_type: str) -> None:
    """Its imports would take 60 MiB of each worker."""
    given = tiny_config(model_type) | ({"sliding_window": None} if model_type == "mistral" else {})
    whole = AutoConfig.for_model(**given).to_dict()
    script = (
        "import json, sys\n"
        "from echo2.worker.engines.embedded.live_weights import read_shape\n"
        "shape = read_shape(json.loads(sys.stdin.read()))\n"
        "assert 'transformers' not in sys.modules\n"
        "print(repr(shape))\n"
    )
    command, text = [sys.executable, "-c", script], json.dumps(whole, default=str)
    told = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    assert told.strip() == repr(read_shape(given))


CONFIGS = [
    tiny_config("qwen3"),
    tiny_config("qwen3", tie_word_embeddings=False, attention_bias=True),
    tiny_config("llama", attention_bias=True, mlp_bias=True),
    tiny_config("qwen2"),
    tiny_config("mistral", sliding_window=None),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config["model_type"]))
def test_names_and_shapes_are_those_of_transformers(config: dict[str, object]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    weights = LiveWeights(read_shape(config))
    assert {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()} == expected


def test_keyframe_and_delta_come_back_bit_for_bit() -> None:
    config = tiny_config("llama")
    models = make_versions(config)
    weights = LiveWeights(read_shape(config))
    weights.apply(weights.checked(keyframe_of(models[0], 0)))
    weights.apply(weights.checked(delta_of(models[0], models[1], 0, 1)))
    expected = dict(models[1].named_parameters())
    for name, value in weights.published():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value.float(), expected[name])
        assert torch.equal(weights.tensors[name], expected[name])


def test_a_failure_in_the_middle_of_an_update_is_undone() -> None:
    config = tiny_config("qwen3")
    models = make_versions(config)
    weights = LiveWeights(read_shape(config))
    weights.apply(weights.checked(keyframe_of(models[0], 0)))
    before = weights.fingerprint(1)
    for staged in (delta_of(models[0], models[1], 0, 1), keyframe_of(models[1], 1)):
        scatters = weights.checked(staged)
        # Positions that a check would have refused stand for whatever can go wrong while weights are written.
        scatters[-1] = replace(scatters[-1], positions=np.array([1 << 40]), bits=scatters[-1].bits[:1])
        with pytest.raises(EngineError, match=scatters[-1].name):
            weights.apply(scatters)
        assert weights.fingerprint(1) == before


def test_float32_weights_are_published_as_they_are() -> None:
    config = tiny_config("qwen3")
    model = make_versions(config)[0]
    weights = LiveWeights(read_shape(config))
    noisy = {name: tensor.detach() + 1e-3 * torch.randn_like(tensor) for name, tensor in model.named_parameters()}
    updates = [
        TensorUpdate(name, "float32", tuple(tensor.shape), None, tensor.reshape(-1).numpy().view(np.uint32))
        for name, tensor in noisy.items()
    ]
    weights.apply(weights.checked(Staged(Version(0), None, updates)))
    assert all(torch.equal(value, noisy[name]) for name, value in weights.published())
    first = updates[0]
    narrow = TensorUpdate(first.name, "bfloat16", first.shape, np.zeros(1, np.int64), np.zeros(1, np.uint16))
    with pytest.raises(EngineError, match="expected dtype float32"):
        weights.checked(Staged(Version(1), Version(0), [narrow]))


TOKENS = 120
PROMPT = tuple(range(5, 25))
ORIGINAL = {"original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [2.0] * 8, "factor": 2.0, **ORIGINAL,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3": ("LlamaConfig", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_theta": 1e4, **LINEAR}}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "llama-yarn-factor": ("LlamaConfig", {"rope_parameters": {"rope_theta": 1e4, **YARN, "attention_factor": 1.0}}),
    "llama-yarn-mscale": ("LlamaConfig", {"rope_parameters": {"rope_theta": 1e4, **YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-yarn": ("Qwen2Config", {"rope_parameters": {"rope_theta": 1e6, **YARN}}),
    "qwen3-yarn": ("Qwen3Config", {"head_dim": 32, "rope_parameters": {"rope_theta": 1e6, **YARN}}),
    "mistral-yarn": ("MistralConfig", {"sliding_window": None, "rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, **LINEAR},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3-longrope": ("Phi3Config", {"rope_parameters": {"rope_theta": 1e4, **LONGROPE}, "original_max_position_embeddings": 128}),
}  # fmt: skip


def config_of(family: str) -> Any:
    name, more = FAMILIES[family]
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return getattr(transformers, name)(**sizes | more)


async def sampled(config: dict[str, Any], model: torch.nn.Module) -> tuple[list[int], list[float]]:
    """Tokens that the engine samples behind PROMPT, and the raw log-probabilities that it tells of them."""
    engine = EmbeddedEngine(config, slot_count=2, context_tokens=TOKENS)
    token_ids: list[int] = []
    logprobs: list[float] = []
    await engine.start()
    try:
        await engine.swap(keyframe_of(model, 0), SwapMode.RECOMPUTE_KV)
        sampling = SamplingParams(max_new_tokens=TOKENS - len(PROMPT), seed=3)
        engine.submit(GenerateRequest("s", PROMPT, (), sampling, "g"))
        while True:
            for chunk in await engine.next_chunks():
                token_ids += chunk.token_ids
                logprobs += chunk.raw_logprobs
                if chunk.finish_reason is not FinishReason.UNFINISHED:
                    return token_ids, logprobs
    finally:
        await engine.stop()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(family: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    token_ids, found = asyncio.run(sampled(json.loads(config_json_of(model.config, size_of(model.config))), model))
    assert len(token_ids) == TOKENS - len(PROMPT)
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0].log_softmax(-1)
    expected = logprobs_TV[len(PROMPT) - 1 : -1].gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    assert (torch.tensor(found) - expected).abs().max() < 1e-4


def test_a_rotation_that_changes_with_the_length_is_refused_by_name() -> None:
    config = config_of("llama-linear")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=r"rope_type: dynamic"):
        EmbeddedEngine(json.loads(config_json_of(config, size_of(config))), slot_count=2)

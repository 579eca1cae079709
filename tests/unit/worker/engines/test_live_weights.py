"""The fused path: what it supports it reads and computes as transformers does, the rest is refused by name."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from echo2.base.errors import ConfigError, EngineError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.learner.training.model import published_name, put_on_adapter
from echo2.weights.elements import published_tensors
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engines.adapter import Adapter, AdapterSpec, load_base
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.embedded.forward import CachedDecoder
from echo2.worker.engines.embedded.general import ATTENTION, GeneralDecoder, ModuleWeights
from echo2.worker.engines.embedded.live_weights import LiveWeights, read_shape
from echo2.worker.engines.embedded.slots import Fill
from tests.contract.engine_rig import Staged, delta_of, full_blocks, keyframe_of, make_versions, tiny_config
from tests.contract.families import FAMILIES, save_tiny

ORIGINAL = {"original_max_position_embeddings": 64, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
CONFIGS = {
    "qwen3": tiny_config("qwen3"),
    "qwen3-mha": tiny_config("qwen3", num_key_value_heads=4, head_dim=16, rope_parameters=YARN),
    "qwen3-untied": tiny_config("qwen3", tie_word_embeddings=False, attention_bias=True),
    "llama3-rope": tiny_config("llama", rope_parameters=LLAMA3),
    "llama-linear": tiny_config("llama", rope_parameters=LINEAR),
    "llama-yarn-factor": tiny_config("llama", rope_parameters=YARN | {"attention_factor": 1.0}),
    "llama-yarn-mscale": tiny_config("llama", rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}),
    "biases": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "qwen2-yarn": tiny_config("qwen2", rope_parameters=YARN),
    "mistral": tiny_config("mistral", sliding_window=None, rope_theta=500.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_and_forward_agree_with_transformers(name: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name])).float().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    weights = LiveWeights(read_shape(CONFIGS[name]))
    assert np.array_equal(weights.shape.rope_frequencies, model.model.rotary_emb.inv_freq.numpy())
    assert {n: t.shape for n, t in weights.tensors.items()} == {n: t.shape for n, t in model.named_parameters()}
    for tensor_name, parameter in model.named_parameters():
        weights.tensors[tensor_name].copy_(parameter.detach())
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
def test_what_the_fused_path_cannot_run_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_shape(tiny_config("qwen3") | change)


def test_a_config_that_transformers_wrote_is_read_without_it(tmp_path: Path) -> None:
    """Its imports would take 60 MiB of each worker."""
    given = [
        tiny_config(kind) | ({"sliding_window": None} if kind == "mistral" else {})
        for kind in ("llama", "mistral", "qwen2", "qwen3")
    ]
    for number, config in enumerate(given):
        (tmp_path / f"{number}.json").write_text(json.dumps(AutoConfig.for_model(**config).to_dict(), default=str))
    script = (
        "import json, pathlib, sys\n"
        "from echo2.worker.engines.embedded.live_weights import read_shape\n"
        "files = sorted(pathlib.Path(sys.argv[1]).iterdir())\n"
        "print(*(repr(read_shape(json.loads(file.read_text()))) for file in files), sep='|')\n"
        "assert 'transformers' not in sys.modules\n"
    )
    told = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout.strip().split("|") == [repr(read_shape(config)) for config in given]


def test_keyframe_and_delta_come_back_bit_for_bit_and_a_failure_in_the_middle_is_undone() -> None:
    config = tiny_config("llama")
    models = make_versions(config)
    weights = LiveWeights(read_shape(config))
    weights.apply(weights.checked(keyframe_of(models[0], 0)))
    before = weights.fingerprint(1)
    for staged in (delta_of(models[0], models[1], 0, 1), keyframe_of(models[1], 1)):
        updates = weights.checked(staged)
        # Positions that a check would have refused stand for whatever can go wrong while weights are written.
        updates[-1] = replace(updates[-1], indices=np.array([1 << 40]), bits=updates[-1].bits[:1])
        with pytest.raises(EngineError, match=updates[-1].name):
            weights.apply(updates)
        assert weights.fingerprint(1) == before
    weights.apply(weights.checked(delta_of(models[0], models[1], 0, 1)))
    expected = dict(models[1].named_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.tensors.items())
    assert weights.fingerprint(1) == fingerprint({name: tensor.bfloat16() for name, tensor in expected.items()}, 1)


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
    assert weights.fingerprint(1) == fingerprint(noisy, 1)
    first = updates[0]
    narrow = TensorUpdate(first.name, "bfloat16", first.shape, np.zeros(1, np.int64), np.zeros(1, np.uint16))
    with pytest.raises(EngineError, match="expected dtype float32"):
        weights.checked(Staged(Version(1), Version(0), [narrow]))


# ---- models that run in transformers' own code

TOKENS = 100
GROWING_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def weights_of(config: dict[str, object]) -> tuple[ModuleWeights, torch.nn.Module]:
    """A policy as a learner has it, and the engine's weights after its keyframe."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().eval()
    for parameter in model.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    weights = ModuleWeights(config)
    weights.apply(weights.checked(keyframe_of(model, 0)))
    return weights, model


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + n / 8 for n in range(16)], "long_factor": [2.0] * 16, "factor": 2.0,
    "original_max_position_embeddings": 128, "rope_theta": 1e4,
}  # fmt: skip
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("gemma3_text", sliding_window=37, rope_parameters=TWO_ROPES),
        tiny_config("gemma2", sliding_window=37, query_pre_attn_scalar=32, attn_logit_softcapping=3.0),
        tiny_config("qwen3_moe"),
        tiny_config("mixtral", num_local_experts=4, sliding_window=37),
        tiny_config("phi", partial_rotary_factor=0.5, num_key_value_heads=4, hidden_size=128),
        tiny_config(
            "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=128, hidden_size=128, pad_token_id=None
        ),
        tiny_config("qwen3", use_sliding_window=True, sliding_window=37, max_window_layers=1),
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_forward_agrees_with_transformers_for_sequences_of_several_lengths(config: dict[str, object]) -> None:
    weights, model = weights_of(config)
    model.set_attn_implementation("eager")
    decoder = GeneralDecoder(weights, full_blocks(3, 128))
    token_ids = torch.randint(0, 96, (TOKENS,)).tolist()
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([token_ids])).logits[0], dim=-1)
        decoder.fill([Fill(2, 0, tuple(token_ids[:80])), Fill(0, 0, tuple(token_ids[:7]))])
        decoder.fill([Fill(1, 0, tuple(token_ids[:3])), Fill(2, 80, tuple(token_ids[80:90]))])
        decoder.fill([Fill(0, 7, tuple(token_ids[7:90]))])
        for step in range(10):
            places = [90 + step, 3 + step, 90 + step]
            got = torch.log_softmax(decoder.decode([token_ids[at] for at in places], [0, 1, 2], places), dim=-1)
            assert (got - expected[places]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "nonsense"}, "nonsense"),
        (tiny_config("gemma2", rope_parameters=GROWING_ROPE), "rope_type"),
        (tiny_config("qwen2_moe", use_sliding_window=True, sliding_window=20, max_window_layers=1), "window of 20"),
        (tiny_config("phimoe", sliding_window=20, num_local_experts=2), "says its window of 20"),
        (tiny_config("gpt_neo", num_heads=4, num_layers=3, attention_types=[[["local"], 3]]), "transformers cannot"),
        ({"model_type": "bloom", "vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "bloom"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_attends_otherwise_is_refused(
    config: dict[str, object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=named):
        EmbeddedEngine(config, slot_count=2, context_tokens=32)
    with caplog.at_level(logging.WARNING, "echo2.worker"):
        EmbeddedEngine(tiny_config("gemma3_text"), slot_count=2)
    assert "slower than the fused path" in caplog.text and "gemma3_text" in caplog.text


def test_a_model_whose_attention_does_more_than_it_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of transformers may hand over what we know nothing of: here the heads' weights for attending to nothing."""
    known = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    functions = ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(functions, ATTENTION, lambda *a, **n: known(*a, **{**n, "s_aux": None}))
    config = tiny_config("gpt_oss", num_local_experts=2, num_experts_per_tok=1, sliding_window=37)
    weights, _ = weights_of(config)
    decoder = GeneralDecoder(weights, full_blocks(1, 128))
    with pytest.raises(ConfigError, match=r"gpt_oss.*does not attend as transformers.*vllm"), torch.inference_mode():
        decoder.fill([Fill(0, 0, (1, 2, 3))])


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning")  # peft's own, for experts
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3-MoE", "GLM-4.5, GLM-4.6", "Qwen3-Next"])
def test_an_adapter_is_on_the_layers_of_which_the_learner_publishes_one(family: str, tmp_path: Path) -> None:
    """Not on a router, which is no linear layer; the base comes with the numbers that it keeps beside its parameters."""
    base = save_tiny(*FAMILIES[family], tmp_path)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    told = put_on_adapter(trained, 4, "bfloat16", torch.device("cpu"))
    published = {published_name(name): p.shape for name, p in trained.named_parameters() if ".lora_" in name}
    spec = AdapterSpec(told.rank, told.scale, told.dtype, told.base_fingerprint)
    adapter = Adapter(load_base(str(tmp_path), spec), spec)
    assert {name: tensor.shape for name, tensor in adapter.tensors.items()} == published
    live = ModuleWeights(json.loads((tmp_path / "config.json").read_text()), adapter).tensors
    assert live.keys() == published_tensors(base).keys()
    for name, tensor in published_tensors(base).items():
        assert torch.allclose(live[name], tensor, rtol=1e-2), name

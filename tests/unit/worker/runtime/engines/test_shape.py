"""Reading a model's config: what is supported is read as transformers reads it, the rest is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import ConfigError
from echo2.worker.runtime.engines.forward import CachedDecoder
from echo2.worker.runtime.engines.shape import read_shape
from echo2.worker.runtime.engines.weights import LiveWeights
from echo2.worker.slots import Fill
from tests.contract.engine_rig import full_blocks, tiny_config

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
        "from echo2.worker.runtime.engines.shape import read_shape\n"
        "shape = read_shape(json.loads(sys.stdin.read()))\n"
        "assert 'transformers' not in sys.modules\n"
        "print(repr(shape))\n"
    )
    command, text = [sys.executable, "-c", script], json.dumps(whole, default=str)
    told = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    assert told.strip() == repr(read_shape(given))

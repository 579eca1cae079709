"""The fused path: what it supports it reads and computes as transformers does, the rest is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import ConfigError, EngineError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engines.embedded.forward import CachedDecoder
from echo2.worker.engines.embedded.live_weights import LiveWeights, read_shape
from echo2.worker.engines.embedded.slots import Fill
from tests.contract.engine_rig import Staged, delta_of, full_blocks, keyframe_of, make_versions, tiny_config

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

"""Live weights: the map to fused storage, bits in and out, and a failure in the middle of an update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import EngineError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.worker.runtime.engines.shape import read_shape
from echo2.worker.runtime.engines.weights import LiveWeights
from tests.contract.engine_rig import Staged, delta_of, keyframe_of, make_versions, tiny_config

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

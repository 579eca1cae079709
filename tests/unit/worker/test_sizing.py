from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import ConfigError, ResourceError
from echo2.worker.sizing import SLOTS_CPU_MAX, ModelSize, cpu_slots, gpu_layout, gpu_slots, model_size
from tests.contract.engine_rig import tiny_config

QWEN3_8B: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
GIB = 1 << 30


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("qwen3"),
        tiny_config("llama"),
        tiny_config("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        tiny_config("qwen2", head_dim=16),
        tiny_config("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    ],
    ids=["qwen3", "llama", "llama with biases", "qwen2", "qwen3_moe"],
)
def test_the_count_is_that_of_the_model_itself(config: dict[str, object]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert model_size(config).parameters == sum(p.numel() for p in model.parameters())


def test_a_known_model_has_its_published_size() -> None:
    size = model_size(QWEN3_8B)
    assert size.parameters == 8_190_735_360
    assert size.kv_values_per_token == 2 * 36 * 8 * 128


def test_a_config_that_lacks_a_field_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        model_size({key: value for key, value in QWEN3_8B.items() if key != "hidden_size"})
    with pytest.raises(ConfigError, match="vocab_size"):
        model_size(QWEN3_8B | {"vocab_size": "many"})


def test_slots_follow_memory_up_to_what_pays() -> None:
    small = model_size(tiny_config("qwen3"))
    assert cpu_slots(small, 8 * GIB) == SLOTS_CPU_MAX
    large = model_size(QWEN3_8B | {"num_hidden_layers": 4})
    room = 6 * large.parameters
    each = 4 * large.kv_values_per_token * 4096
    assert cpu_slots(large, room + 2 * each * 5, context_tokens=4096) == 5
    with pytest.raises(ResourceError, match="one sequence of 4096 tokens"):
        cpu_slots(large, room + each, context_tokens=4096)
    assert gpu_slots(model_size(QWEN3_8B), 80 * GIB) == 20
    assert gpu_slots(model_size(QWEN3_8B), 80 * GIB, context_tokens=2048) == 256


def test_each_gpu_gets_an_engine_where_the_weights_fit_one() -> None:
    layout = gpu_layout(model_size(QWEN3_8B), [80 * GIB] * 8)
    assert (layout.engine_count, layout.tensor_parallel) == (8, 1)


def test_weights_that_fit_no_single_gpu_are_spread_over_as_few_as_hold_them() -> None:
    size = model_size(QWEN3_8B)
    assert gpu_layout(size, [24 * GIB] * 4).tensor_parallel == 2
    assert gpu_layout(size, [24 * GIB] * 5).engine_count == 2
    assert gpu_layout(size, [80 * GIB, 24 * GIB]).tensor_parallel == 2, "the smallest decides"
    with pytest.raises(ResourceError, match="fit 60%"):
        gpu_layout(size, [8 * GIB] * 2)


def test_only_divisors_of_the_heads_come_into_question() -> None:
    size = ModelSize(10 * GIB, 1, 1, head_count=12, kv_head_count=4)
    assert gpu_layout(size, [16 * GIB] * 4).tensor_parallel == 4, "three do not divide four key-value heads"
    with pytest.raises(ConfigError, match="at least one GPU"):
        gpu_layout(size, [])

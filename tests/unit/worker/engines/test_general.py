"""Architectures beyond the fused path: they agree with transformers' own forward or are refused by name."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from echo2.base.errors import ConfigError
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.embedded.general import ATTENTION, GeneralDecoder, ModuleWeights
from echo2.worker.engines.embedded.slots import Fill
from tests.contract.engine_rig import full_blocks, keyframe_of, tiny_config

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
def test_forward_agrees_with_transformers_for_sequences_of_several_lengths_beside_each_other(
    config: dict[str, object],
) -> None:
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
        ({"model_type": "bloom", "vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "bloom"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_attends_in_another_way_is_refused_by_name_and_slower_ways_are_told(
    config: dict[str, object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=named):
        EmbeddedEngine(config, slot_count=2, context_tokens=32)
    with caplog.at_level(logging.WARNING, "echo2.worker"):
        EmbeddedEngine(tiny_config("gemma3_text"), slot_count=2)
    assert "slower than the fused path" in caplog.text and "gemma3_text" in caplog.text


def test_a_model_whose_attention_does_more_than_it_says_is_refused_at_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release of transformers may hand over what we know nothing of: here the heads' weights for attending to nothing."""
    known = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, ATTENTION, lambda *a, **n: known(*a, **{**n, "s_aux": None})
    )
    config = tiny_config("gpt_oss", num_local_experts=2, num_experts_per_tok=1, sliding_window=37)
    weights, _ = weights_of(config)
    decoder = GeneralDecoder(weights, full_blocks(1, 128))
    with (
        pytest.raises(ConfigError, match=r"gpt_oss.*does not attend as transformers does.*vllm"),
        torch.inference_mode(),
    ):
        decoder.fill([Fill(0, 0, (1, 2, 3))])

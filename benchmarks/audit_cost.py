"""What an audited rollout costs a learner whose trainer lends no model: forward passes measured, carried over by arithmetic.

Measured: tokens a second of the audit's own copy of a small model (float32, one CPU thread). Computed: the same work at 8 billion
weights, by floating-point operations alone (2 a weight and token; attention and memory left out).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.audit import Habits, Passage, examine, passage_of
from echo2.learner.rollouts.groups import SentTokens, TrainGroup
from echo2.learner.training.scoring import VersionScorer

TOKENS = 512
LARGE_WEIGHTS = 8.2e9
LARGE_TOKENS = 4096
"""Of one rollout with its prompt, at 8 billion weights."""
CONFIG: dict[str, object] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def passage() -> Passage:
    numbers = (-1.0,) * TOKENS
    spans = (VersionSpan(Version(1), TOKENS),)
    rollout = Rollout(GroupId("g"), 0, tuple(range(TOKENS)), numbers, numbers, spans, FinishReason.LENGTH)
    spec = GroupSpec(GroupId("g"), (5,), 1, SamplingParams(), 0)
    group = TrainGroup(spec, 0, (rollout,), (1.0,), (), ((SentTokens(PeerId("w"), TOKENS),),))
    return passage_of(group, 0, lambda peer: Habits())


def measured(times: int = 2) -> dict[str, Any]:
    """Tokens a second of processor time, the best of some times; one thread, whatever else the machine does."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).float().eval()
    weights = sum(p.numel() for p in model.parameters())
    learner = VersionScorer(model, versions_max=2)
    first = {name: p.detach().bfloat16().clone() for name, p in model.named_parameters()}
    learner.keep(Version(0), first)
    learner.keep(Version(1), {name: t + (torch.rand_like(t) < 0.02) * t.abs() / 64 for name, t in first.items()})
    one, learner_s = passage(), []
    with torch.inference_mode():
        for _ in range(times):
            begun = time.process_time()
            examine([one], learner)
            learner_s.append(time.process_time() - begun)
    return {"weights": weights, "learner_tokens_per_s": TOKENS / min(learner_s)}


def rows_of(kept: dict[str, Any]) -> list[dict[str, object]]:
    """Measured figures, and what follows for 8 billion weights."""
    per_token = LARGE_WEIGHTS / kept["weights"]
    before_s = LARGE_TOKENS * per_token / kept["learner_tokens_per_s"]
    told = f"computed for {LARGE_WEIGHTS / 1e9:g} B weights, a rollout of {LARGE_TOKENS} tokens"
    return [
        row("learner's audit, float32 on one thread", kept["learner_tokens_per_s"], "tokens/CPU s"),
        row(f"learner's thread an audited rollout ({told})", before_s, "s"),
    ]


def row(name: str, value: float, unit: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "target": None, "better": "lower" if unit == "s" else "higher"}

"""What the worker's benchmarks share: one model, its versions, mixed lengths, rows of results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.ids import Version
from echo2.base.rollout import SamplingParams
from echo2.base.staged import TensorUpdate
from echo2.worker.engines.engine import GenerateRequest
from echo2.worker.engines.outbox import Outbox, SampledToken

Row = dict[str, object]
CONTEXT_TOKENS = 512
CONFIG: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    count: int


@dataclass(frozen=True)
class Staged:
    version: Version
    parent: Version | None
    tensors: list[TensorUpdate]

    def updates(self) -> Iterator[TensorUpdate]:
        return iter(self.tensors)


def asks(count: int, seed: int = 0) -> list[Ask]:
    """Mixed lengths: prompts of 8 to 48 tokens; half of the completions short, half up to 128 tokens."""
    rng = random.Random(seed)
    return [
        Ask(
            [rng.randrange(8192) for _ in range(rng.randint(8, 48))],
            rng.choice((rng.randint(8, 48), rng.randint(8, 128))),
        )
        for _ in range(count)
    ]


def make_model(attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), attn_implementation=attention).float().eval()
    )


def keyframe(model: torch.nn.Module) -> Staged:
    return Staged(
        Version(0),
        None,
        [
            TensorUpdate(
                n,
                "bfloat16",
                tuple(t.shape),
                None,
                t.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1),
            )
            for n, t in model.named_parameters()
        ],
    )


def delta(base: Staged, version: int, share: float = 0.015) -> Staged:
    """A change of `share` of all elements by one unit in the last place."""
    rng = np.random.default_rng(version)
    updates = []
    for tensor in base.tensors:
        places = np.flatnonzero(rng.random(len(tensor.bits)) < share).astype(np.int64)
        updates.append(
            TensorUpdate(tensor.name, tensor.dtype, tensor.shape, places, tensor.bits[places] ^ np.uint16(version & 1))
        )
    return Staged(Version(version), Version(version - 1), updates)


def requests(asked: list[Ask], prefix: str = "r") -> list[GenerateRequest]:
    return [
        GenerateRequest(f"{prefix}{i}", tuple(a.prompt), (), SamplingParams(max_new_tokens=a.count), f"{prefix}{i}")
        for i, a in enumerate(asked)
    ]


class Nowhere(Outbox):
    """Takes tokens and keeps none: the loop alone is measured."""

    def put(self, tokens: list[SampledToken]) -> None:
        return


def row(name: str, value: float, unit: str, target: float | None, better: str = "lower") -> Row:
    return {
        "name": name,
        "value": round(value, 8 if abs(value) < 1e-3 else 4),
        "unit": unit,
        "target": target,
        "better": better,
    }

"""Honest snapshots for the delta benchmark: a small language model trained with a GRPO-like gradient.

A transformer is warmed up on a synthetic language with Zipf-like word frequencies (so that rare embedding rows exist),
then trained as in reinforcement learning: groups of rollouts sampled from the model itself, random rewards normalised
in the group, a policy gradient, AdamW on float32 masters, weights published as bf16. After enough steps for Adam's
moments to settle, the run forks into one branch a learning rate, and each branch keeps what it published after 0 to 8
steps.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

LEARNING_RATES = (1e-6, 3e-6, 1e-5)
STEPS_APART = (1, 2, 4, 8)
_VOCABULARY = 8192
_GROUPS, _ROLLOUTS, _PROMPT, _TOKENS = 2, 4, 8, 32
_WARM_UP_STEPS, _SETTLE_STEPS = 40, 30

Snapshot = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large the model is."""

    name: str
    width: int
    layers: int


SMALL = ModelSize("7M", 256, 6)
LARGE = ModelSize("30M", 512, 8)


class Layer(nn.Module):
    """Pre-norm attention and a gated MLP, without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Token and position embeddings, layers, a tied head."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, size.width)
        self.place = nn.Embedding(_PROMPT + _TOKENS, size.width)
        self.layers = nn.ModuleList(Layer(size.width) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x), self.embed.weight)


def _language(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    """Words of a Zipf-like distribution, each a function of the one before it half of the time."""
    ranks = torch.arange(1, _VOCABULARY + 1, dtype=torch.float32)
    words = torch.multinomial(1 / ranks, rows * length, replacement=True, generator=generator).reshape(rows, length)
    follows = torch.rand(rows, length, generator=generator) < 0.5
    for at in range(1, length):
        words[:, at] = torch.where(follows[:, at], (words[:, at - 1] * 17 + 5) % _VOCABULARY, words[:, at])
    return words


def _rollouts(model: Model, generator: torch.Generator) -> torch.Tensor:
    """Groups of continuations of one prompt each, sampled from the model (in two strides of the whole sequence)."""
    prompts = _language(generator, _GROUPS, _PROMPT + _TOKENS).repeat_interleave(_ROLLOUTS, 0)
    with torch.no_grad():
        for start in (_PROMPT, _PROMPT + _TOKENS // 2):
            odds = model(prompts)[:, start - 1 : -1].softmax(-1)
            drawn = torch.multinomial(odds.reshape(-1, _VOCABULARY), 1, generator=generator)
            prompts[:, start:] = drawn.reshape(prompts.shape[0], -1)
    return prompts


def _policy_loss(model: Model, generator: torch.Generator) -> torch.Tensor:
    tokens = _rollouts(model, generator)
    rewards = torch.randint(0, 2, (_GROUPS, _ROLLOUTS), generator=generator).float()
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
    logprobs = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return -(advantages * logprobs[:, _PROMPT - 1 :]).mean()


def _language_loss(model: Model, generator: torch.Generator) -> torch.Tensor:
    tokens = _language(generator, 16, _PROMPT + _TOKENS)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).reshape(-1, _VOCABULARY), tokens[:, 1:].reshape(-1))


def _optimizer(model: Model, rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.01)


def _step(optimizer: torch.optim.AdamW, loss: torch.Tensor, model: Model) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def published(model: Model) -> Snapshot:
    """What the learner publishes: the masters rounded to bf16."""
    return {name: parameter.detach().bfloat16().clone() for name, parameter in model.named_parameters()}


def train_snapshots(size: ModelSize, seed: int = 0) -> dict[float, dict[int, Snapshot]]:
    """Snapshots by learning rate and steps after the fork (0 included)."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Model(size)
    optimizer = _optimizer(model, 1e-3)
    for _ in range(_WARM_UP_STEPS):
        _step(optimizer, _language_loss(model, generator), model)
    optimizer = _optimizer(model, LEARNING_RATES[0])
    for _ in range(_SETTLE_STEPS):
        _step(optimizer, _policy_loss(model, generator), model)
    out: dict[float, dict[int, Snapshot]] = {}
    for rate in LEARNING_RATES:
        branch = copy.deepcopy(model)
        branch_optimizer = _optimizer(branch, rate)
        branch_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in branch_optimizer.param_groups:
            group["lr"] = rate
        out[rate] = {0: published(branch)}
        for step in range(1, max(STEPS_APART) + 1):
            _step(branch_optimizer, _policy_loss(branch, generator), branch)
            out[rate][step] = published(branch)
    return out


def load_or_train(size: ModelSize) -> dict[float, dict[int, Snapshot]]:
    """Snapshots kept in the temporary folder from an earlier run, or trained now."""
    path = Path(tempfile.gettempdir()) / f"echo2-delta-snapshots-{size.name}.pt"
    if not path.exists():
        snapshots = train_snapshots(size)
        unfinished = path.with_suffix(".part")
        torch.save(snapshots, unfinished)
        unfinished.replace(path)
    loaded: dict[float, dict[int, Snapshot]] = torch.load(path, weights_only=True)
    return loaded

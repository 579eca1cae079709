"""Held-out prompts, sampled by the learner itself with the weights it holds.

Guarantees: the same weights and options give the same completions. Its time is counted apart from the steps'. Leaves
to others: scoring (tasks), when (daemon).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from echo2.base.rollout import SamplingParams
from echo2.learner.runtime.model import PolicyModel
from echo2.learner.runtime.world import Answer
from echo2.outside import monotonic

BATCH_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Completions:
    """`token_ids[i]` completes prompt i; stop tokens included."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(slots=True)
class HeldOut:
    """One held-out prompt on its way: `token_ids` is all that was said so far, the prompt included."""

    index: int
    token_ids: tuple[int, ...]
    turns: list[tuple[int, ...]] = field(default_factory=list)
    is_over: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)

    def spoke(self, token_ids: tuple[int, ...]) -> None:
        self.turns.append(token_ids)
        self.token_ids += token_ids

    def heard(self, answer: Answer) -> None:
        """A failed reward counts as 0."""
        self.token_ids += answer.said
        self.is_over = answer.scored is not None
        if answer.scored is not None and answer.scored.reward is not None:
            self.reward, self.parts = answer.scored.reward.value, answer.scored.reward.parts

    def example(self, text_of: Callable[[Sequence[int]], str]) -> dict[str, object]:
        """For samples.jsonl: the completion with all that the world said in between."""
        prompt, completion = self.token_ids[: self.prompt_tokens], self.token_ids[self.prompt_tokens :]
        return {"prompt": text_of(prompt), "completion": text_of(completion), "reward": self.reward}


def complete(
    model: PolicyModel, prompts: Sequence[Sequence[int]], sampling: SamplingParams, greedy: bool, seed: int
) -> Completions:
    """One completion of each prompt. Runs on the trainer's thread."""
    began = monotonic()
    found: list[tuple[int, ...]] = []
    was_training = model.hf_model.training
    model.hf_model.eval()
    generator = torch.Generator(device=model.device).manual_seed(seed)
    try:
        for start in range(0, len(prompts), BATCH_PROMPTS):
            found += _batch(model, prompts[start : start + BATCH_PROMPTS], sampling, greedy, generator)
    finally:
        model.hf_model.train(was_training)
    return Completions(tuple(found), monotonic() - began)


def _batch(
    model: PolicyModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    greedy: bool,
    generator: torch.Generator,
) -> list[tuple[int, ...]]:
    """Left-padded, with the model's own KV cache, until every row has stopped."""
    longest = max(len(prompt) for prompt in prompts)
    ids_BL = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask_BL = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_BL[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask_BL[row, longest - len(prompt) :] = 1
    ids_BL, mask_BL = ids_BL.to(model.device), mask_BL.to(model.device)
    positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=model.device)
    sampled: list[torch.Tensor] = []
    done_B = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    cache = None
    with torch.no_grad():
        for _ in range(sampling.max_new_tokens):
            out = model.policy.next_logits(
                input_ids=ids_BL, attention_mask=mask_BL, position_ids=positions_BL, past_key_values=cache
            )
            cache = out.past_key_values
            next_B = _pick(out.logits[:, -1].float(), sampling, greedy, generator)
            sampled.append(torch.where(done_B, -1, next_B))
            done_B |= torch.isin(next_B, stops)
            if bool(done_B.all()):
                break
            ids_BL, positions_BL = next_B[:, None], positions_BL[:, -1:] + 1
            mask_BL = torch.cat([mask_BL, torch.ones_like(next_B)[:, None]], dim=1)
    rows = torch.stack(sampled, dim=1).tolist()
    return [tuple(token for token in row if token >= 0) for row in rows]


def _pick(logits_BV: torch.Tensor, sampling: SamplingParams, greedy: bool, generator: torch.Generator) -> torch.Tensor:
    if greedy:
        return logits_BV.argmax(-1)
    return torch.multinomial(torch.softmax(logits_BV / sampling.temperature, -1), 1, generator=generator)[:, 0]

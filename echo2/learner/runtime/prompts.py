"""The data plane as the learner sees it: prompts as tokens, rewards of tokens.

Guarantees: the prompt of a cursor is the same after every restart; a prompt whose tokens the model does not have is a
clear error before anything is sampled. What the curriculum remembers starts anew with the process, so a restart may
prefer other prompts; rollouts that were recorded are trained on alike. Leaves to others: the order of instances
(tasks/split), limits on rewards (tasks/runtime/rewards).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from echo2.base.errors import ConfigError
from echo2.base.rng import derived_seed
from echo2.base.rollout import SamplingParams
from echo2.learner.group import Draw
from echo2.learner.runtime.options import LearnerOptions
from echo2.learner.selection import OverlongShaping
from echo2.tasks.curriculum import make_curriculum
from echo2.tasks.runtime.registry import make_task
from echo2.tasks.runtime.rewards import Scored, make_scorer
from echo2.tasks.split import TaskSplit
from echo2.tasks.task import TaskInstance, TaskSpec, prompt_text

SKIPS_MAX = 64
"""Prompts that the curriculum may pass over before the next is taken anyway."""


class Prompts:
    """One task with the model's tokenizer."""

    def __init__(self, options: LearnerOptions, vocabulary_size: int, stop_token_ids: Sequence[int]) -> None:
        self.tokenizer = load_tokenizer(options.trainer.model_path)
        if len(self.tokenizer) > vocabulary_size:
            raise ConfigError(
                f"model {options.trainer.model_path}: expected a tokenizer of at most {vocabulary_size} tokens (the "
                f"model's embedding), got {len(self.tokenizer)}"
            )
        self.seed = options.seed
        self.vocabulary_size = vocabulary_size
        spec = TaskSpec(options.task.name, options.task.args, options.seed)
        self.task = make_task(spec)
        self.split = TaskSplit(self.task.size, options.evaluation.prompts, options.seed)
        self.scorer = make_scorer(self.task, spec)
        self.curriculum = make_curriculum(options.task.curriculum, options.seed)
        buffer_tokens = options.overlong_buffer_tokens
        limit_tokens = options.sampling.max_new_tokens
        self.overlong = OverlongShaping(limit_tokens, buffer_tokens) if buffer_tokens else None
        self.sampling = replace(options.sampling, stop_token_ids=_stops(options.sampling, stop_token_ids))
        self.check_length: Callable[[int], None] = lambda tokens: None  # the model's own, once it is loaded

    def next_wanted(self, cursor: int) -> int:
        """The first cursor from this one on whose prompt the curriculum wants; after a bounded search, the next."""
        for candidate in range(cursor, cursor + SKIPS_MAX):
            if self.curriculum.wants(candidate, self.split.train_index(candidate)):
                return candidate
        return cursor + SKIPS_MAX

    def fared(self, cursor: int, rewards: Sequence[float]) -> None:
        """Tells the curriculum how the group on prompt `cursor` fared."""
        self.curriculum.record(self.split.train_index(cursor), rewards)

    def draw(self, cursor: int) -> Draw:
        """Prompt number `cursor` of the run."""
        sampling = replace(self.sampling, seed=derived_seed(self.seed, "group", cursor))
        return Draw(cursor, 0, self.tokens_of(self.task.sample(self.split.train_index(cursor))), sampling)

    def tokens_of(self, instance: TaskInstance) -> tuple[int, ...]:
        """The prompt as the model reads it: through its chat template where there is one and the prompt is a chat."""
        tokenizer, prompt = self.tokenizer, instance.prompt
        if not isinstance(prompt, str) and tokenizer.chat_template:
            messages = [{"role": message.role, "content": message.content} for message in prompt]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(prompt_text(prompt))
        if not ids or max(ids) >= self.vocabulary_size:
            raise ConfigError(
                f"prompt {instance.index} of task {self.task.name}: expected 1 or more token ids below "
                f"{self.vocabulary_size}, got {len(ids)} up to {max(ids, default=-1)}: wrong tokenizer for this model?"
            )
        self.check_length(len(ids) + self.sampling.max_new_tokens)
        return tuple(ids)

    def text_of(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def score(self, cursor: int, token_ids: Sequence[int]) -> Scored:
        """The reward of a completion of prompt `cursor`, as it is trained on: shaped by its length where that is on."""
        scored = await self.score_instance(self.split.train_index(cursor), token_ids)
        if self.overlong is None or scored.reward is None:
            return scored
        shaped = self.overlong.shaped(scored.reward.value, len(token_ids))
        return replace(scored, reward=replace(scored.reward, value=shaped))

    async def score_instance(self, index: int, token_ids: Sequence[int]) -> Scored:
        """The reward of a completion of the task's instance `index`."""
        future = self.scorer.submit(index, self.text_of(token_ids))
        return future.result() if future.done() else await asyncio.wrap_future(future)

    def held_out(self, count: int) -> list[TaskInstance]:
        return [self.task.sample(self.split.held_out_index(position)) for position in range(count)]

    def close(self) -> None:
        self.scorer.close()


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside a model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: expected a tokenizer beside the model: {error}") from None


def _stops(sampling: SamplingParams, model_stops: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*sampling.stop_token_ids, *model_stops}))

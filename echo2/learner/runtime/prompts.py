"""The learner's data plane: turns prompts into tokens and sampled tokens into rewards.

Guarantees: the prompt of a cursor is the same after every restart; a prompt with tokens that the model does not have raises
`ConfigError` before anything is sampled. The curriculum's state is part of the checkpoint. Leaves to others: the order of instances
(tasks/split), limits on rewards (tasks/runtime/rewards).
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echo2.base.errors import ConfigError, TaskError
from echo2.base.rollout import SamplingParams
from echo2.learner.group import Draw
from echo2.learner.runtime.mixed_world import MixedWorld
from echo2.learner.runtime.options import LearnerOptions
from echo2.learner.runtime.world import PromptWorld, TurnAnswer, make_world
from echo2.learner.selection import OverlongShaping
from echo2.tasks.curriculum import make_curriculum
from echo2.tasks.mixture import MixedSplit
from echo2.tasks.runtime.chat_format import ChatFormat
from echo2.tasks.runtime.rewards import Containment
from echo2.tasks.runtime.token_text import StopStrings
from echo2.tasks.split import TaskSplit
from echo2.tasks.task import TaskInstance, TaskSpec

SKIPS_MAX = 64
"""Unwanted or too long prompts that may be skipped in a row before the next one is taken anyway."""
DRIVEN_PROMPT = (0,)
"""Placeholder for the prompt of a problem given to agents; it is never used."""
_log = logging.getLogger("echo2.learner")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The model's tokenizer, and constructors of the run's world and of others."""

    tokenizer: Any
    make_world: Callable[[], PromptWorld]
    make_other: Callable[[TaskSpec], PromptWorld] | None = None  # for further evaluation sets


def source_of(options: LearnerOptions) -> PromptSource:
    """Makes the source of prompts from the run's options."""
    tokenizer = load_tokenizer(options.trainer.model_path)
    chat = ChatFormat(tokenizer, options.task.chat)
    task, folder = options.task, options.folder.absolute()
    hidden = str(folder.parent if folder.name == "learner" else folder)  # the run's folder also has its workers' keys
    containment = Containment(task.trusted_rewards, task.readable, (hidden,), task.ray, task.reward_processes)

    def make(spec: TaskSpec) -> PromptWorld:
        return make_world(spec, chat, containment)

    def make_own() -> PromptWorld:
        first, *others = task.specs(options.seed)
        if not task.mixture:
            return make(first)
        return MixedWorld([one.name for one in task.mixture], [make(spec) for spec in (first, *others)])

    return PromptSource(tokenizer, make_own, make)


class Prompts:
    """The run's prompts and rewards, with the model's tokenizer. `check_length`: raises for sequences too long for the model.
    `context_tokens`: longest sequence of the run. `secret`: the run's; without it, a seed cannot be known before its lease."""

    def __init__(
        self,
        options: LearnerOptions,
        vocabulary_size: int,
        stop_token_ids: Sequence[int],
        source: PromptSource | None = None,
        *,
        check_length: Callable[[int], None] = lambda tokens: None,
        context_tokens: int = 1 << 20,
        secret: bytes = b"",
    ) -> None:
        source = source or source_of(options)
        self.tokenizer = source.tokenizer
        if len(self.tokenizer) > vocabulary_size:
            raise ConfigError(
                f"model {options.trainer.model_path}: expected a tokenizer of at most {vocabulary_size} tokens (the "
                f"model's embedding), got {len(self.tokenizer)}"
            )
        self.seed = options.seed
        self.vocabulary_size = vocabulary_size
        self.world = source.make_world()
        self._make_other = source.make_other
        self.split = _split_of(self.world, options)
        self.curriculum = make_curriculum(options.task.curriculum, options.seed)
        self._curriculum_name = options.task.curriculum
        buffer_tokens = options.overlong_buffer_tokens
        limit_tokens = options.sampling.max_new_tokens
        self.overlong = OverlongShaping(limit_tokens, buffer_tokens) if buffer_tokens else None
        self.chat = ChatFormat(self.tokenizer, options.task.chat)
        self.stop_strings = StopStrings(self.tokenizer)
        piece_ids, pieces = self.stop_strings.pieces_of([text.decode() for text in options.sampling.stop_strings])
        self.sampling = replace(
            options.sampling,
            stop_token_ids=_stops(options.sampling, stop_token_ids),
            stop_piece_ids=piece_ids,
            stop_pieces=pieces,
        )
        self.check_length, self.context_tokens, self.secret = check_length, context_tokens, secret
        self.prompt_tokens_max = options.prompt_tokens_max
        self.is_driven = options.agent is not None

    def next_wanted(self, cursor: int) -> int:
        """The first cursor from `cursor` on whose prompt is short enough and wanted by the curriculum; after `SKIPS_MAX` misses,
        the next one."""
        candidate = self.split.upcoming(cursor)
        for _ in range(SKIPS_MAX):
            if not self.split.has(candidate):
                return candidate
            index = self.split.train_index(candidate)
            if self.curriculum.wants(candidate, index) and not self._is_too_long(index):
                return candidate
            candidate = self.split.upcoming(candidate + 1)
        return candidate

    def _is_too_long(self, index: int) -> bool:
        if self.is_driven:
            return False
        tokens = len(self.chat.prompt(self.world.instance(index).prompt))
        if tokens > self.prompt_tokens_max:
            _log.warning(
                "prompt %d of task %s passed over: %d tokens, above sampling.max_prompt_tokens of %d",
                index, self.world.name_of(index), tokens, self.prompt_tokens_max,
            )  # fmt: skip
        return tokens > self.prompt_tokens_max

    def take_back(self, state: Mapping[str, float]) -> None:
        """Restores the curriculum from a checkpoint."""
        self.curriculum = make_curriculum(self._curriculum_name, self.seed, state)

    def fared(self, cursor: int, rewards: Sequence[float]) -> None:
        """Reports the rewards of the group on prompt `cursor` to the curriculum."""
        self.curriculum.record(self.split.train_index(cursor), rewards)

    def exhaustion(self) -> TaskError:
        """The error for a run whose prompts are exhausted."""
        return TaskError(
            f"data set exhausted: task {self.world.name} has {self.split.train_count} training prompts, which were drawn "
            f"{self.split.epochs_max} times over (task.epochs); expected prompts for every step, found no more"
        )

    def draw(self, cursor: int) -> Draw:
        """Draws prompt number `cursor` of the run."""
        if self.is_driven:  # the agent decides what to ask the model
            return self.seeded(Draw(cursor, 0, DRIVEN_PROMPT, self.sampling))
        prompt = self.tokens_of(self.world.instance(self.split.train_index(cursor)))
        return self.seeded(Draw(cursor, 0, prompt, self.sampling))

    def seeded(self, draw: Draw) -> Draw:
        """Adds the prompt's seed: the same for every retry and after every restart, and unpredictable without the secret."""
        digest = hmac.digest(self.secret, f"{self.seed}/{draw.cursor}".encode(), "sha256")
        return replace(draw, sampling=replace(draw.sampling, seed=int.from_bytes(digest[:8], "big") >> 1))

    def tokens_of(self, instance: TaskInstance) -> tuple[int, ...]:
        """The prompt as token ids; raises `ConfigError` if the model cannot read it or it is too long."""
        ids = self.chat.prompt(instance.prompt)
        if not ids or max(ids) >= self.vocabulary_size:
            raise ConfigError(
                f"prompt {instance.index} of task {self.world.name_of(instance.index)}: expected 1 or more token ids below "
                f"{self.vocabulary_size}, got {len(ids)} up to {max(ids, default=-1)}: wrong tokenizer for this model?"
            )
        if len(ids) > self.prompt_tokens_max:
            raise ConfigError(
                f"prompt {instance.index} of task {self.world.name_of(instance.index)}: expected at most "
                f"{self.prompt_tokens_max} tokens, got {len(ids)}; a larger sampling.max_prompt_tokens has workers keep room for it"
            )
        self.check_length(len(ids) + self.sampling.max_new_tokens)
        return tuple(ids)

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self.chat.text_of(token_ids)

    async def answer(
        self, cursor: int, turns: Sequence[Sequence[int]], context_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        """Answers a finished turn of prompt `cursor` for training: if overlong shaping is on, the reward depends on the
        completion's length. `context_tokens`: all tokens up to the turn's end. `sender`: the worker that sampled the turn.
        """
        answer = await self.answer_instance(self.split.train_index(cursor), turns, context_tokens, sender)
        scored = answer.scored
        if self.overlong is None or scored is None or scored.reward is None:
            return answer
        shaped = self.overlong.shaped(scored.reward.value, len(turns[-1]))
        return TurnAnswer(replace(scored, reward=replace(scored.reward, value=shaped)))

    async def answer_instance(
        self,
        index: int,
        turns: Sequence[Sequence[int]],
        context_tokens: int,
        sender: str = "",
        world: PromptWorld | None = None,
    ) -> TurnAnswer:
        """Answers a finished turn of instance `index` of the run's own world, or of `world`."""
        room_tokens = self.context_tokens - context_tokens - self.sampling.max_new_tokens
        return await (world or self.world).answer(index, turns, room_tokens, sender)

    def task_of(self, cursor: int) -> str:
        """Name of the task of prompt `cursor` in a mixture; empty for a single task."""
        return self.world.name_of(self.split.train_index(cursor)) if self.is_mixed else ""

    @property
    def is_mixed(self) -> bool:
        return isinstance(self.split, MixedSplit)

    @property
    def held_out_counts(self) -> tuple[tuple[str, int], ...]:
        """Held-out instances per task, with the task's name in the mixture; a single task has an empty name."""
        if isinstance(self.world, MixedWorld) and isinstance(self.split, MixedSplit):
            counts = (split.held_out_count for split in self.split.splits)
            return tuple(zip(self.world.names, counts, strict=True))
        assert isinstance(self.split, TaskSplit), "one world has one split"
        return (("", self.split.held_out_count),)

    def held_out(self, position: int) -> TaskInstance:
        return self.world.instance(self.split.held_out_index(position))

    def make_world(self, spec: TaskSpec) -> PromptWorld:
        """Makes the world of another task, with the run's tokenizer."""
        if self._make_other is None:
            raise ConfigError(f"task {spec.name}: expected none beside the run's own where prompts come from elsewhere")
        return self._make_other(spec)

    def close(self) -> None:
        self.world.close()


def _split_of(world: PromptWorld, options: LearnerOptions) -> TaskSplit | MixedSplit:
    epochs, mixture = options.task.epochs or None, options.task.mixture
    if not isinstance(world, MixedWorld):
        return TaskSplit(world.size, options.evaluation.prompts, options.seed, epochs)
    each = zip(world.worlds, mixture, strict=True)
    splits = tuple(TaskSplit(one.size, share.held_out, options.seed, epochs) for one, share in each)
    return MixedSplit(splits, tuple(share.weight for share in mixture))


def load_tokenizer(path: str) -> Any:
    """Loads the tokenizer in a model's folder; raises `ConfigError` if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: expected a tokenizer beside the model: {error}") from None


def _stops(sampling: SamplingParams, model_stops: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({*sampling.stop_token_ids, *model_stops}))

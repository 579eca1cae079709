"""The learner's data plane: turns prompts into tokens and sampled tokens into rewards.

Guarantees: the prompt of a cursor is the same after every restart; a prompt with tokens that the model does not have raises
`ConfigError` before anything is sampled. Rewards and environment steps run under the reward pool's limits, and a failing one
costs only its own rollout; an environment's message is appended as tokens to exactly the tokens that were sampled, which are
never decoded and encoded again; an episode without room for another turn gets reward 0, as if no answer had come. Waits for: the
pool, at most its time limit per turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from echo2.base.errors import ConfigError, TaskError
from echo2.base.ids import Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.config.run import RunConfig
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts.groups import Batch, Insertion, Prompt, TrainGroup, group_id_of
from echo2.learner.training.model_files import naming
from echo2.learner.training.team import PublishedModel
from echo2.tasks.chat_format import ChatFormat, ChatOptions, StopStrings
from echo2.tasks.data_files import Conversation, local_data_set, read_conversations
from echo2.tasks.registry import drawn, is_environment, make_environment_source, make_task
from echo2.tasks.rewards import (
    Containment,
    RewardFailure,
    RewardPool,
    Scored,
    check_rewards,
    make_scorer,
    unjudgeable_references,
)
from echo2.tasks.split import MixedSplit, TaskSplit
from echo2.tasks.task import Reward, TaskInstance, TaskSpec

SKIPS_MAX = 64  # unwanted or too long prompts that may be skipped in a row before the next one is taken anyway
DRIVEN_PROMPT = (0,)  # placeholder for the prompt of a problem given to agents; it is never used
_log = logging.getLogger("echo2.learner")


# ---- worlds: where prompts come from and answers are judged


class PromptWorld(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int | None: ...

    @property
    def reward_processes(self) -> int:
        """Answers computed at once; 0: in this process, and none waits."""

    def instance(self, index: int) -> TaskInstance: ...

    async def answer(self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = "") -> Scored:
        """Answers the last of an instance's turns: by a reward, or by what the environment says. `room_tokens`: how many more
        tokens the context can hold. `sender`: the worker that sampled the turn."""

    def close(self) -> None: ...


class TaskWorld:
    def __init__(self, spec: TaskSpec, chat: ChatFormat, containment: Containment | None = None) -> None:
        self.task = make_task(spec)
        self.name, self.size = self.task.name, self.task.size
        self._scorer = make_scorer(self.task, spec, None, containment)
        self.reward_processes = self._scorer.process_count
        self._chat = chat

    def instance(self, index: int) -> TaskInstance:
        return drawn(self.name, self.task.sample, index)

    async def answer(self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = "") -> Scored:
        return await _result(self._scorer.submit(index, self._chat.text_of(turns[-1]), sender))

    def close(self) -> None:
        self._scorer.close()


class EnvironmentWorld:
    """Runs several turns. Each step gets all turns so far and runs in the pool, so nothing has to be replayed after a restart."""

    def __init__(self, spec: TaskSpec, chat: ChatFormat, containment: Containment | None = None) -> None:
        self._source = make_environment_source(spec)
        self.name, self.size = self._source.name, self._source.size
        self._pool = RewardPool(spec, None, containment)
        self.reward_processes = self._pool.process_count
        self._chat = chat

    def instance(self, index: int) -> TaskInstance:
        return drawn(self.name, self.reset, index)

    def reset(self, index: int) -> TaskInstance:
        return TaskInstance(index, self._source.open(index).reset(), "")

    async def answer(self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = "") -> Scored:
        texts = [self._chat.text_of(turn) for turn in turns]
        stepped = await _result(self._pool.submit_step(index, texts, sender))
        if not stepped.messages:
            return stepped
        messages = [{"role": message.role, "content": message.content} for message in stepped.messages]
        scored = replace(stepped, messages=())
        token_ids = self._chat.between(messages, turns[-1])
        if len(token_ids) >= room_tokens:
            return replace(scored, reward=Reward(0.0, {"cut": 1.0}))
        return replace(scored, reply=token_ids)

    def close(self) -> None:
        self._pool.close()


async def _result(future: Future[Scored]) -> Scored:
    return future.result() if future.done() else await asyncio.wrap_future(future)


# ---- rewards that can be computed


def _task_specs(config: RunConfig) -> list[TaskSpec]:
    return [TaskSpec(name, args, config.run.seed) for name, args in config.task.asked]


def _containment(options: LearnerOptions) -> Containment:
    task, folder = options.config.task, options.folder.absolute()
    hidden = str(folder.parent if folder.name == "learner" else folder)  # the run's folder also has its workers' keys
    return Containment(task.trusted_rewards, task.readable, (hidden,), task.ray)


def check_rewards_of(options: LearnerOptions) -> LearnerOptions:
    """Raises a `TaskError` or `ConfigError` if a reward of the run cannot be computed; returns the options with the prompts that
    are left out. Agents may bring rewards of their own."""
    config = options.config
    if config.agent.is_on:
        return options
    specs = _task_specs(config)
    further = {name: TaskSpec(each.task, each.args, config.run.seed) for name, each in config.task.eval_sets.items()}
    unjudgeable: dict[str, frozenset[int]] = {}
    for spec in (*specs, *further.values()):
        if spec.to_json() not in unjudgeable:
            check_rewards(spec, _containment(options))
            unjudgeable[spec.to_json()] = unjudgeable_references(spec, _containment(options))
    own = {("", task + row * len(specs)) for task, spec in enumerate(specs) for row in unjudgeable[spec.to_json()]}
    asked = {(name, row) for name, spec in further.items() for row in unjudgeable[spec.to_json()]}
    return replace(options, left_out=frozenset(own | asked))


def check_teacher(config: RunConfig) -> None:
    """Raises `ConfigError` unless the teacher reads each of the model's tokens as the same text; a model is not loaded for it."""
    if not config.learner.teacher:
        return
    ids, other = (load_tokenizer(path).get_vocab() for path in (config.model.path, config.learner.teacher))
    differing = sorted((token for token in ids if other.get(token) != ids[token]), key=ids.__getitem__)
    if differing:
        raise ConfigError(
            f"learner.teacher {config.learner.teacher}: expected a model with the tokenizer of {config.model.path}, because it "
            f"scores the same tokens, got {len(differing)} of {len(ids)} tokens that differ, first {ids[differing[0]]} "
            f"{differing[0]!r}"
        )


# ---- the run's prompts


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A tokenizer and a world in the place of the model's and of the run's tasks."""

    tokenizer: Any
    world: PromptWorld


class Prompts:
    """The run's prompts and rewards, of one task or of a mixture, with the model's tokenizer. `context_tokens`: longest sequence of
    the run. `secret`: without it, a seed cannot be known before its lease. `began`: when the run began, for templates that ask for
    the date."""

    def __init__(
        self, options: LearnerOptions, model: PublishedModel, source: PromptSource | None = None, secret: bytes = b"",
        began: datetime | None = None,
    ) -> None:  # fmt: skip
        config, path = options.config, options.config.model.path
        self.tokenizer = load_tokenizer(path) if source is None else source.tokenizer
        self.vocabulary_size = model.vocabulary_size
        # Without added ones, such as an image's, that no text has: a text model's tokenizer may be its larger sister's.
        if self.tokenizer.vocab_size > self.vocabulary_size:
            raise ConfigError(
                f"model {path}: expected a tokenizer of at most {self.vocabulary_size} tokens (the model's embedding), got "
                f"{self.tokenizer.vocab_size}"
            )
        self._limit_tokens, self._buffer_tokens = config.sampling.max_new_tokens, config.learner.overlong_buffer_tokens
        if self._buffer_tokens > self._limit_tokens:
            raise ConfigError(
                f"learner.overlong_buffer_tokens: expected at most sampling.max_new_tokens {self._limit_tokens}, got "
                f"{self._buffer_tokens}"
            )
        chat = ChatOptions(config.task.system_prompt, config.task.template_args, config.task.plain_prompts)
        chat = chat if began is None else replace(chat, now=began)
        stops = _stops(model.stop_token_ids, ChatFormat(self.tokenizer, chat))
        self.chat = ChatFormat(self.tokenizer, chat, stops)
        self.stop_strings = StopStrings(self.tokenizer)
        sampling, (piece_ids, pieces) = config.sampling, self.stop_strings.pieces_of(config.sampling.stop)
        self.sampling = SamplingParams(
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens, stops,
            stop_strings=tuple(text.encode() for text in sampling.stop), stop_piece_ids=piece_ids, stop_pieces=pieces,
        )  # fmt: skip
        self.seed, self.secret, self.is_driven = config.run.seed, secret, config.agent.is_on
        self._path, self._model_tokens = path, model.context_tokens
        self.context_tokens = min(options.longest_tokens, model.context_tokens)
        self._unjudgeable = options.left_out
        self._prompt_tokens_max = config.sampling.max_prompt_tokens
        self._containment = _containment(options)
        # An index encodes the task and its instance (tasks/split).
        worlds = map(self.make_world, _task_specs(config)) if source is None else (source.world,)
        self.worlds = tuple(worlds)
        self.is_mixed = source is None and bool(config.task.mixture)
        self.names = tuple(config.task.mixture) if self.is_mixed else (self.worlds[0].name,)
        self.name = "mixture" if self.is_mixed else self.names[0]
        self.reward_processes = sum(world.reward_processes for world in self.worlds)
        splits = (
            TaskSplit(world.size, held_out, config.run.seed, config.task.epochs or None)
            for world, held_out in zip(self.worlds, config.task.held_out.values(), strict=True)
        )
        weights = tuple(entry.weight for entry in config.task.mixture.values()) or (1.0,)
        self.split = MixedSplit(tuple(splits), weights)
        # A prompt is looked at before it is drawn: some tasks take long to make one, and a template some milliseconds.
        self._ids_of = lru_cache(maxsize=1)(lambda index: tuple(self._encoded(self.instance(index))))

    def make_world(self, spec: TaskSpec) -> PromptWorld:
        """Makes the world of the task or environment that `spec` describes, with the run's tokenizer."""
        make = EnvironmentWorld if is_environment(spec) else TaskWorld
        return make(spec, self.chat, self._containment)

    def content(self) -> dict[str, object]:
        """What prompts are made of, as digests: a run's data, its tokenizer with the template."""
        data = [str(getattr(getattr(world, "task", None), "content", "")) for world in self.worlds]
        vocabulary = sorted(getattr(self.tokenizer, "get_vocab", dict)().items())
        description = json.dumps([vocabulary, getattr(self.tokenizer, "chat_template", None)])
        return {"data": data, "tokenizer": hashlib.sha256(description.encode()).hexdigest()}

    # ---- drawing

    def next_wanted(self, cursor: int) -> int:
        """The first cursor from `cursor` on whose prompt is short enough; after `SKIPS_MAX` misses, the next one."""
        candidate = self.split.upcoming(cursor)
        for _ in range(SKIPS_MAX):
            if self.is_driven or not self.split.has(candidate):
                return candidate
            index = self.split.train_index(candidate)
            if ("", index) not in self._unjudgeable:
                ids = self._ids_of(index)
                if not (excess := self.excess_of(ids)):
                    return candidate
                name = self.name_of(index)
                _log.warning("prompt %d of task %s passed over: %d tokens, above %s", index, name, len(ids), excess)
            candidate = self.split.upcoming(candidate + 1)
        return candidate

    def exhaustion(self) -> TaskError:
        return TaskError(
            f"data set exhausted: task {self.name} has {self.split.train_count} training prompts, which were drawn "
            f"{self.split.epochs_max} times over (task.epochs); expected prompts for every step, found no more"
        )

    def draw(self, cursor: int) -> Prompt:
        """Prompt number `cursor`. Its seed is the same for every retry and after every restart, and unpredictable without the
        secret."""
        sampling = replace(self.sampling, seed=self.secret_seed(f"{self.seed}/{cursor}"))
        if self.is_driven:  # the agent decides what to ask the model
            return DRIVEN_PROMPT, sampling
        index = self.split.train_index(cursor)
        return self._checked(self._ids_of(index), f"prompt {index} of task {self.name_of(index)}"), sampling

    def secret_seed(self, name: str) -> int:
        digest = hmac.digest(self.secret, name.encode(), "sha256")
        return int.from_bytes(digest[:8], "big") >> 1

    def tokens_of(
        self, instance: TaskInstance, world: PromptWorld | None = None, asked: str = ""
    ) -> tuple[int, ...] | None:
        """A held-out prompt as token ids; None if it is too long or its reference cannot be judged, as for training. Raises
        `ConfigError` if the model cannot read it. `world`: as in `answer_instance`; `asked`: the name of its set."""
        if (asked, instance.index) in self._unjudgeable:
            return None
        ids, name = tuple(self._encoded(instance, world)), self._name_of_prompt(instance, world)
        if excess := self.excess_of(ids):
            _log.warning("%s is not asked: %d tokens, above %s", name, len(ids), excess)
            return None
        return self._checked(ids, name)

    def excess_of(self, ids: tuple[int, ...]) -> str:
        """What a prompt is too long for; empty if it is not."""
        room = self._model_tokens - self.sampling.max_new_tokens
        if len(ids) > self._prompt_tokens_max:
            return f"sampling.max_prompt_tokens of {self._prompt_tokens_max}"
        left = f"the {room} that sampling.max_new_tokens leaves of the model's context of {self._model_tokens}"
        return left if len(ids) > room else ""

    def _checked(self, ids: tuple[int, ...], name: str) -> tuple[int, ...]:
        if not ids or max(ids) >= self.vocabulary_size:
            raise ConfigError(
                f"{name}: expected 1 or more token ids below {self.vocabulary_size}, got {len(ids)} up to "
                f"{max(ids, default=-1)}: wrong tokenizer for this model?"
            )
        if excess := self.excess_of(ids):
            raise ConfigError(
                f"{name}: got {len(ids)} tokens, above {excess}. Change these options, or state a longer context than "
                f"{self._model_tokens} in {self._path}/config.json as its model card says (rope_scaling, max_position_embeddings)"
            )
        return ids

    def _encoded(self, instance: TaskInstance, world: PromptWorld | None = None) -> list[int]:
        try:
            return self.chat.prompt(instance.prompt)
        except ConfigError as error:
            raise ConfigError(f"{self._name_of_prompt(instance, world)}: {error}") from error

    def _name_of_prompt(self, instance: TaskInstance, world: PromptWorld | None) -> str:
        return f"prompt {instance.index} of task {self.name_of(instance.index) if world is None else world.name}"

    # ---- answers

    async def answer(
        self, cursor: int, turns: Sequence[Sequence[int]], context_tokens: int, sender: str = ""
    ) -> Scored:
        """Answers a finished turn of prompt `cursor` for training: if overlong shaping is on, the reward depends on the
        completion's length. `context_tokens`: all tokens up to the turn's end. `sender`: the worker that sampled the turn."""
        scored = await self.answer_instance(self.split.train_index(cursor), turns, context_tokens, sender)
        buffer_tokens = self._buffer_tokens
        if not buffer_tokens or scored.reward is None:
            return scored
        # The soft overlong punishment of DAPO (Yu et al., arXiv 2503.14476): from 0 to 1 over the last tokens before the limit.
        excess_tokens = len(turns[-1]) - (self._limit_tokens - buffer_tokens)
        shaped = scored.reward.value - min(1.0, max(0.0, excess_tokens / buffer_tokens))
        return replace(scored, reward=replace(scored.reward, value=shaped))

    async def answer_instance(
        self, index: int, turns: Sequence[Sequence[int]], context_tokens: int, sender: str = "",
        world: PromptWorld | None = None,
    ) -> Scored:  # fmt: skip
        """Answers a finished turn of instance `index` of the run's own tasks, or of `world`."""
        room_tokens = self.context_tokens - context_tokens - self.sampling.max_new_tokens
        if world is None:
            index, task = divmod(index, len(self.worlds))
            world = self.worlds[task]
        try:
            return await world.answer(index, turns, room_tokens, sender)
        except ConfigError as error:  # tokens that cannot be decoded, or an environment's: it costs this rollout alone
            return Scored(None, RewardFailure.RAISED, str(error), 0.0)

    # ---- tasks

    def instance(self, index: int) -> TaskInstance:
        own_index, task = divmod(index, len(self.worlds))
        problem = self.worlds[task].instance(own_index)
        return replace(problem, index=index) if self.is_mixed else problem

    def name_of(self, index: int) -> str:
        """Name of an instance's task; in a mixture, the run's name for one of several."""
        return self.names[index % len(self.names)]

    def task_of(self, cursor: int) -> str:
        """Name of the task of prompt `cursor` in a mixture; empty for a single task."""
        return self.name_of(self.split.train_index(cursor)) if self.is_mixed else ""

    @property
    def held_out_counts(self) -> tuple[tuple[str, int], ...]:
        """Held-out instances per task, with the task's name in the mixture; a single task has an empty name."""
        names = self.names if self.is_mixed else ("",)
        return tuple((name, split.held_out_count) for name, split in zip(names, self.split.splits, strict=True))

    def close(self) -> None:
        for world in self.worlds:
            world.close()


def load_tokenizer(path: str) -> Any:
    """Loads the tokenizer in a model's folder; raises `ConfigError` if there is none."""
    from transformers import AutoTokenizer

    with naming(path, "expected a tokenizer beside the model"):
        local = Path(path).expanduser()  # which may hold nothing but the tokenizer
        tokenizer = AutoTokenizer.from_pretrained(local if local.is_dir() else path, trust_remote_code=False)
        # Without its files some classes, as Qwen's and Gemma's, make one that reads any text as nothing, or as unknown.
        if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens}:
            raise ConfigError(
                f"model {path}: expected a tokenizer beside the model, found no files of one: copy tokenizer.json and "
                "tokenizer_config.json from where the model comes from"
            )
        return tokenizer


def _stops(model_stops: Sequence[int], chat: ChatFormat) -> tuple[int, ...]:
    """The tokens that end a completion. Some chat models name the end of a turn in the tokenizer or the template alone."""
    named = (getattr(chat.tokenizer, "eos_token_id", None), chat.turn_end)
    further = {int(token) for token in named if token is not None} - set(model_stops)
    if further and model_stops:
        _log.warning(
            "the tokenizer or its chat template ends a turn with token %s, the model's config names %s: completions end at any",
            ", ".join(map(str, sorted(further))), model_stops,
        )  # fmt: skip
    return tuple(sorted({*model_stops, *further}))


# ---- conversations of the supervised warm start: the model's turns are trained on; a restart trains on the same batches

HELD_OUT_MAX = 64
"""Conversations held out, of at most a twentieth: their mean loss is good to a few per cent, and costs one micro-batch or two."""
STEPS_TRIED = 16  # steps whose conversations are all too long: more of them are no accident


def read_conversations_of(config: RunConfig) -> list[Conversation]:
    """The run's conversations, empty without `[sft]`. Raises `TaskError` with row and column for one that cannot be trained on."""
    if not config.sft.path:
        return []
    rows = read_conversations(local_data_set(config.sft.path))
    if len(rows) < 2:
        raise TaskError(f"sft.path {config.sft.path}: expected 2 conversations or more, one of them held out, got 1")
    return rows


class Conversations:
    """`steps`: how many of the run's steps train on them. `longest_tokens`: longer ones are left out. `content`: a digest."""

    def __init__(self, config: RunConfig, chat: ChatFormat, longest_tokens: int, vocabulary_size: int) -> None:
        self.steps, self._chat = config.sft.step_count, chat
        self._longest_tokens, self._vocabulary_size = longest_tokens, vocabulary_size
        self._rows = read_conversations_of(config)
        self._split = TaskSplit(len(self._rows), max(1, min(HELD_OUT_MAX, len(self._rows) // 20)), config.run.seed)
        self._per_step = min(config.learner.rollouts_per_step, len(self._rows) - self._split.held_out_count)
        self._left_out: set[int] = set()
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(repr(row).encode())
        self.content = digest.hexdigest()
        _log.info(
            "supervised warm start: %d steps of %d conversations, %.3g passes over %d; %d more are held out", self.steps,
            self._per_step, self.steps * self._per_step / len(self._rows), len(self._rows) - self._split.held_out_count,
            self._split.held_out_count,
        )  # fmt: skip

    def batch(self, step: int) -> Batch:
        """A step's conversations. If all of them are too long, those of the next step with others, so that the run goes on."""
        held_out = {group.cursor for group in self._held_out}
        for first in range(step * self._per_step, (step + STEPS_TRIED) * self._per_step, self._per_step):
            indices = [self._split.train_index(first + number) for number in range(self._per_step)]
            if groups := self._groups(index for index in indices if index not in held_out):
                return Batch(Step(step), groups)
        raise self._too_long()

    def held_out(self) -> Batch:
        if not self._held_out:
            raise self._too_long()
        return Batch(Step(0), self._held_out)

    @cached_property
    def _held_out(self) -> tuple[TrainGroup, ...]:
        """Those set apart. If all of them are too long, as one alone may be, the first other conversation that is not."""
        if groups := self._groups(map(self._split.held_out_index, range(self._split.held_out_count))):
            return groups
        others = range(min(len(self._rows) - self._split.held_out_count, STEPS_TRIED * self._per_step))
        return next(filter(None, (self._groups([self._split.train_index(place)]) for place in others)), ())

    def _groups(self, indices: Iterable[int]) -> tuple[TrainGroup, ...]:
        groups = (self._group(index, self._rows[index]) for index in dict.fromkeys(indices))
        return tuple(group for group in groups if group is not None)

    def _too_long(self) -> ConfigError:
        return ConfigError(
            f"sft.path: expected conversations of at most {self._longest_tokens} tokens, the run's longest sequence, got "
            f"none among {len(self._left_out)}: raise sampling.max_prompt_tokens or sampling.max_new_tokens"
        )

    def _group(self, index: int, row: Conversation) -> TrainGroup | None:
        """A conversation as a rollout of several turns; None if it is too long."""
        try:
            (prompt, first), *others = self._chat.conversation(row)
        except ConfigError as error:
            raise ConfigError(f"conversation {index} of sft.path: {error}") from error
        tokens, insertions = list(first), []
        for read, turn in others:
            insertions.append(Insertion(len(tokens), tuple(read)))
            tokens += turn
        length = len(prompt) + len(tokens) + sum(len(insertion.token_ids) for insertion in insertions)
        if length > self._longest_tokens or not prompt:
            if index not in self._left_out:
                self._left_out.add(index)
                _log.warning(
                    "conversation %d of sft.path is left out: %d tokens, expected at most %d, the longest sequence of the run",
                    index, length, self._longest_tokens,
                )  # fmt: skip
            return None
        if max((*prompt, *tokens)) >= self._vocabulary_size:
            raise ConfigError(f"conversation {index} of sft.path: expected token ids below {self._vocabulary_size}")
        sampling = SamplingParams(max_new_tokens=len(tokens))
        group_id = group_id_of(index)
        nothing = (0.0,) * len(tokens)  # nobody sampled them
        spans = (VersionSpan(Version(0), len(tokens)),)
        rollout = Rollout(group_id, 0, tuple(tokens), nothing, nothing, spans, FinishReason.STOP)
        spec = GroupSpec(group_id, tuple(prompt), 1, sampling, 0)
        return TrainGroup(spec, index, (rollout,), (0.0,), (tuple(insertions),))

"""The conversations of the supervised warm start as batches: the model's turns are the tokens trained on, the rest is context.

Guarantees: a step's batch is a function of data, seed and step, so a restart trains on the same; conversations that are held out
are never trained on, and none comes twice in a batch. Leaves to others: reading files (tasks/data_files), tokens
(tasks/chat_format), the loss (training/trainer).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable

from echo2.base.errors import ConfigError, TaskError
from echo2.base.ids import Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.config.run import RunConfig
from echo2.learner.rollouts.groups import Batch, Draw, Insertion, TrainGroup
from echo2.tasks.chat_format import ChatFormat
from echo2.tasks.data_files import Conversation, local_data_set, read_conversations
from echo2.tasks.split import TaskSplit

HELD_OUT_MAX = 64
"""Conversations held out, of at most a twentieth: their mean loss is good to a few per cent, and costs one micro-batch or two."""
_log = logging.getLogger("echo2.learner")


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
        """What step `step`, counted from 0, trains on."""
        first = step * self._per_step
        return self._batch(step, (self._split.train_index(first + number) for number in range(self._per_step)))

    def held_out(self) -> Batch:
        return self._batch(0, map(self._split.held_out_index, range(self._split.held_out_count)))

    def _batch(self, step: int, indices: Iterable[int]) -> Batch:
        rows = {index: self._rows[index] for index in indices}
        groups = [group for index, row in rows.items() if (group := self._group(index, row)) is not None]
        if not groups:
            raise ConfigError(
                f"sft.path: expected conversations of at most {self._longest_tokens} tokens, the run's longest sequence, got "
                f"none among {len(rows)}: raise sampling.max_prompt_tokens or sampling.max_new_tokens"
            )
        return Batch(Step(step), tuple(groups))

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
        group_id = Draw(index, 0, tuple(prompt), sampling).group_id()
        nothing = (0.0,) * len(tokens)  # nobody sampled them
        spans = (VersionSpan(Version(0), len(tokens)),)
        rollout = Rollout(group_id, 0, tuple(tokens), nothing, nothing, spans, FinishReason.STOP)
        spec = GroupSpec(group_id, tuple(prompt), 1, sampling, 0)
        return TrainGroup(spec, index, (rollout,), (0.0,), (tuple(insertions),))

"""Answers completions: a task scores them, an environment replies turn by turn.

Guarantees: rewards and environment steps run under the reward pool's limits, and a failing one costs only its own rollout; an
environment's message is appended as tokens to exactly the tokens that were sampled, which are never decoded and encoded again; an
episode without room for another turn gets reward 0, as if no answer had come. Waits for: the pool, at most its time limit per
turn. Leaves to others: the order of prompts (prompts), leases for the next turn (intake).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from echo2.tasks.runtime.chat_format import ChatFormat
from echo2.tasks.runtime.registry import is_environment, make_environment_source, make_task
from echo2.tasks.runtime.rewards import Containment, RewardPool, Scored, make_scorer
from echo2.tasks.task import Reward, TaskInstance, TaskSpec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer to a finished turn: `scored` if the rollout has ended, else `said`, the tokens before the model's next turn."""

    scored: Scored | None
    said: tuple[int, ...] = ()


class PromptWorld(Protocol):
    """Gives prompts by index and answers completions."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    def instance(self, index: int) -> TaskInstance: ...

    def name_of(self, index: int) -> str:
        """Name of the instance's task; in a mixture, one of several."""
        ...

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        """Answers the last of an instance's turns. `room_tokens`: how many more tokens the context can hold. `sender`: the worker
        that sampled the turn."""
        ...

    def close(self) -> None: ...


def make_world(spec: TaskSpec, chat: ChatFormat, containment: Containment | None = None) -> PromptWorld:
    """Makes the world of the task or environment that `spec` describes."""
    make = EnvironmentWorld if is_environment(spec) else TaskWorld
    return make(spec, chat, containment)


class TaskWorld:
    """Scores a single completion."""

    def __init__(self, spec: TaskSpec, chat: ChatFormat, containment: Containment | None = None) -> None:
        self.task = make_task(spec)
        self.name = self.task.name
        self.size = self.task.size
        self._scorer = make_scorer(self.task, spec, None, containment)
        self._chat = chat

    def instance(self, index: int) -> TaskInstance:
        return self.task.sample(index)

    def name_of(self, index: int) -> str:
        return self.name

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        scored = await _result(self._scorer.submit(index, self._chat.text_of(turns[-1]), sender))
        return TurnAnswer(scored)

    def close(self) -> None:
        self._scorer.close()


class EnvironmentWorld:
    """Runs several turns. Each step gets all turns so far and runs in the pool, so nothing has to be replayed after a restart."""

    def __init__(self, spec: TaskSpec, chat: ChatFormat, containment: Containment | None = None) -> None:
        self._source = make_environment_source(spec)
        self.name = self._source.name
        self.size = self._source.size
        self._pool = RewardPool(spec, None, containment)
        self._chat = chat

    def instance(self, index: int) -> TaskInstance:
        return TaskInstance(index, self._source.open(index).reset(), "")

    def name_of(self, index: int) -> str:
        return self.name

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        texts = [self._chat.text_of(turn) for turn in turns]
        stepped = await _result(self._pool.submit_step(index, texts, sender))
        observation = stepped.observation
        scored = Scored(None, stepped.failure, stepped.message, stepped.seconds)
        if observation is None:
            return TurnAnswer(scored)
        if observation.reward is not None:
            return TurnAnswer(replace(scored, reward=observation.reward))
        messages = [{"role": message.role, "content": message.content} for message in observation.messages]
        said = self._chat.between(messages, turns[-1])
        if len(said) >= room_tokens:
            return TurnAnswer(replace(scored, reward=Reward(0.0, {"cut": 1.0})))
        return TurnAnswer(None, said)

    def close(self) -> None:
        self._pool.close()


async def _result(future: Future[_T]) -> _T:
    return future.result() if future.done() else await asyncio.wrap_future(future)

"""What answers the model: the score of a task, or the world of an environment, turn by turn.

Guarantees: rewards and steps run under the reward pool's limits, and one that fails costs its own rollout; the world's
words reach the model as tokens behind exactly the tokens that it was sampled from, never as text encoded again; an
episode that has no room left for another turn is worth 0, as an answer that never came. Waits for: the pool, at most
its time limit a turn. Leaves to others: the order of prompts (prompts), leases for the next turn (intake).
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
    """To a finished turn: the rollout's end, or tokens behind which the model speaks again."""

    scored: Scored | None
    said: tuple[int, ...] = ()


class PromptWorld(Protocol):
    """Prompts by index, and answers to completions."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    def instance(self, index: int) -> TaskInstance: ...

    def name_of(self, index: int) -> str:
        """Of the task that the instance is of: of a mixture, one of several."""
        ...

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        """To the last of an instance's turns. `room_tokens`: how many the context still holds. `sender`: who sampled it."""
        ...

    def close(self) -> None: ...


def make_world(spec: TaskSpec, chat: ChatFormat, containment: Containment | None = None) -> PromptWorld:
    """The task or the environments that `spec` describes."""
    make = EnvironmentWorld if is_environment(spec) else TaskWorld
    return make(spec, chat, containment)


class TaskWorld:
    """One completion, then its score."""

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
    """Several turns. Steps run in the pool, told whole each time, so a restart replays nothing here."""

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

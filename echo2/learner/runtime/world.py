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
from typing import Any, Protocol, TypeVar

from echo2.base.errors import ConfigError
from echo2.tasks.runtime.registry import is_environment, make_environment_source, make_task
from echo2.tasks.runtime.rewards import Containment, RewardPool, Scored, make_scorer
from echo2.tasks.task import ChatMessage, Reward, TaskInstance, TaskSpec, prompt_text

_SAID = "\x02answer\x03"
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

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        """To the last of an instance's turns. `room_tokens`: how many the context still holds. `sender`: who sampled it."""
        ...

    def close(self) -> None: ...


def make_world(spec: TaskSpec, tokenizer: Any, containment: Containment | None = None) -> PromptWorld:
    """The task or the environments that `spec` describes."""
    make = EnvironmentWorld if is_environment(spec) else TaskWorld
    return make(spec, tokenizer, containment)


class TaskWorld:
    """One completion, then its score."""

    def __init__(self, spec: TaskSpec, tokenizer: Any, containment: Containment | None = None) -> None:
        self.task = make_task(spec)
        self.name = self.task.name
        self.size = self.task.size
        self._scorer = make_scorer(self.task, spec, None, containment)
        self._tokenizer = tokenizer

    def instance(self, index: int) -> TaskInstance:
        return self.task.sample(index)

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        scored = await _result(self._scorer.submit(index, text_of(self._tokenizer, turns[-1]), sender))
        return TurnAnswer(scored)

    def close(self) -> None:
        self._scorer.close()


class EnvironmentWorld:
    """Several turns. Steps run in the pool, told whole each time, so a restart replays nothing here."""

    def __init__(self, spec: TaskSpec, tokenizer: Any, containment: Containment | None = None) -> None:
        self._source = make_environment_source(spec)
        self.name = self._source.name
        self.size = self._source.size
        self._pool = RewardPool(spec, None, containment)
        self._tokenizer = tokenizer

    def instance(self, index: int) -> TaskInstance:
        return TaskInstance(index, self._source.open(index).reset(), "")

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        texts = [text_of(self._tokenizer, turn) for turn in turns]
        stepped = await _result(self._pool.submit_step(index, texts, sender))
        observation = stepped.observation
        scored = Scored(None, stepped.failure, stepped.message, stepped.seconds)
        if observation is None:
            return TurnAnswer(scored)
        if observation.reward is not None:
            return TurnAnswer(replace(scored, reward=observation.reward))
        said = tokens_between(self._tokenizer, observation.messages, turns[-1])
        if len(said) >= room_tokens:
            return TurnAnswer(replace(scored, reward=Reward(0.0, {"cut": 1.0})))
        return TurnAnswer(None, said)

    def close(self) -> None:
        self._pool.close()


def text_of(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def prompt_tokens(tokenizer: Any, instance: TaskInstance) -> list[int]:
    """The prompt as the model reads it: through its chat template where there is one and the prompt is a chat."""
    prompt = instance.prompt
    if isinstance(prompt, str) or not tokenizer.chat_template:
        return [int(token) for token in tokenizer.encode(prompt_text(prompt))]
    messages = [{"role": message.role, "content": message.content} for message in prompt]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def tokens_between(tokenizer: Any, messages: Sequence[ChatMessage], turn: Sequence[int]) -> tuple[int, ...]:
    """All tokens from the end of the model's `turn` to where it speaks again, by the chat template.

    Without a template: each message on a line of its own.
    """
    if not tokenizer.chat_template:
        text = "\n" + "\n".join(message.content for message in messages) + "\n"
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
    chat += [{"role": message.role, "content": message.content} for message in messages]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    _, mark, behind = text.partition(_SAID)
    if not mark:
        raise ConfigError("chat template: expected it to repeat what the assistant said, it does not")
    # The model's own closing token, where it sampled one, is not said twice.
    closing = str(tokenizer.decode(list(turn[-1:]), skip_special_tokens=False))
    if turn and closing and int(turn[-1]) in tokenizer.all_special_ids:
        behind = behind.removeprefix(closing)
    return tuple(int(token) for token in tokenizer.encode(behind, add_special_tokens=False))


async def _result(future: Future[_T]) -> _T:
    return future.result() if future.done() else await asyncio.wrap_future(future)

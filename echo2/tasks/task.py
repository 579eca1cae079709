"""What a task is: prompts that can be drawn again by their index, and a score for a completion.

Guarantees required of an implementation: `sample` is a pure function of the task's seed and the index, on every machine and
after every restart; `score` is a pure function of the instance and the text. So the data plane's whole state is a cursor, and a
reward can be computed anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from echo2.base.errors import ConfigError, TaskError


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat: `role` is system, user, assistant or tool."""

    role: str
    content: str


Prompt = str | tuple[ChatMessage, ...]
"""Plain text, or a chat that the model's template turns into text."""


@dataclass(frozen=True, slots=True)
class TaskInstance:
    """One problem. `answer`: the reference that `score` compares with. `metadata`: anything else that `score` needs."""

    index: int
    prompt: Prompt
    answer: str
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_list = isinstance(self.prompt, tuple | list)
        is_chat = is_list and all(isinstance(message, ChatMessage) for message in self.prompt)
        if not isinstance(self.prompt, str) and not (is_chat and self.prompt):
            raise TaskError(
                f"instance {self.index}: expected a prompt of text or of ChatMessages, got {self.prompt!r:.80}"
            )


@dataclass(frozen=True, slots=True)
class Reward:
    """`value`: the number to train on. `parts`: further numbers to log by name, such as accuracy or format."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, number in (("value", self.value), *self.parts.items()):
            try:
                is_finite = math.isfinite(number)
            except (TypeError, OverflowError):
                is_finite = False
            if not is_finite:
                raise TaskError(f"reward {name}: expected a finite number, got {number!r:.80}")


class Task(Protocol):
    """A source of problems with a score."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Number of distinct instances; None: unlimited."""
        ...

    @property
    def is_cheap(self) -> bool:
        """Whether scoring is a plain comparison, well under a millisecond, that needs no process of its own. For a user's task
        this counts only if the operator trusts rewards."""
        ...

    def sample(self, index: int) -> TaskInstance:
        """The instance at `index`, 0 <= index (< size)."""
        ...

    def score(self, instance: TaskInstance, completion_text: str) -> Reward: ...


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What a task is made from, here or in another process: a name, arguments that JSON can carry, and a seed."""

    name: str
    args: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0

    def to_json(self) -> str:
        try:
            return json.dumps({"name": self.name, "args": dict(self.args), "seed": self.seed}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task {self.name}: expected arguments that JSON can carry, got {error}") from error


def spec_from_json(text: str) -> TaskSpec:
    """Reads what `TaskSpec.to_json` wrote."""
    try:
        fields = json.loads(text)
        return TaskSpec(str(fields["name"]), dict(fields["args"]), int(fields["seed"]))
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"task: expected a JSON object with name, args and seed, got {text[:80]!r}") from error


def texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text, for a tokenizer without a chat template: the messages' contents, one a line."""
    return prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)


def checked_index(index: int, size: int | None, owner: str) -> int:
    """`index`, or a `TaskError` if the task has no such instance."""
    if index < 0 or (size is not None and index >= size):
        raise TaskError(f"{owner}: expected an index from 0 to {'any' if size is None else size - 1}, got {index}")
    return index


@dataclass(frozen=True, slots=True)
class Observation:
    """What the world answers: messages for the model to read next, or the reward when the episode is over."""

    messages: tuple[ChatMessage, ...]
    reward: Reward | None = None

    def __post_init__(self) -> None:
        if self.reward is None and not self.messages:
            raise TaskError("observation: expected messages while the episode goes on, got none")
        for message in self.messages:
            if not isinstance(message, ChatMessage):
                raise TaskError(f"observation: expected messages as ChatMessage(role, content), got {message!r:.80}")

    @property
    def is_done(self) -> bool:
        return self.reward is not None


class Environment(Protocol):
    def reset(self) -> Prompt: ...

    def step(self, completion_text: str) -> Observation:
        """Returns the world's answer to a completion. Callers must stop once an observation is done."""
        ...


class EnvironmentSource(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Number of distinct episodes; None: unlimited."""
        ...

    def open(self, index: int) -> Environment: ...

"""Environments: tasks of several turns, in which the world answers between the model's completions.

Guarantees asked of an implementation: an episode is a pure function of its index and of the completions so far, so that
it can be replayed on another process or after a restart; it ends after a stated number of turns. Leaves to others:
running it under limits (runtime/rewards), tokens and masks (episode), asking workers for the next turn: every turn is
a lease of its own whose prompt is all that came before, so workers know nothing of environments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from echo2.base.errors import TaskError
from echo2.tasks.task import ChatMessage, Prompt, Reward


@dataclass(frozen=True, slots=True)
class Observation:
    """What the world answers: messages for the model to read next, or the reward when the episode is over."""

    messages: tuple[ChatMessage, ...]
    reward: Reward | None = None

    def __post_init__(self) -> None:
        if self.reward is None and not self.messages:
            raise TaskError("observation: expected messages while the episode goes on, got none")

    @property
    def is_done(self) -> bool:
        return self.reward is not None


class Environment(Protocol):
    """One episode."""

    def reset(self) -> Prompt:
        """Back to the beginning; the opening prompt."""
        ...

    def step(self, completion_text: str) -> Observation:
        """The world's answer to a completion. Not called again once an observation was done."""
        ...


class EnvironmentSource(Protocol):
    """Makes episodes by their index."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """How many distinct episodes there are; None: without end."""
        ...

    def open(self, index: int) -> Environment: ...


def replayed(source: EnvironmentSource, index: int, completions: tuple[str, ...]) -> tuple[Prompt, list[Observation]]:
    """The episode at `index` after these completions, from its beginning."""
    environment = source.open(index)
    prompt = environment.reset()
    observations: list[Observation] = []
    for text in completions:
        if observations and observations[-1].is_done:
            raise TaskError(f"{source.name} episode {index}: expected no completion after its end, got another")
        observations.append(environment.step(text))
    return prompt, observations

"""Environments: tasks of several turns, in which the world answers between the model's completions.

Guarantees required of an implementation: an episode is a pure function of its index and of the completions so far, so that
it can be replayed on another process or after a restart; it ends after a stated number of turns. Leaves to others:
running it under limits (runtime/rewards), tokens and masks (episode), asking workers for the next turn: every turn is
a lease of its own whose prompt is everything before it, so workers know nothing about environments.
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
        """Restarts the episode and returns the opening prompt."""
        ...

    def step(self, completion_text: str) -> Observation:
        """Returns the world's answer to a completion. Callers must stop once an observation is done."""
        ...


class EnvironmentSource(Protocol):
    """Makes episodes by their index."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Number of distinct episodes; None: unlimited."""
        ...

    def open(self, index: int) -> Environment: ...


def replayed(source: EnvironmentSource, index: int, completions: tuple[str, ...]) -> tuple[Prompt, list[Observation]]:
    """Replays the episode at `index`: returns its opening prompt and the observation after each completion. Raises `TaskError` if a
    completion follows the end."""
    environment = source.open(index)
    prompt = environment.reset()
    observations: list[Observation] = []
    for text in completions:
        if observations and observations[-1].is_done:
            raise TaskError(f"{source.name} episode {index}: expected no completion after its end, got another")
        observations.append(environment.step(text))
    return prompt, observations

"""An environment for the real daemons: digits to sort, asked twice; the second answer counts."""

from __future__ import annotations

from echo2.tasks.built_in import SortDigits
from echo2.tasks.task import ChatMessage, Environment, Observation, Prompt, Reward, TaskInstance

TASK = SortDigits(5)


class _Asked:
    def __init__(self, instance: TaskInstance) -> None:
        self.instance = instance
        self.turns = 0

    def reset(self) -> Prompt:
        self.turns = 0
        return self.instance.prompt

    def step(self, completion_text: str) -> Observation:
        self.turns += 1
        if self.turns == 1:
            return Observation((ChatMessage("user", str(self.instance.prompt)),))
        reward = TASK.score(self.instance, completion_text)
        return Observation((), Reward(reward.value, {**reward.parts, "turns": float(self.turns)}))


class AskedTwice:
    """Source of the above."""

    name = "asked_twice"
    size = TASK.size

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def open(self, index: int) -> Environment:
        return _Asked(TASK.sample(index))

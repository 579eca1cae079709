"""One-digit sums as a chat: the smallest verifiable task for a model that was pretrained.

Guarantees: all 100 prompts are distinct, so held-out prompts are never trained on; scoring takes microseconds. A small
instruct model starts with a fifth of them right and long answers, and learns to answer briefly within minutes on a CPU. Leaves to
others: the model and its chat template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from echo2.base.errors import ConfigError
from echo2.tasks.task import ChatMessage, Reward, TaskInstance, checked_index

NUMBERS_MAX = 1000
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of two numbers below `numbers`. The last number of a completion is its answer: reward 1 if right, else 0."""

    numbers: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= NUMBERS_MAX:
            raise ConfigError(f"sums: expected numbers of 2 to {NUMBERS_MAX}, got {self.numbers}")

    @property
    def name(self) -> str:
        return "sums"

    @property
    def size(self) -> int:
        return self.numbers**2

    @property
    def is_cheap(self) -> bool:
        return True

    def sample(self, index: int) -> TaskInstance:
        left, right = divmod(checked_index(index, self.size, self.name), self.numbers)
        text = f"What is {left} + {right}? Answer with the number only."
        return TaskInstance(index, (ChatMessage("user", text),), str(left + right))

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        found = _NUMBER.findall(completion_text)
        is_right = bool(found) and found[-1].lstrip("0") == instance.answer.lstrip("0")
        is_bare = completion_text.strip() == instance.answer
        return Reward(float(is_right), {"bare": float(is_bare)})

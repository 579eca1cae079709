"""The smallest task worth training on: sort n digits, written `52413>` and answered `12345`.

Guarantees: all 10^n prompts are distinct, so held-out prompts are never trained on; scoring takes microseconds. A
character model learns it within minutes on a CPU from a checkpoint that knows only the answer format. Leaves to others: the model
and its character tokenizer, whose alphabet must hold `ALPHABET`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from echo2.base.errors import ConfigError
from echo2.tasks.task import Reward, TaskInstance, checked_index

PROMPT_END = ">"
ALPHABET = "0123456789" + PROMPT_END
DIGITS_MAX = 12


@dataclass(frozen=True, slots=True)
class SortDigits:
    """Prompts of `digit_count` digits. Half of the reward is for a fully correct answer, half is the share of digits in place.

    The share gives a weak policy a gradient; the other half rewards the complete answer beyond its parts. A checkpoint that repeats
    the prompt's digits in random order earns about 0.13 with five digits. A completion of another length scores 0; blanks, which
    some tokenizers put between characters, are ignored. The part `exact` logs the all-or-nothing score.
    """

    digit_count: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.digit_count <= DIGITS_MAX:
            raise ConfigError(f"sort_digits: expected a digit_count of 1 to {DIGITS_MAX}, got {self.digit_count}")

    @property
    def name(self) -> str:
        return "sort_digits"

    @property
    def size(self) -> int:
        return int(10**self.digit_count)

    @property
    def is_cheap(self) -> bool:
        return True

    def sample(self, index: int) -> TaskInstance:
        digits = str(checked_index(index, self.size, self.name)).zfill(self.digit_count)
        return TaskInstance(index, digits + PROMPT_END, "".join(sorted(digits)))

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        text = "".join(completion_text.split())
        if len(text) != self.digit_count:
            return Reward(0.0, {"exact": 0.0})
        in_place = sum(got == wanted for got, wanted in zip(text, instance.answer, strict=True))
        exact = float(text == instance.answer)
        return Reward(0.5 * exact + 0.5 * in_place / self.digit_count, {"exact": exact})


def format_only_target(instance: TaskInstance, rng: random.Random) -> str:
    """Returns the target of the warm-up: the prompt's digits in random order. The form is right; the order, once in n! times."""
    digits = list(instance.answer)
    rng.shuffle(digits)
    return "".join(digits)

"""A task of one's own: complete a word to a palindrome. Run it with custom-reward.toml, which lies beside it:

[task]
name = "palindromes:Palindromes"
args = { letters = 4 }
"""

from __future__ import annotations

from echo2.base.rng import derived_rng
from echo2.tasks.task import Reward, TaskInstance

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Palindromes:
    """The reward is the share of letters that mirror their counterpart; 0 where the given beginning was not kept."""

    name = "palindromes"
    size = None  # without end
    is_cheap = True  # with task.trusted_rewards: scored in the learner's process; for code that takes microseconds

    def __init__(self, seed: int, letters: int = 4):
        self.seed = seed
        self.letters = letters

    def sample(self, index: int) -> TaskInstance:
        rng = derived_rng(self.seed, "palindromes", index)
        beginning = "".join(rng.choice(ALPHABET) for _ in range(self.letters))
        return TaskInstance(index, f"Complete to a palindrome: {beginning}", beginning)

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        word = completion_text.strip()
        if not word.startswith(instance.answer) or len(word) > 2 * self.letters:
            return Reward(0.0)
        mirrored = sum(one == other for one, other in zip(word, reversed(word), strict=True))
        return Reward(mirrored / len(word))

"""Tasks and environments for tests: the worlds that a learner under test plays with."""

import numpy as np

from echo2.tasks.task import ChatMessage, Environment, Observation, Prompt, Reward, TaskInstance


class DigitShare:
    """Pays for the share of digits in a completion, so that random completions differ in reward and teach something; of `one_in`
    prompts one, the others teach nothing."""

    name = "digit_share"
    size = 1000
    is_cheap = True

    def __init__(self, seed: int, one_in: int = 1) -> None:
        self.seed, self.one_in = seed, one_in

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, f"{index:03d}>", np.int64(index))  # type: ignore[arg-type]  # as tables have it

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        if instance.index % self.one_in:
            return Reward(0.0)
        text = "".join(completion_text.split())
        return Reward(sum(letter.isdigit() for letter in text) / max(1, len(text)))


class Echo:
    """Repeats the beginning of what was said, for 1 to 3 turns by its index, then pays for digits."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.said: list[str] = []

    def reset(self) -> Prompt:
        self.said = []
        return f"say {self.index}:"

    def step(self, completion_text: str) -> Observation:
        self.said.append(completion_text)
        if len(self.said) <= self.index % 3:
            return Observation((ChatMessage("user", "again " + completion_text[:2]),))
        text = "".join(self.said)
        digits = sum(letter.isdigit() for letter in text)
        return Observation((), Reward(digits / max(1, len(text)), {"turns": float(len(self.said))}))


class Echoes:
    """Source of the above."""

    name = "echoes"
    size = None

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def open(self, index: int) -> Environment:
        return Echo(index)


class Endless(Echoes):
    """Never ends an episode: the context does."""

    name = "endless"

    def open(self, index: int) -> Environment:
        return _Endless()


class _Endless:
    def reset(self) -> Prompt:
        return "go:"

    def step(self, completion_text: str) -> Observation:
        return Observation((ChatMessage("user", "more " * 12),))

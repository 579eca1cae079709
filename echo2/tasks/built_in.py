"""The tasks that echo2 brings along: digits to sort, sums, and the data sets of reasoning-gym; and which scorers execute text.

Guarantees: the prompts of `sort_digits` (`52413>`, answered `12345`) are all 10^n distinct, so held-out prompts are never
trained on; a character model learns it within minutes on a CPU from a checkpoint that knows only the answer format. It and
`sums` are scored in microseconds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.task import ChatMessage, Reward, TaskInstance, checked_index

PROMPT_END = ">"  # ends the digits, so that the model knows where its answer begins
ALPHABET = "0123456789" + PROMPT_END  # a token each in the demo's model
DIGITS_MAX = 12  # the demo's character model is made for short prompts


@dataclass(frozen=True, slots=True)
class SortDigits:
    """Prompts of `digit_count` digits. Half of the reward is for a fully correct answer, half is the share of digits in place.
    The share gives a weak policy a gradient; the other half rewards the complete answer beyond its parts. A checkpoint that
    repeats the prompt's digits in random order earns about 0.13 with five digits. A completion of another length scores 0;
    blanks, which some tokenizers put between characters, are ignored. The part `exact` logs the all-or-nothing score."""

    name: ClassVar[str] = "sort_digits"
    is_cheap: ClassVar[bool] = True
    digit_count: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.digit_count <= DIGITS_MAX:
            raise ConfigError(f"sort_digits: expected a digit_count of 1 to {DIGITS_MAX}, got {self.digit_count}")

    @property
    def size(self) -> int:
        return int(10**self.digit_count)

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


NUMBERS_MAX = 1000  # a million sums: more than a run draws
_NUMBER = re.compile(r"\d+")  # the last one of a completion counts


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of two numbers below `numbers`. The last number of a completion is its answer: reward 1 if right, else 0."""

    name: ClassVar[str] = "sums"
    is_cheap: ClassVar[bool] = True
    numbers: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= NUMBERS_MAX:
            raise ConfigError(f"sums: expected numbers of 2 to {NUMBERS_MAX}, got {self.numbers}")

    @property
    def size(self) -> int:
        return self.numbers**2

    def sample(self, index: int) -> TaskInstance:
        left, right = divmod(checked_index(index, self.size, self.name), self.numbers)
        text = f"What is {left} + {right}? Answer with the number only."
        return TaskInstance(index, (ChatMessage("user", text),), str(left + right))

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        numbers = _NUMBER.findall(completion_text)
        is_right = bool(numbers) and numbers[-1].lstrip("0") == instance.answer.lstrip("0")
        is_bare = completion_text.strip() == instance.answer
        return Reward(float(is_right), {"bare": float(is_bare)})


DEFAULT_SIZE = 1_000_000  # more than a run draws; reasoning-gym makes problems on demand, so it costs nothing
_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"  # as reasoning-gym's own system prompt asks


class ReasoningGym:
    """Data set `dataset` with its own options (`args`). It has `size` problems, generated on demand."""

    is_cheap = False

    def __init__(self, dataset: str, seed: int, size: int = DEFAULT_SIZE, args: Mapping[str, object] | None = None):
        self.name = f"reasoning_gym/{dataset}"
        self._data = _created(dataset, seed, size, dict(args or {}))
        self.size = len(self._data)

    def sample(self, index: int) -> TaskInstance:
        entry = self._data[checked_index(index, self.size, self.name)]
        return TaskInstance(index, str(entry["question"]), str(entry.get("answer") or ""), entry)

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        score = float(self._data.score_answer(answer_in(completion_text), dict(instance.metadata)))
        return Reward(score, {"accuracy": float(score >= 1.0)})


def answer_in(completion_text: str) -> str:
    """Returns the content of the last `<answer>` element if there is one, else the whole text; stripped."""
    _, opening, rest = completion_text.rpartition(_ANSWER_OPEN)
    return rest.partition(_ANSWER_CLOSE)[0].strip() if opening else completion_text.strip()


def _created(dataset: str, seed: int, size: int, args: dict[str, object]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(f"reasoning_gym/{dataset}: the package reasoning-gym is not installed ({error})") from error
    if dataset not in DATASETS:
        known = ", ".join(sorted(DATASETS))
        raise ConfigError(f"reasoning_gym: expected a data set among {known}; got {dataset!r}")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **args)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning_gym/{dataset}: expected options of that data set, got {args}: {error}") from error


EXECUTING_DATA_SETS = frozenset({
    "binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens", "number_sorting",
    "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip


PLAIN_TASKS = frozenset({"sort_digits", "sums"})
"""Tasks that echo2 scores by plain comparison, in the learner's process."""


def trusted_text(task_name: str, args: Mapping[str, object]) -> str:
    data_set = args.get("dataset")
    is_executing = task_name == "reasoning_gym" and data_set in EXECUTING_DATA_SETS
    return (
        "task.trusted_rewards is on: rewards are not contained, and what a completion makes them do is done with the "
        "learner's rights" + (f"; reasoning_gym/{data_set} EXECUTES text of completions" if is_executing else "")
    )


OPENENV_PLAYER = "echo2.gateway.openenv_agent:play"  # the harness that plays them
TURNS_MAX = 512  # as the gateway's GatewayLimits.calls_max


class OpenEnvTask:
    """Episodes of an OpenEnv server as problems: the one of index i is the server's environment, reset with seed i. `url`: of
    the server, http(s) or ws(s). `instructions`: what the model is told before the first observation. `turns`: most actions of
    an episode. `reset`: further arguments of the environment's reset."""

    is_cheap = False

    def __init__(self, url: str, instructions: str, size: int, turns: int, reset: Mapping[str, object]) -> None:
        if url.partition("://")[0] not in ("http", "https", "ws", "wss"):
            raise ConfigError(f"task openenv: expected url as http://HOST:PORT or ws://HOST:PORT, got {url!r:.120}")
        if not 1 <= turns <= TURNS_MAX:
            raise ConfigError(
                f"task openenv: expected 1 to {TURNS_MAX} turns, as many calls as an episode may make, got {turns}"
            )
        self.name, self.size, self._instructions = f"openenv/{url}", size, instructions
        self._told = {"url": url, "turns": turns, "reset": dict(reset)}

    def sample(self, index: int) -> TaskInstance:
        seed = checked_index(index, self.size, self.name)
        return TaskInstance(index, self._instructions, "", {**self._told, "seed": seed})

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        raise TaskError(f'{self.name}: expected agent.harness = "{OPENENV_PLAYER}", by which the environment rewards')

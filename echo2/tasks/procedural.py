"""Any reasoning-gym data set by name: problems generated from a seed, scored by the data set itself.

Guarantees: an index gives the same problem whatever was drawn before. Leaves to others: limits on time and memory;
some of these scorers parse programs or solve equations, so they are not cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.task import Reward, TaskInstance, checked_index

DEFAULT_SIZE = 1_000_000
_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"


class _DataSet(Protocol):
    """The part of reasoning-gym's data set interface that echo2 uses."""

    def __getitem__(self, index: int) -> dict[str, object]: ...
    def __len__(self) -> int: ...
    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float: ...


class ReasoningGym:
    """Data set `dataset` with its own options (`args`). It has `size` problems, generated on demand."""

    def __init__(self, dataset: str, seed: int, size: int = DEFAULT_SIZE, args: Mapping[str, object] | None = None):
        self._dataset_name = dataset
        self._data = _created(dataset, seed, size, dict(args or {}))
        self._size = len(self._data)

    @property
    def name(self) -> str:
        return f"reasoning_gym/{self._dataset_name}"

    @property
    def size(self) -> int:
        return self._size

    @property
    def is_cheap(self) -> bool:
        return False

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


def _created(dataset: str, seed: int, size: int, args: dict[str, object]) -> _DataSet:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(f"reasoning_gym/{dataset}: the package reasoning-gym is not installed ({error})") from error
    if dataset not in DATASETS:
        known = ", ".join(sorted(DATASETS))
        raise ConfigError(f"reasoning_gym: expected a data set among {known}; got {dataset!r}")
    try:
        return cast(_DataSet, reasoning_gym.create_dataset(dataset, seed=seed, size=size, **args))
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning_gym/{dataset}: expected options of that data set, got {args}: {error}") from error

"""Several tasks in one run: which task, and which of its instances, is at each position.

Positions form cycles. Within a cycle each task has a number of places proportional to its weight, spread evenly: up to any position
a task deviates from its share by at most one prompt per other task, so a step's batch contains all of them.
Guarantees: a position names the same instance of the same task after every restart; each task has the same held-out instances and
order as it has alone (split); once a finite task has used up its epochs, its places stay empty and are skipped.
Leaves to others: what a task is (task), prompts skipped for their length (learner/runtime/prompts).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from echo2.base.errors import TaskError
from echo2.tasks.split import TaskSplit

CYCLE_MAX = 1000
"""Largest number of places in a cycle, so weights are exact to one part in CYCLE_MAX."""


class Split(Protocol):
    """Maps positions to instances, of one task or of a mixture."""

    @property
    def train_count(self) -> int | None: ...

    @property
    def epochs_max(self) -> int | None: ...

    def upcoming(self, position: int) -> int:
        """Returns the first position at or after this one that has an instance; if there is none, this one."""
        ...

    def has(self, position: int) -> bool: ...
    def held_out_index(self, position: int) -> int: ...
    def train_index(self, position: int) -> int: ...


def places(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the task of each place of a cycle.

    The cycle is the shortest in which every task gets its exact share; if none of up to CYCLE_MAX places does, CYCLE_MAX places are
    apportioned by largest remainder.
    """
    total = sum(weights)
    counts = next((exact for length in range(1, CYCLE_MAX + 1) if (exact := _exact(weights, total, length))), None)
    if counts is None:
        counts = _rounded(weights, total)
    due = [((turn + 0.5) / count, task) for task, count in enumerate(counts) for turn in range(count)]
    return tuple(task for _, task in sorted(due))


def _exact(weights: Sequence[float], total: float, length: int) -> list[int] | None:
    shares = [weight / total * length for weight in weights]
    counts = [round(share) for share in shares]
    is_exact = all(abs(share - count) < 1e-9 * length for share, count in zip(shares, counts, strict=True))
    return counts if is_exact and min(counts) > 0 else None


def _rounded(weights: Sequence[float], total: float) -> list[int]:
    shares = [weight / total * CYCLE_MAX for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda task: counts[task] - shares[task])
    for task in by_remainder[: max(0, CYCLE_MAX - sum(counts))]:
        counts[task] += 1
    return counts


@dataclass(frozen=True, slots=True)
class MixedSplit:
    """The tasks' `splits` combined. Instance i of task t has index t + i * number of tasks."""

    splits: tuple[TaskSplit, ...]
    weights: tuple[float, ...]
    _places: tuple[int, ...] = field(init=False)
    _ranks: tuple[int, ...] = field(init=False)  # per place: earlier places of the same task in the cycle
    _counts: tuple[int, ...] = field(init=False)  # per task: its places in a cycle

    def __post_init__(self) -> None:
        assert len(self.splits) == len(self.weights) > 0, "a weight for each task"
        if min(self.weights) <= 0:
            raise TaskError(f"mixture: expected weights above 0, got {list(self.weights)}")
        order = places(self.weights)
        counts, ranks = [0] * len(self.splits), []
        for task in order:
            ranks.append(counts[task])
            counts[task] += 1
        object.__setattr__(self, "_places", order)
        object.__setattr__(self, "_ranks", tuple(ranks))
        object.__setattr__(self, "_counts", tuple(counts))

    @property
    def train_count(self) -> int | None:
        counts = [split.train_count for split in self.splits]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def epochs_max(self) -> int | None:
        return self.splits[0].epochs_max

    def upcoming(self, position: int) -> int:
        cycle = range(position, position + len(self._places))
        return next((one for one in cycle if self.has(one)), position)

    def has(self, position: int) -> bool:
        task, place = self._at(position)
        return self.splits[task].has(place)

    def train_index(self, position: int) -> int:
        task, place = self._at(position)
        return self.index_of(task, self.splits[task].train_index(place))

    def held_out_index(self, position: int) -> int:
        """Counts through the held-out instances of the first task, then those of the second, and so on."""
        ends = list(accumulate(split.held_out_count for split in self.splits))
        assert 0 <= position < ends[-1], "held-out positions are below the held-out counts' sum"
        task = bisect_right(ends, position)
        split = self.splits[task]
        return self.index_of(task, split.held_out_index(position - (ends[task] - split.held_out_count)))

    def index_of(self, task: int, own_index: int) -> int:
        return task + own_index * len(self.splits)

    def parted(self, index: int) -> tuple[int, int]:
        """Splits an index into its task and the index within that task."""
        own_index, task = divmod(index, len(self.splits))
        return task, own_index

    def task_at(self, position: int) -> int:
        """Returns the task whose turn it is."""
        return self._at(position)[0]

    def _at(self, position: int) -> tuple[int, int]:
        cycle, slot = divmod(position, len(self._places))
        task = self._places[slot]
        return task, cycle * self._counts[task] + self._ranks[slot]

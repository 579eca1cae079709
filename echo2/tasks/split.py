"""Which instance comes next: an order over a task's instances, shuffled by the seed, with some held out.

Guarantees: held-out indices never occur in training; a position names the same instance after every restart, so the
cursor (one integer) is the whole state; each epoch is a new order, and no instance comes twice within one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.base.errors import TaskError
from echo2.base.rng import derived_seed


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """Held-out and training indices of a task of `size` instances (None: unlimited). `epochs_max`: how often a finite
    one may be drawn (`has`); None repeats it, in a new order each time."""

    size: int | None
    held_out_count: int
    seed: int
    epochs_max: int | None = None

    def __post_init__(self) -> None:
        if self.held_out_count < 0 or (self.size is not None and self.held_out_count >= self.size):
            raise TaskError(
                f"eval_prompts: expected fewer held-out prompts than the task has, {self.size}, got {self.held_out_count}"
            )

    @property
    def train_count(self) -> int | None:
        """Instances of one training epoch; None: unlimited."""
        return None if self.size is None else self.size - self.held_out_count

    def has(self, position: int) -> bool:
        return self.epochs_max is None or self.train_count is None or position < self.epochs_max * self.train_count

    def held_out_index(self, position: int) -> int:
        """The task's index of the held-out instance at `position`, 0 <= position < held_out_count."""
        assert 0 <= position < self.held_out_count, "held-out positions are below the held-out count"
        return position if self.size is None else permuted(position, self.size, derived_seed(self.seed, "split"))

    def train_index(self, position: int) -> int:
        """The task's index of the training instance at `position`, 0 <= position, counted over all epochs."""
        assert position >= 0, "positions count from 0"
        if self.size is None:
            return self.held_out_count + position
        epoch_length = self.size - self.held_out_count
        epoch, place = divmod(position, epoch_length)
        shuffled = permuted(place, epoch_length, derived_seed(self.seed, "epoch", epoch))
        return permuted(self.held_out_count + shuffled, self.size, derived_seed(self.seed, "split"))


def permuted(index: int, size: int, seed: int) -> int:
    """A pseudo-random permutation of range(size), one value at a time and without a table. Four Feistel rounds over the
    smallest even number of bits that holds `size`, walked until the value falls inside; the domain is less than four times
    `size`, so the walk is short."""
    assert 0 <= index < size, "the index lies in the range that is permuted"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = index
    while True:
        left, right = value >> half_bits, value & mask
        for round_number in range(4):
            block = hashlib.blake2b(f"{seed}/{round_number}/{right}".encode(), digest_size=8)
            left, right = right, left ^ (int.from_bytes(block.digest(), "big") & mask)
        value = (left << half_bits) | right
        if value < size:
            return value


CYCLE = 1000  # places of several tasks in a cycle: weights are exact to one part in so many


def places(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the task of each place of a cycle, apportioned by largest remainder; each task gets one place at least."""
    if len(weights) == 1:
        return (0,)
    shares = [weight / sum(weights) * CYCLE for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda task: counts[task] - shares[task])
    for task in by_remainder[: max(0, CYCLE - sum(counts))]:
        counts[task] += 1
    due = [((turn + 0.5) / count, task) for task, count in enumerate(counts) for turn in range(count)]
    return tuple(task for _, task in sorted(due))


@dataclass(frozen=True, slots=True)
class MixedSplit:
    """The splits of a run's tasks, of one or of several. Instance i of task t has index t + i * number of tasks."""

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
        """Returns the first position at or after this one that has an instance; if there is none, this one."""
        cycle = range(position, position + len(self._places))
        return next((place for place in cycle if self.has(place)), position)

    def has(self, position: int) -> bool:
        task, place = self._at(position)
        return self.splits[task].has(place)

    def train_index(self, position: int) -> int:
        task, place = self._at(position)
        return task + self.splits[task].train_index(place) * len(self.splits)

    def held_out_index(self, task: int, position: int) -> int:
        return task + self.splits[task].held_out_index(position) * len(self.splits)

    def _at(self, position: int) -> tuple[int, int]:
        cycle, slot = divmod(position, len(self._places))
        task = self._places[slot]
        return task, cycle * self._counts[task] + self._ranks[slot]

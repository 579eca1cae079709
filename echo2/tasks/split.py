"""Which instance comes next: an order over a task's instances, shuffled by the seed, with some held out.

Guarantees: held-out indices never occur in training; a position names the same instance after every restart, so the
cursor (one integer) is the whole state; each epoch is a new order, and no instance comes twice within one. Leaves to
others: keeping the cursor (the learner's checkpoint).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from echo2.base.errors import TaskError
from echo2.base.rng import derived_seed


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """Held-out and training indices of a task of `size` instances (None: unlimited).

    `epochs_max` ends training on a finite task with a `TaskError`; None repeats it, in a new order each time.
    """

    size: int | None
    held_out_count: int
    seed: int
    epochs_max: int | None = None

    def __post_init__(self) -> None:
        if self.held_out_count < 0 or (self.size is not None and self.held_out_count >= self.size):
            raise TaskError(
                f"held-out prompts: expected fewer than the task's {self.size} instances, got {self.held_out_count}"
            )

    @property
    def train_count(self) -> int | None:
        """Instances of one training epoch; None: unlimited."""
        return None if self.size is None else self.size - self.held_out_count

    def has(self, position: int) -> bool:
        """Whether there is a training instance at `position`."""
        return self.epochs_max is None or self.train_count is None or position < self.epochs_max * self.train_count

    def upcoming(self, position: int) -> int:
        """Returns the first position at or after this one that has an instance; if there is none, this one."""
        return position

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
        if self.epochs_max is not None and epoch >= self.epochs_max:
            raise TaskError(
                f"data set exhausted: expected at most {self.epochs_max} epochs of {epoch_length} prompts, "
                f"asked for prompt {position + 1}"
            )
        shuffled = permuted(place, epoch_length, derived_seed(self.seed, "epoch", epoch))
        return permuted(self.held_out_count + shuffled, self.size, derived_seed(self.seed, "split"))


def permuted(index: int, size: int, seed: int) -> int:
    """A pseudo-random permutation of range(size), one value at a time and without a table.

    Four Feistel rounds over the smallest even number of bits that holds `size`, walked until the value falls inside;
    the domain is less than four times `size`, so the walk is short.
    """
    assert 0 <= index < size, "the index lies in the range that is permuted"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = index
    while True:
        left, right = value >> half_bits, value & mask
        for round_number in range(4):
            left, right = right, left ^ (_mixed(seed, round_number, right) & mask)
        value = (left << half_bits) | right
        if value < size:
            return value


def _mixed(seed: int, round_number: int, half: int) -> int:
    block = hashlib.blake2b(f"{seed}/{round_number}/{half}".encode(), digest_size=8)
    return int.from_bytes(block.digest(), "big")

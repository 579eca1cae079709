"""The split: a permutation per epoch, held-out instances never trained on, positions that mean the same for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import TaskError
from echo2.tasks.split import TaskSplit, permuted


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 700), st.integers(0, 1 << 60))
def test_permuted_is_a_permutation_of_its_range(size: int, seed: int) -> None:
    assert sorted(permuted(index, size, seed) for index in range(size)) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 200), st.data())
def test_each_epoch_visits_every_training_instance_once_and_no_held_out_one(size: int, data: st.DataObject) -> None:
    held_out_count = data.draw(st.integers(0, size - 1))
    split = TaskSplit(size, held_out_count, seed=data.draw(st.integers(0, 1000)))
    held_out = {split.held_out_index(position) for position in range(held_out_count)}
    length = size - held_out_count
    epochs = [[split.train_index(epoch * length + place) for place in range(length)] for epoch in range(2)]
    for epoch in epochs:
        assert len(set(epoch)) == length
        assert set(epoch) | held_out == set(range(size))
        assert not set(epoch) & held_out


def test_epochs_come_in_different_orders_and_seeds_give_different_held_out_sets() -> None:
    split = TaskSplit(100, 10, seed=1)
    first, second = ([split.train_index(e * 90 + p) for p in range(90)] for e in range(2))
    assert first != second
    assert [split.held_out_index(p) for p in range(10)] != [
        TaskSplit(100, 10, seed=2).held_out_index(p) for p in range(10)
    ]


def test_an_endless_task_trains_after_its_held_out_indices_and_never_repeats() -> None:
    split = TaskSplit(None, 5, seed=0)
    assert [split.held_out_index(p) for p in range(5)] == [0, 1, 2, 3, 4]
    assert [split.train_index(p) for p in (0, 1, 10**9)] == [5, 6, 10**9 + 5]
    assert split.train_count is None


def test_an_exhausted_data_set_says_so_and_a_split_without_training_prompts_is_refused() -> None:
    split = TaskSplit(10, 4, seed=0, epochs_max=2)
    split.train_index(11)
    with pytest.raises(TaskError, match="2 epochs of 6 prompts, asked for prompt 13"):
        split.train_index(12)
    with pytest.raises(TaskError, match="held-out"):
        TaskSplit(10, 10, seed=0)

"""The order of prompts: a permutation an epoch, none held out among them; mixtures by their shares, each task as it is alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import TaskError
from echo2.tasks.split import CYCLE_MAX, MixedSplit, TaskSplit, places

shares_of_tasks = st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(shares_of_tasks)
def test_up_to_every_place_each_task_has_its_share_to_within_a_prompt_for_each_other_task(shares: list[float]) -> None:
    order, total = places(shares), sum(shares)
    seen: Counter[int] = Counter()
    for at, task in enumerate(order, start=1):
        seen[task] += 1
        for one, share in enumerate(shares):
            rounding = at * len(shares) / len(order)  # a weight below one place of the cycle gets one all the same
            assert abs(seen[one] - at * share / total) <= max(1, len(shares) - 1) + rounding


def test_weights_with_a_short_common_cycle_are_kept_exactly() -> None:
    assert Counter(places([1, 1, 1])) == {0: 1, 1: 1, 2: 1}
    assert Counter(places([0.5, 0.3, 0.2])) == {0: 5, 1: 3, 2: 2}
    assert places([2, 1]) == (0, 1, 0)
    assert len(places([3.14159, 1.0])) == CYCLE_MAX
    assert Counter(places([1e6, 1.0]))[1] == 1  # none is left out


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(5, 40)), st.integers(0, 4), st.floats(0.2, 5)), min_size=1, max_size=4),
    st.integers(0, 50),
)  # fmt: skip
def test_each_task_comes_in_the_order_that_it_has_alone_and_its_held_out_instances_never_do(
    told: list[tuple[int | None, int, float]], seed: int
) -> None:
    alone = [TaskSplit(size, held_out, seed) for size, held_out, _ in told]
    weights = tuple(weight for *_, weight in told)
    mixed, turns = MixedSplit(tuple(alone), weights), places(weights)
    found: dict[int, list[int]] = {task: [] for task in range(len(told))}
    for position in range(300):
        own_index, task = divmod(mixed.train_index(position), len(told))
        assert task == turns[position % len(turns)]
        found[task].append(own_index)
    for task, split in enumerate(alone):
        assert found[task] == [split.train_index(place) for place in range(len(found[task]))]
    count = sum(one.held_out_count for one in alone)
    held_out = [divmod(mixed.held_out_index(place), len(told)) for place in range(count)]
    expected = [
        (split.held_out_index(p), task) for task, split in enumerate(alone) for p in range(split.held_out_count)
    ]
    assert held_out == expected
    assert not any(index in found[task] for index, task in held_out)


def test_a_task_that_was_drawn_as_often_as_it_may_be_is_passed_over_until_none_is_left() -> None:
    splits = (TaskSplit(6, 1, 0, epochs_max=2), TaskSplit(31, 1, 0, epochs_max=1))
    mixed, position, drawn = MixedSplit(splits, (3.0, 1.0)), 0, []
    while mixed.has(position := mixed.upcoming(position)):
        drawn.append(divmod(mixed.train_index(position), 2))
        position += 1
    assert Counter(task for _, task in drawn) == {0: 10, 1: 30}
    assert all(Counter(drawn)[index, 0] == 2 for index in {index for index, task in drawn if task == 0})
    assert not mixed.has(position) and mixed.upcoming(position) == position
    assert mixed.train_count == 35


def test_an_endless_task_in_it_makes_the_mixture_endless() -> None:
    split = TaskSplit(None, 5, seed=0)
    assert [split.held_out_index(p) for p in range(5)] == [0, 1, 2, 3, 4]
    assert [split.train_index(p) for p in (0, 1, 10**9)] == [5, 6, 10**9 + 5] and split.train_count is None
    mixed = MixedSplit((TaskSplit(6, 1, 0, 1), TaskSplit(None, 2, 0, 1)), (1.0, 1.0))
    assert mixed.train_count is None
    assert mixed.has(mixed.upcoming(10**6))
    with pytest.raises(TaskError, match="weights above 0"):
        MixedSplit((TaskSplit(None, 0, 0), TaskSplit(None, 0, 0)), (1.0, 0.0))


# ---- one task


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 200), st.data())
def test_each_epoch_visits_every_training_instance_once_and_no_held_out_one(size: int, data: st.DataObject) -> None:
    held_out_count = data.draw(st.integers(0, size - 1))
    split = TaskSplit(size, held_out_count, seed=data.draw(st.integers(0, 1000)))
    held_out = {split.held_out_index(position) for position in range(held_out_count)}
    length = size - held_out_count
    epochs = [[split.train_index(epoch * length + place) for place in range(length)] for epoch in range(2)]
    assert epochs[0] != epochs[1] or length < 20
    for epoch in epochs:
        assert len(set(epoch)) == length
        assert set(epoch) | held_out == set(range(size))
        assert not set(epoch) & held_out


def test_a_split_without_training_prompts_is_refused() -> None:
    with pytest.raises(TaskError, match="held-out"):
        TaskSplit(10, 10, seed=0)

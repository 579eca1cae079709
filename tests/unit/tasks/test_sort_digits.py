"""Sorting digits: what counts as right, what a beginner earns, and that the warm-up teaches form only."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.built_in import ALPHABET, SortDigits, format_only_target

TASK = SortDigits(5)


@given(st.integers(0, 10**5 - 1))
def test_the_answer_earns_everything_and_prompt_and_answer_stay_in_the_alphabet(index: int) -> None:
    instance = TASK.sample(index)
    assert TASK.score(instance, instance.answer).value == 1.0
    assert set(str(instance.prompt) + instance.answer) <= set(ALPHABET)
    assert sorted(str(instance.prompt)[:5]) == list(instance.answer)


@given(st.integers(0, 10**5 - 1), st.text(ALPHABET, max_size=8))
def test_a_wrong_completion_earns_less_than_half_and_one_of_another_length_nothing(index: int, text: str) -> None:
    instance = TASK.sample(index)
    reward = TASK.score(instance, text)
    if text != instance.answer:
        assert reward.value < 0.5 and reward.parts["exact"] == 0.0
    if len(text) != 5:
        assert reward.value == 0.0


def test_the_format_only_start_earns_little() -> None:
    rng = random.Random(0)
    instances = [TASK.sample(rng.randrange(10**5)) for _ in range(2000)]
    mean = sum(TASK.score(i, format_only_target(i, rng)).value for i in instances) / 2000
    assert 0.05 < mean < 0.2


def test_prompts_are_distinct_and_bounds_are_checked() -> None:
    assert len({SortDigits(2).sample(i).prompt for i in range(100)}) == SortDigits(2).size == 100
    with pytest.raises(TaskError, match="0 to 99, got 100"):
        SortDigits(2).sample(100)
    with pytest.raises(ConfigError, match="digit_count"):
        SortDigits(0)

"""Sums as a chat: the last number counts, and no prompt comes twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.built_in import Sums
from echo2.tasks.registry import make_task
from echo2.tasks.task import ChatMessage, TaskSpec

TASK = Sums()


@given(st.integers(0, 99))
def test_the_last_number_is_the_answer(index: int) -> None:
    instance = TASK.sample(index)
    right, wrong = instance.answer, str(int(instance.answer) + 1)
    assert TASK.score(instance, right).value == 1.0 == TASK.score(instance, right).parts["bare"]
    said = TASK.score(instance, f"The sum is {wrong} or rather {right}.")
    assert (said.value, said.parts["bare"]) == (1.0, 0.0)
    for text in (wrong, f"{right}, no, {wrong}", f"{right}{right}1", "", "many"):
        assert TASK.score(instance, text).value == 0.0, text


def test_prompts_are_chats_and_all_distinct() -> None:
    prompts = {TASK.sample(index).prompt for index in range(TASK.size)}
    assert len(prompts) == 100
    assert TASK.sample(73).prompt == (ChatMessage("user", "What is 7 + 3? Answer with the number only."),)
    with pytest.raises(TaskError):
        TASK.sample(100)


def test_it_is_made_by_name_and_bad_sizes_are_refused() -> None:
    assert make_task(TaskSpec("sums", {"numbers": 20})).size == 400
    with pytest.raises(ConfigError, match="numbers of 2 to 1000, got 1"):
        Sums(1)

"""The built-in tasks: what counts as right, what a beginner earns, and that seed and index alone decide."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.built_in import ALPHABET, ReasoningGym, SortDigits, Sums, answer_in, format_only_target
from echo2.tasks.task import ChatMessage, Reward, TaskSpec, spec_from_json

DIGITS, SUMS = SortDigits(5), Sums()


@given(st.integers(0, 10**5 - 1), st.text(ALPHABET, max_size=8))
def test_sorted_digits_earn_everything_and_less_earns_less_than_half(index: int, text: str) -> None:
    instance = DIGITS.sample(index)
    assert DIGITS.score(instance, instance.answer).value == 1.0
    assert set(str(instance.prompt) + instance.answer) <= set(ALPHABET)
    assert sorted(str(instance.prompt)[:5]) == list(instance.answer)
    reward = DIGITS.score(instance, text)
    if text != instance.answer:
        assert reward.value < 0.5 and reward.parts["exact"] == 0.0
    if len(text) != 5:
        assert reward.value == 0.0


def test_the_format_only_start_earns_little() -> None:
    rng = random.Random(0)
    instances = [DIGITS.sample(rng.randrange(10**5)) for _ in range(2000)]
    mean = sum(DIGITS.score(i, format_only_target(i, rng)).value for i in instances) / 2000
    assert 0.05 < mean < 0.2


@given(st.integers(0, 99))
def test_the_last_number_is_the_answer_of_a_sum(index: int) -> None:
    instance = SUMS.sample(index)
    right, wrong = instance.answer, str(int(instance.answer) + 1)
    assert SUMS.score(instance, right).value == 1.0 == SUMS.score(instance, right).parts["bare"]
    said = SUMS.score(instance, f"The sum is {wrong} or rather {right}.")
    assert (said.value, said.parts["bare"]) == (1.0, 0.0)
    for text in (wrong, f"{right}, no, {wrong}", f"{right}{right}1", "", "many"):
        assert SUMS.score(instance, text).value == 0.0, text


def test_prompts_are_distinct_and_bounds_are_checked() -> None:
    assert len({SortDigits(2).sample(i).prompt for i in range(100)}) == SortDigits(2).size == 100
    assert len({SUMS.sample(index).prompt for index in range(SUMS.size)}) == 100
    assert SUMS.sample(73).prompt == (ChatMessage("user", "What is 7 + 3? Answer with the number only."),)
    for task in (SortDigits(2), SUMS):
        with pytest.raises(TaskError, match="0 to 99, got 100"):
            task.sample(100)
    for make, said in ((SortDigits, "digit_count"), (Sums, "numbers of 2 to 1000, got 0")):
        with pytest.raises(ConfigError, match=said):
            make(0)


@pytest.mark.parametrize("dataset", ["number_sorting", "countdown", "spell_backward"])
def test_an_instance_depends_on_seed_and_index_alone_and_its_answer_is_right(dataset: str) -> None:
    one, other = ReasoningGym(dataset, seed=3), ReasoningGym(dataset, seed=3)
    late = [one.sample(index) for index in (999_999, 5, 0)]
    assert [other.sample(index) for index in (999_999, 5, 0)] == late
    for instance in late:
        assert one.score(instance, f"so it is <answer>{instance.answer}</answer>").value == 1.0
        assert one.score(instance, "no idea").value < 1.0
    assert ReasoningGym(dataset, seed=4).sample(5).prompt != late[1].prompt


def test_options_reach_the_data_set_and_wrong_ones_are_refused() -> None:
    short = ReasoningGym("spell_backward", 0, 10, {"min_word_len": 3, "max_word_len": 3})
    assert all(len(short.sample(i).answer) == 3 for i in range(10))
    with pytest.raises(ConfigError, match="expected options of that data set"):
        ReasoningGym("spell_backward", 0, 10, {"colour": "red"})
    with pytest.raises(ConfigError, match="expected a data set among .*countdown"):
        ReasoningGym("no_such_set", 0)


def test_the_last_answer_element_counts_else_the_whole_text() -> None:
    assert answer_in("<answer>1</answer> no, <answer> 2 </answer>.") == "2"
    assert answer_in("<answer>unclosed") == "unclosed"
    assert answer_in(" 42\n") == "42"


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(TaskError, match="value: expected a finite number, got nan"):
        Reward(math.nan)
    with pytest.raises(TaskError, match="format"):
        Reward(1.0, {"format": math.inf})


def test_a_specification_survives_json_and_refuses_what_json_cannot_carry() -> None:
    spec = TaskSpec("reasoning_gym", {"dataset": "countdown", "options": {"min_numbers": 3}}, seed=7)
    assert spec_from_json(spec.to_json()) == spec
    with pytest.raises(ConfigError, match="JSON"):
        TaskSpec("x", {"a": object()}).to_json()
    with pytest.raises(ConfigError, match="JSON object"):
        spec_from_json("[]")

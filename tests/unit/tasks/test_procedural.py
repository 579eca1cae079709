"""reasoning-gym by name: deterministic by seed and index, its own answers are right, wrong names are refused."""

from __future__ import annotations

import pytest

from echo2.base.errors import ConfigError
from echo2.tasks.built_in import ReasoningGym, answer_in

pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("dataset", ["number_sorting", "countdown", "spell_backward", "basic_arithmetic", "syllogism"])
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

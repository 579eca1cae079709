"""Tool use: real calls to a real calculator, mistakes answered and survived, an end after the turns allowed."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import TaskError
from echo2.tasks.task import replayed
from echo2.tasks.tools import ArithmeticProblems, Calculator, CalculatorEnvironments, tool_calls_in

SOURCE = CalculatorEnvironments(seed=1, turns_max=3)


def call(expression: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}</tool_call>"


def test_an_episode_calls_the_calculator_and_earns_the_reward_with_its_result() -> None:
    environment = SOURCE.open(7)
    prompt = environment.reset()
    assert not isinstance(prompt, str)
    assert "calculator" in prompt[0].content
    expression = prompt[1].content.removeprefix("What is ").removesuffix("?")
    first = environment.step(f"Let me compute. {call(expression)}")
    assert not first.is_done and first.messages[0].role == "tool"
    last = environment.step(f"It is {first.messages[0].content}.")
    assert last.reward is not None
    assert last.reward.value == 1.0 and last.reward.parts["turns"] == 2.0


def test_mistakes_are_answered_and_the_episode_goes_on() -> None:
    environment = SOURCE.open(0)
    environment.reset()
    observation = environment.step(
        '<tool_call>{"name": "telephone"}</tool_call><tool_call>not json</tool_call><tool_call>[1]</tool_call>'
        + call("import os")
        + call("1/0")
    )
    assert [message.content.split(":")[0] for message in observation.messages] == ["error"] * 5
    assert "expected a tool among calculator, got 'telephone'" in observation.messages[0].content


def test_the_last_turn_is_scored_as_it_stands_even_if_it_calls_again() -> None:
    _, observations = replayed(SOURCE, 0, (call("1+1"), call("1+1"), call("1+1")))
    assert [observation.is_done for observation in observations] == [False, False, True]
    with pytest.raises(TaskError, match="no completion after its end"):
        replayed(SOURCE, 0, ("42", "43"))


def test_episodes_depend_on_seed_and_index_alone() -> None:
    completions = (call("2*3"), "no")
    assert replayed(SOURCE, 5, completions) == replayed(SOURCE, 5, completions)
    assert replayed(SOURCE, 5, completions)[0] != replayed(SOURCE, 6, completions)[0]


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_the_calculator_computes(left: int, right: int, sign: str) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert Calculator().call({"expression": f"({left}) {sign} ({right})"}) == str(expected)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "9**9**9**9",
        "(1).__class__",
        "[1][0]",
        "1 if 1 else 2",
        "True",
        "1j",
        "'a'*9",
        "",
        "1" * 300,
    ],
)
def test_the_calculator_does_nothing_but_bounded_arithmetic(expression: str) -> None:
    with pytest.raises(TaskError, match="calculator"):
        Calculator().call({"expression": expression})


def test_deep_nesting_is_refused_and_calls_a_turn_are_bounded() -> None:
    with pytest.raises(TaskError):
        Calculator().call({"expression": "(" * 99 + "1" + ")" * 100})
    assert len(tool_calls_in(call("1") * 40)) == 16


def test_arithmetic_takes_the_last_number() -> None:
    task = ArithmeticProblems(0)
    instance = task.sample(3)
    assert task.score(instance, f"12 + 5 ... so {int(instance.answer):,}").value == 1.0
    assert task.score(instance, "none").value == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 100_000,
        "<tool_call>" + " " * 1_000_000,
        "<tool_call>" + " \n" * 500_000 + "x" + "\t" * 500_000,
        ("<tool_call>" + " " * 1000) * 1000,
        "</tool_call>" * 90_000 + "<tool_call>",
        "<tool_call>" + "[" * 1_000_000 + "</tool_call>",
        "<tool_call>{}</tool_call>" * 40_000,
    ],
)
def test_a_megabyte_against_the_parser_takes_no_time(text: str) -> None:
    began = time.process_time()
    calls = tool_calls_in(text)
    assert time.process_time() - began < 0.5
    assert len(calls) <= 16 and all(call.problem for call in calls)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", " ", "\n", "{}", '{"name": "a"}', "x"]), max_size=40))
def test_calls_are_what_the_plain_reading_of_the_format_finds(pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)[:16]
    assert [bool(call.problem) for call in tool_calls_in(text)] == [found != '{"name": "a"}' for found in expected]

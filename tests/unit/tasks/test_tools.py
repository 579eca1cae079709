"""Calls of tools as families write them; an environment with a real calculator, mistakes answered and survived."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from echo2.base.errors import TaskError
from echo2.tasks.tools import CALLS_MAX, FORMATS, Calculator, CalculatorEnvironments, tool_format_of

BY_NAME = {one.name: one for one in FORMATS}
ADD = {"a": 1, "b": [2, 3]}
WRITTEN = {
    "hermes": 'so: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>',
    "qwen_coder": (
        "so: <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, 3]\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "glm": (
        "so: <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>[2, 3]</arg_value>\n</tool_call>"
    ),
    "mistral": 'so: [TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}]',
    "deepseek": 'so: <｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": [2, 3]}\n```<｜tool▁call▁end｜>',
    "granite": 'so: <|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}]',
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2, 3]}}',
    "llama_json": '{"name": "add", "parameters": {"a": 1, "b": [2, 3]}}',
}
NEWER = {
    "mistral": 'so: [TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, 3]}',
    "deepseek": 'so: <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": [2, 3]}<｜tool▁call▁end｜>',
    "granite": 'so: <|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}]<|/tool_call|>',
}


@pytest.mark.parametrize(("name", "text"), [*WRITTEN.items(), *NEWER.items()])
def test_a_familys_calls_are_found_and_taken_out_of_its_text(name: str, text: str) -> None:
    assert tool_format_of(f"... {BY_NAME[name].sign} ...").name == name
    assert tool_format_of("{{ messages }}").name == "hermes"
    rest, calls = BY_NAME[name].split(text)
    assert [(call.name, call.arguments) for call in calls] == [("add", ADD)]
    assert rest == ("" if name.startswith("llama") else "so:")


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_what_does_not_parse_stays_text(name: str) -> None:
    text = WRITTEN[name]
    unnamed, misnamed = text.replace("add", ""), text.replace("name", "nom").replace("add", "<a{")
    for broken in (text[:-9], unnamed, "no call", "", misnamed):
        rest, calls = BY_NAME[name].split(broken)
        assert calls or rest == broken
    if '"a"' in text:  # half of a character, which no answer of the gateway could hold
        half = text.replace('"a"', '"\\ud83d"')
        assert BY_NAME[name].split(half) == (half, ())
    many = (WRITTEN[name] + " ") * 500
    assert len(BY_NAME[name].split(many)[1]) <= CALLS_MAX


ARGUMENTS = st.dictionaries(st.text("abc", min_size=1), st.text("ab<>=/\n 1", max_size=9), max_size=4)


def arguments_in(name: str, text: str) -> dict[str, Any]:
    before, after = ("<function=f>", "</function>") if name == "qwen_coder" else ("f\n", "")
    (call,) = BY_NAME[name].split(f"<tool_call>{before}{text}{after}</tool_call>")[1]
    return dict(call.arguments)


@given(ARGUMENTS)
def test_values_come_back_as_they_were_written(arguments: dict[str, str]) -> None:
    written = {
        "qwen_coder": "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in arguments.items()),
        "glm": "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in arguments.items()),
    }
    expected = {key: int(value) if value.strip().isdecimal() else value for key, value in arguments.items()}
    assert {name: arguments_in(name, text) for name, text in written.items()} == dict.fromkeys(written, expected)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("glm", "<arg_key>\na\n</arg_key>\n<arg_value>1</arg_value>", {"a": 1}),
        ("glm", "<arg_key>a</arg_key>\n1</arg_value>", {}),
        ("glm", "<arg_key>a<arg_key>b</arg_key><arg_value>1</arg_value>", {"b": 1}),
        ("glm", "<arg_key>a</arg_key>junk<arg_value>1</arg_value>", {}),
        ("glm", "<arg_key>a>b</arg_key><arg_value>1</arg_value>", {"a>b": 1}),
        ("qwen_coder", "<parameter=a\n><parameter=b>2</parameter>", {"b": 2}),
        ("qwen_coder", "<parameter=a<b>2</parameter>", {"a<b": 2}),
    ],
)
def test_of_arguments_written_in_part_the_whole_ones_are_read(name: str, text: str, arguments: dict[str, int]) -> None:
    assert arguments_in(name, text) == arguments


HOSTILE = {
    ("qwen_coder", "<tool_call><function=f>", "</function></tool_call>"): [
        "<parameter=a>", "<parameter=", "<parameter=a", "<parameter=a>\n"
    ],
    ("qwen_coder", "", "</function></tool_call>"): ["<tool_call><function=f>"],
    ("glm", "<tool_call>f", "</tool_call>"): [
        "<arg_key>a</arg_key><arg_value>", "<arg_key>", "<arg_key>a</arg_key>", "<arg_key>a</arg_key>  "
    ],
    ("glm", "<tool_call>f<arg_key>a</arg_key>", "</tool_call>"): [" "],
    ("hermes", "", ""): ["<tool_call>", "<tool_call>{}</tool_call>"],
    ("hermes", "", "</tool_call>"): ["<tool_call>{"],
    ("hermes", "<tool_call>", "</tool_call>"): ["["],
    ("hermes", "<tool_call>", "x\t</tool_call>"): [" \n"],
    ("hermes", "</tool_call>", "<tool_call>"): ["</tool_call>"],
    ("mistral", "", ""): ["[TOOL_CALLS][{", "[TOOL_CALLS]a[ARGS]"],
    ("mistral", "[TOOL_CALLS]", ""): ["[ARGS]"],
    ("deepseek", "", "<｜tool▁call▁end｜>"): ["<｜tool▁call▁begin｜>"],
    ("deepseek", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"): ["function<｜tool▁sep｜>"],
    ("granite", "", ""): ["<|tool_call|>"],
    ("granite", "<|tool_call|>", "<|/tool_call|>"): ["["],
    ("llama", "<|python_tag|>", ""): ["{"],
    ("llama", "<|python_tag|>[", ""): ["1,"],
    ("llama_json", "", ""): ['{"a":'],
    ("llama_json", "[", ""): ["[],"],
}  # fmt: skip
"""What is repeated, by family and what stands before and behind it."""
SOURCE = CalculatorEnvironments(seed=1, turns_max=3)


def answers_to(text: str) -> list[str]:
    environment = SOURCE.open(0)
    environment.reset()
    return [message.content for message in environment.step(text).messages]


@pytest.mark.parametrize(("name", "before", "behind"), HOSTILE)
def test_a_hostile_completion_of_200_kb_takes_no_time(name: str, before: str, behind: str) -> None:
    """Tenths of a second each; what takes the square of the length took many seconds."""
    for again in HOSTILE[name, before, behind]:
        text = before + again * (200_000 // len(again)) + behind
        began = time.process_time()
        BY_NAME[name].split(text)
        if name == "hermes":  # an environment reads them, too
            assert all(answer.startswith("error: expected") for answer in answers_to(text))
        assert time.process_time() - began < 2.0, (before, again)


# ---- an environment with a tool


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
    assert "as JSON in <tool_call>, got 'not json'" in observation.messages[1].content
    assert [environment.step(call("1+1")).is_done for _ in range(2)] == [False, True], "the last is scored as it stands"
    assert len(answers_to(call("1") * 40)) == 16
    assert SOURCE.open(5).reset() == SOURCE.open(5).reset() != SOURCE.open(6).reset()


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_the_calculator_computes(left: int, right: int, sign: str) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert Calculator().call({"expression": f"({left}) {sign} ({right})"}) == str(expected)


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "9**9**9**9", "(1).__class__", "[1][0]", "1 if 1 else 2", "True", "1j", "'a'*9", "", "1" * 300,
     "(" * 99 + "1" + ")" * 100],
)  # fmt: skip
def test_the_calculator_does_nothing_but_bounded_arithmetic(expression: str) -> None:
    with pytest.raises(TaskError, match="calculator"):
        Calculator().call({"expression": expression})

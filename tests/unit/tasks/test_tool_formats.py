"""Calls of tools as families write them."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.tasks import tools as tool_formats
from echo2.tasks.tools import CALLS_MAX, FORMATS, tool_format_of

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
    rest, calls = BY_NAME[name].split(text)
    assert [(call.name, call.arguments) for call in calls] == [("add", ADD)]
    assert rest == ("" if name.startswith("llama") else "so:")


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_what_does_not_parse_stays_text(name: str) -> None:
    text = WRITTEN[name]
    for broken in (
        text[:-9],
        text.replace("add", ""),
        "no call",
        "",
        text.replace("name", "nom").replace("add", "<a{"),
    ):
        rest, calls = BY_NAME[name].split(broken)
        assert calls or rest == broken
    many = (WRITTEN[name] + " ") * 500
    assert len(BY_NAME[name].split(many)[1]) <= CALLS_MAX


def test_the_template_says_which_family_it_is() -> None:
    for one in FORMATS:
        assert tool_format_of(f"... {one.sign} ...").name == one.name
    assert tool_format_of("{{ messages }}").name == "hermes"


PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>\n?(.*?)\n?</parameter>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>([^<]{1,200})</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
LONG = st.sampled_from(["k" * 200, "k" * 201])


def pieces(*marks: str) -> st.SearchStrategy[str]:
    return st.lists(st.one_of(st.sampled_from([*marks, "a", "\n", "\n\n", " ", ">", "<", "1"]), LONG), max_size=24).map(
        "".join
    )


@given(pieces("<parameter=", "<parameter=a>", "<parameter=b>\n1\n", "</parameter>", "<parameter=c>x</parameter>"))
def test_parameters_are_what_the_plain_reading_finds(text: str) -> None:
    """Of each text, well-formed or not: the regular expression says what the format is, and takes the square of its length."""
    assert list(tool_formats._parameters(text)) == PARAMETER.findall(text)


@given(
    pieces(
        "<arg_key>",
        "</arg_key>",
        "<arg_key>a</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "\x1c\u2003",
        "</arg_key><arg_value>",
    )
)
def test_arguments_are_what_the_plain_reading_finds(text: str) -> None:
    assert list(tool_formats._arguments(text)) == ARGUMENT.findall(text)


HOSTILE = {
    "qwen_coder": [
        ("<tool_call><function=f>", "<parameter=a>", "</function></tool_call>"),
        ("<tool_call><function=f>", "<parameter=", "</function></tool_call>"),
        ("<tool_call><function=f>", "<parameter=a", "</function></tool_call>"),
        ("<tool_call><function=f>", "<parameter=a>\n", "</function></tool_call>"),
        ("", "<tool_call><function=f>", "</function></tool_call>"),
    ],
    "glm": [
        ("<tool_call>f", "<arg_key>a</arg_key><arg_value>", "</tool_call>"),
        ("<tool_call>f", "<arg_key>", "</tool_call>"),
        ("<tool_call>f", "<arg_key>a</arg_key>", "</tool_call>"),
        ("<tool_call>f<arg_key>a</arg_key>", " ", "</tool_call>"),
        ("<tool_call>f", "<arg_key>a</arg_key>  ", "</tool_call>"),
    ],
    "hermes": [("", "<tool_call>{", "</tool_call>"), ("", "<tool_call>", ""), ("<tool_call>", "[", "</tool_call>")],
    "mistral": [("", "[TOOL_CALLS][{", ""), ("[TOOL_CALLS]", "[ARGS]", ""), ("", "[TOOL_CALLS]a[ARGS]", "")],
    "deepseek": [
        ("", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ],
    "granite": [("", "<|tool_call|>", ""), ("<|tool_call|>", "[", "<|/tool_call|>")],
    "llama": [("<|python_tag|>", "{", ""), ("<|python_tag|>[", "1,", "")],
    "llama_json": [("", '{"a":', ""), ("[", "[],", "")],
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_completion_of_200_kb_takes_no_time(name: str) -> None:
    """Milliseconds each; what takes the square of the length took seconds."""
    for before, again, behind in HOSTILE[name]:
        text = before + again * (200_000 // len(again)) + behind
        began = time.process_time()
        BY_NAME[name].split(text)
        assert time.process_time() - began < 0.5, (before, again)

"""Calls of tools as families write them."""

from __future__ import annotations

import pytest

from echo2.tasks.tool_formats import CALLS_MAX, FORMATS, tool_format_of

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

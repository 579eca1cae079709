"""Parses tool calls from a completion's text, in the formats of several model families.

Guarantees: text that does not parse stays text, never half a call; one pass, bounded by the text's length and `CALLS_MAX`. Leaves
to others: executing calls (tools), OpenAI-style messages (gateway).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

CALLS_MAX = 64


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call in a completion, at text[begin:end]."""

    name: str
    arguments: Mapping[str, object]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's format. `sign`: text in the chat template that identifies it. `found`: yields the calls of a text."""

    name: str
    sign: str
    found: Callable[[str], Iterator[WrittenCall]]

    def split(self, text: str) -> tuple[str, tuple[WrittenCall, ...]]:
        """Returns the text without its calls, and the first CALLS_MAX calls in order."""
        calls: list[WrittenCall] = []
        for call in self.found(text):
            calls.append(call)
            if len(calls) == CALLS_MAX:
                break
        rest, at = [], 0
        for call in calls:
            rest.append(text[at : call.begin])
            at = max(at, call.end)
        return ("".join([*rest, text[at:]]).strip() if calls else text), tuple(calls)


def _call(told: object, begin: int, end: int) -> WrittenCall | None:
    """Reads `{"name": ..., "arguments" or "parameters": {...}}`; None if it has another shape."""
    if not isinstance(told, dict) or not isinstance(told.get("name"), str) or not told["name"]:
        return None
    arguments = told.get("arguments", told.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return WrittenCall(told["name"], arguments, begin, end) if isinstance(arguments, dict) else None


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _between(text: str, opening: str, closing: str) -> Iterator[tuple[str, int, int]]:
    """Yields each text between the marks, with the offsets where the opening mark begins and the closing one ends."""
    at = 0
    while (begin := text.find(opening, at)) >= 0:
        close = text.find(closing, begin + len(opening))
        if close < 0:
            return
        at = close + len(closing)
        yield text[begin + len(opening) : close], begin, at


def _hermes(text: str) -> Iterator[WrittenCall]:
    for inside, begin, end in _between(text, "<tool_call>", "</tool_call>"):
        if (call := _call(_json(inside.strip()), begin, end)) is not None:
            yield call


KEY_CHARS_MAX = 200
_SPACE = re.compile(r"\s*")


def _values(
    text: str, opening: str, closing: str, key_at: Callable[[str, int], tuple[str, int] | None]
) -> Iterator[tuple[str, int, int]]:
    """Yields each key after `opening`, with the offsets of its value.

    `key_at`: returns the key at an offset and where its value begins, or None. Stops at the first value without `closing`: later
    values have none either, and searching from each of them would take quadratic time.
    """
    at = 0
    while (begin := text.find(opening, at)) >= 0:
        at = begin + len(opening)
        found = key_at(text, at)
        if found is None:
            continue
        key, first = found
        close = text.find(closing, first)
        if close < 0:
            return
        yield key, first, close
        at = close + len(closing)


def _key(text: str, at: int, end: str, but: str) -> str | None:
    """Returns the key from `at` to `end`, of 1 to KEY_CHARS_MAX characters and without `but`; else None."""
    close = text.find(end, at, at + KEY_CHARS_MAX + len(end))
    key = text[at:close] if close > at else ""
    return key if key and but not in key else None


def _parameter_key(text: str, at: int) -> tuple[str, int] | None:
    key = _key(text, at, ">", "\n")
    if key is None:
        return None
    first = at + len(key) + 1
    return key, first + text.startswith("\n", first)


def _argument_key(text: str, at: int) -> tuple[str, int] | None:
    key = _key(text, at, "</arg_key>", "<")
    if key is None:
        return None
    space = _SPACE.match(text, at + len(key) + len("</arg_key>"))
    assert space is not None, "it matches no space as well"
    return (key, space.end() + len("<arg_value>")) if text.startswith("<arg_value>", space.end()) else None


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Yields keys and values of `<parameter=KEY>VALUE</parameter>`, without one newline at either end of the value."""
    for key, first, close in _values(text, "<parameter=", "</parameter>", _parameter_key):
        yield key, text[first : close - (close > first and text[close - 1] == "\n")]


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """Yields keys and values of `<arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>`."""
    for key, first, close in _values(text, "<arg_key>", "</arg_value>", _argument_key):
        yield key, text[first:close]


def _value(text: str) -> object:
    """Parses the value as JSON; if it is none, returns the text."""
    value = _json(text.strip())
    return text if value is None and text.strip() != "null" else value


def _coder(text: str) -> Iterator[WrittenCall]:
    for inside, begin, end in _between(text, "<tool_call>", "</tool_call>"):
        body = inside.strip()
        name, mark, rest = body.removeprefix("<function=").partition(">")
        if body.startswith("<function=") and mark and name and rest.endswith("</function>"):
            yield WrittenCall(name, {key: _value(value) for key, value in _parameters(rest)}, begin, end)


def _glm(text: str) -> Iterator[WrittenCall]:
    for inside, begin, end in _between(text, "<tool_call>", "</tool_call>"):
        name = inside.partition("<arg_key>")[0].strip()
        if name and "<" not in name and "{" not in name:
            yield WrittenCall(name, {key.strip(): _value(value) for key, value in _arguments(inside)}, begin, end)


def _mistral(text: str) -> Iterator[WrittenCall]:
    """Parses `[TOOL_CALLS][{...}, ...]`, or newer models' `[TOOL_CALLS]name[ARGS]{...}`, once per call."""
    mark = "[TOOL_CALLS]"
    at = text.find(mark)
    while at >= 0:
        following = text.find(mark, at + len(mark))
        end = following if following >= 0 else len(text)
        body = text[at + len(mark) : end].strip()
        name, is_named, arguments = body.partition("[ARGS]")
        told = [{"name": name.strip(), "arguments": _json(arguments)}] if is_named else _json(body)
        for one in told if isinstance(told, list) else []:
            if (call := _call(one, at, end)) is not None:
                yield call
        at = following


def _deepseek(text: str) -> Iterator[WrittenCall]:
    for inside, begin, end in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        first, _, second = inside.partition("<｜tool▁sep｜>")
        name, arguments = first, second
        if first.strip() == "function":  # R1 and V3 write the name after it, and the arguments in a code block
            name, _, arguments = second.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        told = _json(arguments.strip())
        if name.strip() and isinstance(told, dict):
            yield WrittenCall(name.strip(), told, begin, end)


def _listed(text: str) -> Iterator[WrittenCall]:
    """Parses Granite's and Phi's list after `<|tool_call|>`."""
    mark = "<|tool_call|>"
    begin = text.find(mark)
    if begin < 0:
        return
    body, is_closed, _ = text[begin + len(mark) :].partition("<|/tool_call|>")
    end = begin + len(mark) + len(body) + (len("<|/tool_call|>") if is_closed else 0)
    told = _json(body.strip())
    for one in told if isinstance(told, list) else []:
        if (call := _call(one, begin, end)) is not None:
            yield call


def _llama(text: str) -> Iterator[WrittenCall]:
    """Parses an answer that consists of nothing but a call, or a list of calls."""
    body = text.removeprefix("<|python_tag|>").strip()
    told = _json(body) if body.startswith(("{", "[")) else None
    for one in told if isinstance(told, list) else [told]:
        if (call := _call(one, 0, len(text))) is not None:
            yield call


FORMATS = (
    ToolFormat("deepseek", "<｜tool▁call▁begin｜>", _deepseek),
    ToolFormat("qwen_coder", "<function=", _coder),
    ToolFormat("glm", "<arg_key>", _glm),
    ToolFormat("mistral", "[TOOL_CALLS]", _mistral),
    ToolFormat("granite", "<|tool_call|>", _listed),
    ToolFormat("hermes", "<tool_call>", _hermes),
    ToolFormat("llama", "<|python_tag|>", _llama),
    ToolFormat("llama_json", '"parameters":', _llama),
)
_DEFAULT = next(one for one in FORMATS if one.name == "hermes")


def tool_format_of(template: str) -> ToolFormat:
    """Chooses the family by the chat template; if no sign matches, the Qwen and Hermes format, which most models know."""
    return next((one for one in FORMATS if one.sign in template), _DEFAULT)

"""Tool use: an environment in which the model may call tools before it answers, and a calculator as a real tool.

Guarantees: a malformed, unknown or failing call is answered with an error message, and the episode continues; a completion
without a call ends the episode and is scored by the underlying task; after `turns_max` turns the last completion is scored,
calls or not. The calculator evaluates arithmetic and nothing else, in bounded time.

A call is written `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models do.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from echo2.base.errors import TaskError
from echo2.base.rng import derived_rng
from echo2.tasks.task import ChatMessage, Environment, Observation, Prompt, Reward, Task, TaskInstance

CALLS_PER_TURN_MAX = 16  # bounds what a turn adds to the context; models make a few calls a turn
EXPRESSION_CHARS_MAX = 200  # keeps recursion of the parser far below its limit
NUMBER_MAX = 1e15  # up to here floats hold whole numbers exactly (2^53 is 9e15)


class Tool(Protocol):
    """Something the model may call. A `TaskError` from `call` is shown to the model."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """What the tool does and takes, for the system prompt."""
        ...

    def call(self, arguments: Mapping[str, object]) -> str: ...


class ToolEnvironment:
    def __init__(self, task: Task, instance: TaskInstance, tools: Sequence[Tool], turns_max: int):
        self._task = task
        self._instance = instance
        self._tools = {tool.name: tool for tool in tools}
        self._turns_max = turns_max
        self._turn_count = 0

    def reset(self) -> Prompt:
        self._turn_count = 0
        prompt = self._instance.prompt
        messages = (ChatMessage("user", prompt),) if isinstance(prompt, str) else prompt
        return (ChatMessage("system", self._instructions()), *messages)

    def step(self, completion_text: str) -> Observation:
        self._turn_count += 1
        written = _between(completion_text, "<tool_call>", "</tool_call>")
        calls = [text.strip() for text, _, _ in itertools.islice(written, CALLS_PER_TURN_MAX)]
        if not calls or self._turn_count >= self._turns_max:
            reward = self._task.score(self._instance, completion_text)
            return Observation((), Reward(reward.value, {**reward.parts, "turns": float(self._turn_count)}))
        return Observation(tuple(ChatMessage("tool", self._answered(call)) for call in calls))

    def _answered(self, text: str) -> str:
        parsed = _json(text)
        call = None if isinstance(parsed, list) else next(_calls(parsed, 0, len(text)), None)
        if call is None:
            return 'error: expected {"name": ..., "arguments": {...}} as JSON in <tool_call>, ' + f"got {text[:80]!r}"
        if call.name not in self._tools:
            return f"error: expected a tool among {', '.join(self._tools)}, got {call.name[:80]!r}"
        try:
            return self._tools[call.name].call(call.arguments)
        except TaskError as error:
            return f"error: {error}"

    def _instructions(self) -> str:
        tools = "\n".join(f"- {tool.name}: {tool.description}" for tool in self._tools.values())
        return (
            "You may call tools before you answer. Write a call as "
            '<tool_call>{"name": "...", "arguments": {...}}</tool_call> and stop; its result comes back to you.\n'
            f"Tools:\n{tools}\nWhen you know the answer, write it without a call."
        )


class Calculator:
    """Evaluates arithmetic: numbers, + - * / ** %, parentheses."""

    name = "calculator"
    description = 'evaluates arithmetic; arguments {"expression": "(3 + 4) * 2"}'

    def call(self, arguments: Mapping[str, object]) -> str:
        expression = arguments.get("expression")
        if not isinstance(expression, str) or len(expression) > EXPRESSION_CHARS_MAX:
            raise TaskError(f"calculator: expected an expression of at most {EXPRESSION_CHARS_MAX} characters")
        try:
            value = _evaluated(ast.parse(expression, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise TaskError(f"calculator: expected arithmetic, got {expression!r}") from error
        return str(int(value)) if value == int(value) else repr(value)


# On floats, so that a power takes eight bytes.
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: operator.mod,
    ast.Pow: math.pow,
}  # fmt: skip


def _evaluated(node: ast.expr) -> float:
    """Evaluates an arithmetic tree. Raises `ValueError` for anything else in it."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(float(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            try:
                return _bounded(_OPERATORS[type(op)](_evaluated(left), _evaluated(right)))
            except (ZeroDivisionError, OverflowError) as error:
                raise TaskError(f"calculator: {error}") from error
    raise ValueError("not arithmetic")


def _bounded(value: float) -> float:
    if not abs(value) <= NUMBER_MAX:
        raise TaskError(f"calculator: expected numbers up to {NUMBER_MAX:g}, got {value:g}")
    return value


@dataclass(frozen=True, slots=True)
class ArithmeticProblems:
    """Products and sums that are tedious by head and easy with a calculator. Right if the completion's last number is exact."""

    name: ClassVar[str] = "arithmetic"
    size: ClassVar[None] = None
    is_cheap: ClassVar[bool] = True
    seed: int = 0

    def sample(self, index: int) -> TaskInstance:
        rng = derived_rng(self.seed, "arithmetic", index)
        a, b, c = rng.randrange(100, 1000), rng.randrange(100, 1000), rng.randrange(10_000)
        return TaskInstance(index, f"What is {a} * {b} + {c}?", str(a * b + c))

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        numbers = re.findall(r"-?\d+", completion_text.replace(",", ""))
        right = float(bool(numbers) and numbers[-1] == instance.answer)
        return Reward(right, {"accuracy": right})


@dataclass(frozen=True, slots=True)
class CalculatorEnvironments:
    """Arithmetic with a calculator tool: the built-in example of a tool-calling environment."""

    name: ClassVar[str] = "calculator"
    size: ClassVar[None] = None
    seed: int = 0
    turns_max: int = 4

    def open(self, index: int) -> Environment:
        task = ArithmeticProblems(self.seed)
        return ToolEnvironment(task, task.sample(index), (Calculator(),), self.turns_max)


CALLS_MAX = 64  # of one message; parsing is linear in them


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call in a completion, at text[begin:end]."""

    name: str
    arguments: Mapping[str, object]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's format. `sign`: text in the chat template that identifies it. `calls_of`: yields the calls of a text."""

    name: str
    sign: str
    calls_of: Callable[[str], Iterator[WrittenCall]]

    def split(self, text: str) -> tuple[str, tuple[WrittenCall, ...]]:
        calls = list(itertools.islice(self.calls_of(text), CALLS_MAX))
        rest, at = [], 0
        for call in calls:
            rest.append(text[at : call.begin])
            at = max(at, call.end)
        return ("".join([*rest, text[at:]]).strip() if calls else text), tuple(calls)


def _calls(value: object, begin: int, end: int) -> Iterator[WrittenCall]:
    """Reads `{"name": ..., "arguments" or "parameters": {...}}`, or those of a list that have this shape."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and isinstance(item.get("name"), str) and item["name"]:
            arguments = item.get("arguments", item.get("parameters", {}))
            arguments = _json(arguments) if isinstance(arguments, str) else arguments
            if isinstance(arguments, dict):
                yield WrittenCall(item["name"], arguments, begin, end)


def _json(text: str) -> object:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair could not be answered
    except (ValueError, RecursionError):
        return None
    return value


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
        if not isinstance(value := _json(inside.strip()), list):
            yield from _calls(value, begin, end)


# A parameter's name has up to 200 characters: without a bound the search in a malformed call takes quadratic time.
_CODER_ARGUMENT = re.compile(r"<parameter=([^\n>]{1,200})>(.*)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]{1,200})</arg_key>\s*<arg_value>(.*)", re.DOTALL)


def _arguments(text: str, argument: re.Pattern[str], closing: str) -> Iterator[tuple[str, str]]:
    """Yields keys and values, of which each ends at `closing`; leaves out what has no key."""
    for piece in text.split(closing)[:-1]:
        if match := argument.search(piece):
            yield match[1], match[2]


def _value(text: str) -> object:
    """Parses the value as JSON; if it is none, returns the text."""
    value = _json(text.strip())
    return text if value is None and text.strip() != "null" else value


def _coder(text: str) -> Iterator[WrittenCall]:
    for inside, begin, end in _between(text, "<tool_call>", "</tool_call>"):
        body = inside.strip()
        name, mark, rest = body.removeprefix("<function=").partition(">")
        if body.startswith("<function=") and mark and name and rest.endswith("</function>"):
            pairs = _arguments(rest, _CODER_ARGUMENT, "</parameter>")
            arguments = {key: _value(value.removeprefix("\n").removesuffix("\n")) for key, value in pairs}
            yield WrittenCall(name, arguments, begin, end)


def _glm(text: str) -> Iterator[WrittenCall]:
    for inside, begin, end in _between(text, "<tool_call>", "</tool_call>"):
        name = inside.partition("<arg_key>")[0].strip()
        if name and "<" not in name and "{" not in name:
            pairs = _arguments(inside, _GLM_ARGUMENT, "</arg_value>")
            arguments = {key.strip(): _value(value) for key, value in pairs}
            yield WrittenCall(name, arguments, begin, end)


def _mistral(text: str) -> Iterator[WrittenCall]:
    """Parses `[TOOL_CALLS][{...}, ...]`, or newer models' `[TOOL_CALLS]name[ARGS]{...}`, once per call."""
    mark = "[TOOL_CALLS]"
    at = text.find(mark)
    while at >= 0:
        following = text.find(mark, at + len(mark))
        end = following if following >= 0 else len(text)
        body = text[at + len(mark) : end].strip()
        name, is_named, arguments = body.partition("[ARGS]")
        calls = [{"name": name.strip(), "arguments": _json(arguments)}] if is_named else _json(body)
        yield from _calls(calls, at, end) if isinstance(calls, list) else ()
        at = following


def _deepseek(text: str) -> Iterator[WrittenCall]:
    for inside, begin, end in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        first, _, second = inside.partition("<｜tool▁sep｜>")
        name, arguments = first, second
        if first.strip() == "function":  # R1 and V3 write the name after it, and the arguments in a code block
            name, _, arguments = second.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        value = _json(arguments.strip())
        if name.strip() and isinstance(value, dict):
            yield WrittenCall(name.strip(), value, begin, end)


def _listed(text: str) -> Iterator[WrittenCall]:
    """Parses Granite's and Phi's list after `<|tool_call|>`."""
    mark = "<|tool_call|>"
    begin = text.find(mark)
    if begin < 0:
        return
    body, is_closed, _ = text[begin + len(mark) :].partition("<|/tool_call|>")
    end = begin + len(mark) + len(body) + (len("<|/tool_call|>") if is_closed else 0)
    calls = _json(body.strip())
    yield from _calls(calls, begin, end) if isinstance(calls, list) else ()


def _llama(text: str) -> Iterator[WrittenCall]:
    """Parses an answer that consists of nothing but a call, or a list of calls."""
    body = text.removeprefix("<|python_tag|>").strip()
    yield from _calls(_json(body) if body.startswith(("{", "[")) else None, 0, len(text))


# In order of their signs: the first whose sign is in the template is used.
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
_DEFAULT = next(each for each in FORMATS if each.name == "hermes")  # what most open models were trained with


def tool_format_of(template: str) -> ToolFormat:
    """Chooses the family by the chat template; if no sign matches, the Qwen and Hermes format, which most models know."""
    return next((tool_format for tool_format in FORMATS if tool_format.sign in template), _DEFAULT)

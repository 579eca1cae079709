"""Tool use: an environment in which the model may call tools before it answers, and a calculator as a real tool.

Guarantees: a malformed, unknown or failing call is answered with an error message, and the episode continues; a completion without
a call ends the episode and is scored by the underlying task; after `turns_max` turns the last completion is scored, calls or not.
The calculator evaluates arithmetic and nothing else, in bounded time. Leaves to others: limits on what a user's own tools do
(runtime/rewards).

A call is written `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models do.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2.base.errors import TaskError
from echo2.base.rng import derived_rng
from echo2.tasks.environment import Environment, Observation
from echo2.tasks.task import ChatMessage, Prompt, Reward, Task, TaskInstance

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
CALLS_PER_TURN_MAX = 16
EXPRESSION_CHARS_MAX = 200
NUMBER_MAX = 1e15


class Tool(Protocol):
    """Something the model may call. A `TaskError` from `call` is shown to the model."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """What the tool does and takes, for the system prompt."""
        ...

    def call(self, arguments: Mapping[str, object]) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it. `problem`: why it is malformed, if it is."""

    name: str
    arguments: Mapping[str, object]
    problem: str = ""


def tool_calls_in(completion_text: str) -> tuple[ToolCall, ...]:
    """Returns the first CALLS_PER_TURN_MAX calls of a completion, in order; malformed ones with their problem. Takes one pass."""
    calls: list[ToolCall] = []
    end = 0
    while len(calls) < CALLS_PER_TURN_MAX:
        start = completion_text.find(_CALL_OPEN, end)
        close = completion_text.find(_CALL_CLOSE, start + len(_CALL_OPEN)) if start >= 0 else -1
        if close < 0:
            break
        calls.append(_parsed(completion_text[start + len(_CALL_OPEN) : close].strip()))
        end = close + len(_CALL_CLOSE)
    return tuple(calls)


def _parsed(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"expected JSON in <tool_call>: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'expected {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, "expected arguments as an object")
    return ToolCall(call["name"], arguments)


class ToolEnvironment:
    """One episode: a problem, tool calls with their results, and the answer."""

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
        calls = tool_calls_in(completion_text)
        if not calls or self._turn_count >= self._turns_max:
            reward = self._task.score(self._instance, completion_text)
            return Observation((), Reward(reward.value, {**reward.parts, "turns": float(self._turn_count)}))
        return Observation(tuple(ChatMessage("tool", self._answered(call)) for call in calls))

    def _answered(self, call: ToolCall) -> str:
        if call.problem:
            return f"error: {call.problem}"
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


_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}


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

    seed: int = 0

    @property
    def name(self) -> str:
        return "arithmetic"

    @property
    def size(self) -> None:
        return None

    @property
    def is_cheap(self) -> bool:
        return True

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

    seed: int = 0
    turns_max: int = 4

    @property
    def name(self) -> str:
        return "calculator"

    @property
    def size(self) -> None:
        return None

    def open(self, index: int) -> Environment:
        task = ArithmeticProblems(self.seed)
        return ToolEnvironment(task, task.sample(index), (Calculator(),), self.turns_max)

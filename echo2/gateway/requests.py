"""Parses request bodies of OpenAI's `chat/completions` and `completions` into `CallRequest`.

Guarantees: a returned request is within the limits; any other body raises `MalformedMessage`, which names the field, what was
expected and what came. `CallRequest.ignored` lists fields that the gateway does not use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, cast

from echo2.base.errors import MalformedMessage
from echo2.base.rollout import STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, TEMPERATURE_MAX

Message = Mapping[str, object]
BODY_BYTES_MAX = 8 << 20  # PROMPT_TOKENS_MAX of some 4 bytes each, twice for JSON's escapes
MESSAGES_MAX = 2048  # four for each call of an episode (Limits.calls_max)
TOOLS_MAX = 128  # what OpenAI's API allows
BODY_VALUES_MAX = 1 << 19
"""Commas and opening brackets in one body: parsing holds the interpreter, so nothing else runs meanwhile."""
CHOICES_MAX = 16  # each choice is a rollout of the group, and a slot of a worker
ID_BYTES = 8  # memory per token ID of a prompt
JSON_DEPTH_MAX = 200  # far below the interpreter's limit on recursion (1,000), which serialising would reach
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a UTF-16 pair as JSON escapes it: no UTF-8 holds it
ROLES = ("system", "user", "assistant", "tool")  # those that chat templates know
_TAKEN = frozenset({
    "model", "messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "stop", "n", "stream",
    "stream_options", "logprobs", "return_token_ids", "user", "metadata", "store",
})  # fmt: skip
_READ = frozenset({"role", "content", "tool_calls", "tool_call_id"})
"""Fields of a message that reach the template."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A parsed call: the `messages` of a chat, or the `prompt` of a text completion, as a string or as token ids. `max_tokens`
    None: as many as the limits allow. `temperature`: obeyed in evaluations only; None: missing, or not a number from 0 to 2.
    `digest`: covers everything that determines the answer, so a retry has the same one. For a chat, `history` holds the key of
    its tools, then the key of the chat up to each message; `sizes` holds the length of each as JSON, in characters."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    choices: int = 1
    is_streamed: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    wants_ids: bool = False
    temperature: float | None = None
    ignored: tuple[str, ...] = ()
    digest: bytes = b""
    history: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the request while it waits."""
        if self.prompt is None:
            return sum(self.sizes)
        return len(self.prompt) * (1 if isinstance(self.prompt, str) else ID_BYTES)

    @property
    def is_streamed_in_pieces(self) -> bool:
        """One choice, and only its text is wanted. Tool calls are parsed from the whole text."""
        is_plain = not (self.tools or self.wants_logprobs or self.wants_ids)
        return self.is_streamed and self.choices == 1 and is_plain

    def with_digests(self) -> CallRequest:
        """Returns a copy with `digest`, `history` and `sizes` filled in. Slow for a large request."""
        parts = [self.messages, self.tools, self.prompt, self.max_tokens, self.stops, self.choices, self.temperature]
        digest = blake2b(json.dumps(parts, sort_keys=True, default=dict).encode(), digest_size=16).digest()
        if self.prompt is not None:
            return replace(self, digest=digest)
        key, size = beginning(self.tools)
        keys, sizes = [key], [size]
        for message in self.messages:
            key, size = behind(key, message)
            keys.append(key)
            sizes.append(size)
        return replace(self, digest=digest, history=tuple(keys), sizes=tuple(sizes))


def body_of(data: bytes) -> dict[str, object]:
    """Parses the body as a JSON object; an empty body gives an empty object."""
    count = data.count(b",") + data.count(b"[") + data.count(b"{")
    if count > BODY_VALUES_MAX:
        raise MalformedMessage(f"body: expected at most {BODY_VALUES_MAX} commas and opening brackets, got {count}")
    try:
        text = data.decode() or "{}"
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"body: expected UTF-8, got {error}") from None
    if not isinstance(body := _parsed(text, "body"), dict):
        raise MalformedMessage("body: expected a JSON object")
    return body


def chat_call(body: Mapping[str, object]) -> CallRequest:
    """Parses a body of `chat/completions`."""
    items = body.get("messages")
    if not isinstance(items, list) or not 1 <= len(items) <= MESSAGES_MAX:
        raise MalformedMessage(f"messages: expected a list of 1 to {MESSAGES_MAX}, got {shown(items)}")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX or not all(isinstance(tool, dict) for tool in tools):
        raise MalformedMessage(f"tools: expected a list of at most {TOOLS_MAX} objects, got {shown(tools)}")
    if any("function" in tool and not isinstance(tool["function"], dict) for tool in tools):
        raise MalformedMessage(f"tools: expected an object as each function, got {shown(tools)}")
    if body.get("tool_choice") == "none":
        tools = []
    messages = tuple(_message(item, place) for place, item in enumerate(items))
    unread = {f"messages.{name}" for item in items for name, told in item.items() if name not in _READ and told}
    return _call(body, unread, messages=messages, tools=tuple(cast(Sequence[Message], tools)))


def text_call(body: Mapping[str, object]) -> CallRequest:
    """Parses a body of `completions`."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return _call(body, prompt=tuple(prompt))
    if not isinstance(prompt, str) or not prompt:
        raise MalformedMessage(f"prompt: expected one text or one list of token ids, got {shown(prompt)}")
    return _call(body, prompt=prompt)


def _call(
    body: Mapping[str, object],
    unread: Iterable[str] = (),
    messages: tuple[Message, ...] = (),
    tools: tuple[Message, ...] = (),
    prompt: str | tuple[int, ...] | None = None,
) -> CallRequest:
    tokens = body.get("max_tokens") if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
    options = body.get("stream_options")
    logprobs = body.get("logprobs")
    taken = _TAKEN | {"tool_choice"} if body.get("tool_choice") in ("auto", "none") else _TAKEN
    ignored = sorted([*(name for name, item in body.items() if name not in taken and item is not None), *unread])
    call = CallRequest(
        messages=messages,
        tools=tools,
        prompt=prompt,
        max_tokens=None if tokens is None else whole_number(tokens, "max_tokens", 1 << 20),
        stops=stop_texts(body.get("stop")),
        choices=whole_number(1 if body.get("n") is None else body["n"], "n", CHOICES_MAX),
        is_streamed=is_set(body, "stream"),
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        wants_logprobs=is_set(body, "logprobs") if prompt is None else logprobs is not None and logprobs is not False,
        wants_ids=is_set(body, "return_token_ids"),
        temperature=_temperature(body.get("temperature")),
        ignored=tuple(ascii(name)[1:-1][:40] for name in ignored[:32]),  # ASCII, since they go into a header
    )
    return call.with_digests()


def beginning(tools: Sequence[Message]) -> tuple[bytes, int]:
    """Returns the key of an empty chat with these tools, and the length of the tools as JSON."""
    text = json.dumps(list(tools), sort_keys=True, default=dict)
    return blake2b(text.encode(), digest_size=16).digest(), len(text)


def behind(key: bytes, message: Message) -> tuple[bytes, int]:
    """Returns the key of the chat extended by `message`, and the length of the message as JSON."""
    calls = cast(list[Any], message.get("tool_calls", []))
    # Without the call's ID, which some clients generate anew.
    tools = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    text = json.dumps([message["role"], message["content"], tools], sort_keys=True)
    return blake2b(key + text.encode(), digest_size=16).digest(), len(text)


def _message(item: object, place: int) -> Message:
    """Parses one message: content as plain text, tool calls as name and arguments."""
    where = f"messages[{place}]"
    if not isinstance(item, dict):
        raise MalformedMessage(f"{where}: expected an object, got {shown(item)}")
    role = {"developer": "system", "function": "tool"}.get(str(item.get("role")), item.get("role"))
    if role not in ROLES:
        raise MalformedMessage(f"{where}.role: expected one of {', '.join(ROLES)}, got {shown(item.get('role'))}")
    message: dict[str, object] = {"role": role, "content": _text(item.get("content"), where)}
    if calls := item.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list) or len(calls) > TOOLS_MAX:
            expected = f"at most {TOOLS_MAX} of an assistant"
            raise MalformedMessage(f"{where}.tool_calls: expected {expected}, got {shown(calls)}")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        message["tool_call_id"] = item["tool_call_id"]
    return message


def _tool_call(item: object, where: str) -> Message:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        expected = "{id, type, function: {name, arguments}}"
        raise MalformedMessage(f"{where}.tool_calls: expected {expected}, got {shown(item)}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}.tool_calls: arguments")
    called = {"name": function["name"], "arguments": arguments}
    return {"id": str(item.get("id", "")), "type": "function", "function": called}


def _parsed(text: str, where: str) -> object:
    """Parses JSON. Refuses what could not be serialised again: surrogate halves, and nesting deeper than JSON_DEPTH_MAX."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"{where}: expected JSON, got {error}") from None
    level = [value]
    for _ in range(JSON_DEPTH_MAX + 1):
        inner = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [child for children in inner for child in children if isinstance(child, dict | list)]
    if level:
        raise MalformedMessage(f"{where}: expected at most {JSON_DEPTH_MAX} levels of lists and objects")
    if _SURROGATE.search(text) is not None:  # the parser has joined whole pairs: only lone halves cannot be encoded
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise MalformedMessage(f"{where}: expected text in Unicode, got half of a surrogate pair") from None
    return value


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise MalformedMessage(f"{where}.content: expected text, or parts of type text, got {shown(content)}")
    return "".join(cast(list[str], texts))


def stop_texts(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > STOP_STRINGS_MAX or not all(
        isinstance(text, str) and 1 <= len(text.encode()) <= STOP_STRING_BYTES_MAX for text in stops
    ):  # fmt: skip
        raise MalformedMessage(
            f"stop: expected at most {STOP_STRINGS_MAX} texts of 1 to {STOP_STRING_BYTES_MAX} bytes, got {shown(value)}"
        )
    return tuple(stops)


def _temperature(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= TEMPERATURE_MAX else None  # type: ignore[operator, arg-type]


def is_set(body: Mapping[str, object], name: str, where: str = "") -> bool:
    """Whether the field is true; missing is false."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise MalformedMessage(f"{where}{name}: expected true or false, got {shown(value)}")
    return value is True


def whole_number(value: object, name: str, high: int, low: int = 1) -> int:
    if type(value) is not int or not low <= value <= high:
        raise MalformedMessage(f"{name}: expected a whole number from {low} to {high}, got {shown(value)}")
    return value


def shown(value: object) -> str:
    return repr(value)[:80]

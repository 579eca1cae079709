"""Encodes chats and decodes completions of one model, by its tokenizer and the tool-call format of its template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from echo2.gateway.requests import Message
from echo2.tasks.runtime.chat_format import ChatFormat
from echo2.tasks.tool_formats import tool_format_of


class ChatReading:
    """The gateway's `ModelReading` of one model."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        tokenizer = chat.tokenizer
        self._tools = tool_format_of(str(tokenizer.chat_template or ""))
        self._special = frozenset(tokenizer.all_special_ids)
        self.token_text = lru_cache(maxsize=65_536)(self._token_text)

    def opening(self, messages: Sequence[Message], tools: Sequence[Message]) -> Sequence[int]:
        return self._chat.opening(messages, tools)

    def between(self, messages: Sequence[Message], turn: Sequence[int]) -> Sequence[int]:
        return self._chat.between(messages, turn)

    def encoded(self, text: str, *, is_beginning: bool) -> Sequence[int]:
        special = {} if is_beginning else {"add_special_tokens": False}
        return [int(token) for token in self._chat.tokenizer.encode(text, **special)]

    def said(self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool) -> tuple[str, list[Message]]:
        text = _before(self._chat.text_of(token_ids), stops)
        if not has_tools:
            return text, []
        end = len(token_ids)
        while end and token_ids[end - 1] in self._special:
            end -= 1
        raw = str(self._chat.tokenizer.decode(list(token_ids[:end]), skip_special_tokens=False))
        rest, calls = self._tools.split(_before(raw, stops))
        if not calls:
            return text, []
        return rest, [
            {"id": "", "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in calls
        ]

    def _token_text(self, token_id: int) -> str:
        return str(self._chat.tokenizer.decode([token_id], skip_special_tokens=False))


def _before(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string. The API leaves the stop string out."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]

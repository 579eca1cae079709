"""Encodes chats and decodes completions of one model, by its tokenizer and the tool-call format of its template."""

from __future__ import annotations

from collections.abc import Sequence

from echo2.gateway.requests import Message
from echo2.tasks.chat_format import ChatFormat
from echo2.tasks.tools import tool_format_of


class ModelCodec:
    """The `ChatCodec` of one model. `token_bytes`: each token's bytes, by id."""

    def __init__(self, chat: ChatFormat, token_bytes: Sequence[bytes]) -> None:
        self._chat, self._token_bytes = chat, token_bytes
        tokenizer = chat.tokenizer
        self._tools = tool_format_of(str(tokenizer.chat_template or ""))
        self._special = frozenset(tokenizer.all_special_ids)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Message]) -> Sequence[int]:
        return self._chat.opening(messages, tools)

    def encode_after(self, messages: Sequence[Message], turn: Sequence[int]) -> Sequence[int]:
        return self._chat.between(messages, turn)

    def encode_text(self, text: str, *, is_beginning: bool) -> Sequence[int]:
        """Encodes a client's raw prompt. It writes its own template, if any, so that control tokens in it are its own."""
        return self._chat.control_tokens.encode(text, is_beginning=is_beginning)

    def decode(
        self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool
    ) -> tuple[str, list[Message]]:
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

    def bytes_of(self, token_id: int) -> bytes:
        """The token's part of the text; empty for end tokens, and for ids of a padded vocabulary."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""


def _before(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string. The API leaves the stop string out."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]

"""Renders chats with a model's template, token for token.

Guarantees: sampled tokens are never re-encoded: the next prompt is the previous prompt, the sampled ids, and the template's text
after them (`between`); a message that the template drops or refuses is rendered in a role that it supports, or ConfigError is
raised. Leaves to others: the messages (world, gateway), where completions stop (token_text).

Templates support different roles. If a template refuses a system message, its text is put before the first user message; a tool's
message becomes a user message; adjacent messages of one role are joined if roles must alternate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echo2.base.errors import ConfigError
from echo2.tasks.task import ChatMessage, Prompt, prompt_text

_SAID = "\x02answer\x03"
_Chat = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`system_prompt`: opens every chat without a system message. `arguments`: passed to the template, such as enable_thinking.
    `is_plain`: ignore the template; text prompts stay text, and environments' messages become plain lines."""

    system_prompt: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    is_plain: bool = False


class ChatFormat:
    """One tokenizer with its template, if it has one."""

    def __init__(self, tokenizer: Any, options: ChatOptions | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options or ChatOptions()
        self.is_chat = bool(tokenizer.chat_template) and not self.options.is_plain

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decodes a completion, leaving out special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def prompt(self, prompt: Prompt) -> list[int]:
        """Encodes a task's prompt."""
        if isinstance(prompt, str):
            if not self.is_chat:
                system = self.options.system_prompt
                return self._encoded(f"{system}\n{prompt}" if system else prompt, is_beginning=True)
            prompt = (ChatMessage("user", prompt),)
        return self.opening([{"role": message.role, "content": message.content} for message in prompt])

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Encodes a whole chat, up to the point where the model answers."""
        chat = [dict(message) for message in messages]
        if self.options.system_prompt and not any(message["role"] == "system" for message in chat):
            chat.insert(0, {"role": "system", "content": self.options.system_prompt})
        if not self.tokenizer.chat_template:
            return self._encoded(
                prompt_text(tuple(ChatMessage(str(m["role"]), _content(m)) for m in chat)), is_beginning=True
            )
        return self._encoded(self._rendered(chat, tools, _contents(chat)))

    def between(self, messages: Sequence[Mapping[str, Any]], turn: Sequence[int]) -> tuple[int, ...]:
        """Encodes everything between the end of the model's `turn` and its next one: `messages`, and what the template adds."""
        if not self.is_chat:
            text = "\n" + "\n".join(_content(message) for message in messages) + "\n"
            return tuple(self._encoded(text))
        behind = self._behind([dict(message) for message in messages])
        # If the model sampled its closing token, do not repeat that token.
        closing = str(self.tokenizer.decode(list(turn[-1:]), skip_special_tokens=False)) if turn else ""
        if closing and int(turn[-1]) in self._special_ids() and behind.startswith(closing):
            # Encode both together: some tokenizers encode text differently after a special token.
            whole, alone = self._encoded(behind), self._encoded(closing)
            if whole[: len(alone)] == alone:
                return tuple(whole[len(alone) :])
            return tuple(self._encoded(behind.removeprefix(closing)))
        return tuple(self._encoded(behind))

    def _behind(self, messages: _Chat) -> str:
        chat: _Chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}, *messages]
        text = self._rendered(chat, (), [_SAID, *_contents(messages)])
        return text.rpartition(_SAID)[2]

    def _special_ids(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {number for number, one in added.items() if one.special}

    # ---- what a template takes

    def _rendered(self, chat: _Chat, tools: Sequence[Mapping[str, Any]], must_hold: Sequence[str]) -> str:
        """Renders the first variant of the chat in which the template keeps every message. Raises ConfigError if there is none."""
        problem = ""
        for way in (chat, *_other_ways(chat)):
            try:
                text = str(
                    self.tokenizer.apply_chat_template(
                        way,
                        tokenize=False,
                        add_generation_prompt=True,
                        **({"tools": [dict(tool) for tool in tools]} if tools else {}),
                        **dict(self.options.arguments),
                    )
                )
            except Exception as error:  # noqa: BLE001 - a template may raise anything: TemplateError, TypeError, ...
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            lost = [content for content in must_hold if content.strip() not in text]
            if not lost:
                return text
            problem = problem or f"it leaves out {lost[0][:60]!r}"
        raise ConfigError(
            f"chat template: expected one that takes the roles {', '.join(dict.fromkeys(str(m['role']) for m in chat))}; "
            f"{problem}"
        )

    def _encoded(self, text: str, *, is_beginning: bool = False) -> list[int]:
        special = {} if is_beginning else {"add_special_tokens": False}
        return [int(token) for token in self.tokenizer.encode(text, **special)]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _contents(chat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the texts that a rendering must contain. Leaves out the model's turns, since templates may drop its thoughts."""
    return [_content(message) for message in chat if message["role"] != "assistant"]


def _other_ways(chat: _Chat) -> list[_Chat]:
    """Returns variants of the chat for templates that support fewer roles, each giving up more than the one before."""
    untooled = [{"role": "user", "content": _content(m)} if m["role"] == "tool" else m for m in chat]
    unsystemed = _folded(untooled)
    return [untooled, _joined(untooled), unsystemed, _joined(unsystemed)]


def _folded(chat: _Chat) -> _Chat:
    """Moves the system messages' text to the start of the first user message."""
    system = "\n\n".join(_content(message) for message in chat if message["role"] == "system")
    rest = [dict(message) for message in chat if message["role"] != "system"]
    first = next((message for message in rest if message["role"] == "user"), None)
    if system and first is None:
        return [{"role": "user", "content": system}, *rest]
    if system and first is not None:
        first["content"] = f"{system}\n\n{_content(first)}"
    return rest


def _joined(chat: _Chat) -> _Chat:
    """Joins adjacent messages of one role."""
    found: _Chat = []
    for message in chat:
        if found and found[-1]["role"] == message["role"]:
            found[-1] = {**found[-1], "content": f"{_content(found[-1])}\n\n{_content(message)}"}
        else:
            found.append(dict(message))
    return found

"""Renders chats with a model's template, token for token, and reads its completions; the gateway's `ChatCodec`.

Guarantees: sampled tokens are never re-encoded: the next prompt is the previous prompt, the sampled ids, and the template's text
after them (`between`); a message that the template drops or refuses is rendered in a role that it supports, or ConfigError is
raised, as for tools that it does not tell the model of; what a message or tool spells is never a control token.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from echo2.base.errors import ConfigError, LimitExceeded
from echo2.base.rollout import STOP_PIECES_MAX, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, piece_of_part
from echo2.tasks.rendering import render
from echo2.tasks.task import ChatMessage, Prompt, prompt_text, texts_in
from echo2.tasks.tools import tool_format_of

_STARTED = datetime.now(UTC).replace(microsecond=0)  # for use outside a run, which tells when it began
_Chat = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`system_prompt`: opens every chat without a system message. `arguments`: passed to the template, such as enable_thinking.
    `is_plain`: ignore the template; text prompts stay text, and environments' messages become plain lines. `now`: the moment that a
    template which asks for the date is told, one for the whole run, so that a prompt is the same at every time."""

    system_prompt: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    is_plain: bool = False
    now: datetime = _STARTED


class ChatFormat:
    """One tokenizer with its template, if it has one. `ends`: tokens that end a completion, besides the tokenizer's own."""

    def __init__(self, tokenizer: Any, options: ChatOptions | None = None, ends: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.options = options or ChatOptions()
        self._left_out = frozenset(ends) | named_ids(tokenizer)
        self.is_chat = bool(tokenizer.chat_template) and not self.options.is_plain

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decodes a completion, leaving out what begins, ends and pads a text. Other special tokens (`<answer>`) stay: they
        are what the model wrote."""
        return self._decoded([token for token in token_ids if int(token) not in self._left_out])

    def prompt(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not self.is_chat:
                system = self.options.system_prompt
                return self._plain(f"{system}\n{prompt}" if system else prompt, is_beginning=True)
            prompt = (ChatMessage("user", prompt),)
        return self.opening([{"role": message.role, "content": message.content} for message in prompt])

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Encodes a whole chat, up to the point where the model answers."""
        mark, _ = marks_for([*messages, *tools, self.options.system_prompt])
        chat = self.control_tokens.marked_chat(messages, mark)
        if self.options.system_prompt and not any(message["role"] == "system" for message in chat):
            chat.insert(0, {"role": "system", "content": self.options.system_prompt})
        if not self.tokenizer.chat_template:
            if tools:
                raise ConfigError("chat template: expected one that tells the model of tools, the model has none")
            text = prompt_text(tuple(ChatMessage(str(m["role"]), _content(m)) for m in chat))
            return self.control_tokens.encode(text, mark, is_beginning=True)
        tools = self.control_tokens.marked(tools, mark)
        names = [str(tool.get("function", tool).get("name", "")) for tool in tools]
        return self.control_tokens.encode(self._rendered(chat, tools, [*_contents(chat), *names]), mark)

    def between(self, messages: Sequence[Mapping[str, Any]], turn: Sequence[int]) -> tuple[int, ...]:
        """Encodes everything between the end of the model's `turn` and its next one: `messages`, and what the template adds."""
        if not self.is_chat:
            return tuple(self._plain("\n" + "\n".join(_content(message) for message in messages) + "\n"))
        mark, other = marks_for(list(messages))
        answer, after = f"{other}answer{other}", self.control_tokens.marked_chat(messages, mark)
        chat: _Chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}, *after]
        behind = self._rendered(chat, (), [answer, *_contents(after)]).rpartition(answer)[2]
        # If the model sampled its closing token, do not repeat that token.
        closing = self._decoded(turn[-1:]) if turn else ""
        if closing and int(turn[-1]) in self._special_ids and behind.startswith(closing):
            # Encode both together: some tokenizers encode text differently after a special token.
            whole, alone = self.control_tokens.encode(behind, mark), self.control_tokens.encode(closing, mark)
            if whole[: len(alone)] == alone:
                return tuple(whole[len(alone) :])
            behind = behind.removeprefix(closing)
        return tuple(self.control_tokens.encode(behind, mark))

    def conversation(self, messages: Sequence[ChatMessage]) -> list[tuple[list[int], list[int]]]:
        """Encodes a whole chat, turn by turn as a run samples it: pairs of what the model reads and the turn that it then takes,
        with its end. Messages after the last turn are left out."""
        pairs: list[tuple[list[int], list[int]]] = []
        before: list[ChatMessage] = []
        for message in messages:
            if message.role != "assistant":
                before.append(message)
                continue
            if pairs:
                chat = [{"role": earlier.role, "content": earlier.content} for earlier in before]
                read = list(self.between(chat, pairs[-1][1]))
            else:
                is_text = len(before) == 1 and before[0].role == "user"
                read = self.prompt(before[0].content if is_text else tuple(before))
            pairs.append((read, self._turn(message.content)))
            before = []
        return pairs

    def _turn(self, content: str) -> list[int]:
        """A turn of the model as it would sample it: a text within a text, whose control tokens are text, then the turn's end."""
        mark, _ = marks_for(content)
        marked = str(self.control_tokens.marked_chat([{"role": "assistant", "content": content}], mark)[0]["content"])
        ends = (self.turn_end, self.tokenizer.eos_token_id)
        end = next(([int(token)] for token in ends if token is not None), [])
        return self.control_tokens.encode(mark + marked, mark) + end

    def encode_text(self, text: str, *, is_beginning: bool) -> list[int]:
        """Encodes a client's raw prompt. It writes its own template, if any, so that control tokens in it are its own."""
        return self.control_tokens.encode(text, is_beginning=is_beginning)

    def decode(
        self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool
    ) -> tuple[str, list[Mapping[str, object]]]:
        """Returns a completion's text before the first stop string, and its tool calls in the OpenAI API's shape."""
        text = _before(self.text_of(token_ids), stops)
        if not has_tools:
            return text, []
        end = len(token_ids)
        while end and token_ids[end - 1] in self.tokenizer.all_special_ids:
            end -= 1
        tool_format = tool_format_of(str(self.tokenizer.chat_template or ""))
        rest, calls = tool_format.split(_before(self._decoded(token_ids[:end]), stops))
        if not calls:
            return text, []
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return rest, [{"id": "", "type": "function", "function": function} for function in functions]

    def settled(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Without a run of single bytes (`<0xF0>`) at the end, which is decoded as a whole: one that is no UTF-8 spoils all."""
        end = len(token_ids)
        while end and (token_ids[end - 1] in self._left_out or self._is_byte(token_ids[end - 1])):
            end -= 1
        return token_ids[:end]

    def _is_byte(self, token_id: int) -> bool:
        name = str(self.tokenizer.convert_ids_to_tokens(token_id))
        return len(name) == 6 and name.startswith("<0x")

    @cached_property
    def turn_end(self) -> int | None:
        """The control token with which the template closes the model's turn, whatever comes next; None if there is none."""
        if not self.is_chat:
            return None
        try:
            ends = [self.between(messages, ()) for messages in ([], [{"role": "user", "content": "?"}])]
        except ConfigError:  # a template of single prompts
            return None
        for token, other in zip(*ends, strict=False):
            if token != other:
                return None
            if token in self._special_ids or self._decoded([token]).strip():
                return token if token in self._special_ids else None
        return None

    def _plain(self, text: str, *, is_beginning: bool = False) -> list[int]:
        mark, _ = marks_for(text)
        return self.control_tokens.encode(self.control_tokens.marked(text, mark), mark, is_beginning=is_beginning)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(checked_call(lambda: self.tokenizer.decode(list(token_ids), skip_special_tokens=False)))

    @cached_property
    def control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}

    # ---- what a template takes

    def _rendered(self, chat: _Chat, tools: Sequence[Mapping[str, Any]], must_hold: Sequence[str]) -> str:
        """Renders the first variant of the chat in which the template keeps every message. Raises ConfigError if there is none."""
        problem = ""
        try:
            template = self.tokenizer.get_chat_template(tools=list(tools) or None)
        except ValueError as error:  # several by name, none of them the default
            raise ConfigError(f"chat template: {error}") from None
        arguments = {**self.tokenizer.special_tokens_map, **self.options.arguments}
        untooled = [{"role": "user", "content": _content(m)} if m["role"] == "tool" else m for m in chat]
        unsystemed = _folded(untooled)
        # Each gives up more; DeepSeek's template takes arguments as text.
        for way in (chat, _with_texts(chat), untooled, _joined(untooled), unsystemed, _joined(unsystemed)):
            try:
                text = render(template, way, tools, arguments, self.options.now)
            except LimitExceeded as error:
                raise ConfigError(f"chat template: {error}") from None
            except ConfigError as error:
                problem = problem or str(error)
                continue
            lost = [content for content in must_hold if not _is_in(text, content.strip())]
            if not lost:
                return text
            problem = problem or f"it leaves out {lost[0][:60]!r}"
        roles = ", ".join([*dict.fromkeys(str(message["role"]) for message in chat), *(["tools"] if tools else [])])
        raise ConfigError(f"chat template: expected one that takes the roles {roles}; {problem}")


def _before(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string. The API leaves the stop string out."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _contents(chat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the texts that a rendering must contain. Leaves out the model's turns, since templates may drop its thoughts."""
    return [_content(message) for message in chat if message["role"] != "assistant"]


def _is_in(text: str, content: str) -> bool:
    """As it is, or as JSON, as the templates of Llama 3.1 and gpt-oss write what a tool gave."""
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _with_texts(chat: _Chat) -> _Chat:
    """The arguments of tools' calls as JSON."""

    def told(call: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(function := call.get("function"), Mapping):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [m | {"tool_calls": [*map(told, m["tool_calls"])]} if m.get("tool_calls") else m for m in chat]


def _folded(chat: _Chat) -> _Chat:
    system = "\n\n".join(_content(message) for message in chat if message["role"] == "system")
    rest = [dict(message) for message in chat if message["role"] != "system"]
    first = next((message for message in rest if message["role"] == "user"), None)
    if system and first is None:
        return [{"role": "user", "content": system}, *rest]
    if system and first is not None:
        first["content"] = f"{system}\n\n{_content(first)}"
    return rest


def _joined(chat: _Chat) -> _Chat:
    joined: _Chat = []
    for message in chat:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**joined[-1], "content": f"{_content(joined[-1])}\n\n{_content(message)}"}
        else:
            joined.append(dict(message))
    return joined


_MARKS = range(0xE000, 0xF900)  # Unicode's private characters, which text does not contain
_ANCHOR = "\n"  # put before a piece and cut off again: some tokenizers write a blank before the first word of a text
_T = TypeVar("_T")


class ControlTokens:
    """One tokenizer's control tokens: its special tokens and, but for the model's own turns, all added ones that the template
    writes (`<tool_response>`)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        template = str(tokenizer.chat_template or "")
        special = {*map(str, tokenizer.all_special_tokens), *(token.content for token in added if token.special)}
        written = {token.content for token in added if token.content in template}
        self._special, self._written = _longest_first(special), _longest_first(special | written)

    def marked_chat(self, chat: Iterable[Mapping[str, Any]], mark: str) -> list[dict[str, Any]]:
        """The messages with marks; the model's own may hold the added tokens that are not special, which it samples itself."""
        return [
            _marked(dict(message), self._special if message["role"] == "assistant" else self._written, mark)
            for message in chat
        ]

    def marked(self, value: Any, mark: str) -> Any:
        """The text, or all texts in a JSON value, with marks."""
        return _marked(value, self._written, mark)

    def encode(self, text: str, mark: str = "", *, is_beginning: bool = False) -> list[int]:
        """Encodes a text with marks, which are left out. `is_beginning`: with what the tokenizer puts around a text."""
        first, *others = text.split(mark) if mark else [text]
        if not others:
            return self._encoded(first, is_framed=is_beginning)
        body = self._encoded(first)
        before, after = list[int](), list[int]()
        if is_beginning:
            framed = self._encoded(first, is_framed=True)
            at = next((at for at in range(len(framed)) if framed[at : at + len(body)] == body), len(framed))
            before, after = framed[:at], framed[at + len(body) :]
        anchor = self._encoded(_ANCHOR)
        for piece in others:
            whole = self._encoded(_ANCHOR + piece)
            body += whole[len(anchor) :] if whole[: len(anchor)] == anchor else self._encoded(piece)
        return [*before, *body, *after]

    def _encoded(self, text: str, *, is_framed: bool = False) -> list[int]:
        ids = checked_call(lambda: self._tokenizer.encode(text, add_special_tokens=is_framed))
        return [int(token) for token in ids]


def marks_for(value: Any) -> tuple[str, str]:
    """Two characters that occur in none of the texts in `value`. Raises ConfigError if there are none."""
    used = set[str]()
    for text in texts_in(value):
        used.update(text)
    free = (chr(number) for number in _MARKS if chr(number) not in used)
    marks = next(free, ""), next(free, "")
    if not marks[1]:
        raise ConfigError(f"chat: expected text without all {len(_MARKS)} private characters of Unicode, got them all")
    return marks


def checked_call(call: Callable[[], _T]) -> _T:
    """The result of a call of the tokenizer. Raises ConfigError for whatever it raises."""
    try:
        return call()
    except BaseException as error:
        kind = type(error).__name__
        if not isinstance(error, Exception) and kind != "PanicException":  # of its Rust code; it is no Exception
            raise
        raise ConfigError(f"tokenizer: expected one that takes this text, got {kind}: {error}") from error


def _longest_first(tokens: Iterable[str]) -> list[str]:
    return sorted((token for token in tokens if len(token) > 1), key=lambda token: (-len(token), token))


def _marked(value: Any, tokens: list[str], mark: str) -> Any:
    if isinstance(value, str):
        for token in tokens:
            while token in value:  # again, since tokens may overlap themselves
                value = value.replace(token, token[0] + mark + token[1:])
        return value
    if isinstance(value, Mapping):
        return {_marked(key, tokens, mark): _marked(inner, tokens, mark) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(inner, tokens, mark) for inner in value]
    return value


# ---- the bytes of each token of a tokenizer, and which tokens can be part of a stop string
#
# A completion decodes to its tokens' bytes, concatenated; its named special tokens have no bytes.

_SPACE = "▁"  # how SentencePiece writes a space


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's table: the byte that each character of a byte-level token stands for."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def named_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that a tokenizer has names for, which begin, end or pad a text and are no part of it."""
    names = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
    return frozenset(int(token) for token in ids if token is not None)


def token_texts(tokenizer: Any) -> list[bytes]:
    """Returns each token's bytes, indexed by ID; empty for the tokenizer's named special tokens and unused ids."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = named_ids(tokenizer)
    added = {number: token.content for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False) if backend is not None else ""
    is_byte_level, is_spaced = "ByteLevel" in decoder, _SPACE in decoder or "Metaspace" in decoder
    texts = []
    for number, name in enumerate(names):
        if name is None or number in special:
            texts.append(b"")
        elif number in added:
            texts.append(added[number].encode())
        elif is_byte_level:
            table = _byte_of_character()
            texts.append(bytes(table[c] for c in name) if all(c in table for c in name) else name.encode())
        elif len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            texts.append(bytes.fromhex(name[3:5]))
        else:
            texts.append((name.replace(_SPACE, " ") if is_spaced else name).encode())
    return texts


class _PrefixIndex:
    def __init__(self, texts: Sequence[bytes], numbers: Sequence[int]) -> None:
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._texts = [texts[place] for place in order]
        self._numbers = [numbers[place] for place in order]

    def beginning_with(self, start: bytes) -> Sequence[int]:
        """Returns the numbers of the texts that begin with `start`, which must not consist of 0xFF bytes only."""
        first = bisect_left(self._texts, start)
        return self._numbers[first : bisect_left(self._texts, _behind(start), first)]


class TokenIndex:
    """Finds the tokens that can be part of a stop string, without scanning a vocabulary of 150,000 tokens or more."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        numbers = [number for number, text in enumerate(texts) if text]
        known = [texts[number] for number in numbers]
        self._forward = _PrefixIndex(known, numbers)
        self._backward = _PrefixIndex([text[::-1] for text in known], numbers)
        self._same: dict[bytes, list[int]] = {}
        for number in numbers:
            self._same.setdefault(texts[number], []).append(number)
        self._numbers = numbers
        self._starts = list(itertools.accumulate((len(text) + 1 for text in known), initial=0))
        self._joined = b"\xff".join(known)  # 0xFF occurs in no UTF-8 text

    def parts_of(self, strings: Sequence[bytes], most: int) -> set[int]:
        """Returns the ids of all tokens that contain one of `strings`, lie within one, end with its beginning or begin with its
        end. Stops early once there are more than `most`."""
        parts: set[int] = set()
        for string in strings:
            for numbers in self._parts_of(string):
                parts.update(numbers[: most + 1])
                if len(parts) > most:
                    return parts
        return parts

    def _parts_of(self, string: bytes) -> Iterator[Sequence[int]]:
        length = len(string)
        for size in range(1, length + 1):
            yield self._backward.beginning_with(string[:size][::-1])
            yield self._forward.beginning_with(string[-size:])
        inner = {string[a:b] for a in range(length) for b in range(a + 1, length + 1)}
        yield [number for text in inner for number in self._same.get(text, ())]
        at = self._joined.find(string)
        while at >= 0:
            place = bisect_right(self._starts, at) - 1
            yield self._numbers[place : place + 1]
            at = self._joined.find(string, self._starts[place + 1])


def _behind(start: bytes) -> bytes:
    """Returns the smallest byte string greater than all that begin with `start`."""
    head = start.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,))


class StopStrings:
    """Computes what a lease carries for stop strings, for one tokenizer. Caches up to 64 sets of strings."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._looked_up = lru_cache(maxsize=64)(self._look_up)

    @cached_property
    def index(self) -> TokenIndex:
        """Built at first use: some tenths of a second for a large vocabulary."""
        return TokenIndex(token_texts(self._tokenizer))

    @property
    def longest_bytes(self) -> int:
        return max(map(len, self.index.texts), default=1)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's part of the text; empty for end tokens, and for ids of a padded vocabulary."""
        texts = self.index.texts
        return texts[token_id] if token_id < len(texts) else b""

    def pieces_of(self, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """Returns ids and pieces of all tokens that can be part of one of `strings`. Raises `ConfigError` if there are too many
        tokens or strings, or a string is too long."""
        return self._looked_up(tuple(strings))

    def _look_up(self, strings: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        wanted = [text.encode() for text in strings]
        if len(wanted) > STOP_STRINGS_MAX or not all(1 <= len(text) <= STOP_STRING_BYTES_MAX for text in wanted):
            raise ConfigError(
                f"stop: expected at most {STOP_STRINGS_MAX} strings of 1 to {STOP_STRING_BYTES_MAX} bytes, got {strings}"
            )
        if not wanted:
            return (), ()
        numbers = sorted(self.index.parts_of(wanted, STOP_PIECES_MAX))
        if len(numbers) > STOP_PIECES_MAX:
            raise ConfigError(f"stop: expected strings with at most {STOP_PIECES_MAX} tokens as parts, got {strings}")
        return tuple(numbers), tuple(piece_of_part(self.index.texts[number], wanted) for number in numbers)

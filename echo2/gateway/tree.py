"""Append-only tree of one episode's tokens; finds the node that a request continues.

Guarantees: sampled tokens appear in later prompts as the same ids; a history that does not repeat a completion word for word
starts a new chain, which is counted. Nodes are added, never changed. A node stores only the tokens that it adds to its parent,
four bytes a token; texts and lists of ids are recognised by digest, not kept.

    opening --sampled--> node --between + sampled--> node --...      one chain: each call continues the one before
                           '-- another request continues it ------> a new chain (a branch)
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from echo2.gateway.requests import CallRequest, Message, behind

NODE_BYTES = 512  # approximate memory of a node without its tokens


class ChatCodec(Protocol):
    """Encodes text for one model, and decodes what it sampled. Raises an `EchoError` for what its template cannot express."""

    def opening(self, messages: Sequence[Message], tools: Sequence[Message]) -> Sequence[int]:
        """A whole chat, up to where the model is to speak."""

    def between(self, messages: Sequence[Message], turn: Sequence[int]) -> Sequence[int]:
        """The messages that follow the sampled `turn`, up to where the model is to speak again."""

    def encode_text(self, text: str, *, is_beginning: bool) -> Sequence[int]: ...

    def decode(
        self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool
    ) -> tuple[str, list[Message]]:
        """Returns the text before the first stop string, and the tool calls in the OpenAI API's shape."""

    def settled(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tokens without those at their end whose text may depend on what follows."""


@dataclass(frozen=True, slots=True)
class Node:
    """One answered call. `added`: the tokens that its prompt adds to its parent's, then `sampled_count` sampled ids. `length`:
    tokens from the root to the end of this node."""

    chain: int
    depth: int
    parent: Node | None
    added: array[int]
    sampled_count: int
    length: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The sampled ids."""
        return tuple(self.added[len(self.added) - self.sampled_count :])

    @property
    def all_token_ids(self) -> Iterator[int]:
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return itertools.chain.from_iterable(node.added for node in reversed(path))


@dataclass(frozen=True, slots=True)
class Wording:
    """What a request adds after its parent, before encoding: `token_ids`, a `text`, or chat `messages`. A chat without `turn`
    starts with `tools`; otherwise the messages follow the sampled `turn`. `size`: length of the addition (characters of JSON
    for a chat, bytes for a text), 0 for token ids."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    turn: tuple[int, ...] | None = None
    size: int = 0

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of its text and message contents. Divided by the longest token's bytes, a lower bound on its tokens."""
        texts = [self.text, *(str(message["content"]) for message in self.messages)]
        return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)

    def tokens(self, codec: ChatCodec) -> Sequence[int]:
        """Encodes the addition. Raises what `codec` raises."""
        if self.messages and self.turn is None:
            return codec.opening(self.messages, self.tools)
        if self.messages:
            return codec.between(self.messages, self.turn or ())
        return codec.encode_text(self.text, is_beginning=self.turn is None) if self.text else self.token_ids


@dataclass(frozen=True, slots=True)
class TreePlace:
    """A request's position: after `parent`, or at the root if None. `key`: the chat history's key, which the answer will extend;
    empty for a text."""

    wording: Wording
    parent: Node | None
    key: bytes

    @property
    def length(self) -> int:
        """Number of prompt tokens known already."""
        return 0 if self.parent is None else self.parent.length

    @property
    def known_ids(self) -> Iterator[int]:
        return iter(()) if self.parent is None else self.parent.all_token_ids


@dataclass(slots=True)
class _Beginnings:
    """Index of known prompt prefixes, by length in bytes and digest."""

    _nodes: dict[bytes, Node] = field(default_factory=dict)
    _lengths: dict[int, None] = field(default_factory=dict)

    def add(self, data: bytes, node: Node) -> None:
        self._nodes.setdefault(blake2b(data, digest_size=16).digest(), node)
        self._lengths[len(data)] = None

    def longest(self, data: bytes, limit: int) -> tuple[int, Node] | None:
        """Returns length and node of the longest known prefix of `data` of at most `limit` bytes."""
        digest, at, best = blake2b(digest_size=16), 0, None
        for length in sorted(length for length in self._lengths if length <= limit):
            digest.update(memoryview(data)[at:length])
            at = length
            node = self._nodes.get(digest.digest())
            best = (length, node) if node is not None else best
        return best


@dataclass(slots=True)
class TokenTree:
    """Token tree of one episode. `lengths`: calls of each chain, including those under way. `kept_bytes`: approximate memory of all
    nodes."""

    _by_history: dict[bytes, Node] = field(default_factory=dict)
    _texts: _Beginnings = field(default_factory=_Beginnings)
    _ids: _Beginnings = field(default_factory=_Beginnings)
    lengths: dict[int, int] = field(default_factory=dict)
    branches: int = 0
    kept_bytes: int = 0

    def place_of(self, request: CallRequest) -> TreePlace:
        """Finds the longest known history that the request continues. Prompt token ids must be below 2**32."""
        if request.prompt is not None:
            return self._place_of_text(request.prompt)
        sizes, messages = request.sizes, request.messages
        for count in range(len(messages) - 1, 0, -1):
            parent = self._by_history.get(request.history[count])
            if parent is not None:
                turn = parent.token_ids
                wording = Wording(messages=messages[count:], turn=turn, size=sum(sizes[count + 1 :]))
                return TreePlace(wording, parent, request.history[-1])
        return TreePlace(Wording(messages=messages, tools=request.tools, size=sum(sizes)), None, request.history[-1])

    def _place_of_text(self, prompt: str | tuple[int, ...]) -> TreePlace:
        if isinstance(prompt, str):
            text = prompt.encode()
            known = self._texts.longest(text, len(text) - 1)
            if known is None:
                return TreePlace(Wording(text=prompt, size=len(text)), None, b"")
            rest = text[known[0] :].decode()
            return TreePlace(Wording(text=rest, turn=known[1].token_ids, size=len(text) - known[0]), known[1], b"")
        data = array("I", prompt).tobytes()
        known = self._ids.longest(data, len(data))
        if known is None:
            return TreePlace(Wording(token_ids=prompt), None, b"")
        return TreePlace(Wording(token_ids=prompt[known[1].length :]), known[1], b"")

    def chain_for(self, place: TreePlace) -> int | None:
        """Returns the chain that a call at this place continues; None: the call starts a new one."""
        parent = place.parent
        return parent.chain if parent is not None and self.lengths[parent.chain] == parent.depth else None

    def began(self, chain: int) -> int:
        """Records a new call of this chain and returns its depth. Each chain after an episode's first counts as a branch."""
        self.branches += chain not in self.lengths and bool(self.lengths)
        self.lengths[chain] = self.lengths.get(chain, 0) + 1
        return self.lengths[chain]

    def node(
        self, place: TreePlace, chain: int, depth: int, prompt_token_ids: tuple[int, ...], token_ids: tuple[int, ...]
    ) -> Node:
        """Makes the node of an answered call at `place`."""
        added = array("I", prompt_token_ids[place.length :])
        added.extend(token_ids)
        self.kept_bytes += NODE_BYTES + added.itemsize * len(added)
        return Node(chain, depth, place.parent, added, len(token_ids), len(prompt_token_ids) + len(token_ids))

    def answered(self, node: Node, key: bytes, answer: Message) -> None:
        """Registers the answer to the chat at `key`, in the form in which the client will repeat it."""
        self._by_history.setdefault(behind(key, answer)[0], node)

    def completed(self, node: Node, texts: Iterable[str]) -> None:
        """Registers the answer to a text completion. `texts`: prompt and completion, with and without its stop string; none if the
        prompt was token ids."""
        self._ids.add(array("I", node.all_token_ids).tobytes(), node)
        for text in texts:
            self._texts.add(text.encode(), node)

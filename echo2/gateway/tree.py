"""The append-only tree of one episode's tokens: where in it a request stands.

Guarantees: what was sampled stands in later prompts as the very ids that were sampled; a history that does not repeat it word for
word begins a chain of its own, which is counted. Nodes are added, never changed; each keeps what it adds to its parent, in four
bytes a token, and a text or list of ids is known again by its digest alone. Leaves to others: templates (Speech), leases.

    opening --sampled--> node --between + sampled--> node --...      one chain: each call continues the one before
                           '-- another request continues it ------> a chain of its own (a branch)
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from echo2.gateway.requests import CallRequest, Message, behind

NODE_BYTES = 512
"""About what a node takes beside its tokens."""


class Speech(Protocol):
    """A model's words as tokens. An `EchoError` says what it cannot say."""

    def opening(self, messages: Sequence[Message], tools: Sequence[Message]) -> Sequence[int]: ...

    def between(self, messages: Sequence[Message], turn: Sequence[int]) -> Sequence[int]: ...

    def encoded(self, text: str, *, is_beginning: bool) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Node:
    """One call that has its answer. `added`: what its prompt adds to its parent, then the `sampled_count` sampled ids; `length`: of
    all tokens up to its end."""

    chain: int
    depth: int
    parent: Node | None
    added: array[int]
    sampled_count: int
    length: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was sampled."""
        return tuple(self.added[len(self.added) - self.sampled_count :])

    @property
    def all_token_ids(self) -> Iterator[int]:
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return itertools.chain.from_iterable(one.added for one in reversed(path))


@dataclass(frozen=True, slots=True)
class Wording:
    """What a request adds behind its parent, before it is tokens: `token_ids` of its own, a `text`, or `messages` of a chat, which
    begins with `tools` or goes on behind the sampled `turn`. `size`: of all of it as JSON."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    turn: tuple[int, ...] | None = None
    size: int = 0

    @property
    def text_bytes(self) -> int:
        """Of what people and tools say in it; as tokens it is no shorter than this by the longest token."""
        texts = [self.text, *(str(message["content"]) for message in self.messages)]
        return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)

    def tokens(self, speech: Speech) -> Sequence[int]:
        """Raises what `speech` raises."""
        if self.messages and self.turn is None:
            return speech.opening(self.messages, self.tools)
        if self.messages:
            return speech.between(self.messages, self.turn or ())
        return speech.encoded(self.text, is_beginning=self.turn is None) if self.text else self.token_ids


@dataclass(frozen=True, slots=True)
class TreePlace:
    """Where a request stands: behind `parent`, or at a beginning. `key`: of its history, behind which the answer comes."""

    wording: Wording
    parent: Node | None
    key: bytes

    @property
    def length(self) -> int:
        """Of the tokens that are known."""
        return 0 if self.parent is None else self.parent.length

    @property
    def known_ids(self) -> Iterator[int]:
        return iter(()) if self.parent is None else self.parent.all_token_ids


@dataclass(slots=True)
class _Beginnings:
    """What a prompt may begin with, by its length in bytes and a digest."""

    _nodes: dict[bytes, Node] = field(default_factory=dict)
    _lengths: dict[int, None] = field(default_factory=dict)

    def add(self, data: bytes, node: Node) -> None:
        self._nodes.setdefault(blake2b(data, digest_size=16).digest(), node)
        self._lengths[len(data)] = None

    def longest(self, data: bytes, limit: int) -> tuple[int, Node] | None:
        """The longest of at most `limit` bytes that `data` begins with."""
        digest, at, found = blake2b(digest_size=16), 0, None
        for length in sorted(length for length in self._lengths if length <= limit):
            digest.update(memoryview(data)[at:length])
            at = length
            node = self._nodes.get(digest.digest())
            found = (length, node) if node is not None else found
        return found


@dataclass(slots=True)
class TokenTree:
    """`lengths`: calls of each chain, those under way included. `kept_bytes`: about what all nodes take."""

    _by_history: dict[bytes, Node] = field(default_factory=dict)
    _texts: _Beginnings = field(default_factory=_Beginnings)
    _ids: _Beginnings = field(default_factory=_Beginnings)
    lengths: dict[int, int] = field(default_factory=dict)
    branches: int = 0
    kept_bytes: int = 0

    def place_of(self, request: CallRequest) -> TreePlace:
        """Of token ids, all are below 2**32."""
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
            found = self._texts.longest(text, len(text) - 1)
            if found is None:
                return TreePlace(Wording(text=prompt, size=len(text)), None, b"")
            rest = text[found[0] :].decode()
            return TreePlace(Wording(text=rest, turn=found[1].token_ids, size=len(text) - found[0]), found[1], b"")
        data = array("I", prompt).tobytes()
        found = self._ids.longest(data, len(data))
        if found is None:
            return TreePlace(Wording(token_ids=prompt), None, b"")
        return TreePlace(Wording(token_ids=prompt[found[1].length :]), found[1], b"")

    def chain_for(self, place: TreePlace) -> int | None:
        """The chain that a call at this place goes on with; None: it begins one."""
        parent = place.parent
        if parent is not None and self.lengths[parent.chain] == parent.depth:
            return parent.chain
        return None

    def began(self, chain: int) -> int:
        """A call of this chain is under way; returns its depth. A second beginning in an episode is a branch."""
        self.branches += chain not in self.lengths and bool(self.lengths)
        self.lengths[chain] = self.lengths.get(chain, 0) + 1
        return self.lengths[chain]

    def node(
        self, place: TreePlace, chain: int, depth: int, prompt_token_ids: tuple[int, ...], token_ids: tuple[int, ...]
    ) -> Node:
        """What a call at `place` becomes with its answer."""
        added = array("I", prompt_token_ids[place.length :])
        added.extend(token_ids)
        self.kept_bytes += NODE_BYTES + added.itemsize * len(added)
        return Node(chain, depth, place.parent, added, len(token_ids), len(prompt_token_ids) + len(token_ids))

    def answered(self, node: Node, key: bytes, answer: Message) -> None:
        """The answer to the chat at `key` is known, as the client will repeat it."""
        self._by_history.setdefault(behind(key, answer)[0], node)

    def completed(self, node: Node, text: str) -> None:
        """So is the answer to a text, which with its prompt is `text`, or to token ids, where it is empty."""
        self._ids.add(array("I", node.all_token_ids).tobytes(), node)
        if text:
            self._texts.add(text.encode(), node)

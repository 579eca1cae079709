"""The append-only tree of one episode's tokens: where in it a request stands.

Guarantees: what was sampled stands in later prompts as the very ids that were sampled; a history that does not repeat it word for
word begins a chain of its own, which is counted. Nodes are added, never changed. Leaves to others: templates (Speech), leases.

    opening --sampled--> node --between + sampled--> node --...      one chain: each call continues the one before
                           '-- another request continues it ------> a chain of its own (a branch)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from echo2.gateway.requests import CallRequest, Message


class Speech(Protocol):
    """A model's words as tokens. An `EchoError` says what it cannot say."""

    def opening(self, messages: Sequence[Message], tools: Sequence[Message]) -> Sequence[int]: ...

    def between(self, messages: Sequence[Message], turn: Sequence[int]) -> Sequence[int]: ...

    def encoded(self, text: str, *, is_beginning: bool) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Node:
    """One call that has its answer. `text`: of completions of text, prompt and answer as the client knows them."""

    chain: int
    depth: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str = ""

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.token_ids


@dataclass(frozen=True, slots=True)
class TreePlace:
    """Where a request stands: behind `parent`, or at a beginning. `key`: of its history, behind which the answer comes."""

    prompt_token_ids: tuple[int, ...]
    parent: Node | None
    key: bytes


@dataclass(slots=True)
class TokenTree:
    """`lengths`: calls of each chain, those under way included."""

    _by_history: dict[bytes, Node] = field(default_factory=dict)
    _texts: list[Node] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    branches: int = 0

    def place_of(self, request: CallRequest, speech: Speech) -> TreePlace:
        """Raises what `speech` raises."""
        if request.prompt is not None:
            return self._place_of_text(request.prompt, speech)
        keys = [_beginning(request.tools)]
        for message in request.messages:
            keys.append(_behind(keys[-1], message))
        for count in range(len(request.messages) - 1, 0, -1):
            parent = self._by_history.get(keys[count])
            if parent is not None:
                said = speech.between(request.messages[count:], parent.token_ids)
                return TreePlace((*parent.all_token_ids, *said), parent, keys[-1])
        return TreePlace(tuple(speech.opening(request.messages, request.tools)), None, keys[-1])

    def _place_of_text(self, prompt: str | tuple[int, ...], speech: Speech) -> TreePlace:
        if isinstance(prompt, str):
            found = max(
                (node for node in self._texts if node.text and prompt.startswith(node.text) and len(prompt) > len(node.text)),
                key=lambda node: len(node.text), default=None,
            )  # fmt: skip
            if found is None:
                return TreePlace(tuple(speech.encoded(prompt, is_beginning=True)), None, b"")
            said = speech.encoded(prompt[len(found.text) :], is_beginning=False)
            return TreePlace((*found.all_token_ids, *said), found, b"")
        parent = max(
            (node for node in self._texts if prompt[: len(node.all_token_ids)] == node.all_token_ids),
            key=lambda node: len(node.all_token_ids), default=None,
        )  # fmt: skip
        return TreePlace(prompt, parent, b"")

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

    def ended(self, node: Node, key: bytes, answer: Message | None) -> None:
        """The answer to the call at `key` is known, as the client will repeat it."""
        if answer is not None:
            self._by_history.setdefault(_behind(key, answer), node)
        else:
            self._texts.append(node)


def _beginning(tools: Sequence[Message]) -> bytes:
    return blake2b(json.dumps(list(tools), sort_keys=True, default=dict).encode(), digest_size=16).digest()


def _behind(key: bytes, message: Message) -> bytes:
    calls = message.get("tool_calls")
    told = [_call_key(call) for call in calls] if isinstance(calls, list) else []
    said = json.dumps([message["role"], message["content"], told], sort_keys=True)
    return blake2b(key + said.encode(), digest_size=16).digest()


def _call_key(call: Mapping[str, object]) -> object:
    """Without the id, which some clients make anew."""
    function = call["function"]
    assert isinstance(function, Mapping), "parsed before"
    return [function["name"], function["arguments"]]

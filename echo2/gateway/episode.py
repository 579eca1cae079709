"""State that the sessions keep: problems with their seats, episodes with their calls, and counters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from echo2.gateway import events as e
from echo2.gateway.requests import ID_BYTES, CallRequest
from echo2.gateway.tree import Node, TokenTree, TreePlace


@dataclass(slots=True)
class Problem:
    """One problem and its seats. `seats`: session id by seat number, None if free. `restarts`: count by seat number. `told`: what
    its agents learn about it."""

    root: str
    told: dict[str, object]
    seats: list[str | None]
    restarts: list[int]
    is_evaluation: bool = False
    label: str = ""

    @property
    def is_untouched(self) -> bool:
        return not self.label and not any(self.seats) and not any(self.restarts)


@dataclass(slots=True)
class Call:
    """One request under way.

    `number`: identifies the call for its whole life. `call_id`: identifies the client's latest try, which gets the answer.
    `depths`: chain and depth, by choice. `sampled`: finished completions, by choice.
    """

    number: int
    call_id: int
    request: CallRequest
    place: TreePlace
    prompt_token_ids: tuple[int, ...] = ()  # empty until encoded
    depths: dict[int, tuple[int, int]] = field(default_factory=dict)
    sampled: dict[int, e.CallTokens] = field(default_factory=dict)
    is_waited_for: bool = True
    answer: e.CallAnswer | None = None
    told_text: str = ""  # text already sent to a streaming client
    grown_at: float = -math.inf


@dataclass(slots=True)
class Session:
    """One episode in one seat. `told_calls`: how many calls of each chain were answered, and so count for training."""

    session_id: str
    key: str
    root: str
    seat: int
    is_own: bool
    began_at: float
    heard_at: float
    tree: TokenTree = field(default_factory=TokenTree)
    calls: dict[int, Call] = field(default_factory=dict)
    told_calls: dict[int, int] = field(default_factory=dict)
    last: Node | None = None
    call_count: int = 0
    is_scored: bool = False

    @property
    def kept_bytes(self) -> int:
        """Approximate memory of the episode: its tokens, and its requests that are under way or not yet answered to a client."""
        waiting = sum(c.request.size_bytes + ID_BYTES * len(c.prompt_token_ids) for c in self.calls.values())
        return self.tree.kept_bytes + waiting

    def call_of(self, request: CallRequest) -> Call | None:
        """Finds an earlier identical call whose client has disconnected."""
        return next(
            (c for c in self.calls.values() if c.request.digest == request.digest and not c.is_waited_for), None
        )


@dataclass(slots=True)
class GatewayCounts:
    """Counters since the start."""

    sessions: int = 0
    calls: int = 0
    branches: int = 0
    retried: int = 0
    refused: int = 0
    restarted: int = 0
    dropped: int = 0
    rewarded: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0  # prompt tokens that were in the tree already

"""What the sessions keep: problems with their seats, episodes with their calls, and counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from echo2.gateway import events as e
from echo2.gateway.requests import ID_BYTES, CallRequest
from echo2.gateway.tree import Node, TokenTree, TreePlace


@dataclass(slots=True)
class Problem:
    """`seats`: by number, the session that has it; None: free. `restarts`: of each seat."""

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
    """One request under way. `number`: its own for good; `call_id`: whom it is answered, the client's last try. `sampled`: what
    came, by choice."""

    number: int
    call_id: int
    request: CallRequest
    place: TreePlace
    prompt_token_ids: tuple[int, ...] = ()  # once it is tokens
    depths: dict[int, tuple[int, int]] = field(default_factory=dict)
    sampled: dict[int, e.CallTokens] = field(default_factory=dict)
    is_waited_for: bool = True
    answer: e.CallAnswer | None = None
    told_text: str = ""  # of a stream, what its client has read
    grown_at: float = -math.inf


@dataclass(slots=True)
class Session:
    """One episode of one seat. `told_calls`: by chain, so many calls were answered and count."""

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
        """About what the gateway keeps of it: its tokens, and requests that are under way or whose answer nobody read."""
        waiting = sum(c.request.size_bytes + ID_BYTES * len(c.prompt_token_ids) for c in self.calls.values())
        return self.tree.kept_bytes + waiting

    def call_of(self, request: CallRequest) -> Call | None:
        """The same call made before, behind which nobody waits any more."""
        return next(
            (c for c in self.calls.values() if c.request.digest == request.digest and not c.is_waited_for), None
        )


@dataclass(slots=True)
class GatewayCounts:
    """Since the start."""

    sessions: int = 0
    calls: int = 0
    branches: int = 0
    retried: int = 0
    refused: int = 0
    restarted: int = 0
    dropped: int = 0
    rewarded: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0  # of prompts, those that stood in the tree already

"""Join tokens.

Guarantees: a token is stored only as its SHA-256 (it carries 256 random bits, so no slow hash is needed); a token that is
unknown, expired, used up, revoked or for another role is refused with the reason; a peer that enrols again with the same token
counts as one use; a worker that says no hello within HELLO_WITHIN_S of its enrolment is forgotten, and takes a use again when
it does; of a token without a limit of its own USES_DEFAULT peers are kept at most.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from echo2.base.errors import BadToken, LimitExceeded, MalformedMessage, NotAllowed
from echo2.base.ids import PeerId
from echo2.trust.identity import PeerIdentity, Role

SECRET_CHARS_MIN = 32  # of base64: 192 bits
LABEL_CHARS_MAX = 100  # a cell of the page
LIFETIME_S_MAX = 366 * 86_400.0  # longer than any run
USES_MAX = 1_000_000  # each use is a row of the state
USES_DEFAULT = 10_000
"""Of a token made without a limit. A fleet has a few thousand workers, and each machine one identity."""
HELLO_WITHIN_S = 3600.0  # a machine says hello at once, or after it has fetched its model
SILENT_MAX = 1000
"""Peers of a token that have said no hello: the oldest gives way, so that whoever holds a link cannot use it up by enrolling."""
ROLES = (Role.WORKER, Role.LEARNER, Role.OPERATOR)  # that join; each has a link of its own


def token_hash(secret: str) -> str:
    return hashlib.sha256(b"echo2-join-token:" + secret.encode()).hexdigest()


@dataclass(slots=True)
class Token:
    """`use_limit`: number of peers that may use it; 0: USES_DEFAULT. `peers`: those that have used it. `silent`: those of them that
    have said no hello, and since when they are known, oldest first."""

    token_id: str
    hash: str
    role: str
    label: str
    created_at: float
    expires_at: float
    use_limit: int = 0
    is_revoked: bool = False
    peers: set[PeerId] = field(default_factory=set)
    silent: dict[PeerId, float] = field(default_factory=dict)

    @property
    def uses_max(self) -> int:
        return self.use_limit or USES_DEFAULT

    def problem(self, now: float) -> str:
        """Why the token admits no new peer; empty while it does."""
        if self.is_revoked:
            return "it was revoked"
        if now >= self.expires_at:
            return f"it expired {now - self.expires_at:.0f} s ago"
        if len(self.peers) >= self.uses_max:
            return f"it was used {len(self.peers)} of {self.uses_max} times"
        return ""

    def outdated(self, now: float) -> list[PeerId]:
        """The silent peers to forget before one more comes: late ones, and the oldest of too many."""
        late = [peer for peer, since in self.silent.items() if now - since >= HELLO_WITHIN_S]
        return late or list(self.silent)[: max(0, len(self.silent) + 1 - SILENT_MAX)]


@dataclass(slots=True)
class TokenBook:
    tokens_max: int
    tokens: dict[str, Token] = field(default_factory=dict)
    changed_peers: set[tuple[str, PeerId]] = field(default_factory=set)
    """By token and peer: entered, greeted or forgotten since whoever saves them last emptied it."""
    _by_hash: dict[str, Token] = field(default_factory=dict)

    def restore(self, tokens: list[Token]) -> None:
        for token in tokens:
            self.tokens[token.token_id] = token
            self._by_hash[token.hash] = token

    def create(self, secret: str, role: str, label: str, lifetime_s: float, use_limit: int, now: float) -> Token:
        """Adds a token for a new secret. MalformedMessage if a field is out of range; LimitExceeded if there are too many."""
        if role not in ROLES:
            raise MalformedMessage(f"token role: expected one of {', '.join(ROLES)}, got {role[:40]!r}")
        if len(label) > LABEL_CHARS_MAX or not (label.isprintable()):
            raise MalformedMessage(f"token label: expected up to {LABEL_CHARS_MAX} printable characters")
        if not 0 < lifetime_s <= LIFETIME_S_MAX:
            raise MalformedMessage(f"token lifetime_s: expected above 0 and at most a year, got {lifetime_s}")
        if not 0 <= use_limit <= USES_MAX:
            raise MalformedMessage(f"token use_limit: expected 0 (none) to {USES_MAX}, got {use_limit}")
        if len(self.tokens) >= self.tokens_max:
            raise LimitExceeded(f"tokens: expected {self.tokens_max} at most; revoked and expired ones count")
        assert len(secret) >= SECRET_CHARS_MIN, "a token's secret is too short to be unguessable"
        hashed = token_hash(secret)
        token = Token(hashed[:12], hashed, role, label, now, now + lifetime_s, use_limit)
        self.restore([token])
        return token

    def _known(self, secret: str, peer: str) -> Token:
        token = self._by_hash.get(token_hash(secret))
        if token is None:
            raise BadToken(
                f"join token of {peer}: expected one of this run, got one that it does not know; ask for a new link"
            )
        return token

    def redeem(self, secret: str, role: str, peer_id: PeerId, now: float) -> Token:
        """Uses the token to admit `peer_id` as `role` and returns it; else BadToken or NotAllowed with the reason."""
        token = self._known(secret, peer_id)
        if token.role != role:
            raise NotAllowed(
                f"join token {token.token_id} of {peer_id}: it is for the role {token.role}, not {role[:40]!r}; "
                f"the link of that role is in RUNS/NAME/links"
            )
        for silent in token.outdated(now):
            self.forget(token, silent)
        problem = token.problem(now)
        is_known = peer_id in token.peers and not token.is_revoked and now < token.expires_at
        if problem and not is_known:
            raise BadToken(f"join token {token.token_id} ({token.label or token.role}) of {peer_id}: {problem}")
        if peer_id not in token.peers and role == "worker":
            token.silent[peer_id] = now
        token.peers.add(peer_id)
        self.changed_peers.add((token.token_id, peer_id))
        return token

    def forget(self, token: Token, peer_id: PeerId) -> None:
        """Its use is free again, and the peer itself comes back only if it still is."""
        token.peers.discard(peer_id)
        token.silent.pop(peer_id, None)
        self.changed_peers.add((token.token_id, peer_id))

    def greet(self, token_id: str, peer_id: PeerId) -> None:
        """A worker that was admitted with the token says hello: it is kept. BadToken if it was forgotten and no use is left."""
        token = self.tokens.get(token_id)
        if token is None or (peer_id in token.peers and peer_id not in token.silent):
            return
        if peer_id not in token.peers and (token.is_revoked or len(token.peers) >= token.uses_max):
            raise BadToken(
                f"join token {token_id} of {peer_id}: its use went to another, as {HELLO_WITHIN_S:.0f} s after an enrolment "
                "without a hello or on a machine that lost its disk, and the token has no use left: ask for a new link"
            )
        token.silent.pop(peer_id, None)
        token.peers.add(peer_id)
        self.changed_peers.add((token_id, peer_id))

    def look_up(self, secret: str, peer: str, now: float) -> Token:
        """Returns the token without using it, even if it is used up. BadToken if it is unknown, expired or revoked."""
        token = self._known(secret, peer)
        if token.is_revoked or now >= token.expires_at:
            raise BadToken(f"join token {token.token_id} ({token.label or token.role}) of {peer}: {token.problem(now)}")
        return token

    def check_operator(self, caller: PeerIdentity) -> None:
        """NotAllowed for an operator whose token was revoked: nothing else takes the right from one that has joined."""
        token = self.tokens.get(caller.token_id)
        if caller.role is Role.OPERATOR and token is not None and token.is_revoked:
            raise NotAllowed(f"operator {caller.peer_id}: join token {token.token_id}, by which it came, was revoked")

    def revoke(self, token_id: str) -> Token:
        token = self.tokens.get(token_id)
        if token is None:
            raise BadToken(f"expected the id of a token of this run, got {token_id[:40]!r}")
        token.is_revoked = True
        return token

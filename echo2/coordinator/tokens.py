"""Join tokens, and a rate limit on attempts to use them.

Guarantees: a token is stored only as its SHA-256 (it carries 256 random bits, so no slow hash is needed); a token that is
unknown, expired, used up, revoked or for another role is refused with the reason; a peer that enrols again with the same
token counts as one use. Leaves to others: making random bytes, storing tokens on disk, issuing certificates.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from echo2.base.errors import BadToken, LimitExceeded, MalformedMessage, NotAllowed
from echo2.base.ids import PeerId

SECRET_CHARS_MIN = 32
LABEL_CHARS_MAX = 100
LIFETIME_S_MAX = 366 * 86_400.0
USES_MAX = 1_000_000
ROLES = ("worker", "learner", "operator")


def token_hash(secret: str) -> str:
    return hashlib.sha256(b"echo2-join-token:" + secret.encode()).hexdigest()


@dataclass(slots=True)
class Token:
    """`use_limit`: number of peers that may use it; 0: any number. `peers`: those that have used it."""

    token_id: str
    hash: str
    role: str
    label: str
    created_at: float
    expires_at: float
    use_limit: int = 0
    is_revoked: bool = False
    peers: set[PeerId] = field(default_factory=set)

    def problem(self, now: float) -> str:
        """Why the token admits no new peer; empty while it does."""
        if self.is_revoked:
            return "it was revoked"
        if now >= self.expires_at:
            return f"it expired {now - self.expires_at:.0f} s ago"
        if self.use_limit and len(self.peers) >= self.use_limit:
            return f"it was used {len(self.peers)} of {self.use_limit} times"
        return ""


@dataclass(slots=True)
class TokenBook:
    tokens_max: int
    tokens: dict[str, Token] = field(default_factory=dict)
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

    def redeem(self, secret: str, role: str, peer_id: PeerId, now: float) -> Token:
        """Uses the token to admit `peer_id` as `role` and returns it; else BadToken or NotAllowed with the reason."""
        token = self._by_hash.get(token_hash(secret))
        if token is None:
            raise BadToken(
                f"join token of {peer_id}: expected one of this run, got one that it does not know; ask for a new link"
            )
        if token.role != role:
            raise NotAllowed(
                f"join token {token.token_id} of {peer_id}: it is for the role {token.role}, not {role[:40]!r}"
            )
        problem = token.problem(now)
        is_known = peer_id in token.peers and not token.is_revoked and now < token.expires_at
        if problem and not is_known:
            raise BadToken(f"join token {token.token_id} ({token.label or token.role}) of {peer_id}: {problem}")
        token.peers.add(peer_id)
        return token

    def look_up(self, secret: str, whose: str, now: float) -> Token:
        """Returns the token without using it, even if it is used up. BadToken if it is unknown, expired or revoked."""
        token = self._by_hash.get(token_hash(secret))
        if token is None:
            raise BadToken(
                f"join token of {whose}: expected one of this run, got one that it does not know; ask for a new link"
            )
        if token.is_revoked or now >= token.expires_at:
            raise BadToken(
                f"join token {token.token_id} ({token.label or token.role}) of {whose}: {token.problem(now)}"
            )
        return token

    def revoke(self, token_id: str) -> Token:
        token = self.tokens.get(token_id)
        if token is None:
            raise BadToken(f"expected the id of a token of this run, got {token_id[:40]!r}")
        token.is_revoked = True
        return token


@dataclass(slots=True)
class RateLimiter:
    """A token bucket per key: holds `burst` and refills at `per_s`. Beyond `keys_max` keys, the least recently used is
    forgotten."""

    per_s: float
    burst: int
    keys_max: int = 10_000
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, key: str, now: float) -> float:
        """Returns 0.0 if the call may go on, else the number of seconds to wait."""
        level, at = self._buckets.pop(key, (float(self.burst), now))
        level = min(float(self.burst), level + max(0.0, now - at) * self.per_s)
        short = max(0.0, (1.0 - level) / self.per_s)
        self._buckets[key] = (level - 1.0 if short == 0.0 else level, max(at, now))
        while len(self._buckets) > self.keys_max:
            self._buckets.popitem(last=False)
        return short

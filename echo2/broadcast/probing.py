"""What a machine can find out about its own link before it joins: limits, rate, verdict. Pure.

Guarantees: a measuring transfer has at most TRANSFER_BYTES and takes about TRANSFER_S; the rate ignores the first
half of the time, while a connection speeds up; the verdict carries its reason. Leaves to others: the calls
(runtime/probing), serving them (coordinator), the link between a pair of nodes (reachability).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from echo2.broadcast.reachability import LinkKind, LinkWay

BLOCK_BYTES = 32 << 10
TRANSFER_BYTES = 64 << 20
TRANSFER_S = 4.0
DIAL_BACK_S = 4.0
TURN_S = 30.0
"""How long a machine waits for its turn: one transfer at a time, or concurrent ones would distort each other."""
NONCE_BYTES = 16
SETTLED_SHARE = 0.5


@dataclass(slots=True)
class Throughput:
    """Measures the rate of one transfer as its bytes arrive."""

    total_bytes: int = 0
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=TRANSFER_BYTES // BLOCK_BYTES + 1))

    def add(self, size_bytes: int, now: float) -> None:
        self.total_bytes += size_bytes
        self._seen.append((now, self.total_bytes))

    def is_enough(self, now: float) -> bool:
        """Whether the transfer has reached TRANSFER_S or TRANSFER_BYTES."""
        return self.total_bytes >= TRANSFER_BYTES or (bool(self._seen) and now - self._seen[0][0] >= TRANSFER_S)

    @property
    def bytes_per_s(self) -> float:
        """0.0 before the second sample."""
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return 0.0
        (began, _), (ended, total) = self._seen[0], self._seen[-1]
        settled_at = began + SETTLED_SHARE * (ended - began)
        at, before = max(seen for seen in self._seen if seen[0] <= settled_at)
        return (total - before) / (ended - at)


@dataclass(frozen=True, slots=True)
class Seen:
    """One connection at both of its ends. `local` None: this end's address is unknown. `dialled_port` 0: dialling back failed."""

    local: tuple[str, int] | None
    observed: tuple[str, int]
    dialled_port: int
    has_relay: bool


def own_reach(seen: Seen) -> LinkWay:
    """The best kind of link that two machines such as this one would get to each other."""
    host, port = seen.observed
    if seen.dialled_port:
        return LinkWay(LinkKind.DIRECT, f"others can dial this machine at {host}, port {seen.dialled_port}")
    if seen.local is None:
        return LinkWay(
            LinkKind.RELAYED, f"nobody can dial it at {host}; whether holes can be punched cannot be told here"
        )
    if seen.local[0] == host:
        hidden = f"nobody can dial it: {host} is its own address, and something filters what comes in"
    else:
        hidden = f"nobody can dial it: it is behind a NAT, {seen.local[0]} is seen as {host}"
    if not seen.has_relay:
        return LinkWay(LinkKind.NONE, f"{hidden}; the coordinator has no relay where hidden machines meet")
    if seen.local[1] == port:
        return LinkWay(LinkKind.HOLE_PUNCHED, f"{hidden}, but ports are kept, so holes can be punched")
    return LinkWay(LinkKind.RELAYED, f"{hidden}, and port {seen.local[1]} became {port}, so holes cannot be foreseen")

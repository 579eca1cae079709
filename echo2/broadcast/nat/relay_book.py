"""What a relay grants its members: reservations, circuits, bytes and time. A pure ledger; the relay acts on its answers.

Guarantees: no more circuits, bytes or seconds than `RelayLimits` allows, for the relay, per member and per circuit; bytes are
counted per member and hour, so opening another circuit does not evade the limit; a refusal names the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.base.errors import LimitExceeded
from echo2.base.ids import PeerId

HOUR_S = 3600.0  # limits are told per hour


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """The limits of one relay. Both ends of a circuit are charged for it."""

    reservations_max: int = 1024
    reservation_s: float = 3600.0
    circuits_max: int = 128
    circuits_per_member_max: int = 16
    circuit_bytes_max: int = 4 << 30
    circuit_s_max: float = 6 * HOUR_S
    member_bytes_per_hour: int = 16 << 30


PIPES = RelayLimits(circuits_max=1024, circuits_per_member_max=64)
"""Limits for byte pipes: a pipe costs hardly any CPU, and a link may use several."""
_WITHOUT_END = 1 << 60  # more than any run moves
PIPES_OF_LEARNER = RelayLimits(
    circuits_max=4096, circuits_per_member_max=4096, circuit_bytes_max=_WITHOUT_END, circuit_s_max=float(_WITHOUT_END),
    member_bytes_per_hour=_WITHOUT_END,
)  # fmt: skip
"""If the learner is behind a NAT, all workers reach it through these: rollouts, and weights that no other worker carries."""


@dataclass(slots=True)
class Circuit:
    number: int
    source: PeerId
    target: PeerId
    ends_at: float
    moved_bytes: int = 0


@dataclass(slots=True)
class _Usage:
    hour_from: float
    moved_bytes: int = 0


@dataclass(slots=True)
class RelayBook:
    limits: RelayLimits
    circuits: dict[int, Circuit] = field(default_factory=dict)
    reserved_until: dict[PeerId, float] = field(default_factory=dict)
    refused: int = 0
    _usage: dict[PeerId, _Usage] = field(default_factory=dict)
    _next: int = 0

    def reserve(self, member: PeerId, now: float) -> float:
        """Grants or renews a reservation; returns its end. Raises LimitExceeded if all are taken."""
        self.reserved_until = {peer: until for peer, until in self.reserved_until.items() if until > now}
        if member not in self.reserved_until and len(self.reserved_until) >= self.limits.reservations_max:
            raise self._refusal(f"all {self.limits.reservations_max} places are taken")
        self.reserved_until[member] = now + self.limits.reservation_s
        return self.reserved_until[member]

    def open(self, source: PeerId, target: PeerId, now: float) -> Circuit:
        """Opens a circuit from `source` to `target`, or raises LimitExceeded."""
        if self.reserved_until.get(target, now) <= now:
            raise self._refusal(f"peer {target} holds no place here")
        if len(self.circuits) >= self.limits.circuits_max:
            raise self._refusal(f"all {self.limits.circuits_max} circuits are in use")
        for member in (source, target):
            held = sum(member in (other.source, other.target) for other in self.circuits.values())
            if held >= self.limits.circuits_per_member_max:
                raise self._refusal(f"peer {member} has {held} circuits, the most allowed")
            if self._used(member, now).moved_bytes >= self.limits.member_bytes_per_hour:
                raise self._refusal(f"peer {member} has moved {self.limits.member_bytes_per_hour} bytes within an hour")
        self._next += 1
        circuit = Circuit(self._next, source, target, now + self.limits.circuit_s_max)
        self.circuits[circuit.number] = circuit
        return circuit

    def move(self, circuit: Circuit, count: int, now: float) -> None:
        """Charges `count` bytes; raises LimitExceeded if a limit forbids them."""
        if now >= circuit.ends_at:
            raise self.too_old(circuit)
        if circuit.moved_bytes + count > self.limits.circuit_bytes_max:
            raise self._refusal(f"circuit {circuit.number} has moved {circuit.moved_bytes} bytes, the most allowed")
        uses = [self._used(member, now) for member in {circuit.source, circuit.target}]
        if any(use.moved_bytes + count > self.limits.member_bytes_per_hour for use in uses):
            limit = self.limits.member_bytes_per_hour
            raise self._refusal(f"a member of circuit {circuit.number} has moved {limit} bytes within an hour")
        for use in uses:
            use.moved_bytes += count
        circuit.moved_bytes += count

    def too_old(self, circuit: Circuit) -> LimitExceeded:
        """What to raise once `ends_at` has come."""
        return self._refusal(f"circuit {circuit.number} is {self.limits.circuit_s_max:.0f} s old, the most allowed")

    def close(self, circuit: Circuit) -> None:
        self.circuits.pop(circuit.number, None)

    def _used(self, member: PeerId, now: float) -> _Usage:
        """The member's usage in its current hour; drops members whose hour is over."""
        usage = self._usage.get(member)
        if usage is None or now - usage.hour_from >= HOUR_S:
            self._usage = {peer: use for peer, use in self._usage.items() if now - use.hour_from < HOUR_S}
            usage = self._usage[member] = _Usage(now)
        return usage

    def _refusal(self, why: str) -> LimitExceeded:
        self.refused += 1
        return LimitExceeded(f"relay: {why}")

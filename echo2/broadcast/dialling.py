"""Which peers to dial, when, and which of two connections to the same peer stays. Pure rules; the node acts on them.

Where two nodes meet is decided in broadcast/reachability. If both can dial, the one with the lower peer ID does; the other
only after GRACE_S. If both dialled, the connection of the lower peer ID stays; a newer connection dialled by the same
side replaces the older one (its process has restarted).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.plan import BroadcastPlan
from echo2.broadcast.reachability import Access, LinkKind, meeting
from echo2.control.waits import ceiling_s

GRACE_S = 3.0  # for the other side to dial first, with its handshake
PAUSE_FIRST_S, PAUSE_MAX_S = 0.25, 8.0  # a restart is noticed at once; 48 dead peers cost 6 dials a second
STANDBY_NEIGHBOURS = 4  # one or two may be gone or slow


@dataclass(slots=True)
class Target:
    """A peer that we want a connection to. `dials_first`: we do; else the peer has GRACE_S to dial us. `is_to_dial_us`: it cannot
    be dialled, so a relayed link to it is a detour."""

    peer_id: PeerId
    addresses: tuple[str, ...]
    wanted_since: float
    next_try: float
    dials_first: bool = True
    is_to_dial_us: bool = False
    failures: int = 0
    last_error: str = ""
    has_left_detour: bool = False


@dataclass(slots=True)
class Dialling:
    me: PeerId
    publisher: tuple[PeerId, str] | None = None
    plan: BroadcastPlan | None = None
    targets: dict[PeerId, Target] = field(default_factory=dict)

    def refresh(self, now: float) -> None:
        """Updates the targets to match the plan and the publisher."""
        wanted = {target.peer_id: target for target in self._planned(now)}
        if self.publisher is not None and self.publisher[0] != self.me:
            peer, address = self.publisher
            target = wanted.setdefault(peer, Target(peer, (), now, now))
            target.addresses = tuple(dict.fromkeys((*([address] if address else []), *target.addresses)))
        for peer, target in wanted.items():
            known = self.targets.get(peer)
            if known is not None and known.addresses == target.addresses:
                known.dials_first, known.is_to_dial_us = target.dials_first, target.is_to_dial_us
                wanted[peer] = known
        self.targets = wanted

    def _planned(self, now: float) -> Iterator[Target]:
        """The plan's neighbours; for a node outside the plan, a few nodes to pull from."""
        if self.plan is None:
            return
        by_id = {node.peer_id: node for node in self.plan.nodes}
        mine = by_id[self.me].whole_access if self.me in by_id else None
        for peer in self.plan.neighbours(self.me) or self._standby_neighbours():
            theirs = by_id[peer].whole_access
            there = meeting(self.me, mine or Access(), peer, theirs)
            target = Target(peer, there.addresses, now, now)
            if mine is not None:
                target.is_to_dial_us = there.way.kind is LinkKind.REVERSE
                can_be_dialled = bool(meeting(peer, theirs, self.me, mine).addresses)
                target.dials_first = not target.is_to_dial_us and (not can_be_dialled or self.me < peer)
            yield target

    def _standby_neighbours(self) -> tuple[PeerId, ...]:
        """Spread by our peer ID."""
        assert self.plan is not None
        able = [node.peer_id for node in self.plan.nodes[1:] if node.addresses and node.peer_id != self.me]
        start = sum(self.me.encode()) % len(able) if able else 0
        return tuple((able[start:] + able[:start])[:STANDBY_NEIGHBOURS])

    def is_detour(self, peer: PeerId, address: str) -> bool:
        """Whether to close a link that we dialled at `address`, so that the peer dials us instead. True only once per plan: if
        the peer cannot dial us, the detour stays."""
        target = self.targets.get(peer)
        if target is None or target.has_left_detour or address not in target.addresses or not target.is_to_dial_us:
            return False
        target.has_left_detour = True
        return True

    def due(self, connected: set[PeerId], now: float) -> list[tuple[Target, str]]:
        """The targets to dial now, each with the address to try."""
        targets = []
        for target in self.targets.values():
            if target.peer_id in connected:
                target.wanted_since = now
                continue
            is_ours = target.dials_first or now - target.wanted_since >= GRACE_S
            if target.addresses and is_ours and now >= target.next_try:
                targets.append((target, target.addresses[target.failures % len(target.addresses)]))
        return targets

    def waits_for(self) -> str:
        """Describes the connection that has been missing longest."""
        target = min(self.targets.values(), key=lambda target: target.wanted_since)
        return f"a connection to {target.peer_id} ({target.last_error or 'dialling'})"

    def failed(self, target: Target, error: str, now: float) -> None:
        target.failures += 1
        target.last_error = error
        target.next_try = now + ceiling_s(target.failures, PAUSE_FIRST_S, PAUSE_MAX_S)

    def replaces(self, peer: PeerId, new_is_outgoing: bool, old_is_outgoing: bool) -> bool:
        """Whether a new connection to `peer` replaces the old one."""
        if new_is_outgoing == old_is_outgoing:
            return True
        return new_is_outgoing == (self.me < peer)


LINKS_MAX = 48  # the 32 of a plan, and half as many others
NEWCOMERS_MAX = 24  # of LINKS_MAX, half: the planned ones have theirs
PER_HOST_MAX = 16  # a machine with many GPUs behind one address
PER_TOKEN_MAX = 16  # a third of LINKS_MAX: three tokens must be stolen to fill it


@dataclass(frozen=True, slots=True)
class Slot:
    """One link among those that may be open. `host`: the address that the peer connects from; empty: through a relay. `token`: id
    of the join token that admitted it."""

    peer: PeerId
    host: str
    is_planned: bool
    token: str = ""
    is_proven: bool = False


def giving_way(new: Slot, held: Sequence[Slot], *, has_plan: bool) -> PeerId | None:
    """Which of `held` (oldest first) to evict for `new`; None: no need. Raises Unreachable if there is no room."""
    newcomers = [slot for slot in held if not (slot.is_planned or slot.is_proven)]
    if has_plan and not (new.is_planned or new.is_proven):
        of_its_host = [slot for slot in newcomers if slot.host == new.host]
        of_its_token = [slot for slot in newcomers if slot.token == new.token]
        if len(of_its_host) >= PER_HOST_MAX:
            return _of_the_largest(of_its_host).peer
        if new.token and len(of_its_token) >= PER_TOKEN_MAX:
            return of_its_token[0].peer
        if len(newcomers) >= NEWCOMERS_MAX:
            return _of_the_largest(newcomers).peer
    if len(held) < LINKS_MAX:
        return None
    if not newcomers:
        proven = [slot for slot in held if not slot.is_planned]
        if new.is_planned and proven:
            return proven[0].peer
        raise Unreachable(f"peer {new.peer}: {LINKS_MAX} connections are open, the most allowed")
    gone = _of_the_largest(newcomers)
    if not (has_plan or new.is_planned or new.is_proven) and _share(gone, newcomers) <= _share(new, newcomers) + 1:
        raise Unreachable(f"peer {new.peer}: {LINKS_MAX} connections are open, the most allowed")
    return gone.peer


def _of_the_largest(newcomers: Sequence[Slot]) -> Slot:
    """The oldest newcomer of the token that holds most slots."""
    counts = Counter(slot.token for slot in newcomers)
    return max(newcomers, key=lambda slot: counts[slot.token])


def _share(whose: Slot, newcomers: Sequence[Slot]) -> int:
    """Number of slots that its token holds."""
    return sum(slot.token == whose.token for slot in newcomers)

"""How two nodes get a link: direct, reverse, hole-punched or relayed. A pure rule over known facts.

Guarantees: both ends arrive at the same kind; every answer carries its reason, in words for the operator. Leaves to
others: finding the facts (runtime/p2p), dialling (runtime/dialling), what a link is used for (topology).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.ids import PeerId

RELAYED_NEIGHBOURS = 4
"""Per side, in the order of peer IDs: a node keeps relayed links to at most twice as many peers."""


class LinkKind(enum.StrEnum):
    """Kinds of link, best first."""

    DIRECT = "direct"
    REVERSE = "reverse"
    HOLE_PUNCHED = "hole-punched"
    RELAYED = "relayed"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class LinkWay:
    """The kind of a link, and the reason for it."""

    kind: LinkKind
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Access:
    """How a node can be reached. `addresses`: any peer can dial them. `lan_addresses`: only peers with the same
    `public_host` can. `relays`: peer IDs of the relays where it has a reservation. `met`: hidden peers to which it has an
    unrelayed connection.
    """

    addresses: tuple[str, ...] = ()
    lan_addresses: tuple[str, ...] = ()
    public_host: str = ""
    relays: tuple[PeerId, ...] = ()
    met: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The rule's answer for an ordered pair: where the first dials the second; no addresses: it waits to be dialled.

    `is_fit_for_trees`: the link is known to work and loads no third party, so trees may use it.
    """

    way: LinkWay
    addresses: tuple[str, ...] = ()
    is_fit_for_trees: bool = False


def meeting(me: PeerId, mine: Access, other: PeerId, theirs: Access) -> Meeting:
    """How `me` and `other` get a link, and which addresses `me` dials."""
    if theirs.addresses:
        return Meeting(LinkWay(LinkKind.DIRECT, "the peer can be dialled"), theirs.addresses, is_fit_for_trees=True)
    if mine.addresses:
        return Meeting(LinkWay(LinkKind.REVERSE, "the peer cannot be dialled, so it dials us"), is_fit_for_trees=True)
    have_met = other in mine.met and me in theirs.met
    circuits = tuple(circuit_address(relay) for relay in theirs.relays if relay in mine.relays)
    if mine.public_host and mine.public_host == theirs.public_host and (mine.lan_addresses or theirs.lan_addresses):
        way = LinkWay(LinkKind.DIRECT, f"both are behind {mine.public_host} and share its network")
        return Meeting(way, theirs.lan_addresses + circuits, have_met)
    if have_met:
        way = LinkWay(LinkKind.HOLE_PUNCHED, "neither can be dialled; both opened their NAT at once")
        return Meeting(way, circuits, is_fit_for_trees=True)
    if circuits:
        return Meeting(LinkWay(LinkKind.RELAYED, "neither can be dialled, and no hole has been punched"), circuits)
    return Meeting(LinkWay(LinkKind.NONE, "neither can be dialled, and they share no relay"))


def circuit_address(relay: PeerId) -> str:
    """The address of a peer that has a reservation at `relay`."""
    return f"/p2p/{relay}/p2p-circuit"


def relay_of(address: str) -> PeerId | None:
    """The relay that an address goes through; None for host:port."""
    head, found, _ = address.partition("/p2p-circuit")
    return PeerId(head.rpartition("/p2p/")[2]) if found else None


def is_relayed_neighbour(first: PeerId, second: PeerId, hidden: Sequence[PeerId]) -> bool:
    """Whether two nodes that need a relay keep a link: their positions in the ring of `hidden` peers are close."""
    ring = sorted(hidden)
    if first not in ring or second not in ring:
        return False
    apart = abs(ring.index(first) - ring.index(second))
    return min(apart, len(ring) - apart) <= RELAYED_NEIGHBOURS

"""Who of those that want a link with a node gets one of its places. A pure rule.

Guarantees: a peer of the plan finds a place as long as any is held by one that is not; peers that the plan does not name yet
hold NEWCOMERS_MAX places together and PER_HOST_MAX of one address, and among them the one that came first gives way to the
next, so that however many identities an address brings, the next newcomer is let in. Before there is a plan only the places
are counted. Leaves to others: what is done with a link (node).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId

PLACES_MAX = 48
NEWCOMERS_MAX = 24
PER_HOST_MAX = 16


@dataclass(frozen=True, slots=True)
class Place:
    """`host`: where the peer comes from; empty: through a relay."""

    peer: PeerId
    host: str
    is_planned: bool


def giving_way(new: Place, held: Sequence[Place], *, has_plan: bool) -> PeerId | None:
    """Who of `held` (first come first) makes room for `new`; None: nobody has to. Unreachable where there is no room."""
    newcomers = [place for place in held if not place.is_planned]
    if not new.is_planned and has_plan:
        of_its_host = [place for place in newcomers if place.host == new.host]
        if len(of_its_host) >= PER_HOST_MAX:
            return of_its_host[0].peer
        if len(newcomers) >= NEWCOMERS_MAX:
            return newcomers[0].peer
    if len(held) < PLACES_MAX:
        return None
    if not newcomers or not (new.is_planned or has_plan):
        raise Unreachable(f"peer {new.peer}: {PLACES_MAX} connections are open, the most allowed")
    return newcomers[0].peer

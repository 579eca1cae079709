"""Which peers get one of a node's connection slots ("places"). A pure rule.

Guarantees: a peer of the plan gets a place as long as any is held by a peer outside the plan; a proven peer (one that has
delivered work) yields only to those. All others are newcomers: at most NEWCOMERS_MAX in total, PER_HOST_MAX per address and
PER_TOKEN_MAX per join token. At a limit, the next newcomer evicts the oldest connection of the token that holds most places
among those that count towards that limit. So however many identities and addresses one join link brings, a newcomer with another
link gets in and stays. Before there is a plan, newcomers may hold all places, and nothing is counted per address or token
until they do. Leaves to others: acting on the answer (node), who is proven (learner).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId

PLACES_MAX = 48
NEWCOMERS_MAX = 24
PER_HOST_MAX = 16
PER_TOKEN_MAX = 16


@dataclass(frozen=True, slots=True)
class Place:
    """`host`: the address that the peer connects from; empty: through a relay. `token`: id of the join token that admitted it."""

    peer: PeerId
    host: str
    is_planned: bool
    token: str = ""
    is_proven: bool = False


def giving_way(new: Place, held: Sequence[Place], *, has_plan: bool) -> PeerId | None:
    """Which of `held` (oldest first) to evict for `new`; None: no need. Raises Unreachable if there is no room."""
    newcomers = [place for place in held if not (place.is_planned or place.is_proven)]
    if has_plan and not (new.is_planned or new.is_proven):
        of_its_host = [place for place in newcomers if place.host == new.host]
        of_its_token = [place for place in newcomers if place.token == new.token]
        if len(of_its_host) >= PER_HOST_MAX:
            return _of_the_largest(of_its_host).peer
        if new.token and len(of_its_token) >= PER_TOKEN_MAX:
            return of_its_token[0].peer
        if len(newcomers) >= NEWCOMERS_MAX:
            return _of_the_largest(newcomers).peer
    if len(held) < PLACES_MAX:
        return None
    if not newcomers:
        proven = [place for place in held if not place.is_planned]
        if new.is_planned and proven:
            return proven[0].peer
        raise Unreachable(f"peer {new.peer}: {PLACES_MAX} connections are open, the most allowed")
    gone = _of_the_largest(newcomers)
    if not (has_plan or new.is_planned or new.is_proven) and _share(gone, newcomers) <= _share(new, newcomers) + 1:
        raise Unreachable(f"peer {new.peer}: {PLACES_MAX} connections are open, the most allowed")
    return gone.peer


def _of_the_largest(newcomers: Sequence[Place]) -> Place:
    """The oldest newcomer of the token that holds most places."""
    counts = Counter(place.token for place in newcomers)
    return max(newcomers, key=lambda place: counts[place.token])


def _share(whose: Place, newcomers: Sequence[Place]) -> int:
    """Number of places that its token holds."""
    return sum(place.token == whose.token for place in newcomers)

"""Who of those that want a link with a node gets one of its places. A pure rule.

Guarantees: a peer of the plan finds a place as long as any is held by one that is not; a proven peer, that has delivered work,
gives way to none but those. The others are newcomers: NEWCOMERS_MAX together, PER_HOST_MAX of one address and PER_TOKEN_MAX of
one join token; of those of its address, of its token or of all, the first of the token that holds most gives way to the next.
So however many identities and addresses a link brings, a newcomer of another link is let in and stays. Before there is a plan
the newcomers may hold all places, and no address or token is counted until they do. Leaves to others: what is done with a link
(node), who is proven (learner).
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
    """`host`: where the peer comes from; empty: through a relay. `token`: the id of the one that let it into the run."""

    peer: PeerId
    host: str
    is_planned: bool
    token: str = ""
    is_proven: bool = False


def giving_way(new: Place, held: Sequence[Place], *, has_plan: bool) -> PeerId | None:
    """Who of `held` (first come first) makes room for `new`; None: nobody has to. Unreachable where there is no room."""
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
    """Of the token that holds most, the first that came."""
    counts = Counter(place.token for place in newcomers)
    return max(newcomers, key=lambda place: counts[place.token])


def _share(whose: Place, newcomers: Sequence[Place]) -> int:
    """Places that its token holds."""
    return sum(place.token == whose.token for place in newcomers)

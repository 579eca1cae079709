"""With whom a node exchanges nothing: peers that it found out itself, and those that the coordinator names.

Guarantees: what the coordinator lifts is lifted, of its own bans alone; what this node found stays until its process ends, or
FOUND_MAX more were found: identities cost an attacker little, and are not to cost us memory.
Leaves to others: closing what stands (node).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from echo2.base.errors import EchoError, ResourceError, VersionMismatch
from echo2.base.ids import PeerId
from echo2.outside.guard import MISHAPS, Refusals

FOUND_MAX = 4096
_log = logging.getLogger("echo2.broadcast")


class Bans:
    def __init__(self) -> None:
        self._drops = Refusals(_log)  # newcomers may come and go without end
        self.found: dict[PeerId, str] = {}
        self._named: set[PeerId] = set()

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._named or peer in self.found

    def accused(self, peer: PeerId, reason: str, *, is_ban: bool) -> None:
        """Logs why a peer goes; `is_ban`: for good, as this node's own finding."""
        if not is_ban:
            self._drops.warn("peer %s dropped: %s", peer, reason)
            return
        _log.warning("peer %s banned: %s", peer, reason)
        self.found.pop(peer, None)
        self.found[peer] = reason
        while len(self.found) > FOUND_MAX:
            del self.found[next(iter(self.found))]

    def name(self, peer: PeerId, *, is_lifted: bool) -> None:
        """The coordinator's word on one peer."""
        (self._named.discard if is_lifted else self._named.add)(peer)

    def name_all(self, peers: Iterable[PeerId]) -> None:
        """The coordinator's word on all, in place of what it said before."""
        self._named = set(peers)

    def among(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in peers if peer in self]


def deserves_ban(error: Exception, peer: PeerId) -> bool:
    """Whether `peer` broke the protocol. What nobody foresaw is noted, and costs it the connection alone."""
    if not isinstance(error, EchoError):
        MISHAPS.note("a connection of the broadcast", peer, error)
    return isinstance(error, EchoError) and not isinstance(error, ResourceError | VersionMismatch)

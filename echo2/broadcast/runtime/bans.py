"""Banned peers: those that this node caught itself, and those that the coordinator names.

Guarantees: the coordinator can lift only its own bans; this node's own bans stay until its process ends, or until
FOUND_MAX newer ones push them out: identities cost an attacker little, and must not cost us memory.
Leaves to others: closing open links (node).
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
        self._drops = Refusals(_log)  # rate-limited: newcomers may come and go without end
        self.found: dict[PeerId, str] = {}
        self._named: set[PeerId] = set()

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._named or peer in self.found

    def accused(self, peer: PeerId, reason: str, *, is_ban: bool) -> None:
        """Logs why a peer is dropped; `is_ban`: also bans it, as this node's own finding."""
        if not is_ban:
            self._drops.warn("peer %s dropped: %s", peer, reason)
            return
        _log.warning("peer %s banned: %s", peer, reason)
        self.found.pop(peer, None)
        self.found[peer] = reason
        while len(self.found) > FOUND_MAX:
            del self.found[next(iter(self.found))]

    def name(self, peer: PeerId, *, is_lifted: bool) -> None:
        """Adds or lifts the coordinator's ban of one peer."""
        (self._named.discard if is_lifted else self._named.add)(peer)

    def name_all(self, peers: Iterable[PeerId]) -> None:
        """Replaces the whole list of the coordinator's bans."""
        self._named = set(peers)

    def among(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in peers if peer in self]


def deserves_ban(error: Exception, peer: PeerId) -> bool:
    """Whether `peer` broke the protocol. An unexpected error is recorded, and costs the peer only its connection."""
    if not isinstance(error, EchoError):
        MISHAPS.note("a connection of the broadcast", peer, error)
    return isinstance(error, EchoError) and not isinstance(error, ResourceError | VersionMismatch)

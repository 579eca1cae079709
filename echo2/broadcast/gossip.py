"""What this node announces to peers: headers, seals, and have-maps of the chunks it holds.

    a header or a seal: sent to a peer once, before anything that needs it
    a have-map:  changed --at most once per interval, less often with many peers--> sent to peers whose last one differs

Guarantees: have-maps leave out chunks that are about to be pushed, or peers would request what is on its way; the last few
chunks of an artifact are announced quickly, because many peers wait for them. Leaves to others: sending (runtime/outbox).
"""

from __future__ import annotations

from collections.abc import Mapping

from echo2.base.ids import PeerId
from echo2.broadcast import policy
from echo2.broadcast.events import Action, SendHave, SendHeader, SendSeal
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.seeding import Seeding
from echo2.broadcast.swarm import Artifact, Peer


class Gossip:
    """The announcements of one node; shares `peers` and `artifacts` with the session."""

    def __init__(
        self, peers: Mapping[PeerId, Peer], artifacts: Mapping[ArtifactKey, Artifact], seeding: Seeding
    ) -> None:
        self._peers, self._artifacts, self._seeding = peers, artifacts, seeding
        self._next_at = float("-inf")
        self._is_untold = False

    @property
    def next_at(self) -> float | None:
        """When have-maps are due; None while nothing has changed."""
        return self._next_at if self._is_untold else None

    def changed(self) -> None:
        """Some artifact's have-map changed."""
        self._is_untold = True

    def greeting(self, peer: Peer) -> list[Action]:
        """Announces everything to a peer that has just connected."""
        actions: list[Action] = []
        for key, artifact in self._artifacts.items():
            actions += self.header(peer, key)
            if artifact.held:
                actions += self._have(peer, artifact)
            if artifact.chunk_count is not None:
                actions.append(SendSeal(peer.peer_id, key))
        return actions

    def header(self, peer: Peer, key: ArtifactKey) -> list[Action]:
        """Sends the header unless the peer knows it."""
        if key in peer.knows:
            return []
        peer.knows.add(key)
        return [SendHeader(peer.peer_id, key)]

    def seal(self, peer: Peer, key: ArtifactKey) -> list[Action]:
        """Sends the seal, after its header, unless the peer knows it."""
        if key in peer.sealed:
            return []
        peer.sealed.add(key)
        return [*self.header(peer, key), SendSeal(peer.peer_id, key)]

    def due(self, now: float) -> list[Action]:
        """Changed have-maps for all peers, at most once per interval. The interval grows with the peers, except near completion."""
        if not self._is_untold or now < self._next_at:
            return []
        self._is_untold = False
        is_ending = any(a.is_nearly_complete and not a.is_complete for a in self._artifacts.values())
        crowd = 1.0 if is_ending else max(1.0, len(self._peers) / policy.HAVE_PEERS)
        self._next_at = now + policy.HAVE_INTERVAL_S * crowd
        actions: list[Action] = []
        for artifact in self._artifacts.values():
            shown = self._shown(artifact)
            for peer in self._peers.values():
                if shown != peer.told.get(artifact.key, 0):
                    actions += self._have(peer, artifact)
        return actions

    def _have(self, peer: Peer, artifact: Artifact) -> list[Action]:
        shown = peer.told[artifact.key] = self._shown(artifact)
        have = SendHave(peer.peer_id, artifact.key, shown, artifact.chunk_count is not None)
        return [*self.header(peer, artifact.key), have]

    def _shown(self, artifact: Artifact) -> int:
        return artifact.held & ~self._seeding.waiting.get(artifact.key, 0)

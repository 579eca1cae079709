"""Which chunks to request from which peers: those that no push brought, rarest first. Pure functions.

Guarantees: a chunk is requested from one peer at a time; a peer never has more open requests than its window, which
follows its measured rate; a request that times out goes to another holder.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from echo2.base.ids import PeerId
from echo2.broadcast import pace
from echo2.broadcast.artifact import ArtifactKey, all_of, those_in
from echo2.broadcast.events import Action, Have, SendHeader, SendSeal
from echo2.broadcast.peer import Artifact, OpenRequest, Peer
from echo2.broadcast.seeding import Seeding

CANDIDATES_MAX = 256  # several windows, so that the rarest can be found among them
EVEN = 1e-6  # of a rate: whom to prefer of those that are as fast


def patience_s(artifact: Artifact) -> float:
    """How long to wait for a push of a chunk that a neighbour already holds, before requesting it. Shorter for the last few
    chunks: a duplicate costs little, waiting for one slow connection costs much."""
    if artifact.is_nearly_complete:
        return pace.PULL_LAST_AFTER_S
    return min(pace.PULL_AFTER_MAX_S, pace.PULL_AFTER_S + 1.5 * artifact.push_lag_s)


def is_pushed_to(artifact: Artifact, now: float) -> bool:
    return now - artifact.pushed_at < pace.PUSH_SILENCE_S


def due_chunks(artifact: Artifact, now: float) -> list[int]:
    """Missing chunks that neighbours have offered for so long that no push is to be expected."""
    if not artifact.is_wanted or not artifact.missing_since:
        return []
    patience = patience_s(artifact) if is_pushed_to(artifact, now) else 0.0
    due: list[int] = []
    for index, since in artifact.missing_since.items():
        if now - since < patience:
            break  # in order of `since`
        due.append(index)
        if len(due) >= CANDIDATES_MAX:
            break
    return due


def window_chunks(peer: Peer, artifact: Artifact) -> int:
    """How many open requests a peer may have at once. A window shorter than a satellite's round trip would shrink ever more."""
    window_s = pace.PULL_WINDOW_S if peer.answer_s == float("inf") else max(pace.PULL_WINDOW_S, 2 * peer.answer_s)
    by_rate = int(peer.rate.bytes_per_s * window_s / artifact.mean_chunk_bytes)
    return max(2, min(pace.PULL_CHUNKS_MAX, by_rate))


def choose(
    artifact: Artifact,
    peers: Mapping[PeerId, Peer],
    publisher: PeerId | None,
    me: PeerId,
    region: Sequence[PeerId],
    rng: random.Random,
    now: float,
) -> dict[PeerId, list[int]]:
    """Which chunks to ask of which peers now. The publisher is asked only for chunks that no other peer can send."""
    due = due_chunks(artifact, now)
    if not due:
        return {}
    room, key, is_pushed = dict[PeerId, int](), artifact.key, is_pushed_to(artifact, now)
    for peer_id, peer in peers.items():
        free = window_chunks(peer, artifact) - len(peer.requests) if peer.haves.get(key) else 0
        if free > 0:
            room[peer_id] = free
    left = sum(room.values())
    if not left:
        return {}
    asked = {ref[1] for peer in peers.values() for ref in peer.requests if ref[0] == key}
    wanted = [index for index in due if index not in asked]
    if not is_pushed:
        wanted = scattered(wanted, [peer.haves.get(key, 0) for peer in peers.values()], 2 * left, rng)
    holders: dict[int, list[PeerId]] = {index: [] for index in wanted}
    for peer_id, peer in peers.items():
        for index in those_in(peer.haves.get(key, 0), holders):
            holders[index].append(peer_id)
    spare = {p: free * peers[p].rate.bytes_per_s * (1 + EVEN * rng.random()) for p, free in room.items()}
    chosen: dict[PeerId, list[int]] = {}
    for index in sorted(holders, key=lambda index: len(holders[index])):
        others = [p for p in holders[index] if p != publisher and not peers[p].is_stuck]
        age_s = now - artifact.missing_since[index]
        if age_s < pace.FAR_AFTER_S and is_pushed:
            near = [p for p in others if peers[p].is_near]
            if near or region[index % len(region)] != me:  # one member asks afar, the others ask that one
                holders[index] = others = near
        if not others and len(peers) > 1 and age_s < pace.PUBLISHER_ALONE_AFTER_S:
            continue  # other peers may be about to announce it
        is_urgent = age_s > pace.PUBLISHER_AFTER_S
        pool = [p for p in (holders[index] if is_urgent or not others else others) if room.get(p, 0) > 0]
        if not pool:
            continue
        pick = max(pool, key=spare.__getitem__)
        spare[pick] -= spare[pick] / room[pick]
        room[pick] -= 1
        chosen.setdefault(pick, []).append(index)
        if not (left := left - 1):
            break
    return chosen


def scattered(wanted: list[int], haves: list[int], most: int, rng: random.Random) -> list[int]:
    """Of what is pushed to nobody and one peer alone holds, each node asks for other chunks: those who come together then have them
    of each other, and not all of the publisher. Up to `most` of these, and all others."""
    once, several, span = 0, 0, all_of(max(wanted, default=-1) + 1)
    for have in haves:
        several |= once & have
        once |= have & span
    alone = those_in(once & ~several, wanted)
    return rng.sample(alone, min(most, len(alone))) + those_in(several, wanted)


def note_requests(artifact: Artifact, peer: Peer, indices: list[int], now: float) -> tuple[int, ...]:
    """Records the requests with a deadline that follows from the peer's rate."""
    if not peer.requests:
        peer.rate.begin(now)
    for index in indices:
        ahead = (len(peer.requests) + 1) * artifact.mean_chunk_bytes
        deadline = now + min(10.0, pace.PULL_TIMEOUT_S + 3 * ahead / peer.rate.bytes_per_s)
        peer.requests[(artifact.key, index)] = OpenRequest(now, deadline)
        peer.asked[artifact.key] = peer.asked.get(artifact.key, 0) | 1 << index
    return tuple(indices)


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
        crowd = 1.0 if is_ending else max(1.0, len(self._peers) / pace.HAVE_PEERS)
        self._next_at = now + pace.HAVE_INTERVAL_S * crowd
        actions: list[Action] = []
        for artifact in self._artifacts.values():
            bitmap = self._bitmap(artifact)
            for peer in self._peers.values():
                if bitmap != peer.sent_haves.get(artifact.key, 0):
                    actions += self._have(peer, artifact)
        return actions

    def _have(self, peer: Peer, artifact: Artifact) -> list[Action]:
        bitmap = peer.sent_haves[artifact.key] = self._bitmap(artifact)
        have = Have(peer.peer_id, artifact.key, bitmap, artifact.chunk_count is not None)
        return [*self.header(peer, artifact.key), have]

    def _bitmap(self, artifact: Artifact) -> int:
        return artifact.held & ~self._seeding.waiting.get(artifact.key, 0)

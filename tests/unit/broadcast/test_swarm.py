"""Whether a peer still needs its seed, and whose queue is served next."""

from __future__ import annotations

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey, all_of
from echo2.broadcast.peer import Outgoing, Peer, service_order

DELTA, KEYFRAME = ArtifactKey(b"d" * 16), ArtifactKey(b"k" * 16)
WHOLES = {DELTA: all_of(3), KEYFRAME: all_of(5)}


def test_a_peer_needs_its_seed_until_it_has_told_of_one_whole_artifact_of_the_version() -> None:
    peer = Peer(PeerId("w"))
    assert peer.needs(WHOLES)
    for index in range(2):
        peer.note(DELTA, index)
        peer.note(KEYFRAME, index)
    assert peer.needs(WHOLES)
    peer.note(DELTA, 2)
    assert not peer.needs(WHOLES)


def test_a_peer_with_chunks_on_their_way_needs_its_seed_and_one_without_anything_published_does_not() -> None:
    peer = Peer(PeerId("w"))
    assert not peer.needs({})
    peer.pull_queue.append(Outgoing(KEYFRAME, 0, None, 0.0))
    assert peer.needs({})
    peer.pull_queue.clear()
    peer.in_transport = 1
    assert peer.needs({})


def waiting_peer(name: str, served_at: int, queue: str, is_late: bool = False, in_transport: int = 0) -> Peer:
    peer = Peer(PeerId(name), is_late, served_at=served_at, in_transport=in_transport)
    getattr(peer, queue).append(Outgoing(DELTA, 0, None, 0.0))
    return peer


def served(*peers: Peer) -> list[PeerId]:
    return [peer.peer_id for peer, queue in service_order(peers, 2) if queue]


def test_relays_are_served_before_requests_and_leaves_and_the_longest_unserved_first() -> None:
    leaf, asked = waiting_peer("leaf", 1, "leaf_queue"), waiting_peer("asked", 2, "pull_queue")
    new, old = waiting_peer("new", 9, "relay_queue"), waiting_peer("old", 3, "relay_queue")
    assert served(leaf, asked, new, old) == ["old", "new", "asked", "leaf"]
    assert served(leaf, waiting_peer("full", 0, "relay_queue", in_transport=2)) == ["leaf"]


def test_late_peers_are_served_one_chunk_at_a_time_while_nothing_waits_for_others() -> None:
    late, busy = waiting_peer("late", 0, "pull_queue", True), waiting_peer("busy", 1, "pull_queue", True, 1)
    assert served(late, busy) == ["late"]
    assert served(late, waiting_peer("leaf", 5, "leaf_queue")) == ["leaf"]
    full = waiting_peer("full", 5, "leaf_queue", in_transport=2)
    assert served(late, busy, full) == ["late"]

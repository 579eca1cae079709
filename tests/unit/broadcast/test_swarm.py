"""Whether a peer still needs its seed."""

from __future__ import annotations

from echo2.base.ids import PeerId
from echo2.broadcast.chunks import all_of
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.swarm import Outgoing, Peer

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

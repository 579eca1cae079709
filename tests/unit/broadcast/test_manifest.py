"""What the publisher signed, and what nobody else can pass off as signed by it."""

from dataclasses import replace

import pytest

from echo2.base.errors import CorruptChunk
from echo2.broadcast.artifact import ArtifactKey, Chunk
from echo2.trust.identity import Identity

PUBLISHER, OTHER = Identity.generate(), Identity.generate()
CHUNK = Chunk.signed(ArtifactKey(bytes(16)), 3, False, b"weights", PUBLISHER)[0]
CHANGED = {
    "payload": replace(CHUNK, payload=b"weighTs"),
    "place": replace(CHUNK, index=4),
    "end of a block": replace(CHUNK, ends_block=True),
    "artifact": replace(CHUNK, key=ArtifactKey(bytes([1, *bytes(15)]))),
    "signature": replace(CHUNK, signature=bytes([CHUNK.signature[0] ^ 1, *CHUNK.signature[1:]])),
    "signer": Chunk.signed(CHUNK.key, 3, False, b"weights", OTHER)[0],
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_chunk_as_it_was_signed_is_sound_and_one_of_which_anything_was_changed_corrupt(what: str) -> None:
    assert len(CHUNK.verify(PUBLISHER.peer_id)) == 32
    with pytest.raises(CorruptChunk, match="signed by"):
        CHANGED[what].verify(PUBLISHER.peer_id)

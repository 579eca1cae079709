from __future__ import annotations

import time
from pathlib import Path

import pytest

from echo2.base.errors import CorruptChunk
from echo2.base.ids import RunId, Version
from echo2.broadcast.chunks import signed_chunks
from echo2.broadcast.identity import Identity
from echo2.broadcast.manifest import ArtifactId, Header
from echo2.broadcast.runtime.chunk_store import ChunkStore
from echo2.broadcast.runtime.library import Library, LibraryLimits

RUN = RunId("run")


def test_a_chunk_that_the_disk_changed_is_neither_served_nor_decoded(tmp_path: Path) -> None:
    """Served, it would make honest peers ban this node for a signature that does not hold."""
    identity = Identity.generate()
    library = Library(ChunkStore(tmp_path, 1 << 20), RUN, LibraryLimits())
    header = Header(ArtifactId(Version(1)), RUN, "", time.time(), 1000, True, identity.peer_id).signed(identity)
    library.add_header(header)
    for chunk, digest in signed_chunks(100, identity, header.key, 0, bytes(range(250))):
        library.add_chunk(chunk, digest)
    assert all(library.frame(header.key, index) for index in range(3))
    (path,) = tmp_path.glob("*.artifact")
    data = bytearray(path.read_bytes())
    data[data.index(bytes(range(100, 110)))] ^= 1
    path.write_bytes(bytes(data))
    assert library.frame(header.key, 1) is None and "disk changed it" in library.trouble
    assert library.frame(header.key, 0) and library.frame(header.key, 2)
    with pytest.raises(CorruptChunk, match="chunk 1"):
        library.chunk(header.key, 1)

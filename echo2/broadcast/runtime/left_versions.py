"""Versions that an earlier process of this node published, read from its chunk store before a node takes the store over.

Guarantees: only reads the store; verifies the publisher's signature of every chunk it applies; a version either comes out
with the expected fingerprint or raises. Leaves to others: what is removed, fetched or published again (restoring, node).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from echo2.base.errors import EchoError, FingerprintMismatch, StateError
from echo2.base.ids import RunId, Version
from echo2.broadcast.catch_up import link_of
from echo2.broadcast.chunks import BlockAssembler
from echo2.broadcast.manifest import ArtifactId, Header, Seal
from echo2.broadcast.runtime.chunk_store import ends_of_records, read_records
from echo2.weights import ContainerDecoder, HostWeights
from echo2.weights.container import FORMAT_VERSION
from echo2.weights.policy import Edge, plan_catch_up
from echo2.wire import broadcast as wire

_DISK = link_of(1e9, 1e-4)
_log = logging.getLogger("echo2.broadcast")


@dataclass(frozen=True, slots=True)
class LeftArtifact:
    """A complete artifact in the file `path`."""

    path: Path
    header: Header
    seal: Seal

    def blocks(self) -> Iterator[bytes]:
        """Yields the blocks in order, verifying each chunk's signature."""
        assembler, expected = BlockAssembler(), 0
        for _, frame in read_records(self.path):
            message = wire.parse(frame, str(self.path))
            if message.WhichOneof("kind") != "chunk":
                continue
            chunk = wire.chunk_from(message.chunk)
            if chunk.key != self.header.key or chunk.index != expected:
                raise StateError(f"{self.path}: expected chunk {expected} of {self.header.artifact}, got {chunk.index}")
            chunk.verify(self.header.publisher)
            expected += 1
            block = assembler.add(chunk.payload, chunk.ends_block)
            if block is not None:
                yield block


class LeftVersions:
    """The complete artifacts of a run in the chunk store at `folder`."""

    def __init__(self, folder: Path, run_id: RunId, lineage: str = f"delta {FORMAT_VERSION}") -> None:
        self._folder, self._run_id, self._lineage = folder, run_id, lineage
        self._found: list[LeftArtifact] | None = None

    @property
    def artifacts(self) -> list[LeftArtifact]:
        if self._found is None:
            paths = sorted(self._folder.glob("*.artifact"))
            self._found = [left for path in paths if (left := self._read(path)) is not None]
        return self._found

    def _read(self, path: Path) -> LeftArtifact | None:
        """Header and seal are a file's first and last record."""
        try:
            first, last = ends_of_records(path)
            begun, ended = wire.parse(first, str(path)), wire.parse(last, str(path))
            if (begun.WhichOneof("kind"), ended.WhichOneof("kind")) != ("header", "seal"):
                return None
            header, seal = wire.header_from(begun.header), wire.seal_from(ended.seal)
            header.verify()
            seal.verify(header.publisher)
        except (EchoError, OSError) as error:
            _log.debug("chunk file %s holds no whole artifact: %s", path, error)
            return None
        is_ours = (header.run_id, header.lineage, header.key) == (self._run_id, self._lineage, seal.key)
        return LeftArtifact(path, header, seal) if is_ours else None

    def fingerprint_of(self, version: Version) -> str:
        """The version's published fingerprint in hex; empty if no complete artifact of it is left."""
        return next((left.seal.fingerprint for left in self.artifacts if left.header.artifact.version == version), "")

    def bring(self, host: HostWeights, version: Version, fingerprint: str) -> list[ArtifactId]:
        """Brings `host` from the version that it holds to `version`; returns the artifacts it applied."""
        if host.version != version:
            applied = [self._apply(left, host) for left in self._way(host.version, version)]
        else:
            applied = []
        if (found := f"{host.fingerprint():016x}") != fingerprint:
            raise FingerprintMismatch(
                f"version {version} from {self._folder}: expected fingerprint {fingerprint}, got {found}"
            )
        return applied

    def _way(self, start: Version | None, version: Version) -> list[LeftArtifact]:
        of_edge = {
            Edge(left.header.artifact.parent, left.header.artifact.version, left.seal.total_bytes): left
            for left in self.artifacts
        }
        weights_bytes = max((left.header.full_snapshot_bytes for left in self.artifacts), default=0)
        plan = plan_catch_up(start, version, list(of_edge), _DISK, weights_bytes)
        if plan is None:
            held = ", ".join(str(left.header.artifact) for left in self.artifacts) or "nothing whole"
            raise StateError(
                f"{self._folder}: expected artifacts that lead from version {start} to the published {version}, found {held}"
            )
        return [of_edge[piece] for piece in plan.pieces]

    def _apply(self, left: LeftArtifact, host: HostWeights) -> ArtifactId:
        decoder = ContainerDecoder(host)
        for block in left.blocks():
            decoder.feed(block)
        host.commit(decoder.finish())
        return left.header.artifact

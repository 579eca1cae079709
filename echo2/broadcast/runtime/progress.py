"""What a node tells whoever decodes: artifacts in the order in which they apply, block by block while they arrive."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.manifest import ArtifactId, ArtifactKey, Header
from echo2.broadcast.reachability import LinkWay


@dataclass(frozen=True, slots=True)
class ArtifactBegun:
    """The first of an artifact's events. Its parent, if it has one, was handed out whole before."""

    header: Header


@dataclass(frozen=True, slots=True)
class BlockArrived:
    """The next block, exactly as it was published."""

    artifact: ArtifactId
    payload: bytes


@dataclass(frozen=True, slots=True)
class ArtifactSealed:
    """All blocks were handed out; the weights must have this fingerprint."""

    artifact: ArtifactId
    fingerprint: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ArtifactDropped:
    """Half-way abandoned: throw away what came of it. Another way to a newer version is quicker, or it was replaced."""

    artifact: ArtifactId
    reason: str


Progress = ArtifactBegun | BlockArrived | ArtifactSealed | ArtifactDropped


@dataclass(frozen=True, slots=True)
class AvailableArtifact:
    """An artifact that this node or a neighbour of it holds."""

    artifact: ArtifactId
    key: ArtifactKey
    held_bytes: int
    total_bytes: int  # 0: not sealed yet
    is_complete: bool


@dataclass(frozen=True, slots=True)
class PublicationDone:
    """A finished publication."""

    artifact: ArtifactId
    chunk_count: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """One live link; the reason in `way` also says why it is made of several connections."""

    peer_id: PeerId
    way: LinkWay
    connections: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Counters since start; bytes count frames, chunk bytes count chunk frames alone."""

    links: tuple[LinkStatus, ...]
    sent_chunk_bytes: int
    received_chunk_bytes: int
    duplicate_bytes: int
    pulled_chunks: int
    sent_by_artifact: dict[ArtifactId, int]
    received_by_artifact: dict[ArtifactId, int]
    uplink_bytes_per_s: float  # measured over the last busy second; 0 before the first
    newest_version_in_flight: int
    newest_chunks_held: int
    newest_chunk_count: int  # 0: not sealed yet
    banned: dict[PeerId, str]
    trouble: str
    waits_for: str
    way: str = ""  # how the newest version was or is to be reached, and why

"""What a node hands to its consumer: artifacts in the order in which they apply, block by block as they arrive."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.manifest import ArtifactId, ArtifactKey, Header
from echo2.broadcast.reachability import LinkWay


@dataclass(frozen=True, slots=True)
class ArtifactBegun:
    """The first event of an artifact. Its parent, if any, has been handed out completely before."""

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
    """The artifact is abandoned half-way: discard what was decoded of it. `reason`: for the log."""

    artifact: ArtifactId
    reason: str


Progress = ArtifactBegun | BlockArrived | ArtifactSealed | ArtifactDropped


@dataclass(frozen=True, slots=True)
class AvailableArtifact:
    """An artifact that this node holds or that a neighbour has announced."""

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
    """One live link; the reason in `way` also says why it has several connections."""

    peer_id: PeerId
    way: LinkWay
    connections: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Counters since start; byte counts of links include all frames, `*_chunk_bytes` only chunk frames."""

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

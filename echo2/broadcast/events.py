"""The session's events and actions. They carry no payload bytes: the runtime stores and checks those."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.plan import BroadcastPlan


@dataclass(frozen=True, slots=True)
class Route:
    """Which tree of which plan a chunk travels on."""

    epoch: int
    tree: int


# ---- messages: an action that sends one to `peer`, an event where one came from `peer`


@dataclass(frozen=True, slots=True)
class Have:
    """All chunks that a node holds and shows, as a bitmap."""

    peer: PeerId
    key: ArtifactKey
    bitmap: int
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class Request:
    peer: PeerId
    key: ArtifactKey
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Of requests: another peer brought these chunks, or is to bring them."""

    peer: PeerId
    key: ArtifactKey
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RelayAck:
    """The chunk was relayed to all children; `backlog` more from the same parent wait there. `is_slow`: its uplink carries less
    than the plan says."""

    peer: PeerId
    key: ArtifactKey
    index: int
    backlog: int
    is_slow: bool = False


# ---- events


@dataclass(frozen=True, slots=True)
class PlanSet:
    plan: BroadcastPlan


@dataclass(frozen=True, slots=True)
class PeerUp:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerDown:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkWidened:
    """The link to the peer now has this many connections."""

    peer: PeerId
    connections: int


@dataclass(frozen=True, slots=True)
class WidthWished:
    """The peer asks for a link of this many connections."""

    peer: PeerId
    connections: int


@dataclass(frozen=True, slots=True)
class HeaderSeen:
    """A verified header; `peer` None: our own, or read back from disk."""

    peer: PeerId | None
    key: ArtifactKey
    is_wanted: bool


@dataclass(frozen=True, slots=True)
class ChunkSeen:
    """A verified chunk that the store now holds. `is_fresh`: we publish it and no peer has it yet."""

    peer: PeerId | None
    key: ArtifactKey
    index: int
    size_bytes: int
    route: Route | None = None
    is_fresh: bool = False
    is_answer: bool = False  # to a request of ours


@dataclass(frozen=True, slots=True)
class ChunksKept:
    """All verified chunks of an artifact that the store kept from an earlier run: a bitmap, and each chunk's size in bytes."""

    key: ArtifactKey
    bitmap: int
    sizes: dict[int, int]


@dataclass(frozen=True, slots=True)
class SealSeen:
    peer: PeerId | None
    key: ArtifactKey
    chunk_count: int


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """The transport took a chunk that we asked it to send; `is_lost`: not sent, because the store no longer had it."""

    peer: PeerId
    key: ArtifactKey
    index: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class UplinkSeen:
    """A sample of our connections, several times a second while any of them sends: bytes that peers confirmed and those sent again
    since the last one, and by how much the least delayed connection's round trip exceeds its own minimum."""

    delivered_bytes: int
    queue_s: float
    resent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Fetch this artifact even though no peer pushes it; or no longer: it stalls, and its requests take the place of others."""

    key: ArtifactKey
    is_wanted: bool


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The store dropped this artifact."""

    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class Emptied:
    """The store discarded this artifact because its bytes were bad; fetch it again from peers that have it."""

    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class Woken:
    """The timer set by Wake has fired."""


Event = (
    PlanSet | PeerUp | PeerDown | LinkWidened | WidthWished | HeaderSeen | ChunkSeen | ChunksKept | SealSeen | Have
    | Request | Cancel | RelayAck | ChunkSent | UplinkSeen | Wanted | Forgotten | Emptied | Woken
)  # fmt: skip

# ---- actions


@dataclass(frozen=True, slots=True)
class SendHeader:
    peer: PeerId
    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class SendChunk:
    """The runtime answers with ChunkSent once the transport has taken the chunk."""

    peer: PeerId
    key: ArtifactKey
    index: int
    route: Route | None
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class SendSeal:
    peer: PeerId
    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class Accuse:
    """The peer broke the protocol: drop the connection, ban the peer and log the reason."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Send Woken at `at` (monotonic seconds); a later Wake replaces this one."""

    at: float


Message = SendHeader | SendSeal | Have | Request | Cancel | RelayAck
Action = SendChunk | Message | Accuse | Wake

"""What goes into the session and what comes out. Payload bytes never pass: the runtime keeps and checks them."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.manifest import ArtifactKey
from echo2.broadcast.topology import BroadcastPlan


@dataclass(frozen=True, slots=True)
class Route:
    """Which tree of which plan a chunk travels on."""

    epoch: int
    tree: int


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
    """The link to the peer is made of so many connections now."""

    peer: PeerId
    connections: int


@dataclass(frozen=True, slots=True)
class WidthWished:
    """The peer would like the link to be made of so many."""

    peer: PeerId
    connections: int


@dataclass(frozen=True, slots=True)
class HeaderSeen:
    """A verified header; `peer` None: it is our own or was kept on disk."""

    peer: PeerId | None
    key: ArtifactKey
    is_wanted: bool


@dataclass(frozen=True, slots=True)
class ChunkSeen:
    """A verified chunk that the store now holds. `is_fresh`: we publish it and nobody has it yet."""

    peer: PeerId | None
    key: ArtifactKey
    index: int
    size_bytes: int
    route: Route | None = None
    is_fresh: bool = False
    is_answer: bool = False  # to a request of ours


@dataclass(frozen=True, slots=True)
class ChunksKept:
    """Verified chunks that the store still holds from an earlier run, all at once: a bitmap, and the bytes of each."""

    key: ArtifactKey
    bitmap: int
    sizes: dict[int, int]


@dataclass(frozen=True, slots=True)
class SealSeen:
    peer: PeerId | None
    key: ArtifactKey
    chunk_count: int


@dataclass(frozen=True, slots=True)
class HaveSeen:
    peer: PeerId
    key: ArtifactKey
    bitmap: int
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class RequestSeen:
    peer: PeerId
    key: ArtifactKey
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelSeen:
    peer: PeerId
    key: ArtifactKey
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RelayAckSeen:
    """The peer has passed the chunk on to all that it relays to; it has `backlog` more of ours."""

    peer: PeerId
    key: ArtifactKey
    index: int
    backlog: int


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """The transport took a chunk that we asked it to send; `is_lost`: the store no longer had it."""

    peer: PeerId
    key: ArtifactKey
    index: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class UplinkSeen:
    """How our connections fare, several times a second while any sends; see governor.UplinkSample."""

    delivered_bytes: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class ArtifactWanted:
    """Fetch this artifact even though nobody pushes it."""

    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Ask for this artifact no more: it has stopped coming, and requests for it take the place of others."""

    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The store dropped this artifact."""

    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class Emptied:
    """The store held this artifact, but it was no good and is gone; it is fetched anew from whoever has it."""

    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class Woken:
    """A timer that was asked for."""


Event = (
    PlanSet | PeerUp | PeerDown | LinkWidened | WidthWished | HeaderSeen | ChunkSeen | ChunksKept | SealSeen | HaveSeen
    | RequestSeen | CancelSeen | RelayAckSeen | ChunkSent | UplinkSeen | ArtifactWanted | Unwanted | Forgotten | Emptied | Woken
)  # fmt: skip

# ---- actions


@dataclass(frozen=True, slots=True)
class SendHeader:
    peer: PeerId
    key: ArtifactKey


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Answered by ChunkSent once the transport has taken it."""

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
class SendHave:
    peer: PeerId
    key: ArtifactKey
    bitmap: int
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class SendRequest:
    peer: PeerId
    key: ArtifactKey
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendCancel:
    peer: PeerId
    key: ArtifactKey
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendRelayAck:
    peer: PeerId
    key: ArtifactKey
    index: int
    backlog: int


@dataclass(frozen=True, slots=True)
class Accuse:
    """The peer broke the protocol: drop the connection, ban it, say so."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Send Woken at `at` (a later Wake replaces it)."""

    at: float


Action = (
    SendHeader | SendChunk | SendSeal | SendHave | SendRequest | SendCancel | SendRelayAck | Accuse | Wake
)  # fmt: skip

"""What a broadcast node is told when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from echo2.base.ids import PeerId
from echo2.broadcast.link_shape import LinkShape
from echo2.broadcast.runtime.library import LibraryLimits
from echo2.weights.container import FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How one node takes part. A chunk has at most `chunk_bytes`, more in very large artifacts
    (topology.chunk_bytes_for). `store_bytes` 0: from the size of the weights (room).

    `uplink_limit_bytes_per_s` 0: no cap. `shape`: an emulated link, for trials. `lineage`: the format of what is published
    and read; what another release left is no use. `bulk_host`: where it takes connections for chunks, at `bulk_port` or any port
    where that is taken; empty: nowhere, and chunks that others send come over gRPC.
    """

    folder: Path
    chunk_bytes: int = 256 << 10
    store_bytes: int = 0
    uplink_limit_bytes_per_s: float = 0.0
    shape: LinkShape = field(default_factory=LinkShape)
    limits: LibraryLimits = field(default_factory=LibraryLimits)
    seed: int = 0
    bulk_host: str = ""
    bulk_port: int = 0
    lineage: str = f"delta {FORMAT_VERSION}"


def bulk_port_beside(port: int) -> int:
    """The next one, so that whoever opens ports knows which; 0 (any) beside one that is not known yet."""
    return port + 1 if 0 < port < 65_535 else 0


@dataclass(frozen=True, slots=True)
class NodeCalls:
    """What a node asks and tells whoever made it. `is_proven`: whether a peer has delivered work. `lost`: told of what this node
    published and lies no more as it was on its disk."""

    is_proven: Callable[[PeerId], bool] = lambda peer_id: False
    lost: Callable[[str], None] = lambda what: None

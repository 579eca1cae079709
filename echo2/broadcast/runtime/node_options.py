"""Options and callbacks of a broadcast node."""

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
    """How one node takes part. `chunk_bytes`: a chunk's largest size; larger in very large artifacts
    (topology.chunk_bytes_for). `store_bytes` 0: derived from the size of the weights (room).

    `uplink_limit_bytes_per_s` 0: no cap. `shape`: an emulated link, for experiments. `lineage`: the format of published
    artifacts; those of another release are rejected. `bulk_host`: where it accepts bulk connections, at `bulk_port` or, if that
    is taken, at any port; empty: nowhere, and chunks arrive over gRPC.
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
    """The next port, so that an operator who opens ports knows which; 0 (any) if `port` is not known yet."""
    return port + 1 if 0 < port < 65_535 else 0


@dataclass(frozen=True, slots=True)
class NodeCalls:
    """Callbacks to the node's owner. `is_proven`: whether a peer has delivered work. `lost`: called with the name of a published
    artifact whose bytes on disk are lost or corrupt."""

    is_proven: Callable[[PeerId], bool] = lambda peer_id: False
    lost: Callable[[str], None] = lambda what: None

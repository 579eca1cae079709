"""Options of a libp2p host, and what it has found out about itself.

Kept apart from the host, so that processes that cross no NAT do not load libp2p (60 MB).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.relay_book import RelayBook
from echo2.outside.families import EVERY_ADDRESS


@dataclass(frozen=True, slots=True)
class HostOptions:
    """`port` 0: any. `grpc_port` 0: do not check whether it can be reached. `book`: set if this node is a relay.
    `is_barred`: members to refuse; `proven`: called with each member's address that a dial-back reached (both in trio).
    """

    listen_host: str = EVERY_ADDRESS
    port: int = 0
    grpc_port: int = 0
    book: RelayBook | None = None
    is_barred: Callable[[PeerId], bool] = lambda peer: False
    proven: Callable[[PeerId, str], None] = lambda peer, address: None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is known about how this node can be reached. `is_reachable` None: not checked yet."""

    public_host: str = ""
    is_reachable: bool | None = None
    relays: tuple[PeerId, ...] = ()
    trouble: str = ""

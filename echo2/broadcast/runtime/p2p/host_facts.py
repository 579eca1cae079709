"""What a libp2p host is told and what it says of itself.

Apart from the host, so that who never crosses a NAT does not load libp2p (60 MB).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.broadcast.relay_book import RelayBook
from echo2.outside.families import EVERY_ADDRESS


@dataclass(frozen=True, slots=True)
class HostOptions:
    """`port` 0: any. `grpc_port` 0: nobody is asked whether it can be reached. `book`: this node is a relay.
    `is_barred`: members that get nothing here; `proven`: told where a member was dialled back (both in trio).
    """

    listen_host: str = EVERY_ADDRESS
    port: int = 0
    grpc_port: int = 0
    book: RelayBook | None = None
    is_barred: Callable[[PeerId], bool] = lambda peer: False
    proven: Callable[[PeerId, str], None] = lambda peer, address: None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is known of how this node is met. `is_reachable` None: nobody has said yet."""

    public_host: str = ""
    is_reachable: bool | None = None
    relays: tuple[PeerId, ...] = ()
    trouble: str = ""

"""The transport that workers use: gRPC to host:port, libp2p to circuits. libp2p starts only when there is a NAT to cross.

Guarantees: those of the transport protocol. `facts` says how this node can be reached, as far as known. Leaves
to others: which address of a peer to dial (dialling, by the rule in broadcast/reachability).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo2.base.errors import Unreachable
from echo2.base.hosts import joined
from echo2.base.ids import PeerId
from echo2.broadcast.pipe_hello import pipe_address
from echo2.broadcast.reachability import relay_of
from echo2.broadcast.relay_book import RelayBook
from echo2.broadcast.runtime.p2p.host_facts import HostFacts, HostOptions
from echo2.broadcast.runtime.pipe_relay import PipeRelay
from echo2.broadcast.runtime.transport import Accept, Connection, refuse_exchange
from echo2.broadcast.runtime.transport_grpc import GrpcTransport
from echo2.outside.families import EVERY_ADDRESS
from echo2.outside.grpc_net import check_free
from echo2.trust.runtime.tls import Credentials

if TYPE_CHECKING:
    from echo2.broadcast.runtime.p2p.transport import P2pTransport
_log = logging.getLogger("echo2.broadcast")


def _p2p_transport() -> type[P2pTransport]:
    """Loads libp2p, which takes 60 MB and seconds; only nodes with a NAT to cross pay for it."""
    from echo2.broadcast.runtime.p2p.transport import P2pTransport

    return P2pTransport


@dataclass(frozen=True, slots=True)
class P2pSettings:
    """`grpc_port`: the port of this node's broadcast service, to check whether it can be dialled; 0: not checked."""

    listen_host: str = EVERY_ADDRESS
    port: int = 0
    grpc_port: int = 0
    book: RelayBook | None = None
    is_barred: Callable[[PeerId], bool] = lambda peer: False
    proven: Callable[[PeerId, str], None] = lambda peer, address: None


class MixedTransport:
    """`accept`: called with peers' connections; `changed`: called when it is found out how this node can be reached."""

    def __init__(
        self,
        credentials: Credentials,
        accept: Accept = refuse_exchange,
        settings: P2pSettings | None = None,
        changed: Callable[[HostFacts], None] = lambda facts: None,
    ) -> None:
        self._credentials = credentials
        self._accept = accept
        self._settings = settings or P2pSettings()
        self._changed = changed
        self._grpc = GrpcTransport(credentials)
        self._p2p: P2pTransport | None = None
        self._starting: asyncio.Task[None] | None = None
        self._relays: dict[PeerId, str] = {}
        self._pipe_relay: PipeRelay | None = None
        self._pipe_places: dict[PeerId, str] = {}

    @property
    def facts(self) -> HostFacts:
        return self._p2p.facts if self._p2p is not None else HostFacts()

    @property
    def pipes(self) -> Mapping[PeerId, str]:
        return {**{relay: pipe_address(address) for relay, address in self._relays.items()}, **self._pipe_places}

    @property
    def pipe_places(self) -> Mapping[PeerId, str]:
        return self.pipes if self.facts.is_reachable is False else self._pipe_places

    def is_piped(self, peer_id: PeerId) -> bool:
        """Whether that peer holds a place for byte pipes at this relay."""
        return self._pipe_relay is not None and self._pipe_relay.holds(peer_id)

    def hold_pipe_place(self, relay: PeerId, relay_address: str) -> None:
        """Holds a byte-pipe place at a relay, even if this node can be dialled; an empty address ends that."""
        self._pipe_places.pop(relay, None)
        if address := pipe_address(relay_address):
            self._pipe_places[relay] = address

    def use_relay(self, peer: PeerId, address: str) -> None:
        """Keeps a reservation at the relay at host:port; an empty address ends that."""
        if self._relays.get(peer, "") == address:
            return
        if self._p2p is not None and peer in self._relays:
            self._p2p.drop_relay(peer)
        self._relays[peer] = address
        if not address:
            del self._relays[peer]
        elif self._p2p is not None:
            self._p2p.use_relay(peer, address)
        elif self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def serve(self, settings: P2pSettings | None = None) -> int:
        """Listens, as a relay if the settings say so; returns the port. PortBusy if it is in use: libp2p would share it."""
        self._settings = settings or self._settings
        host, port = self._settings.listen_host, self._settings.port
        check_free(host, port, joined(host, port))
        await self._start()
        assert self._p2p is not None
        if self._settings.book is not None:
            self._serve_pipes(host, self._p2p.port + 1)
        return self._p2p.port

    def _serve_pipes(self, host: str, port: int) -> None:
        relay = PipeRelay(self._credentials, self._settings.is_barred)
        try:
            relay.listen(host, port)
        except (OSError, OverflowError) as error:
            _log.warning("no byte pipes at %s: %s; relayed links go over libp2p alone", joined(host, port), error)
            return
        self._pipe_relay = relay
        _log.info("byte pipes at %s", joined(host, port))

    async def _start(self) -> None:
        settings = self._settings
        options = HostOptions(
            settings.listen_host, settings.port, settings.grpc_port, settings.book, settings.is_barred, settings.proven
        )
        p2p = (await asyncio.to_thread(_p2p_transport))(self._credentials, options, self._accept, self._changed)
        await p2p.start()
        self._p2p = p2p
        _log.info("libp2p listens on %s:%d", settings.listen_host, p2p.port)
        for peer, address in self._relays.items():
            p2p.use_relay(peer, address)

    async def dial(self, address: str, peer_id: PeerId) -> Connection:
        if relay_of(address) is None:
            return await self._grpc.dial(address, peer_id)
        if self._p2p is None:
            raise Unreachable(f"peer {peer_id}: libp2p has not started yet")
        return await self._p2p.dial(address, peer_id)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # reported when it happened
                await self._starting
        if self._pipe_relay is not None:
            await self._pipe_relay.close()
        if self._p2p is not None:
            await self._p2p.close()
        await self._grpc.close()

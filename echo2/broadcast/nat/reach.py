"""How a node crosses NATs: its relays, their byte pipes, and holes that libp2p punches. libp2p starts only where there is a NAT.

    hidden peer --byte pipe of a relay--> linked, relayed --both punch a hole--> linked over the hole (a newer connection)

Guarantees: `facts` says how this node can be reached, as far as known. Leaves to others: which address of a peer to dial (dialling,
by the rule in reachability), connections over pipes (transport), everything that speaks libp2p (libp2p).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echo2.base.errors import PortBusy, TrustError
from echo2.base.hosts import joined
from echo2.base.ids import PeerId
from echo2.broadcast.nat.pipes import PipeRelay, pipe_address
from echo2.broadcast.transport import Accept
from echo2.outside.ending import cancel_all
from echo2.outside.net import EVERY_ADDRESS, check_free
from echo2.trust.identity import NodeCertificate
from echo2.trust.tls import Credentials

if TYPE_CHECKING:
    from echo2.broadcast.nat.libp2p import P2pSide

START_PAUSE_S = 30.0  # what keeps libp2p from starting (memory, descriptors, a port) does not pass in seconds
RELAY_TRIES = 8  # two ports in a row are free at the first or second
PROBE_S = 4.0  # two handshakes over 500 ms and lost packets
_log = logging.getLogger("echo2.broadcast")


@dataclass(frozen=True, slots=True)
class HostOptions:
    """`port` 0: any. `own_port`: where others dial this node; 0: it is not checked whether they can. `is_relay`: set by `serve`.
    `is_barred`: members to refuse; `proven`: called with each member's address that a dial-back reached (both in trio).
    """

    listen_host: str = EVERY_ADDRESS
    port: int = 0
    own_port: int = 0
    is_relay: bool = False
    is_barred: Callable[[PeerId], bool] = lambda peer: False
    proven: Callable[[PeerId, str], None] = lambda peer, address: None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is known about how this node can be reached. `is_reachable` None: not checked yet."""

    public_host: str = ""
    is_reachable: bool | None = None
    relays: tuple[PeerId, ...] = ()
    trouble: str = ""


def _p2p_side() -> type[P2pSide]:
    """Loads libp2p, which takes 60 MB and seconds; only nodes with a NAT to cross pay for it."""
    from echo2.broadcast.nat.libp2p import P2pSide

    return P2pSide


class Nat:
    """`accept`: called with connections over punched holes; `changed`: when it is found out how this node can be reached."""

    def __init__(
        self,
        credentials: Credentials,
        accept: Accept | None = None,
        options: HostOptions | None = None,
        changed: Callable[[HostFacts], None] = lambda facts: None,
    ) -> None:
        self._credentials, self._accept, self._changed = credentials, accept, changed
        self._options = options or HostOptions()
        self.own_port = self._options.own_port
        self._p2p: P2pSide | None = None
        self._starting: asyncio.Task[None] | None = None
        self._relays: dict[PeerId, str] = {}
        self._pipe_relay: PipeRelay | None = None
        self._pipe_places: dict[PeerId, str] = {}

    @property
    def facts(self) -> HostFacts:
        return self._p2p.facts if self._p2p is not None else HostFacts()

    @property
    def pipes(self) -> Mapping[PeerId, str]:
        """The address of the byte pipes of each relay that is known."""
        return {**{relay: pipe_address(address) for relay, address in self._relays.items()}, **self._pipe_places}

    @property
    def pipe_places(self) -> Mapping[PeerId, str]:
        """The relays at which this node must hold a place, because it cannot be dialled."""
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
            self._starting = asyncio.create_task(self._keep_starting())

    def punch(self, peer_id: PeerId, relay: PeerId) -> None:
        """Tries to punch a hole to a peer that is met at a relay; the connection over it comes by `accept`."""
        if self._p2p is not None:
            self._p2p.punch(peer_id, relay)

    async def serve(self, options: HostOptions) -> int:
        """Serves as a relay and returns its port, which that of its byte pipes follows. PortBusy if one of them is in use."""
        self._options, self.own_port = replace(options, is_relay=True), options.own_port
        for turn in range(RELAY_TRIES):
            check_free(options.listen_host, options.port, joined(options.listen_host, options.port))
            await self._start()
            assert self._p2p is not None
            relay = PipeRelay(self._credentials, options.is_barred)
            try:
                relay.listen(options.listen_host, self._p2p.port + 1)
            except (PortBusy, OverflowError):
                if options.port or turn == RELAY_TRIES - 1:
                    raise
                await self._p2p.close()  # any port will do, if the next one is free too
                continue
            self._pipe_relay = relay
            _log.info("byte pipes at %s", joined(options.listen_host, relay.port))
            return self._p2p.port
        raise AssertionError("the last try returned or raised")

    async def _keep_starting(self) -> None:
        while True:
            try:
                return await self._start()
            except Exception as error:  # of any kind; links through byte pipes go on without libp2p
                why = str(error) or type(error).__name__
                _log.warning("libp2p did not start: %s; it is tried again in %.0f s", why, START_PAUSE_S)
            await asyncio.sleep(START_PAUSE_S)

    async def _start(self) -> None:
        p2p = (await asyncio.to_thread(_p2p_side))(
            self._credentials, replace(self._options, own_port=self.own_port), self._accept, self._changed
        )
        await p2p.start()
        self._p2p = p2p
        _log.info("libp2p listens on %s:%d", self._options.listen_host, p2p.port)
        for peer, address in self._relays.items():
            p2p.use_relay(peer, address)

    async def close(self) -> None:
        if self._starting is not None:
            await cancel_all([self._starting])
        if self._pipe_relay is not None:
            await self._pipe_relay.close()
        if self._p2p is not None:
            await self._p2p.close()


def outward_host(listen_host: str, towards: str) -> str:
    """The listening host; for a wildcard, the address from which this machine reaches `towards` (host:port). Empty: no route."""
    host = listen_host.strip("[]")
    if not _is_any(host):
        return host
    there, _, port = towards.rpartition(":")
    there = there.strip("[]")
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, int(port)))  # sends nothing: the system picks the route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def loopback_of(listen_host: str) -> str:
    """The host at which this machine itself reaches that listener."""
    host = listen_host.strip("[]")
    return "127.0.0.1" if _is_any(host) else host


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def shows_certificate(host: str, port: int, peer_id: PeerId, authority_pem: bytes) -> bool:
    """Whether `peer_id` answers there with its certificate of the run. We present none: theirs is shown anyway."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), timeout=PROBE_S) as raw, context.wrap_socket(raw) as connection:
            shown = connection.getpeercert(binary_form=True)
        certificate = NodeCertificate.parse(shown or b"", f"{host}:{port}")
        certificate.check_peer(peer_id)
        certificate.check_issuer(authority_pem)
    except (OSError, TrustError) as error:
        _log.debug("%s:%d is not %s: %s", host, port, peer_id, error)
        return False
    return True

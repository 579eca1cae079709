"""How a node crosses NATs: its relays, their byte pipes, and holes that libp2p punches. libp2p starts only where there is a NAT.

    hidden peer --byte pipe of a relay--> linked, relayed --both punch a hole--> linked over the hole (a newer connection)

Guarantees: `facts` says how this node can be reached, as far as known.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc.aio

from echo2.base.errors import PortBusy, TrustError, Unreachable
from echo2.base.ids import PeerId
from echo2.base.units import address_of
from echo2.broadcast.nat.pipes import PipeRelay, pipe_address
from echo2.broadcast.reachability import BLOCK_BYTES, DIAL_BACK_S, NONCE_BYTES, TRANSFER_S, TURN_S, Seen, Throughput
from echo2.broadcast.transport import Accept
from echo2.broadcast.uplink import local_end
from echo2.outside import here, monotonic, unix_now
from echo2.outside.guard import cancel_all
from echo2.outside.net import EVERY_ADDRESS, check_free, listened, listening_socket
from echo2.trust.enrolment import checked_certificate
from echo2.trust.identity import JoinLink, NodeCertificate, dns_name_of
from echo2.trust.tls import PROTOCOL_VERSION, Credentials, error_of, open_enrolment_channel
from echo2.wire.gen.echo2.v1 import probe_pb2 as pb, probe_pb2_grpc

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
        self._running: asyncio.Task[None] | None = None
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
        """The relays at which this node must hold a place, because it cannot be dialled."""
        return self.pipes if self.facts.is_reachable is False else self._pipe_places

    def is_piped(self, peer_id: PeerId) -> bool:
        return self._pipe_relay is not None and self._pipe_relay.holds(peer_id)

    def hold_pipe_place(self, relay: PeerId, relay_address: str) -> None:
        """Holds a byte-pipe place at a relay, even if this node can be dialled; an empty address ends that."""
        self._pipe_places.pop(relay, None)
        if address := pipe_address(relay_address):
            self._pipe_places[relay] = address

    def use_relay(self, peer: PeerId, address: str) -> None:
        """Keeps a reservation at the relay at host:port; an empty address ends that."""
        self._relays.pop(peer, None)
        if address:
            self._relays[peer] = address
        if self._p2p is not None:
            self._p2p.keep_relays(self._relays)
        elif address and self._running is None:
            self._running = asyncio.create_task(self._keep_running())

    def punch(self, peer_id: PeerId, relay: PeerId) -> None:
        """Tries to punch a hole to a peer that is met at a relay; the connection over it comes by `accept`."""
        if self._p2p is not None:
            self._p2p.punch(peer_id, relay)

    async def serve(self, options: HostOptions) -> int:
        """Serves as a relay and returns its port, which that of its byte pipes follows. PortBusy if one of them is in use."""
        self._options, self.own_port = replace(options, is_relay=True), options.own_port
        for turn in range(RELAY_TRIES):
            check_free(options.listen_host, options.port, address_of(options.listen_host, options.port))
            p2p = await self._start()
            relay = PipeRelay(self._credentials, options.is_barred)
            try:
                relay.listen(options.listen_host, p2p.port + 1)
            except (PortBusy, OverflowError):
                await p2p.close()
                if options.port or turn == RELAY_TRIES - 1:
                    raise
                continue  # any port will do, if the next one is free too
            self._pipe_relay = relay
            self._options = replace(self._options, port=p2p.port)
            self._running = asyncio.create_task(self._keep_running(p2p))
            _log.info("byte pipes at %s", address_of(options.listen_host, relay.port))
            return p2p.port
        raise AssertionError("the last try returned or raised")

    async def _keep_running(self, p2p: P2pSide | None = None) -> None:
        while True:
            try:
                p2p = p2p or await self._start()
                await p2p.wait_ended()
                await p2p.close()
                why = "libp2p has ended"
            except Exception as error:  # of any kind; links through byte pipes go on without libp2p
                why = f"libp2p did not start: {str(error) or type(error).__name__}"
            _log.warning("%s; it is tried again in %.0f s", why, START_PAUSE_S)
            await asyncio.sleep(START_PAUSE_S)
            p2p = None

    async def _start(self) -> P2pSide:
        p2p = (await asyncio.to_thread(_p2p_side))(
            self._credentials, replace(self._options, own_port=self.own_port), self._accept, self._changed
        )
        await p2p.start()
        self._p2p = p2p
        _log.info("libp2p listens on %s:%d", self._options.listen_host, p2p.port)
        p2p.keep_relays(self._relays)
        return p2p

    async def close(self) -> None:
        if self._running is not None:
            await cancel_all([self._running])
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
    try:
        der = here().net.certificate_at(host, port, dns_name_of(peer_id), PROBE_S)
        certificate = NodeCertificate.parse(der, f"{host}:{port}")
        certificate.check_peer(peer_id)
        certificate.check_issuer(authority_pem)
    except (Unreachable, TrustError) as error:
        _log.debug("%s:%d is not %s: %s", host, port, peer_id, error)
        return False
    return True


# Measures this machine's own link with the help of the coordinator that its join link pins. Nothing is joined.
#
# Guarantees: the coordinator proves to be the peer of the link before the token is shown; the token is not used up; no
# listener is left open. Waits: `timeout_s` for an answer, DIAL_BACK_S for the dial-back, TURN_S and twice
# TRANSFER_S for each direction.

TRANSFER_TIMEOUT_S = TURN_S + 2 * TRANSFER_S


@dataclass(frozen=True, slots=True)
class OwnLink:
    """The result of a probe. `tried_port`: the port that the coordinator dialled back. `skew_s`: how far its clock is ahead of
    ours. A rate of 0.0 was not measured; `rate_problem` says why."""

    seen: Seen
    tried_port: int
    failure: str
    skew_s: float
    role: str
    token_problem: str
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    rate_problem: str = ""


async def look_at_own_link(link: JoinLink, ports: Mapping[str, int], timeout_s: float) -> OwnLink:
    """Runs the probe; listens for the dial-back on the port of the link's role (0 or missing: any port). Raises Unreachable,
    TrustError, BadToken, VersionMismatch or PortBusy."""
    certificate = await asyncio.to_thread(checked_certificate, link, timeout_s)
    async with open_enrolment_channel(link, certificate.pem) as channel:
        stub = probe_pb2_grpc.ProbeStub(channel)
        try:
            question = pb.ReachRequest(protocol_version=PROTOCOL_VERSION, token=link.token)
            reach: pb.ReachReply = await stub.Reach(question, timeout=timeout_s)
            own_link = await _reach(stub, link, ports.get(reach.role, 0), timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, f"coordinator at {link.address}") from None
        try:
            down, up = await _download(stub, link.token), await _upload(stub, link.token)
        except grpc.aio.AioRpcError as error:
            return replace(own_link, rate_problem=str(error_of(error, f"coordinator at {link.address}")))
    return replace(own_link, uplink_bytes_per_s=up, downlink_bytes_per_s=down)


async def _reach(stub: probe_pb2_grpc.ProbeStub, link: JoinLink, port: int, timeout_s: float) -> OwnLink:
    nonce = secrets.token_bytes(NONCE_BYTES)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonce)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    every = listening_socket(EVERY_ADDRESS)
    try:
        every.bind((listened(EVERY_ADDRESS), port))
        listener = await asyncio.start_server(greet, sock=every)
    except OSError as error:
        every.close()
        raise PortBusy(
            f"expected to listen on port {port}: {os.strerror(error.errno) if error.errno else error}"
        ) from None
    async with listener:
        tried = port or listener.sockets[0].getsockname()[1]
        began = unix_now()
        request = pb.ReachRequest(protocol_version=PROTOCOL_VERSION, token=link.token, port=tried, nonce=nonce)
        reply: pb.ReachReply = await stub.Reach(request, timeout=timeout_s + DIAL_BACK_S)
        ended = unix_now()
        skew_s = min(0.0, reply.unix_s - began) + max(
            0.0, reply.unix_s - ended
        )  # 0 if the coordinator's time lies between ours
    dialled = tried if reply.is_dialled else 0
    view = Seen(local_end(link.port), (reply.host, reply.port), dialled, reply.has_relay)
    return OwnLink(view, tried, reply.failure, skew_s, reply.role, reply.token_problem)


async def _download(stub: probe_pb2_grpc.ProbeStub, token: str) -> float:
    rate = Throughput()
    call = stub.Download(pb.DownloadRequest(token=token), timeout=TRANSFER_TIMEOUT_S)
    async for block in call:
        rate.add(len(block.data), monotonic())
        if rate.is_enough(monotonic()):
            break
    call.cancel()
    return rate.bytes_per_s


async def _upload(stub: probe_pb2_grpc.ProbeStub, token: str) -> float:
    data = os.urandom(BLOCK_BYTES)

    async def blocks() -> AsyncIterator[pb.UploadBlock]:
        yield pb.UploadBlock(token=token)
        while True:
            yield pb.UploadBlock(data=data)

    reply: pb.UploadReply = await stub.Upload(blocks(), timeout=TRANSFER_TIMEOUT_S)
    return reply.bytes_per_s

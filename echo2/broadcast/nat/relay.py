"""Which libp2p peers belong to the run, and the circuits on which two of them agree to punch a hole.

libp2p proves that a peer holds the key of its peer ID; the certificate, issued by the run's authority for that
peer ID, proves that it may take part: both sides of a connection show theirs. Guarantees: a member's certificate was checked by
this process and has not expired; a relay serves members alone, within its book. Waits HANDSHAKE_S for the other side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p.abc import IHost
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.io.utils import read_exactly
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2 import CircuitV2Protocol
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    HopMessage,
    Limit,
    PeerId as CircuitPeer,
    Reservation,
    Status,
    StopMessage,
)
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP_PROTOCOL, STOP_PROTOCOL_ID
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import MAX_WINDOW_SIZE, YamuxStream
from multiaddr import Multiaddr

from echo2.base.errors import LimitExceeded, MalformedMessage, NotAllowed, TrustError, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.nat.relay_book import Circuit, RelayBook
from echo2.trust.identity import NodeCertificate, PeerIdentity
from echo2.trust.tls import Credentials

PROTOCOL = TProtocol("/echo2/member/1")
CERTIFICATE_BYTES_MAX = 16 << 10  # ten times one of ours
HANDSHAKE_S = 10.0  # over a slow link, and a busy loop
MEMBERS_MAX = 20_000  # twice the largest fleet that is planned for
_LENGTH_BYTES = 4  # big endian, before each message


@dataclass(slots=True)
class Members:
    credentials: Credentials
    is_barred: Callable[[PeerId], bool] = lambda peer: False
    _known: dict[PeerId, NodeCertificate] = field(default_factory=dict)

    def identity_of(self, peer_id: PeerId) -> PeerIdentity | None:
        """The peer's identity in the run; None unless it has shown a valid certificate."""
        certificate = self._known.get(peer_id)
        if certificate is None or certificate.not_after_unix_s < time.time() or self.is_barred(peer_id):
            return None
        return certificate.whose

    def is_member(self, peer_id: PeerId) -> bool:
        return self.identity_of(peer_id) is not None

    async def wait_known(self, peer_id: PeerId) -> bool:
        """Waits up to HANDSHAKE_S for the peer's certificate, which may be on its way; returns whether it is a member."""
        until = trio.current_time() + HANDSHAKE_S
        while not self.is_member(peer_id) and trio.current_time() < until:
            await trio.sleep(0.05)
        return self.is_member(peer_id)

    async def introduce(self, stream: Any, peer_id: PeerId, *, is_first: bool) -> PeerIdentity:
        """Certificates go both ways; the accepting side checks the caller's before it shows its own. TrustError if it is wrong."""
        pem = self.credentials.certificate.pem
        frame = len(pem).to_bytes(_LENGTH_BYTES, "big") + pem
        with trio.fail_after(HANDSHAKE_S):
            if is_first:
                await stream.write(frame)
            size = int.from_bytes(await read_exactly(stream, _LENGTH_BYTES), "big")
            if size > CERTIFICATE_BYTES_MAX:
                raise MalformedMessage(
                    f"peer {peer_id}: expected a certificate of at most {CERTIFICATE_BYTES_MAX} bytes, it announces {size}"
                )
            identity = self._admit(peer_id, await read_exactly(stream, size))
            if not is_first:
                await stream.write(frame)
        return identity

    def _admit(self, peer_id: PeerId, pem: bytes) -> PeerIdentity:
        """libp2p has verified the peer's key."""
        certificate = NodeCertificate.parse(pem, f"certificate of {peer_id}")
        certificate.check_peer(peer_id)
        certificate.check_issuer(self.credentials.authority_pem)
        certificate.check_time(time.time())
        if certificate.run_id != self.credentials.run_id:
            raise TrustError(f"peer {peer_id}: expected a certificate of run {self.credentials.run_id!r}")
        while len(self._known) >= MEMBERS_MAX:
            del self._known[next(iter(self._known))]  # it shows its certificate again when it reconnects
        self._known[peer_id] = certificate
        return certificate.whose


WINDOW_BYTES: int = MAX_WINDOW_SIZE
WRITE_PIECE_BYTES = 48 << 10  # below the 64 KiB of a noise message
ROOM_LOOK_S = 0.005  # a fraction of a round trip


async def widen(stream: Any) -> None:
    """Lets the other side send up to WINDOW_BYTES unacknowledged. `stream`: a libp2p network stream."""
    inner = getattr(stream, "muxed_stream", None)
    if not isinstance(inner, YamuxStream):
        return
    async with inner.window_lock:
        more = WINDOW_BYTES - inner.target_recv_window
        if more <= 0:
            return
        inner.target_recv_window = WINDOW_BYTES
        inner.recv_window += more
    await inner.send_window_update(more)


async def write(stream: Any, data: bytes) -> None:
    """Writes all data, waiting for room without limit; raises MuxedStreamError if the stream ends."""
    inner = getattr(stream, "muxed_stream", None)
    view = memoryview(data)
    for start in range(0, len(data), WRITE_PIECE_BYTES):
        piece = view[start : start + WRITE_PIECE_BYTES]
        while isinstance(inner, YamuxStream) and inner.send_window < len(piece):
            if inner.closed or inner.send_closed:
                raise MuxedStreamError("the stream ended while it had no room")
            await trio.sleep(ROOM_LOOK_S)
        await stream.write(bytes(piece))


MESSAGE_S = 10.0  # a message has some hundred bytes
PIECE_BYTES = 64 << 10  # a noise message
_log = logging.getLogger("echo2.broadcast")


def peer_of_stream(stream: Any) -> PeerId:
    return PeerId(stream.muxed_conn.peer_id.to_base58())


def circuit_multiaddr(relay: PeerId, peer: PeerId) -> Multiaddr:
    return Multiaddr(f"/p2p/{relay}/p2p-circuit/p2p/{peer}")


class MemberRelay(CircuitV2Protocol):  # type: ignore[misc]  # untyped library
    """Circuits, on which two members agree to punch a hole. `is_relay` False: only those that end here. `on_circuit`: called for
    each of those."""

    def __init__(
        self, host: IHost, members: Members, book: RelayBook, is_relay: bool, on_circuit: Callable[[PeerId], None]
    ) -> None:
        super().__init__(host, allow_hop=is_relay)
        self._members, self._book, self._on_circuit = members, book, on_circuit

    # ---- a circuit that ends here

    async def _handle_stop_stream(self, stream: Any) -> None:
        relay = peer_of_stream(stream)
        try:
            with trio.fail_after(MESSAGE_S):
                is_member = self._members.is_member(relay)  # otherwise its message is not even read
                message = await read_delimited_msg(stream, StopMessage) if is_member else StopMessage()
                if not is_member or message.type != StopMessage.CONNECT:
                    await write_delimited_msg(stream, _stop_status(Status.PERMISSION_DENIED))
                    await stream.close()
                    return
                await write_delimited_msg(stream, _stop_status(Status.OK))
            peer = PeerId(ID(message.peer.id).to_base58())
            address = circuit_multiaddr(relay, peer)
            raw = RawConnection(stream, False, ConnectionType.RELAYED, [address])
            muxed = await self.host.upgrade_inbound_connection(raw, address)
            tag_as_relayed(self.host, peer, muxed, address)
            self._on_circuit(peer)
        except Exception as error:  # a peer's stream must not end the host
            _log.debug("circuit through %s: %s", relay, error)
            await reset(stream)

    # ---- the relay

    async def _handle_hop_stream(self, stream: Any) -> None:
        member = peer_of_stream(stream)
        try:
            if not self._members.is_member(member):
                raise NotAllowed(f"relay: {member} has shown no certificate of this run")
            with trio.fail_after(MESSAGE_S):
                message = await read_delimited_msg(stream, HopMessage)
            if message.type == HopMessage.RESERVE:
                await self._reserve(stream, member)
            elif message.type == HopMessage.CONNECT:
                await self._connect(stream, member, PeerId(ID(message.peer.id).to_base58()))
        except (LimitExceeded, NotAllowed) as error:
            _log.info("%s", error)
            is_limit = isinstance(error, LimitExceeded)
            await self._refuse(stream, Status.RESOURCE_LIMIT_EXCEEDED if is_limit else Status.PERMISSION_DENIED)
        except Exception as error:
            _log.debug("relay: request of %s: %s", member, error)
            await reset(stream)

    async def _reserve(self, stream: Any, member: PeerId) -> None:
        left_s = self._book.reserve(member, trio.current_time()) - trio.current_time()
        reply = _hop_status(Status.OK)
        reply.reservation.CopyFrom(Reservation(expire=int(time.time() + left_s)))
        reply.limit.CopyFrom(self._limit())
        await write_delimited_msg(stream, reply)
        await stream.close()

    def _limit(self) -> Limit:
        limits = self._book.limits
        return Limit(duration=int(limits.circuit_s_max), data=limits.circuit_bytes_max)

    async def _connect(self, stream: Any, member: PeerId, target: PeerId) -> None:
        circuit = self._book.open(member, target, trio.current_time())
        other: Any = None
        try:
            with trio.fail_after(MESSAGE_S):
                other = await self._reach(member, target)
                reply = _hop_status(Status.OK)
                reply.limit.CopyFrom(self._limit())
                await write_delimited_msg(stream, reply)
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = circuit.ends_at  # also where nothing moves
                nursery.start_soon(self._carry, circuit, stream, other, nursery.cancel_scope)
                nursery.start_soon(self._carry, circuit, other, stream, nursery.cancel_scope)
        except (trio.TooSlowError, Unreachable):
            await self._refuse(stream, Status.CONNECTION_FAILED)
        finally:
            self._book.close(circuit)
            with trio.CancelScope(shield=True):
                await reset(stream)
                if other is not None:
                    await reset(other)

    async def _reach(self, member: PeerId, target: PeerId) -> Any:
        """Opens a stream to the circuit's target, which must agree; Unreachable if it does not."""
        peer = ID.from_base58(target)
        if not self.host.get_network().connections.get(peer):
            raise Unreachable(f"relay: {target} is not connected")
        other = await self.host.new_stream(peer, [STOP_PROTOCOL_ID])
        source = CircuitPeer(id=ID.from_base58(member).to_bytes())
        await write_delimited_msg(other, StopMessage(type=StopMessage.CONNECT, peer=source, limit=self._limit()))
        answer = await read_delimited_msg(other, StopMessage)
        if answer.status != Status.OK:
            await reset(other)
            raise Unreachable(f"relay: {target} refused a circuit")
        return other

    async def _carry(self, circuit: Circuit, source: Any, target: Any, both: trio.CancelScope) -> None:
        """Moves bytes in one direction, until the stream ends or a limit is reached."""
        try:
            while piece := await source.read(PIECE_BYTES):
                self._book.move(circuit, len(piece), trio.current_time())
                await write(target, piece)
        except LimitExceeded as error:
            _log.info("%s", error)
        except trio.Cancelled:
            raise
        except Exception as error:  # streams end by many exceptions; all mean that the circuit is over
            _log.debug("circuit %d: %s", circuit.number, error)
        both.cancel()

    async def _refuse(self, stream: Any, status: Status.ValueType) -> None:
        try:
            with trio.fail_after(MESSAGE_S):
                await write_delimited_msg(stream, _hop_status(status))
                await stream.close()
        except Exception as error:
            _log.debug("relay: %s", error)
            await reset(stream)


async def reserve(host: IHost, relay: PeerId) -> None:
    with trio.fail_after(MESSAGE_S):
        stream = await host.new_stream(ID.from_base58(relay), [HOP_PROTOCOL])
        try:
            await write_delimited_msg(stream, HopMessage(type=HopMessage.RESERVE))
            _granted(await read_delimited_msg(stream, HopMessage), relay)
        finally:
            await reset(stream)


async def dial_circuit(host: IHost, relay: PeerId, peer: PeerId) -> None:
    """Connects to `peer` through `relay`, encrypted end to end."""
    with trio.fail_after(2 * MESSAGE_S):
        stream = await host.new_stream(ID.from_base58(relay), [HOP_PROTOCOL])
        try:
            target = CircuitPeer(id=ID.from_base58(peer).to_bytes())
            await write_delimited_msg(stream, HopMessage(type=HopMessage.CONNECT, peer=target))
            _granted(await read_delimited_msg(stream, HopMessage), relay)
            address = circuit_multiaddr(relay, peer)
            raw = RawConnection(stream, True, ConnectionType.RELAYED, [address])
            connection = await host.upgrade_outbound_connection(raw, ID.from_base58(peer))
            tag_as_relayed(host, peer, connection.muxed_conn, address)
        except BaseException:
            with trio.CancelScope(shield=True):
                await reset(stream)
            raise


def _granted(reply: HopMessage, relay: PeerId) -> None:
    if reply.status != Status.OK:
        raise Unreachable(f"relay {relay}: {Status.Name(reply.status)}")


def tag_as_relayed(host: IHost, peer: PeerId, muxed: Any, address: Multiaddr) -> None:
    """Marks a circuit as relayed; the library leaves it without an address, so that it looks like a direct connection."""
    for connection in host.get_network().connections.get(ID.from_base58(peer), []):
        if connection.muxed_conn is muxed:
            connection.set_transport_info([address], ConnectionType.RELAYED)


def _hop_status(status: Status.ValueType) -> HopMessage:
    return HopMessage(type=HopMessage.STATUS, status=status)


def _stop_status(status: Status.ValueType) -> StopMessage:
    return StopMessage(type=StopMessage.STATUS, status=status)


async def reset(stream: Any) -> None:
    try:
        with trio.move_on_after(1.0):
            await stream.reset()
    except Exception as error:  # already closed
        _log.debug("reset: %s", error)

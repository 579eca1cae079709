"""Which libp2p peers belong to the run: both sides of a connection show their certificate of the run.

libp2p proves that a peer holds the key of its peer ID; the certificate, issued by the run's authority for that
peer ID, proves that it may take part. Guarantees: `identity_of` returns only peers whose certificate was checked by this
process and has not expired; a certificate of another peer or another run, or an expired one, raises
TrustError. Waits HANDSHAKE_S for the other side.
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
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2 import CircuitV2Protocol
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, Reservation, Status, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeer
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP_PROTOCOL
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID
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

    async def wait_known(self, peer_id: PeerId) -> bool:
        """Waits up to HANDSHAKE_S for the peer's certificate, which may be on its way; returns whether it is known."""
        until = trio.current_time() + HANDSHAKE_S
        while self.identity_of(peer_id) is None and trio.current_time() < until:
            await trio.sleep(0.05)
        return self.identity_of(peer_id) is not None

    def admit(self, peer_id: PeerId, pem: bytes) -> PeerIdentity:
        """Checks the certificate shown by `peer_id`, whose key libp2p has verified; raises TrustError."""
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

    async def show(self, stream: Any, peer_id: PeerId) -> PeerIdentity:
        """Shows our certificate and checks theirs, on a stream that we opened."""
        with trio.fail_after(HANDSHAKE_S):
            await write_block(stream, self.credentials.certificate.pem)
            return self.admit(peer_id, await read_block(stream, CERTIFICATE_BYTES_MAX, f"peer {peer_id}"))

    async def answer(self, stream: Any, peer_id: PeerId) -> PeerIdentity:
        """The accepting side: checks the peer's certificate before showing ours."""
        with trio.fail_after(HANDSHAKE_S):
            identity = self.admit(peer_id, await read_block(stream, CERTIFICATE_BYTES_MAX, f"peer {peer_id}"))
            await write_block(stream, self.credentials.certificate.pem)
        return identity


async def write_block(stream: Any, block: bytes) -> None:
    """Writes a 4-byte length, then the bytes."""
    await stream.write(len(block).to_bytes(_LENGTH_BYTES, "big") + block)


async def read_block(stream: Any, limit: int, whose: str) -> bytes:
    """Reads a block of `write_block`; MalformedMessage if it exceeds `limit`, before reading it."""
    size = int.from_bytes(await read_exactly(stream, _LENGTH_BYTES), "big")
    if size > limit:
        raise MalformedMessage(f"{whose}: expected at most {limit} bytes in a message, it announces {size}")
    return await read_exactly(stream, size)


async def read_exactly(stream: Any, count: int) -> bytes:
    """Reads `count` bytes; EOFError if the stream ends first."""
    parts = bytearray()
    while len(parts) < count:
        part = await stream.read(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


WINDOW_BYTES: int = MAX_WINDOW_SIZE
RELAY_WINDOW_BYTES = 4 << 20  # 100 Mbit/s at 300 ms
WRITE_PIECE_BYTES = 48 << 10  # below the 64 KiB of a noise message
ROOM_LOOK_S = 0.005  # a fraction of a round trip


async def widen(stream: Any, window_bytes: int = WINDOW_BYTES) -> None:
    """Lets the other side send up to `window_bytes` unacknowledged. `stream`: a libp2p network stream."""
    inner = getattr(stream, "muxed_stream", None)
    if not isinstance(inner, YamuxStream):
        return
    async with inner.window_lock:
        more = window_bytes - inner.target_recv_window
        if more <= 0:
            return
        inner.target_recv_window = window_bytes
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
    """`book` None: this node is not a relay and only accepts circuits to itself. `came`: called for each of those."""

    def __init__(self, host: IHost, members: Members, book: RelayBook | None, came: Callable[[PeerId], None]) -> None:
        super().__init__(host, allow_hop=book is not None)
        self._members = members
        self._book = book
        self._came = came

    # ---- a circuit that ends here

    async def _handle_stop_stream(self, stream: Any) -> None:
        relay = peer_of_stream(stream)
        try:
            with trio.fail_after(MESSAGE_S):
                is_member = self._members.identity_of(relay) is not None  # otherwise its message is not even read
                message = await read_delimited_msg(stream, StopMessage) if is_member else StopMessage()
                if not is_member or message.type != StopMessage.CONNECT:
                    await write_delimited_msg(stream, _stop_status(Status.PERMISSION_DENIED))
                    await stream.close()
                    return
                await widen(stream)
                await write_delimited_msg(stream, _stop_status(Status.OK))
            peer = PeerId(ID(message.peer.id).to_base58())
            address = circuit_multiaddr(relay, peer)
            raw = RawConnection(stream, False, ConnectionType.RELAYED, [address])
            muxed = await self.host.upgrade_inbound_connection(raw, address)
            tag_as_relayed(self.host, peer, muxed, address)
            self._came(peer)
        except Exception as error:  # a peer's stream must not end the host
            _log.debug("circuit through %s: %s", relay, error)
            await reset(stream)

    # ---- the relay

    async def _handle_hop_stream(self, stream: Any) -> None:
        member = peer_of_stream(stream)
        assert self._book is not None, "only relays register this handler"
        try:
            if self._members.identity_of(member) is None:
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
        assert self._book is not None
        left_s = self._book.reserve(member, trio.current_time()) - trio.current_time()
        reply = _hop_status(Status.OK)
        reply.reservation.CopyFrom(Reservation(expire=int(time.time() + left_s)))
        reply.limit.CopyFrom(self._limit())
        await write_delimited_msg(stream, reply)
        await stream.close()

    def _limit(self) -> Limit:
        assert self._book is not None
        limits = self._book.limits
        return Limit(duration=int(limits.circuit_s_max), data=limits.circuit_bytes_max)

    async def _connect(self, stream: Any, member: PeerId, target: PeerId) -> None:
        assert self._book is not None
        circuit = self._book.open(member, target, trio.current_time())
        other: Any = None
        try:
            with trio.fail_after(MESSAGE_S):
                other = await self._reach(member, target)
                reply = _hop_status(Status.OK)
                reply.limit.CopyFrom(self._limit())
                await widen(stream, RELAY_WINDOW_BYTES)
                await widen(other, RELAY_WINDOW_BYTES)
                await write_delimited_msg(stream, reply)
            async with trio.open_nursery() as nursery:
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
        assert self._book is not None
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
    """Takes or renews a reservation at `relay`. Unreachable if the relay refuses."""
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
            await widen(stream)
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
    """Resets a stream in any state."""
    try:
        with trio.move_on_after(1.0):
            await stream.reset()
    except Exception as error:  # already closed
        _log.debug("reset: %s", error)

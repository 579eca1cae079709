"""Circuit relay v2: our end of a circuit and, on relays, reservations and circuits for members of the run.

Guarantees: only members get a reservation or a circuit, within the limits of the book; a refusal is logged with its
limit; a circuit is closed at both ends when either ends. Waits: MESSAGE_S for a peer's message.

The library's handlers are replaced; its messages, streams and upgrades are used. Its handlers keep circuits by peer, so that
the end of one circuit closes the newest one of the same peer (0.8.1, `_active_relays`); they count bytes per reservation
but not per member; they admit anyone; and they name the target itself as the relay of an incoming circuit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import trio
from libp2p.abc import IHost
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2 import CircuitV2Protocol
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, PeerId, Reservation, Status, StopMessage
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP_PROTOCOL
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from multiaddr import Multiaddr

from echo2.base import ids
from echo2.base.errors import LimitExceeded, NotAllowed, Unreachable
from echo2.broadcast.relay_book import Circuit, RelayBook
from echo2.broadcast.runtime.p2p.membership import Members
from echo2.broadcast.runtime.p2p.yamux import RELAY_WINDOW_BYTES, widen, write

MESSAGE_S = 10.0
PIECE_BYTES = 64 << 10
_log = logging.getLogger("echo2.broadcast")


def peer_of_stream(stream: Any) -> ids.PeerId:
    return ids.PeerId(stream.muxed_conn.peer_id.to_base58())


def circuit_multiaddr(relay: ids.PeerId, peer: ids.PeerId) -> Multiaddr:
    return Multiaddr(f"/p2p/{relay}/p2p-circuit/p2p/{peer}")


class MemberRelay(CircuitV2Protocol):  # type: ignore[misc]  # untyped library
    """`book` None: this node is not a relay and only accepts circuits to itself. `came`: called for each of those."""

    def __init__(
        self, host: IHost, members: Members, book: RelayBook | None, came: Callable[[ids.PeerId], None]
    ) -> None:
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
            peer = ids.PeerId(ID(message.peer.id).to_base58())
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
                await self._connect(stream, member, ids.PeerId(ID(message.peer.id).to_base58()))
        except (LimitExceeded, NotAllowed) as error:
            _log.info("%s", error)
            is_limit = isinstance(error, LimitExceeded)
            await self._refuse(stream, Status.RESOURCE_LIMIT_EXCEEDED if is_limit else Status.PERMISSION_DENIED)
        except Exception as error:
            _log.debug("relay: request of %s: %s", member, error)
            await reset(stream)

    async def _reserve(self, stream: Any, member: ids.PeerId) -> None:
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

    async def _connect(self, stream: Any, member: ids.PeerId, target: ids.PeerId) -> None:
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

    async def _reach(self, member: ids.PeerId, target: ids.PeerId) -> Any:
        """Opens a stream to the circuit's target, which must agree; Unreachable if it does not."""
        peer = ID.from_base58(target)
        if not self.host.get_network().connections.get(peer):
            raise Unreachable(f"relay: {target} is not connected")
        other = await self.host.new_stream(peer, [STOP_PROTOCOL_ID])
        source = PeerId(id=ID.from_base58(member).to_bytes())
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


async def reserve(host: IHost, relay: ids.PeerId) -> None:
    """Takes or renews a reservation at `relay`. Unreachable if the relay refuses."""
    with trio.fail_after(MESSAGE_S):
        stream = await host.new_stream(ID.from_base58(relay), [HOP_PROTOCOL])
        try:
            await write_delimited_msg(stream, HopMessage(type=HopMessage.RESERVE))
            _granted(await read_delimited_msg(stream, HopMessage), relay)
        finally:
            await reset(stream)


async def dial_circuit(host: IHost, relay: ids.PeerId, peer: ids.PeerId) -> None:
    """Connects to `peer` through `relay`, encrypted end to end."""
    with trio.fail_after(2 * MESSAGE_S):
        stream = await host.new_stream(ID.from_base58(relay), [HOP_PROTOCOL])
        try:
            target = PeerId(id=ID.from_base58(peer).to_bytes())
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


def _granted(reply: HopMessage, relay: ids.PeerId) -> None:
    if reply.status != Status.OK:
        raise Unreachable(f"relay {relay}: {Status.Name(reply.status)}")


def tag_as_relayed(host: IHost, peer: ids.PeerId, muxed: Any, address: Multiaddr) -> None:
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

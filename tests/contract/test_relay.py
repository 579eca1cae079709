"""A relay serves members of the run, within its limits, and nobody else. Real libp2p on loopback."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.host.autonat.autonat import AUTONAT_PROTOCOL_ID
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeer, Status, StopMessage
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID
from libp2p.utils import encode_varint_prefixed, read_varint_prefixed_bytes
from multiaddr import Multiaddr

from echo2.base.ids import PeerId, RunId
from echo2.broadcast.connection import Connection
from echo2.broadcast.nat import host
from echo2.broadcast.nat.host import EXCHANGE, P2pHost, _multiaddr_of
from echo2.broadcast.nat.reach import HostFacts, HostOptions, Nat
from echo2.broadcast.nat.relay_book import RelayLimits
from echo2.broadcast.transport import Transport
from echo2.trust import tls
from echo2.trust.identity import Identity, RunAuthority
from tests.certificates import issued
from tests.contract.fleet import until
from tests.patience import WAIT_S

PING, IDENTIFY, DCUTR = "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0", "/libp2p/dcutr"
RUN = RunId("relay")


def authority() -> RunAuthority:
    return RunAuthority.create(Identity.generate(), RUN, time.time())


class Lab:
    """A relay, and whoever joins it. No hole is ever punched here, so that all goes through the relay."""

    def __init__(self) -> None:
        self.authority = authority()
        self.barred: set[PeerId] = set()
        self.met: dict[PeerId, str] = {}
        self.own = issued(self.authority)
        self.options = HostOptions("127.0.0.1", is_barred=self.barred.__contains__, proven=self.met.__setitem__)
        self.relay = Nat(self.own)
        self.transports = [self.relay]

    async def serve(self) -> None:
        self.address = f"127.0.0.1:{await self.relay.serve(self.options)}"
        assert self.relay._p2p is not None
        self.book = self.relay._p2p._host.book

    def member(self, of: tls.Credentials, accept: Callable[[Connection], Any] | None = None) -> Nat:
        made = Nat(of, accept, HostOptions("127.0.0.1"))
        made.use_relay(self.own.peer_id, self.address)
        self.transports.append(made)
        return made


@asynccontextmanager
async def lab(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setattr(host, "PAUSES_S", ())
    monkeypatch.setattr("echo2.broadcast.nat.host.PUNCH_S", 2.0)
    made = Lab()
    await made.serve()
    try:
        yield made
    finally:
        for transport in reversed(made.transports):
            await transport.close()


async def test_the_librarys_own_services_answer_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab(monkeypatch) as made:
        asked = made.own.peer_id, made.address
        for of, is_answered in ((issued(made.authority), True), (issued(authority()), False)):
            caller = Nat(of)
            made.transports.append(caller)
            await caller.serve(HostOptions("127.0.0.1"))
            p2p = caller._p2p
            assert p2p is not None
            for protocol, sent in ((PING, b"x" * 32), (IDENTIFY, b""), (DCUTR, b"")):
                answer = await p2p._thread.call(partial(ask, p2p._host, asked, protocol, sent))
                assert bool(answer) == (is_answered and protocol != DCUTR), (protocol, is_answered)
            connect = StopMessage(type=StopMessage.CONNECT, peer=CircuitPeer(id=ID.from_base58(asked[0]).to_bytes()))
            sent = encode_varint_prefixed(connect.SerializeToString())
            answer = await p2p._thread.call(partial(ask, p2p._host, asked, STOP_PROTOCOL_ID, sent))
            expected = Status.OK if is_answered else Status.PERMISSION_DENIED
            assert StopMessage.FromString(answer[1:]).status == expected, "nor is a circuit taken of a stranger"


async def test_members_alone_have_places_and_vouch_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab(monkeypatch) as made:
        own, other, barred = (issued(made.authority) for _ in range(3))
        made.barred.add(barred.peer_id)
        stranger, outlaw = made.member(issued(authority())), made.member(barred)
        transport = Transport(own)
        port = transport.listen("127.0.0.1", 0)
        transport.serve(lambda connection: connection.close())
        try:
            for of, is_told in ((own, True), (other, False)):
                member = made.member(of)  # the second one may forward the port of the first
                await until(lambda member=member: member.facts.relays, "a place")  # type: ignore[misc]
                p2p, asked = member._p2p, partial(claim, made.own.peer_id, own.peer_id, port)
                assert p2p is not None
                assert await p2p._thread.call(partial(asked, p2p._host)) == is_told
                assert made.met == ({own.peer_id: f"127.0.0.1:{port}"} if is_told else {})
                made.met.clear()
        finally:
            await transport.close()
        await until(lambda: stranger.facts.trouble and outlaw.facts.trouble, "both refused")
        assert (stranger.facts.relays, outlaw.facts.relays) == ((), ())
        assert set(made.book.reserved_until) == {own.peer_id, other.peer_id}
        assert "PERMISSION_DENIED" in outlaw.facts.trouble


async def claim(relay: PeerId, claimed: PeerId, port: int, host: P2pHost) -> bool:
    """Whether the relay says that the member of that name can be reached at this machine's port."""
    request = Message(type=Message.DIAL)
    request.dial.peer.id = ID.from_base58(claimed).to_bytes()
    request.dial.peer.addrs.append(Multiaddr(f"/ip4/127.0.0.1/tcp/{port}").to_bytes())
    stream = await host._host.new_stream(ID.from_base58(relay), [AUTONAT_PROTOCOL_ID])
    await stream.write(encode_varint_prefixed(request.SerializeToString()))
    answer = Message()
    answer.ParseFromString(await read_varint_prefixed_bytes(stream))
    return int(answer.dialResponse.status) == int(Message.OK)


async def test_what_a_peer_names_is_not_dialled_for_a_stream_or_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identify and hole host leave what a peer says of itself in the library's book of addresses."""
    met = asyncio.Event()
    async with lab(monkeypatch) as made, await asyncio.start_server(lambda *_: met.set(), "127.0.0.1", 0) as victim:
        member = made.member(issued(made.authority))
        await until(lambda: bool(member.facts.relays), "a place at the relay, which is dialled")
        p2p = member._p2p
        assert p2p is not None
        port, peer = victim.sockets[0].getsockname()[1], Identity.generate().peer_id
        await p2p._thread.call(partial(lead_astray, p2p._host, peer, port))
        assert not met.is_set()


async def lead_astray(host: P2pHost, peer: PeerId, port: int) -> None:
    """All that the library does with an address that `peer` named."""
    named, target = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"), ID.from_base58(peer)
    host._host.get_peerstore().add_addrs(target, [named], 600)
    with contextlib.suppress(Exception), trio.move_on_after(3.0):
        await host._host.new_stream(target, [TProtocol(PING)])
    for is_responder in (False, True):
        with trio.move_on_after(1.0):
            host._host.get_peerstore().add_addrs(target, [named], 600)
            await host._puncher._perform_hole_punch(target, [named], is_responder)
            await host._puncher._dial_peer(target, named, None, is_responder)


async def ask(caller: P2pHost, asked: tuple[PeerId, str], protocol: str, sent: bytes) -> bytes:
    """What the relay answers within a second to whoever speaks `protocol` to it, a member having shown its certificate."""
    peer, address = asked
    relay = await _multiaddr_of(address)
    caller._gate.know_relay(relay)
    await caller._host.connect(PeerInfo(ID.from_base58(peer), [relay]))
    with contextlib.suppress(Exception):  # a stranger is refused in many ways
        await caller._introduce(peer)
    with contextlib.suppress(Exception), trio.move_on_after(1.0):
        stream = await caller._host.new_stream(ID.from_base58(peer), [TProtocol(protocol)])
        if sent:
            await stream.write(sent)
        return bytes(await stream.read(32))
    return b""


async def test_a_circuit_carries_no_chunks_and_ends_where_no_hole_is_punched(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: asyncio.Queue[Connection] = asyncio.Queue()

    async with lab(monkeypatch) as made:
        target = issued(made.authority)
        first, second = made.member(issued(made.authority), taken.put), made.member(target, taken.put)
        await until(lambda: first.facts.relays and second.facts.relays, "places for both")
        first.punch(target.peer_id, made.own.peer_id)
        await until(lambda: made.book.circuits, "a circuit on which a hole could be agreed")
        (circuit,) = made.book.circuits.values()
        p2p = first._p2p
        assert p2p is not None
        assert await p2p._thread.call(partial(is_refused_an_exchange, p2p._host, target.peer_id))
        await until(lambda: not made.book.circuits, "the circuit to be closed")
        assert taken.empty() and circuit.moved_bytes < 100_000


async def test_a_circuit_on_which_nothing_moves_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab(monkeypatch) as made:
        monkeypatch.setattr(host, "PUNCH_S", 60.0)
        made.book.limits = RelayLimits(circuit_s_max=1.0)
        target = issued(made.authority)
        first, second = made.member(issued(made.authority)), made.member(target)
        await until(lambda: first.facts.relays and second.facts.relays, "places for both")
        first.punch(target.peer_id, made.own.peer_id)
        await until(lambda: made.book.circuits, "a circuit on which a hole could be agreed")
        await until(lambda: not made.book.circuits, "its end", 20.0)


async def is_refused_an_exchange(caller: P2pHost, peer: PeerId) -> bool:
    """Whether that peer takes no chunks over a circuit."""
    with trio.fail_after(WAIT_S):
        while ID.from_base58(peer) not in caller._host.get_network().connections:
            await trio.sleep(0.05)
        await caller._introduce(peer)
        stream = await caller._host.new_stream(ID.from_base58(peer), [EXCHANGE])
        try:
            await stream.write(b"a frame")
            return not await stream.read(1)
        except Exception:  # noqa: BLE001  it is reset
            return True


def test_a_machine_that_has_another_address_is_looked_for_there_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers were told the old one for five minutes, by a verdict that was still fresh."""

    async def done(*_: object) -> None:
        pass

    async def back(facts: list[HostFacts]) -> None:
        own = issued(authority())
        moved = P2pHost(own, HostOptions("127.0.0.1", own_port=8422), facts.append, done)
        moved._host = mock.Mock(connect=done)
        moved._introduce = done  # type: ignore[method-assign,assignment]
        moved._autonat = mock.Mock(is_reachable=mock.AsyncMock(return_value=True))
        for seen_at in ("198.51.100.1", "203.0.113.1"):
            moved._observed_host = mock.AsyncMock(return_value=seen_at)  # type: ignore[method-assign]
            await moved._settle_at(own.coordinator_peer_id, "127.0.0.1:8423", 0)

    monkeypatch.setattr(host, "reserve", done)
    facts: list[HostFacts] = []
    trio.run(back, facts)
    assert facts[-1].public_host == "203.0.113.1"

"""A relay serves members of the run, within its limits, and nobody else. Real libp2p on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.host.autonat.autonat import AUTONAT_PROTOCOL_ID
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.utils import encode_varint_prefixed, read_varint_prefixed_bytes
from multiaddr import Multiaddr

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId, RunId
from echo2.broadcast.reachability import LinkKind, circuit_address
from echo2.broadcast.relay_book import RelayBook, RelayLimits
from echo2.broadcast.runtime.p2p import punching
from echo2.broadcast.runtime.p2p.host import P2pHost, _multiaddr_of
from echo2.broadcast.runtime.transport import Connection, refuse_exchange, way_of
from echo2.broadcast.runtime.transport_mixed import MixedTransport, P2pSettings
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.runtime import tls

WAIT_S = 20.0
PING, IDENTIFY, DCUTR = "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0", "/libp2p/dcutr"
RUN = RunId("relay")


def credentials(authority: RunAuthority) -> tls.Credentials:
    identity, key = Identity.generate(), TlsKey.generate()
    issued = authority.issue(certificate_request(identity, key), Role.WORKER, time.time())
    return tls.Credentials(
        identity, key.to_pem(), issued, authority.certificate_pem, RUN, identity.peer_id, "nowhere:1"
    )


def authority() -> RunAuthority:
    return RunAuthority.create(Identity.generate(), RUN, time.time())


class Lab:
    """A relay, and whoever joins it. No hole is ever punched here, so that all goes through the relay."""

    def __init__(self, limits: RelayLimits) -> None:
        self.authority = authority()
        self.book = RelayBook(limits)
        self.barred: set[PeerId] = set()
        self.met: dict[PeerId, str] = {}
        self.own = credentials(self.authority)
        settings = P2pSettings(
            "127.0.0.1", book=self.book, is_barred=self.barred.__contains__, proven=self.met.__setitem__
        )
        self.relay = MixedTransport(self.own, settings=settings)
        self.transports = [self.relay]

    async def serve(self) -> None:
        self.address = f"127.0.0.1:{await self.relay.serve()}"

    def member(self, of: tls.Credentials, accept: Callable[[Connection], Any] = refuse_exchange) -> MixedTransport:
        made = MixedTransport(of, accept, P2pSettings("127.0.0.1"))
        made.use_relay(self.own.peer_id, self.address)
        self.transports.append(made)
        return made


@asynccontextmanager
async def lab(monkeypatch: pytest.MonkeyPatch, **limits: float) -> AsyncIterator[Lab]:
    monkeypatch.setattr(punching, "PAUSES_S", ())
    monkeypatch.setattr("echo2.broadcast.runtime.p2p.host.PUNCH_S", 0.0)
    made = Lab(RelayLimits(**limits))  # type: ignore[arg-type]
    await made.serve()
    try:
        yield made
    finally:
        for transport in reversed(made.transports):
            await transport.close()


async def dialled_again(transport: MixedTransport, address: str, peer_id: PeerId) -> Connection:
    """As a node dials: again after a while, since the end of the old circuit may not have reached everybody yet."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return await transport.dial(address, peer_id)
        except Unreachable:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


async def until(holds: Callable[[], object], what: str) -> None:
    for _ in range(int(WAIT_S / 0.05)):
        if holds():
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"expected {what} within {WAIT_S:.0f} s")


def test_a_stranger_gets_no_place_and_a_barred_member_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with lab(monkeypatch) as made:
            barred = credentials(made.authority)
            made.barred.add(barred.peer_id)
            stranger = made.member(credentials(authority()))
            outlaw = made.member(barred)
            member = made.member(credentials(made.authority))
            await until(lambda: member.facts.relays, "a place for a member")
            await until(lambda: stranger.facts.trouble and outlaw.facts.trouble, "both refused")
            assert (stranger.facts.relays, outlaw.facts.relays) == ((), ())
            assert len(made.book.reserved_until) == 1
            assert "PERMISSION_DENIED" in outlaw.facts.trouble

    asyncio.run(scene())


def test_the_librarys_own_services_answer_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with lab(monkeypatch) as made:
            asked = made.own.peer_id, made.address
            for of, is_answered in ((credentials(made.authority), True), (credentials(authority()), False)):
                caller = MixedTransport(of, settings=P2pSettings("127.0.0.1"))
                made.transports.append(caller)
                await caller.serve()
                p2p = caller._p2p
                assert p2p is not None
                for protocol, sent in ((PING, b"x" * 32), (IDENTIFY, b""), (DCUTR, b"")):
                    answer = await p2p._thread.call(partial(ask, p2p._host, asked, protocol, sent))
                    assert bool(answer) == (is_answered and protocol != DCUTR), (protocol, is_answered)

    asyncio.run(scene())


def test_a_member_that_is_dialled_back_is_told_with_its_address_and_vouches_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        async with lab(monkeypatch) as made:
            own = credentials(made.authority)
            server = tls.new_server()
            port = tls.bind_server(server, "127.0.0.1:0", tls.server_credentials(own))
            await server.start()
            try:
                for of, claimed, is_told in ((own, own, True), (credentials(made.authority), own, False)):
                    member = made.member(of)  # the second one may forward the port of the first
                    await until(lambda member=member: member.facts.relays, "a place")  # type: ignore[misc]
                    p2p, asked = member._p2p, partial(claim, made.own.peer_id, claimed.peer_id, port)
                    assert p2p is not None
                    assert await p2p._thread.call(partial(asked, p2p._host)) == is_told
                    assert made.met == ({own.peer_id: f"127.0.0.1:{port}"} if is_told else {})
                    made.met.clear()
            finally:
                await server.stop(0)

    asyncio.run(scene())


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


def test_what_a_peer_names_is_dialled_neither_for_a_stream_nor_for_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identify and hole punching leave what a peer says of itself in the library's book of addresses."""

    async def scene() -> None:
        met = asyncio.Event()
        async with lab(monkeypatch) as made, await asyncio.start_server(lambda *_: met.set(), "127.0.0.1", 0) as victim:
            member = made.member(credentials(made.authority))
            await until(lambda: member.facts.relays, "a place at the relay, which is dialled")
            p2p = member._p2p
            assert p2p is not None
            port, peer = victim.sockets[0].getsockname()[1], Identity.generate().peer_id
            await p2p._thread.call(partial(lead_astray, p2p._host, peer, port))
            assert not met.is_set()

    asyncio.run(scene())


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


def test_a_relayed_link_says_so_and_ends_where_its_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        taken: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def take(connection: Connection) -> None:
            while True:
                frame = await connection.receive()
                taken.put_nowait(frame)
                if frame is None:
                    return

        async with lab(monkeypatch, circuit_bytes_max=1 << 20) as made:
            target = credentials(made.authority)
            first, second = made.member(credentials(made.authority)), made.member(target, take)
            await until(lambda: first.facts.relays and second.facts.relays, "places for both")
            connection = await first.dial(circuit_address(made.own.peer_id), target.peer_id)
            way = way_of(connection)
            assert way.kind is LinkKind.RELAYED and made.own.peer_id in way.reason
            await connection.send(bytes(100_000))
            assert await asyncio.wait_for(taken.get(), WAIT_S) == bytes(100_000)
            assert 100_000 < made.book.moved_bytes < 200_000
            with pytest.raises(Unreachable):
                for _ in range(100):
                    await asyncio.wait_for(connection.send(bytes(100_000)), WAIT_S)
            assert made.book.moved_bytes <= 1 << 20
            await until(lambda: not made.book.circuits, "the circuit to be closed")
            assert made.book.refused == 1
            again = await dialled_again(first, circuit_address(made.own.peer_id), target.peer_id)
            await again.send(b"a new circuit")
            await until(lambda: not taken.empty() and b"a new circuit" in [taken.get_nowait()], "the link made anew")

    asyncio.run(scene())

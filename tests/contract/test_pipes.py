"""Byte pipes on real sockets: a member that nobody dials is reached through a relay, by TLS that the relay cannot read."""

import asyncio
import contextlib
import gc
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId, RunId
from echo2.broadcast.connection import Connection
from echo2.broadcast.nat import pipes, relay_book
from echo2.broadcast.nat.pipes import PipeAnswer, PipeMember, PipeRelay
from echo2.broadcast.nat.relay_book import RelayBook, RelayLimits
from echo2.broadcast.transport import Transport
from echo2.trust import tls
from echo2.trust.identity import Identity, Role, RunAuthority
from echo2.trust.ports import LEARNER
from echo2.wire.gen.echo2.v1.probe_pb2 import ProbeBlock
from tests.certificates import issued
from tests.contract.fleet import until
from tests.patience import WAIT_S

HOST = "127.0.0.1"
FRAMES = [os.urandom(300_000) for _ in range(20)]


class Scene:
    """A relay, a member that holds a place there and echoes what it is sent, and whoever calls."""

    def __init__(self) -> None:
        self.authority = RunAuthority.create(Identity.generate(), RunId("pipes"), time.time())
        self.relay_credentials = self.credentials(Role.COORDINATOR)
        self.barred: set[PeerId] = set()
        self.relay = PipeRelay(self.relay_credentials, self.barred.__contains__)
        self.relay.listen(HOST, 0)
        self.member = self.credentials(Role.WORKER)
        self.transport = Transport(self.member)
        self.taken: list[PeerId] = []
        self.holder = PipeMember(self.transport.dial, lambda caller, way: self.transport.take(caller, self._echo, way))

    def credentials(self, role: Role, authority: RunAuthority | None = None) -> tls.Credentials:
        return issued(authority or self.authority, role)

    async def _echo(self, connection: Connection) -> None:
        self.taken.append(connection.peer.peer_id)
        while (frame := await connection.receive()) is not None:
            await connection.send(frame)

    async def hold(self) -> None:
        self.holder.keep({self.relay_credentials.peer_id: f"{HOST}:{self.relay.port}"})
        await until(lambda: bool(self.relay._places), "the member holds a place")

    async def call(self, credentials: tls.Credentials | None = None) -> Connection:
        caller = Transport(credentials or self.credentials(Role.WORKER))
        return await caller.dial(f"{HOST}:{self.relay.port}", self.member.peer_id)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    try:
        await made.hold()
        yield made
    finally:
        await made.holder.close()
        await made.transport.close()
        await made.relay.close()


async def exchanged(connection: Connection) -> list[bytes]:
    async def send() -> None:
        for frame in FRAMES:
            await connection.send(frame)

    sending = asyncio.create_task(send())
    got = [await asyncio.wait_for(connection.receive(), WAIT_S) for _ in FRAMES]
    await sending
    return [frame or b"" for frame in got]


@pytest.mark.parametrize("has_splice", [True, False])
async def test_caller_and_member_meet_and_prove_who_they_are(has_splice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_splice:
        monkeypatch.setattr(pipes, "_splice", None)
    async with scene() as s:
        caller = s.credentials(Role.WORKER)
        connection = await s.call(caller)
        assert connection.peer.peer_id == s.member.peer_id
        assert await exchanged(connection) == FRAMES
        assert s.taken == [caller.peer_id]
        assert sum(c.moved_bytes for c in s.relay._book.circuits.values()) >= 2 * sum(map(len, FRAMES))
        await connection.close()
        await until(lambda: not s.relay._book.circuits, "the pipe has ended")
        assert not s.relay._openings and not s.relay._waiting


async def test_grpc_through_a_pipe_reaches_the_members_own_server() -> None:
    async def echo(request: ProbeBlock, context: object) -> ProbeBlock:
        return request

    async with scene() as s:
        server = tls.new_server(LEARNER)
        method = grpc.unary_unary_rpc_method_handler(echo, ProbeBlock.FromString, ProbeBlock.SerializeToString)
        server.add_registered_method_handlers("echo2.v1.Ingest", {"Report": method})  # its messages may be large
        port = tls.bind_server(server, f"{HOST}:0", tls.server_credentials(s.member))
        await server.start()
        s.holder.grpc_at = (HOST, port)
        caller = s.credentials(Role.WORKER)
        async with tls.open_channel(f"{HOST}:{s.relay.port}", s.member.peer_id, caller) as channel:
            said = ProbeBlock(data=os.urandom(300_000)).SerializeToString()
            assert await channel.unary_unary("/echo2.v1.Ingest/Report")(said, timeout=WAIT_S) == said
        await server.stop(0)


class Tickets:
    """A place at a relay that calls very often."""

    def __init__(self, remote: tuple[str, int], count: int) -> None:
        self.remotes, self._left = frozenset({remote}), count

    async def receive(self) -> bytes:
        if not self._left:
            await asyncio.Event().wait()
        self._left -= 1
        return os.urandom(pipes.TICKET_BYTES)

    async def close(self) -> None:
        pass


async def test_a_learner_behind_a_nat_comes_to_as_many_callers_as_its_relay_lets_in() -> None:
    came: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.readexactly(pipes.ANSWER_BYTES))
        await reader.read()  # a caller that stays
        writer.close()

    async def dial(address: str, peer_id: PeerId) -> Tickets:
        return Tickets((HOST, port), 300)

    async with await asyncio.start_server(take, HOST, 0, backlog=512) as server:
        port = server.sockets[0].getsockname()[1]
        member = PipeMember(dial, lambda caller, way: None)  # type: ignore[arg-type]
        member.keep({PeerId("relay"): f"{HOST}:{port}"})
        await until(lambda: len(set(came)) == 300, "all callers are met")
        await member.close()


async def test_a_member_that_is_refused_a_place_comes_back_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Barred, or of a folder that another process has copied: it shook hands once a second for ever."""
    monkeypatch.setattr(pipes, "PAUSE_S_MIN", 0.005)
    dialled: list[float] = []

    class Refusal(Tickets):
        async def receive(self) -> None:  # type: ignore[override]
            return None

    async def dial(address: str, peer_id: PeerId) -> Refusal:
        dialled.append(time.monotonic())
        return Refusal((HOST, 1), 0)

    member = PipeMember(dial, lambda caller, way: None)  # type: ignore[arg-type]
    member.keep({PeerId("relay"): f"{HOST}:1"})
    await until(lambda: len(dialled) == 6, "it has come back five times")
    await member.close()
    assert dialled[5] - dialled[0] >= 0.005 * 31


async def test_strangers_guessers_and_callers_of_nobody_get_no_further_than_the_door() -> None:
    async with scene() as s:
        other = RunAuthority.create(Identity.generate(), RunId("pipes"), time.time())
        strange = replace(s.credentials(Role.WORKER, other), authority_pem=s.authority.certificate_pem)
        for peer in (s.member.peer_id, s.relay_credentials.peer_id):  # a place, too, is for members of the run
            with contextlib.suppress(Unreachable):  # TLS 1.3 lets a client believe that it is in until it reads
                connection = await Transport(strange).dial(f"{HOST}:{s.relay.port}", peer)
                assert await asyncio.wait_for(connection.receive(), WAIT_S) is None
                await connection.close()
        assert not s.taken and len(s.relay._places) == 1
        with pytest.raises(Unreachable):
            await Transport(s.credentials(Role.WORKER)).dial(f"{HOST}:{s.relay.port}", Identity.generate().peer_id)
        for opening in (PipeAnswer(bytes(16)).to_bytes(), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff"):
            reader, writer = await asyncio.open_connection(HOST, s.relay.port)
            writer.write(opening)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
        connection = await s.call()
        await connection.send(b"still served")
        assert await connection.receive() == b"still served"
        await connection.close()


async def test_a_barred_member_is_not_reached_any_more_and_holds_no_place() -> None:
    async with scene() as s:
        s.barred.add(s.member.peer_id)
        with pytest.raises(Unreachable):
            await s.call()
        s.holder.keep({})
        await until(lambda: not s.relay._places, "the place is given up")
        s.holder.keep({s.relay_credentials.peer_id: f"{HOST}:{s.relay.port}"})
        await asyncio.sleep(0.5)
        assert not s.relay._places


async def test_a_place_is_kept_for_as_long_as_its_connection_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """And taken again after the relay was away."""
    monkeypatch.setattr(relay_book, "PIPES", replace(relay_book.PIPES, reservation_s=0.4))
    async with scene() as s:
        await asyncio.sleep(1.0)
        await (await s.call()).close()
        port = s.relay.port
        await s.relay.close()
        s.relay = PipeRelay(s.relay_credentials)
        s.relay.listen(HOST, port)
        await until(lambda: bool(s.relay._places), "the member has come back")
        connection = await s.call()
        assert connection.peer.peer_id == s.member.peer_id
        await connection.close()
        s.holder.keep({})
        await until(lambda: not s.relay._places, "the place is given up")
        with pytest.raises(Unreachable):
            await s.call()


async def test_a_pipe_ends_at_the_limit_of_its_ledger_and_further_pipes_are_refused() -> None:
    async with scene() as s:
        small = RelayBook(RelayLimits(circuit_bytes_max=1 << 20, circuits_per_member_max=1))
        (place,) = s.relay._places.values()
        s.relay._places = {name: replace(place, book=small) for name in s.relay._places}
        small.reserve(s.member.peer_id, time.monotonic())
        connection = await s.call()
        with pytest.raises(Unreachable):
            await s.call()
        with pytest.raises((Unreachable, AssertionError)):
            got = await exchanged(connection)
            assert got == FRAMES
        assert small.refused >= 2


async def test_callers_that_say_nothing_are_bounded_and_give_up_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "OPENING_S", 0.5)
    async with scene() as s:
        silent = [socket.create_connection((HOST, s.relay.port)) for _ in range(pipes.CALLERS_PER_HOST + 8)]
        await until(lambda: s.relay._openings[HOST] == pipes.CALLERS_PER_HOST, "as many as may wait")
        await until(lambda: not s.relay._openings, "they were hung up on")
        connection = await s.call()
        await connection.close()
        for one in silent:
            one.close()


async def test_a_relay_that_is_closed_as_a_caller_comes_leaves_no_socket_open() -> None:
    """pytest makes an error of the warning with which a socket goes that nobody closed."""
    relay = Scene().relay
    with socket.create_connection((HOST, relay.port), timeout=WAIT_S) as caller:
        while not relay._openings:
            await asyncio.sleep(0)
        await relay.close()  # what serves the caller has not begun
        assert caller.recv(1) == b""
    gc.collect()

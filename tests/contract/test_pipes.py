"""Byte pipes on real sockets: a member that nobody dials is reached through a relay, by TLS that the relay cannot read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId, RunId
from echo2.broadcast.pipe_hello import PipeAnswer
from echo2.broadcast.relay_book import PIPES, RelayBook, RelayLimits
from echo2.broadcast.runtime import pipe_member, pipe_relay, splicing
from echo2.broadcast.runtime.pipe_member import PipeMember
from echo2.broadcast.runtime.pipe_relay import PipeRelay
from echo2.broadcast.runtime.transport import Connection
from echo2.broadcast.runtime.transport_bulk import BulkTransport
from echo2.broadcast.runtime.transport_grpc import GrpcTransport
from echo2.outside import Machine, entered
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.runtime import tls
from tests.contract.fleet import until
from tests.unit.outside.test_outside import StoppedClock

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
        self.bulk = BulkTransport(self.member)
        self.taken: list[PeerId] = []
        self.holder = PipeMember(self.bulk.dial, lambda raw, host: self.bulk.take(raw, host, self._echo))

    def credentials(self, role: Role, authority: RunAuthority | None = None) -> tls.Credentials:
        identity, key = Identity.generate(), TlsKey.generate()
        authority = authority or self.authority
        certificate = authority.issue(certificate_request(identity, key), role, time.time())
        return tls.Credentials(
            identity, key.to_pem(), certificate, authority.certificate_pem, authority.run_id,
            authority.identity.peer_id, "nowhere:1",
        )  # fmt: skip

    async def _echo(self, connection: Connection) -> None:
        self.taken.append(connection.peer.peer_id)
        while (frame := await connection.receive()) is not None:
            await connection.send(frame)

    async def hold(self) -> None:
        self.holder.keep({self.relay_credentials.peer_id: f"{HOST}:{self.relay.port}"})
        await until(lambda: bool(self.relay._places), "the member holds a place")

    async def call(self, credentials: tls.Credentials | None = None) -> Connection:
        caller = BulkTransport(credentials or self.credentials(Role.WORKER))
        return await caller.dial(HOST, self.relay.port, self.member.peer_id)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    try:
        await made.hold()
        yield made
    finally:
        await made.holder.close()
        await made.bulk.close()
        await made.relay.close()


async def exchanged(connection: Connection) -> list[bytes]:
    async def send() -> None:
        for frame in FRAMES:
            await connection.send(frame)

    sending = asyncio.create_task(send())
    got = [await asyncio.wait_for(connection.receive(), 10) for _ in FRAMES]
    await sending
    return [frame or b"" for frame in got]


@pytest.mark.parametrize("has_splice", [True, False])
def test_a_caller_meets_a_member_through_a_pipe_and_each_proves_who_it_is(
    has_splice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_splice:
        monkeypatch.setattr(splicing, "_splice", None)

    async def play() -> None:
        async with scene() as s:
            caller = s.credentials(Role.WORKER)
            connection = await s.call(caller)
            assert connection.peer.peer_id == s.member.peer_id
            assert await exchanged(connection) == FRAMES
            assert s.taken == [caller.peer_id]
            assert s.relay.moved_bytes >= 2 * sum(map(len, FRAMES))
            await connection.close()
            await until(lambda: not s.relay._book.circuits, "the pipe has ended")
            assert not s.relay._openings and not s.relay._waiting

    asyncio.run(play())


def test_grpc_through_a_pipe_reaches_the_members_own_server() -> None:
    async def play() -> None:
        async with scene() as s:
            server, side = tls.new_server(), GrpcTransport(s.member)
            side.add_to_server(server, s._echo)
            port = tls.bind_server(server, f"{HOST}:0", tls.server_credentials(s.member))
            await server.start()
            s.holder.grpc_at = (HOST, port)
            caller = GrpcTransport(s.credentials(Role.WORKER))
            connection = await caller.dial(f"{HOST}:{s.relay.port}", s.member.peer_id)
            assert await exchanged(connection) == FRAMES
            await connection.close()
            await server.stop(0)

    asyncio.run(play())


def test_a_stranger_and_a_caller_of_nobody_get_no_further_than_the_door() -> None:
    async def play() -> None:
        async with scene() as s:
            other = RunAuthority.create(Identity.generate(), RunId("pipes"), time.time())
            strange = replace(s.credentials(Role.WORKER, other), authority_pem=s.authority.certificate_pem)
            with contextlib.suppress(Unreachable):  # TLS 1.3 lets a client believe that it is in until it reads
                connection = await s.call(strange)
                assert await asyncio.wait_for(connection.receive(), 10) is None
            assert not s.taken
            caller = BulkTransport(s.credentials(Role.WORKER))
            with pytest.raises(Unreachable):
                await caller.dial(HOST, s.relay.port, Identity.generate().peer_id)
            with pytest.raises(Unreachable):  # a place is for members of the run
                await BulkTransport(strange).dial(HOST, s.relay.port, s.relay_credentials.peer_id)
                raise Unreachable("TLS 1.3: it is told at its first read")
            await asyncio.sleep(0.1)
            assert len(s.relay._places) == 1

    asyncio.run(play())


def test_a_barred_member_is_not_reached_any_more_and_holds_no_place() -> None:
    async def play() -> None:
        async with scene() as s:
            s.barred.add(s.member.peer_id)
            with pytest.raises(Unreachable):
                await s.call()
            s.holder.keep({})
            await until(lambda: not s.relay._places, "the place is given up")
            s.holder.keep({s.relay_credentials.peer_id: f"{HOST}:{s.relay.port}"})
            await asyncio.sleep(0.5)
            assert not s.relay._places

    asyncio.run(play())


def test_a_place_is_kept_for_as_long_as_its_member_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_member, "STILL_HERE_S", 0.02)
    machine, clock = Machine(), StoppedClock(time.time())
    machine.clock = clock

    async def play() -> None:
        async with scene() as s:
            book = s.relay._book
            for _ in range(3):
                clock.now += 0.9 * PIPES.reservation_s
                await until(
                    lambda: book.reserved_until[s.member.peer_id] == clock.now + PIPES.reservation_s,
                    "it was heard, and its place is for as long again",
                )
            connection = await s.call()
            assert connection.peer.peer_id == s.member.peer_id
            await connection.close()

    with entered(machine):
        asyncio.run(play())


def test_a_member_that_does_not_speak_is_not_called_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_member, "STILL_HERE_S", 1e6)
    machine, clock = Machine(), StoppedClock(time.time())
    machine.clock = clock

    async def play() -> None:
        async with scene() as s:
            connection = await s.call()
            await connection.close()
            clock.now += PIPES.reservation_s
            with pytest.raises(Unreachable):
                await s.call()
            assert s.relay._book.refused == 1

    with entered(machine):
        asyncio.run(play())


def test_a_ticket_is_worth_nothing_twice_or_to_whoever_guesses_one() -> None:
    async def play() -> None:
        async with scene() as s:
            for opening in (PipeAnswer(bytes(16)).to_bytes(), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff"):
                reader, writer = await asyncio.open_connection(HOST, s.relay.port)
                writer.write(opening)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()
            connection = await s.call()
            await connection.send(b"still served")
            assert await connection.receive() == b"still served"
            await connection.close()

    asyncio.run(play())


def test_a_pipe_ends_at_the_limit_of_its_ledger_and_further_pipes_are_refused() -> None:
    async def play() -> None:
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

    asyncio.run(play())


def test_callers_that_say_nothing_are_bounded_and_give_up_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe_relay, "OPENING_S", 0.5)

    async def play() -> None:
        async with scene() as s:
            silent = [socket.create_connection((HOST, s.relay.port)) for _ in range(pipe_relay.CALLERS_PER_HOST + 8)]
            await until(lambda: s.relay._openings[HOST] == pipe_relay.CALLERS_PER_HOST, "as many as may wait")
            await until(lambda: not s.relay._openings, "they were hung up on")
            connection = await s.call()
            await connection.close()
            for one in silent:
                one.close()

    asyncio.run(play())


def test_a_member_takes_its_place_again_after_the_relay_was_away() -> None:
    async def play() -> None:
        async with scene() as s:
            port = s.relay.port
            await s.relay.close()
            s.relay = PipeRelay(s.relay_credentials)
            s.relay.listen(HOST, port)
            await until(lambda: bool(s.relay._places), "the member has come back")
            connection = await s.call()
            await connection.close()

    asyncio.run(play())

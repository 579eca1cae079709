"""Strangers and members that want a relay's byte pipes for themselves: they get their share for a time, and others are served."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from echo2.base.ids import PeerId
from echo2.base.units import address_of
from echo2.broadcast import connection
from echo2.broadcast.connection import Connection
from echo2.broadcast.nat import access, host, pipes
from echo2.broadcast.nat.relay_book import RelayBook, RelayLimits
from echo2.broadcast.transport import Transport
from echo2.trust.identity import Role, dns_name_of
from echo2.trust.ports import PIPES
from tests.certificates import issued
from tests.contract.fleet import until
from tests.contract.test_connections import TlsByHand
from tests.contract.test_pipes import FRAMES, HOST, Scene, exchanged, scene
from tests.contract.test_relay import lab
from tests.patience import WAIT_S
from tests.redteam.hostile import ELSEWHERE, idle_connections, still_open
from tests.unit.broadcast.test_frames import tls_hello

GARBAGE = b"no record of TLS"
_Caller = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def hello_for(peer: PeerId) -> bytes:
    """A whole TLS hello that names a peer, as any client makes it."""
    return tls_hello(dns_name_of(peer))


@asynccontextmanager
async def callers(s: Scene, said: bytes, count: int) -> AsyncIterator[list[_Caller]]:
    """Of another address than all else here; each keeps its socket open whatever the other side does."""
    made = [await asyncio.open_connection(HOST, s.relay.port, local_addr=(ELSEWHERE, 0)) for _ in range(count)]
    try:
        for _, writer in made:
            writer.write(said)
        yield made
    finally:
        for _, writer in made:
            writer.close()


async def is_served(s: Scene) -> bool:
    connection = await s.call()
    await connection.send(b"here?")
    answer = await asyncio.wait_for(connection.receive(), WAIT_S)
    await connection.close()
    return answer == b"here?"


async def until_left(those: list[_Caller], count: int, limit_s: float = 5.0) -> None:
    """Only so many of them have not been hung up on."""
    ending = [asyncio.create_task(reader.read()) for reader, _ in those]
    await until(lambda: sum(not one.done() for one in ending) <= count, f"at most {count} are left", limit_s)
    for one in ending:
        one.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def with_limits(s: Scene, limits: RelayLimits) -> RelayBook:
    """The relay's, from now on."""
    book = RelayBook(limits)
    (place,) = s.relay._places.values()
    s.relay._places = {name: replace(place, book=book) for name in s.relay._places}
    book.reserve(s.member.peer_id, time.monotonic())
    return book


@pytest.mark.parametrize("has_splice", [True, False])
async def test_a_caller_that_stays_behind_holds_no_pipe(has_splice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "ENDING_S", 0.2)
    if not has_splice:
        monkeypatch.setattr(pipes, "_splice", None)
    async with scene() as s:
        book = with_limits(s, RelayLimits(circuits_per_member_max=8))
        async with callers(s, hello_for(s.member.peer_id) + GARBAGE, 4) as those:
            for reader, _ in those:  # the member sees the garbage and hangs up; the caller does not
                await asyncio.wait_for(reader.read(), WAIT_S)
            await until(lambda: not book.circuits, "the relay has ended the other direction as well")
            assert await is_served(s)


async def test_a_pipe_on_which_nothing_moves_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STILL_HERE_S", 10 * WAIT_S)
    async with scene() as s:
        book = with_limits(s, RelayLimits(circuit_s_max=0.5))
        called = await s.call()
        assert await asyncio.wait_for(called.receive(), WAIT_S) is None
        await called.close()
        assert book.refused == 1, "the log says which limit it was"


async def test_hellos_for_the_relay_itself_that_go_no_further_have_the_share_of_their_address() -> None:
    async with scene() as s:
        hello = hello_for(s.relay_credentials.peer_id)
        async with callers(s, hello, pipes.CALLERS_PER_HOST) as those:
            for reader, _ in those:
                await asyncio.wait_for(reader.readexactly(1), WAIT_S)  # the relay has begun the handshake
            async with callers(s, hello, 8) as more:
                await until_left(more, 0, 3.0)
            assert await is_served(s) and len(s.relay._places) == 1


async def test_pipes_and_places_stay_where_strangers_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "PIPES", replace(PIPES, stranger_s=1.5))
    async with scene() as s:
        place, connection = s.relay._places.copy(), await s.call()
        async with callers(s, b"", 1) as those:
            await until_left(those, 0)
        assert await exchanged(connection) == FRAMES
        assert s.relay._places == place
        await connection.close()


async def test_an_address_gets_half_of_the_port_however_many_members_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "PIPES", replace(PIPES, connections_cap=16))
    async with scene() as s:
        async with callers(s, hello_for(s.member.peer_id), 12) as those:  # each has a pipe until the member gives it up
            await until_left(those, 8)
            assert await is_served(s)
        await until(lambda: not s.relay._connected[ELSEWHERE], "they have left")


async def test_an_address_gets_half_of_a_members_pipes() -> None:
    async with scene() as s:
        with_limits(s, RelayLimits(circuits_per_member_max=4))
        async with callers(s, hello_for(s.member.peer_id), 6) as those:
            await until_left(those, 2)
            assert await is_served(s)
        await until(lambda: not s.relay._piped, "they have left")


async def test_a_members_second_place_ends_its_first_however_often() -> None:
    async with scene() as s:
        worker = Transport(s.credentials(Role.WORKER))
        made: list[Connection] = []
        for count in range(12):
            made.append(await worker.dial(address_of(HOST, s.relay.port), s.relay_credentials.peer_id))
            await until(lambda: len(s.relay._places) == 2, "it holds a place")
            if count:
                assert await asyncio.wait_for(made[-2].receive(), WAIT_S) is None
        await until(lambda: s.relay._connected[HOST] == 2, "one of the worker, one of the member")
        assert not made[-1].ended.is_set() and len(s.relay._places) == 2
        assert await is_served(s)
        for one in made:
            await one.close()


async def test_a_member_that_never_says_it_is_still_here_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STILL_HERE_S", 0.2)
    monkeypatch.setattr(connection, "SILENT_S", 1.0)
    async with scene() as s:
        mine = s.credentials(Role.WORKER)
        silent = await asyncio.to_thread(TlsByHand, mine, s.relay.port, s.relay_credentials.peer_id)
        with silent.socket:
            await asyncio.to_thread(silent.shake_hands)
            await until(lambda: s.relay.holds(mine.peer_id), "it holds a place")
            await until(lambda: not s.relay.holds(mine.peer_id), "it has lost it", 5.0)
            assert s.relay.holds(s.member.peer_id), "that one says it is still here"
            assert await is_served(s)


async def test_a_member_that_talks_to_the_relay_loses_its_place() -> None:
    """Each frame would have the relay look at all its places."""
    async with scene() as s:
        talker = Transport(s.credentials(Role.WORKER))
        connection = await talker.dial(address_of(HOST, s.relay.port), s.relay_credentials.peer_id)
        await until(lambda: len(s.relay._places) == 2, "it holds a place")
        await connection.send(b"something")
        assert await asyncio.wait_for(connection.receive(), WAIT_S) is None
        await until(lambda: len(s.relay._places) == 1, "it has lost it")
        assert await is_served(s)
        await connection.close()


# ---- floods of connections to a relay's libp2p listener. Real libp2p on loopback


async def test_idle_connections_keep_no_member_out_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "STRANGER_S", 2.0)
    async with lab(monkeypatch) as made:
        port = int(made.address.rpartition(":")[2])
        with idle_connections(port, 300, ELSEWHERE) as held:
            async with asyncio.timeout(6.0):  # before the library's own deadline for a handshake
                await until(lambda: still_open(held) <= access.STRANGERS_PER_HOST, "an address's share")
            member = made.member(issued(made.authority))
            await until(lambda: member.facts.relays, "a place for a member beside them")
            await until(lambda: not still_open(held), "the end of those that prove nothing")
            await asyncio.sleep(2.0)
            assert member.facts.relays, "members stay"


async def test_a_relay_that_had_as_many_callers_as_places_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PEERS_MAX", 4)
    async with lab(monkeypatch) as made:
        p2p = made.relay._p2p
        for _ in range(6):
            member = made.member(issued(made.authority))
            await until(lambda member=member: member.facts.relays, "a place")  # type: ignore[misc]
            await member.close()
            made.transports.remove(member)
            await until(lambda: len(p2p._host.accepted.places) == 0, "its connection to be forgotten")

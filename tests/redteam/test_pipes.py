"""Strangers and members that want a relay's byte pipes for themselves: they get their share for a time, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from echo2.base.ids import PeerId
from echo2.broadcast.relay_book import RelayBook, RelayLimits
from echo2.broadcast.runtime import splicing
from echo2.trust.identity import dns_name_of
from tests.contract.fleet import until
from tests.contract.test_pipes import HOST, Scene, scene
from tests.redteam.target import ELSEWHERE

GARBAGE = b"no record of TLS"
_Caller = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def hello_for(peer: PeerId) -> bytes:
    """A whole TLS hello that names a peer, as any client makes it."""
    context = ssl.create_default_context()
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname=dns_name_of(peer)).do_handshake()
    return said.read()


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
    answer = await asyncio.wait_for(connection.receive(), 10)
    await connection.close()
    return answer == b"here?"


def with_limits(s: Scene, limits: RelayLimits) -> RelayBook:
    """The relay's, from now on."""
    book = RelayBook(limits)
    (place,) = s.relay._places.values()
    s.relay._places = {name: replace(place, book=book) for name in s.relay._places}
    book.reserve(s.member.peer_id, time.monotonic())
    return book


@pytest.mark.parametrize("has_splice", [True, False])
def test_a_caller_that_stays_behind_the_members_end_holds_no_pipe(
    has_splice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splicing, "ENDING_S", 0.2)
    if not has_splice:
        monkeypatch.setattr(splicing, "_splice", None)

    async def play() -> None:
        async with scene() as s:
            book = with_limits(s, RelayLimits(circuits_per_member_max=4))
            async with callers(s, hello_for(s.member.peer_id) + GARBAGE, 4) as those:
                for reader, _ in those:  # the member sees the garbage and hangs up; the caller does not
                    await asyncio.wait_for(reader.read(), 10)
                await until(lambda: not book.circuits, "the relay has ended the other direction as well", 5.0)
                assert await is_served(s)

    asyncio.run(play())


def test_a_pipe_on_which_nothing_moves_ends_when_its_time_is_over() -> None:
    async def play() -> None:
        async with scene() as s:
            book = with_limits(s, RelayLimits(circuit_s_max=0.5))
            connection = await s.call()
            assert await asyncio.wait_for(connection.receive(), 10) is None
            await connection.close()
            assert book.refused == 1, "the log says which limit it was"

    asyncio.run(play())

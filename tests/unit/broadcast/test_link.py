"""A link to one peer, over as many connections as it has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import cast
from unittest import mock

import pytest

from echo2.base.errors import MalformedMessage
from echo2.base.ids import PeerId
from echo2.broadcast import connection
from echo2.broadcast.connection import CLOSE_S, HEAD, Connection
from echo2.broadcast.exchange import Exchange
from echo2.broadcast.link import PeerLink
from echo2.outside.guard import FairShare
from echo2.sim.virtual_loop import VirtualLoop
from echo2.trust.identity import PeerIdentity, Role


class Hung:
    """A connection whose other side answers nothing, so that each close takes as long as one may."""

    peer = PeerIdentity(PeerId("peer"), Role.WORKER)

    def __init__(self) -> None:
        self.is_closed = False

    async def receive_all(self, take: Callable[[bytes], bool]) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await asyncio.sleep(CLOSE_S)
        self.is_closed = True


def test_a_link_to_a_peer_that_hangs_closes_as_fast_as_one_of_its_connections() -> None:
    loop, lines = VirtualLoop(), [Hung() for _ in range(8)]

    async def scene() -> None:
        first, *others = (cast(Connection, line) for line in lines)
        link = PeerLink(first, mock.Mock(spec=Exchange), FairShare())  # it has nothing to send
        carrying = [asyncio.create_task(link.carry(other)) for other in others]
        await asyncio.sleep(0)
        assert link.width == len(lines)
        begun = loop.time()
        await link.close()
        assert loop.time() - begun <= 1.5 * CLOSE_S and all(line.is_closed for line in lines)
        await asyncio.gather(*carrying)

    try:
        loop.run_until_complete(scene())
    finally:
        loop.close()


class Read:
    """A connection to whose reader the test gives bytes as its stream would."""

    def __init__(self, share: FairShare | None = None) -> None:
        self.stream = mock.Mock(is_closing=lambda: False)
        self.connection = Connection(is_outgoing=True, share=share)
        self.connection.connection_made(self.stream, ("10.0.0.1", 1), b"")

    def comes(self, *frames: bytes) -> None:
        data = b"".join(HEAD.pack(len(frame)) + frame for frame in frames)
        room = self.connection.get_buffer(-1)
        room[: len(data)] = data
        self.connection.buffer_updated(len(data))


@contextlib.asynccontextmanager
async def taking(read: Read, take: Callable[[bytes], bool]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(read.connection.receive_all(take))
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        read.connection.connection_lost(None)
        with contextlib.suppress(MalformedMessage):
            await task


async def test_frames_are_taken_as_they_come_those_before_and_to_the_end() -> None:
    read, taken = Read(), list[bytes]()
    read.comes(b"early")

    def take(frame: bytes) -> bool:
        taken.append(frame)
        return True

    async with taking(read, take) as task:
        assert taken == [b"early"]
        read.comes(b"one", b"\0", b"two")
        assert taken == [b"early", b"one", b"two"], "without another turn of the loop, and no beats"
    assert task.done() and task.exception() is None


async def test_an_error_in_a_frame_ends_the_taking_and_no_later_frame_is_looked_at() -> None:
    read, taken = Read(), list[bytes]()

    def take(frame: bytes) -> bool:
        taken.append(frame)
        raise MalformedMessage("peer: expected sense")

    async with taking(read, take) as task:
        read.comes(b"bad", b"worse")
        read.comes(b"worst")
        with pytest.raises(MalformedMessage, match="expected sense"):
            await task
    assert taken == [b"bad"] and read.stream.pause_reading.called


async def test_a_peer_that_used_up_its_share_for_nothing_is_not_read_for_a_while() -> None:
    share = mock.Mock(pause_s=mock.Mock(side_effect=[0.0, 0.05, 0.0]))
    read, taken = Read(cast(FairShare, share)), list[bytes]()

    def take(frame: bytes) -> bool:
        taken.append(frame)
        return frame == b"useful"

    async with taking(read, take):
        read.stream.reset_mock()
        read.comes(b"useful", b"a", b"b", b"c", b"useful")
        assert taken == [b"useful", b"a", b"b"] and read.stream.pause_reading.called
        await asyncio.sleep(0.1)
        assert taken == [b"useful", b"a", b"b", b"c", b"useful"] and read.stream.resume_reading.called


async def test_what_a_useful_frame_takes_is_not_of_the_time_that_its_read_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now, share = 0.0, mock.Mock(pause_s=mock.Mock(return_value=0.0))
    monkeypatch.setattr(connection, "monotonic", lambda: now)
    read = Read(cast(FairShare, share))

    def take(frame: bytes) -> bool:
        nonlocal now
        now += 0.5
        return True

    async with taking(read, take):
        for _ in range(2):
            read.comes(b"useful")
            read.connection.worked(0.6, 1, 6)
    assert [call.args[0] for call in share.pause_s.call_args_list] == [pytest.approx(0.1)] * 2

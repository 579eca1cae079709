"""A link to one peer, over as many connections as it has."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import cast
from unittest import mock

import pytest

from echo2.base.errors import (
    CorruptChunk,
    DiskFull,
    EchoError,
    LimitExceeded,
    MalformedMessage,
    Unreachable,
    VersionMismatch,
)
from echo2.base.ids import PeerId, RunId
from echo2.broadcast import connection
from echo2.broadcast.artifact import ArtifactKey
from echo2.broadcast.connection import CLOSE_S, HEAD, Connection
from echo2.broadcast.events import Have, SendChunk
from echo2.broadcast.exchange import Exchange, deserves_ban
from echo2.broadcast.link import CONTROL_FRAMES_MAX, FINISH_S, PeerLink, greet
from echo2.broadcast.pace import SLOTS_PER_PEER
from echo2.broadcast.plan import CHUNK_BYTES_MIN
from echo2.outside.guard import FairShare
from echo2.trust.identity import PeerIdentity, Role
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.wire import broadcast as wire

pytestmark = pytest.mark.usefixtures("virtual_time")
RUN, KEY = RunId("a-run"), ArtifactKey(b"k" * 16)


class Hung:
    """A connection whose other side answers nothing, so that each close takes as long as one may. `frames`: what it said before;
    `is_cut`: it takes nothing, either."""

    peer = PeerIdentity(PeerId("peer"), Role.WORKER)

    def __init__(self, *frames: bytes | None, is_cut: bool = False) -> None:
        self.is_closed, self._is_cut, self._frames, self.sent = False, is_cut, list(frames), list[bytes]()

    async def receive(self) -> bytes | None:
        return self._frames.pop(0) if self._frames else await asyncio.Event().wait()  # type: ignore[func-returns-value]

    async def receive_all(self, take: Callable[[bytes], bool]) -> None:
        await asyncio.Event().wait()

    async def send(self, *parts: bytes) -> None:
        if not self._is_cut:
            self.sent.append(b"".join(parts))
        await asyncio.sleep(0.1)
        if self._is_cut:
            raise Unreachable("peer: it was cut")

    async def close(self) -> None:
        await asyncio.sleep(CLOSE_S)
        self.is_closed = True


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ((), "no hello within 10 s"),
        ((None,), "ended before its hello"),
        ((wire.control_frame(Have(PeerId(""), KEY, 1, False)),), "expected a hello first, got have"),
        ((wire.hello(PROTOCOL_VERSION + 1, RUN),), "expected protocol"),
        ((wire.hello(PROTOCOL_VERSION, RunId("another")),), "of run another"),
    ],
)
async def test_whoever_does_not_greet_as_a_peer_of_the_run_gets_no_link(
    frames: tuple[bytes | None, ...], error: str
) -> None:
    with pytest.raises(EchoError, match=error):
        await greet(cast(Connection, Hung(*frames)), RUN)


def test_whoever_breaks_the_protocol_is_banned_and_nobody_for_another_release_or_for_what_we_lack() -> None:
    errors = MalformedMessage(""), CorruptChunk(""), VersionMismatch(""), LimitExceeded(""), DiskFull(""), KeyError("")
    assert [deserves_ban(error, PeerId("peer")) for error in errors] == [True, True, False, False, False, False]


def linked(line: Hung) -> PeerLink:
    exchange = mock.Mock(spec=Exchange)
    exchange.library = mock.Mock(header_frame=lambda key: b"header", frame=lambda key, index: bytes([index]))
    return PeerLink(cast(Connection, line), exchange, FairShare())


async def test_control_frames_go_first_and_in_their_order_and_a_peer_that_takes_none_has_a_bound() -> None:
    line = Hung()
    link = linked(line)
    for index in range(4):
        link.send_chunk(SendChunk(PeerId("peer"), KEY, index, None))
        link.send_control(bytes([100 + index]))
    for _ in range(CONTROL_FRAMES_MAX - 4):
        link.send_control(b"more")
    with pytest.raises(LimitExceeded, match="expected it to read"):
        link.send_control(b"too many")
    running = asyncio.create_task(link.run())
    await asyncio.sleep(0.2 * CONTROL_FRAMES_MAX)
    await link.close()
    await running
    assert [frame[-1] for frame in line.sent[:4]] == [100, 101, 102, 103]
    assert [frame[-1] for frame in line.sent[CONTROL_FRAMES_MAX:]] == [0, 1, 2, 3]
    assert link.sent_bytes == sum(map(len, line.sent))


@pytest.mark.parametrize("ends", ["cut", "given up", "with the link"])
async def test_chunks_go_over_whichever_connection_is_free_and_those_that_one_did_not_take_over_another(
    ends: str,
) -> None:
    line, further = Hung(), Hung(is_cut=ends == "cut")
    link = linked(line)
    running = asyncio.create_task(link.run())
    carrying = asyncio.create_task(link.carry(cast(Connection, further)))
    await asyncio.sleep(0.1)
    for index in range(9):
        link.send_chunk(SendChunk(PeerId("peer"), KEY, index, None))
    await asyncio.sleep(0.25)
    assert link.width == (1 if ends == "cut" else 2)
    if ends == "given up":
        link.narrow()
    await asyncio.sleep(FINISH_S + 5.0)
    assert carrying.done() == (ends != "with the link") and link.width == 1 + (ends == "with the link")
    await link.close()
    await asyncio.gather(running, carrying)
    chunks = [frame for frame in further.sent if frame != b"header"]
    assert sorted(frame[-1] for frame in line.sent + chunks) == list(range(9))
    if ends != "cut":
        assert further.sent == [b"header", *chunks] and len(chunks) > 1


async def test_a_link_to_a_peer_that_hangs_closes_as_fast_as_one_of_its_connections() -> None:
    lines = [Hung() for _ in range(8)]
    loop = asyncio.get_running_loop()
    first, *others = (cast(Connection, line) for line in lines)
    link = PeerLink(first, mock.Mock(spec=Exchange), FairShare())  # it has nothing to send
    carrying = [asyncio.create_task(link.carry(other)) for other in others]
    await asyncio.sleep(0)
    assert link.width == len(lines)
    begun = loop.time()
    await link.close()
    assert loop.time() - begun <= 1.5 * CLOSE_S and all(line.is_closed for line in lines)
    await asyncio.gather(*carrying)


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


async def test_of_the_smallest_chunks_a_stream_that_does_not_go_on_takes_two() -> None:
    """As asyncio's transports count what they could not send."""
    read, unsent = Read(), 0
    high = read.stream.set_write_buffer_limits.call_args.kwargs["high"]

    def writelines(parts: Iterable[bytes]) -> None:
        nonlocal unsent
        unsent += sum(map(len, parts))
        if unsent > high:
            read.connection.pause_writing()

    read.stream.writelines = writelines
    chunk, taken = bytes(CHUNK_BYTES_MIN), 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            while True:
                await read.connection.send(chunk)
                taken += 1
    assert taken <= SLOTS_PER_PEER


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

"""Connections between nodes on real sockets: the port proves callers, strangers are bounded, frames arrive however they are cut."""

import asyncio
import contextlib
import fcntl
import gc
import random
import socket
import ssl
import struct
import termios
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from echo2.base.errors import TrustError
from echo2.base.ids import PeerId
from echo2.broadcast import (
    connection as connection_module,
    connections as connections_module,
    node as node_module,
    transport as transport_module,
)
from echo2.broadcast.connection import HEAD, UNREAD_BYTES_MAX, Connection
from echo2.broadcast.link import PeerLink
from echo2.broadcast.node import BroadcastNode
from echo2.broadcast.transport import Accept, Transport
from echo2.outside.guard import FairShare
from echo2.outside.tls_streams import ROOM_BYTES, SHUTDOWN_S, SocketCaller, TlsStream, tls_context
from echo2.trust import tls
from echo2.trust.identity import Role, TlsKey, certificate_request, dns_name_of
from echo2.trust.ports import BULK
from echo2.wire import broadcast as wire
from tests.certificates import issued
from tests.contract.fleet import Fleet, fleet, until
from tests.contract.test_broadcast_stripes import width_of
from tests.patience import WAIT_S


def port_of(node: BroadcastNode) -> int:
    return node._connections.transport.port


def address_of(node: BroadcastNode) -> str:
    return f"127.0.0.1:{port_of(node)}"


def listen(transport: Transport, accept: Accept) -> None:
    transport.listen("127.0.0.1", 0)
    transport.serve(accept)


def link_to(node: BroadcastNode, other: BroadcastNode) -> PeerLink:
    return node._connections.links[other.peer_id]


async def test_a_further_connection_of_a_link_that_was_replaced_or_that_the_other_side_dialled_joins_none(
    tmp_path: Path,
) -> None:
    """Whoever dialled a link opens further connections itself: one that comes was for a link that this one took the place of."""
    async with fleet(tmp_path, 1) as f:
        learner, worker = (m.node for m in f.members)
        node, other = (learner, worker) if link_to(learner, worker).connection.is_outgoing else (worker, learner)
        former = PeerLink(link_to(node, other).connection, node.exchange, FairShare(), link_to(node, other).address)
        late = await other._connections.transport.dial(address_of(node), node.peer_id)
        widened = list[PeerLink]()
        node.exchange.on_width = widened.append  # type: ignore[method-assign]
        async with asyncio.timeout(WAIT_S):
            await node._connections._dial_further(former)  # each ends at once
            await other._connections._serve(late, further_of=link_to(other, node))
        assert not widened
        await until(lambda: {width_of(node, other), width_of(other, node)} == {1}, "one connection for chunks each way")


def test_a_call_that_is_given_up_at_any_moment_leaves_no_socket_open(tmp_path: Path) -> None:
    """pytest makes an error of the warning with which a socket goes that nobody closed."""
    noted = list[object]()

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noted.append(context))
        async with fleet(tmp_path, 1) as f:
            learner, worker = (m.node for m in f.members)
            for turns in range(25):
                dialling = asyncio.create_task(
                    worker._connections.transport.dial(f"localhost:{port_of(learner)}", learner.peer_id)
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                dialling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await dialling).close()
                del dialling
            gc.collect()

    asyncio.run(scene())
    gc.collect()
    assert not noted, "the log has no error that nobody waited for"


async def test_a_peer_that_is_banned_before_its_hello_has_come_gets_no_link(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        victim, credentials = f.members[0], f.credentials(Role.WORKER)
        connection = await Transport(credentials).dial(victim.address, victim.node.peer_id)
        assert await connection.receive() is not None, "the victim's own hello: now it waits for ours"
        victim.node.bans.name(credentials.peer_id, is_lifted=False)
        victim.node.drop_banned()
        await connection.send(wire.hello(tls.PROTOCOL_VERSION, credentials.run_id))
        async with asyncio.timeout(WAIT_S):
            assert await connection.receive() is None
        assert credentials.peer_id not in victim.node._connections.links
        await connection.close()


async def test_whom_a_full_node_lets_go_after_its_handshake_dials_it_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a large fleet, beyond the links of their learner, dialled it once a second, each."""
    monkeypatch.setattr(connections_module, "LINKS_MAX", 1)
    monkeypatch.setattr(connections_module, "PAUSE_FIRST_S", 1e-3)
    monkeypatch.setattr(node_module, "CONNECT_INTERVAL_S", 0.01)
    async with fleet(tmp_path, 1) as f:
        refused, learner = (await f.add()).node, f.members[0].node
        target = refused._dialling.targets[learner.peer_id]
        await until(lambda: target.failures >= 3, "it has come back three times")
        assert target.last_error == "the connection ended" and refused.peer_id not in learner._connections.links


async def test_a_caller_that_only_asks_whether_the_port_is_open_raises_no_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(tmp_path, 0) as f:
        port = port_of(f.members[0].node)
        with caplog.at_level("DEBUG", "echo2.ports"):
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            await until(lambda: "a caller left" in caplog.text, "the caller that left is noted")
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as raw:
                raw.sendall(b"no hello" * 8)
                await until(lambda: "a caller was refused" in caplog.text, "the caller without a hello is told")
    assert [one.levelname for one in caplog.records if f"port {port}: a caller" in one.message] == [
        "DEBUG",
        "WARNING",
    ]


async def test_whoever_shows_no_certificate_is_let_go(tmp_path: Path) -> None:
    """In TLS 1.3 a client hears of its refusal with its first read."""

    def is_ended(port: int) -> bool:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as raw:
            try:
                with context.wrap_socket(raw) as connection:
                    return connection.recv(1) == b""
            except ssl.SSLError:
                return True

    async with fleet(tmp_path, 0) as f:
        assert await asyncio.to_thread(is_ended, port_of(f.members[0].node))


async def test_a_frame_that_has_begun_and_does_not_go_on_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "STALLED_S", 0.3)
    monkeypatch.setattr(connection_module, "STILL_HERE_S", 0.1)
    async with pair() as (sending, taking):
        sending.stream.write(HEAD.pack(1000) + bytes(10))
        assert await asyncio.wait_for(taking.receive(), WAIT_S) is None


class TlsByHand:
    """A member's end of a connection, whose records are cut into segments as the test likes."""

    def __init__(self, credentials: tls.Credentials, port: int, peer_id: PeerId) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls_context(credentials.key_and_certificate(), credentials.authority_pem, ssl.PROTOCOL_TLS_CLIENT)
        self._tls = context.wrap_bio(self._came, self._goes, server_hostname=dns_name_of(peer_id))

    def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                self.socket.sendall(self._goes.read())
                return
            except ssl.SSLWantReadError:
                self.socket.sendall(self._goes.read())
                self._came.write(self.socket.recv(1 << 16))

    def sealed(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._goes.read()

    def farewell(self) -> bytes:
        with contextlib.suppress(ssl.SSLError):  # it waits for the other's
            self._tls.unwrap()
        return self._goes.read()


def unacknowledged_bytes(raw: socket.socket) -> int:
    """What the other end's kernel does not have yet."""
    return int(struct.unpack("i", fcntl.ioctl(raw, termios.TIOCOUTQ, bytes(4)))[0])


@asynccontextmanager
async def by_hand() -> AsyncIterator[tuple[TlsByHand, asyncio.Queue[bytes | None], asyncio.Event]]:
    """A member whose records are cut by the test, what the other end takes (None: its end), and whether that was let go."""
    f = Fleet(Path())
    theirs, heard, lost = f.credentials(Role.WORKER), asyncio.Queue[bytes | None](), asyncio.Event()

    async def take(connection: Connection) -> None:
        assert isinstance(connection, Connection)
        while (frame := await connection.receive()) is not None:
            heard.put_nowait(frame)
        heard.put_nowait(None)
        await connection.ended.wait()
        lost.set()

    receiver = Transport(theirs)
    listen(receiver, take)
    sender = await asyncio.to_thread(TlsByHand, f.credentials(Role.WORKER), receiver.port, theirs.peer_id)
    with sender.socket:
        await asyncio.to_thread(sender.shake_hands)
        sender.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sender, heard, lost
    await receiver.close()


async def arrived(sender: TlsByHand, data: bytes) -> None:
    """The other end's loop reads it, if it is woken."""
    sender.socket.sendall(data)
    while unacknowledged_bytes(sender.socket):
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_end_of_a_frame_arrives_wherever_the_link_cut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel wakes the loop once a large piece is there, while more than that must still come. What TLS has of a record that
    is not complete has come already, though the frame misses it. Segment by segment it is woken with the first, then for the
    whole chunk."""
    reads, plain = list[int](), TlsStream.buffer_updated

    def counted(self: TlsStream, count: int) -> None:
        reads.append(count)
        plain(self, count)

    async with by_hand() as (sender, heard, _):
        for size in (70_000, 200_000, 33_000):
            frame = random.Random(size).randbytes(size)
            sealed, sent = sender.sealed(HEAD.pack(size) + frame), 0
            for share in (0.2, 0.35, 0.41, 0.62, 0.93, 0.9999, 1.0):
                end = int(share * len(sealed))
                await arrived(sender, sealed[sent:end])
                sent = end
            assert await asyncio.wait_for(heard.get(), WAIT_S) == frame
        monkeypatch.setattr(TlsStream, "buffer_updated", counted)
        frame = random.Random(0).randbytes(64 << 10)
        sealed = sender.sealed(HEAD.pack(len(frame))) + sender.sealed(frame)
        for begin in range(0, len(sealed), 1448):
            await arrived(sender, sealed[begin : begin + 1448])
        assert await asyncio.wait_for(heard.get(), WAIT_S) == frame
        assert sum(reads) == len(sealed) and len(reads) <= 2, reads


@pytest.mark.parametrize("is_farewell_said", [True, False])
async def test_who_has_said_farewell_or_nonsense_is_let_go_though_it_keeps_the_connection(
    is_farewell_said: bool,
) -> None:
    async with by_hand() as (sender, heard, lost):
        sender.socket.sendall(sender.sealed(HEAD.pack(5) + b"hello"))
        sender.socket.sendall(sender.farewell() if is_farewell_said else b"\x17\x03\x03\x00\x20" + bytes(32))
        assert await asyncio.wait_for(heard.get(), WAIT_S) == b"hello"
        assert await asyncio.wait_for(heard.get(), WAIT_S) is None
        await asyncio.wait_for(lost.wait(), 10 * SHUTDOWN_S)  # the kernel by itself takes 40 s


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Connection]]:
    """Both ends of a connection, the dialler's first."""
    f = Fleet(Path())
    members = [f.credentials(Role.WORKER) for _ in range(2)]
    receiver, sender = map(Transport, members)
    came, done = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def accept(connection: Connection) -> None:
        came.set_result(connection)
        await done.wait()

    listen(receiver, accept)
    sending = await sender.dial(f"127.0.0.1:{receiver.port}", members[0].peer_id)
    yield sending, await came
    done.set()
    for one in (sending, sender, receiver):
        await one.close()


async def test_what_a_peer_sends_waits_in_its_own_machine_while_nobody_takes_it() -> None:
    frames = [number.to_bytes(4, "big") + bytes(UNREAD_BYTES_MAX // 4) for number in range(256)]
    assert sum(map(len, frames)) > 32 << 20, "far more than the buffers of two sockets"
    held_most = 4 * UNREAD_BYTES_MAX  # with a frame that is not whole, both ends' buffers, and what is unsent
    async with pair() as (sending, taken):
        for end in (sending, taken):  # by default the kernel's buffer is 128 KiB, a window of 64
            raw = end.stream._raw  # type: ignore[attr-defined]
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 2 * ROOM_BYTES
        sent = 0

        async def send() -> None:
            nonlocal sent
            for frame in frames:
                await sending.send(frame)
                sent += 1

        tracemalloc.start()
        try:
            task, before = asyncio.create_task(send()), -1
            await until(lambda: task.done() or tracemalloc.get_traced_memory()[0] > UNREAD_BYTES_MAX, "so much waits")
            while before != sent < len(frames):
                before = sent
                await asyncio.sleep(0.5)
            assert not task.done(), "the sender was stopped"
            assert tracemalloc.get_traced_memory()[1] < held_most
            for frame in frames:
                assert await asyncio.wait_for(taken.receive(), WAIT_S) == frame, "and it goes on as they are taken"
            assert tracemalloc.get_traced_memory()[1] < held_most
        finally:
            tracemalloc.stop()
        await task


async def test_of_too_many_half_handshakes_of_one_host_the_oldest_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come through byte pipes, too: no door sees them."""
    monkeypatch.setattr(transport_module, "HANDSHAKE_S", 600.0)
    f = Fleet(tmp_path)
    bulk = Transport(f.credentials(Role.WORKER))

    async def accept(connection: Connection) -> None:
        raise AssertionError("none of them proves who it is")

    def come(host: str) -> socket.socket:
        ours, theirs = _connected()
        theirs.sendall(bytes.fromhex("1603010200"))  # the first bytes of a TLS hello
        bulk.take(SocketCaller(ours, host), accept)
        return theirs

    crowd = [come("10.0.0.1") for _ in range(BULK.strangers_per_host)]
    neighbour = come("10.0.0.2")
    await asyncio.sleep(0)  # each handshake begins
    assert not any(map(_is_ended, crowd))
    crowd += [come("10.0.0.1") for _ in range(3)]
    await until(lambda: all(map(_is_ended, crowd[:3])), "the first to come are ended")
    assert not any(map(_is_ended, (*crowd[3:], neighbour)))
    assert len(bulk._shaking) == BULK.strangers_per_host + 1
    await bulk.close()
    for one in (*crowd, neighbour):
        one.close()


def _connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection to a port that nobody watches."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    for one in (ours, theirs):
        one.setblocking(False)
    return ours, theirs


def _is_ended(theirs: socket.socket) -> bool:
    try:
        return theirs.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def test_a_renewed_certificate_is_shown_by_the_next_handshake(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        member, caller, key = f.members[1], Transport(f.credentials(Role.WORKER)), TlsKey.generate()
        shown = list[bytes]()
        for _ in range(2):
            bulk = await caller.dial(member.address, member.node.peer_id)
            shown.append(bulk.certificate)
            await bulk.close()
            request = certificate_request(member.credentials.identity, key)
            member.credentials.renew(key.to_pem(), f.authority.issue(request, Role.WORKER, time.time() - 5))
        another = issued(f.authority)
        with pytest.raises(TrustError, match=member.node.peer_id):
            member.credentials.renew(another.tls_key_pem, another.certificate)
        assert shown[0] != shown[1]

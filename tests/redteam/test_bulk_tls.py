"""Work that lies below the frames of a bulk connection: it is bounded, and charged to the peer that causes it."""

import asyncio
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.ids import PeerId
from echo2.broadcast.connection import HEAD, UNREAD_BYTES_MAX, Connection
from echo2.broadcast.exchange import BANS_MAX, Bans
from echo2.broadcast.transport import Transport
from echo2.outside.guard import FairShare
from echo2.outside.tls_streams import TlsStream
from echo2.trust.identity import Role
from tests.contract.fleet import Fleet, fleet, hostile, until
from tests.contract.test_connections import TlsByHand, address_of, listen
from tests.patience import WAIT_S

KEY_UPDATE, DATA, HANDSHAKE = bytes.fromhex("1800000100"), 23, 22


class Records:
    """Makes a client's records of TLS 1.3, which OpenSSL does not let one send at will."""

    def __init__(self, secret: bytes, cipher: str) -> None:
        self._hash = SHA384() if cipher.endswith("SHA384") else SHA256()
        self._is_chacha, self._key_bytes = "CHACHA" in cipher, 16 if "128" in cipher else 32
        self._begin(secret)

    def _expanded(self, label: bytes, size: int) -> bytes:
        info = size.to_bytes(2, "big") + bytes((6 + len(label),)) + b"tls13 " + label + b"\0"
        return HKDFExpand(self._hash, size, info).derive(self._secret)

    def _begin(self, secret: bytes) -> None:
        self._secret, self._number = secret, 0
        key = self._expanded(b"key", self._key_bytes)
        self._cipher = ChaCha20Poly1305(key) if self._is_chacha else AESGCM(key)
        self._iv = int.from_bytes(self._expanded(b"iv", 12), "big")

    def sealed(self, data: bytes, kind: int = DATA) -> bytes:
        head = b"\x17\x03\x03" + (len(data) + 17).to_bytes(2, "big")
        nonce = (self._iv ^ self._number).to_bytes(12, "big")
        self._number += 1
        return head + self._cipher.encrypt(nonce, data + bytes((kind,)), head)

    def key_updates(self, count: int) -> bytes:
        made = []
        for _ in range(count):
            made.append(self.sealed(KEY_UPDATE, HANDSHAKE))
            self._begin(self._expanded(b"traffic upd", self._hash.digest_size))
        return b"".join(made)


class ByHand(TlsByHand):
    """It also makes records of its own, once the handshake is done."""

    def records(self, keys: Path) -> Records:
        (line,) = (one for one in keys.read_text().splitlines() if one.startswith("CLIENT_TRAFFIC_SECRET_0"))
        cipher = self._tls.cipher()
        return Records(bytes.fromhex(line.split()[2]), cipher[0])


@dataclass
class Received:
    """What a receiver had of one sender: its connection, once it was proven, and how it ended."""

    connection: asyncio.Future[Connection]
    end: asyncio.Future[EchoError | None]
    sender: ByHand
    records: Records


@asynccontextmanager
async def receiving(tmp_path: Path, *, reads: bool = True) -> AsyncIterator[Received]:
    keys, loop = tmp_path / "keys", asyncio.get_running_loop()
    connection, end = loop.create_future(), loop.create_future()

    async def take(made: Connection) -> None:
        assert isinstance(made, Connection)
        connection.set_result(made)
        if not reads:
            await made.ended.wait()
            return
        try:
            while await made.receive() is not None:
                pass
        except EchoError as error:
            end.set_result(error)
        else:
            end.set_result(None)

    f = Fleet(tmp_path)
    mine, theirs = (f.credentials(Role.WORKER) for _ in range(2))
    receiver = Transport(theirs)
    listen(receiver, take)
    sender = await asyncio.to_thread(ByHand, mine, receiver.port, theirs.peer_id)
    try:
        with sender.socket:
            sender._tls.context.keylog_filename = str(keys)
            await asyncio.to_thread(sender.shake_hands)
            yield Received(connection, end, sender, sender.records(keys))
    finally:
        await receiver.close()


def send_soon(received: Received, data: bytes) -> asyncio.Future[None]:
    """As fast as the other side takes it; it may end the connection meanwhile."""

    def send() -> None:
        received.sender.socket.settimeout(WAIT_S)
        with suppress(OSError):
            received.sender.socket.sendall(data)

    return asyncio.get_running_loop().run_in_executor(None, send)


class Watch:
    """Seconds that the loop spent on bytes of bulk connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, plain = 0.0, TlsStream.buffer_updated

        def timed(stream: TlsStream, nbytes: int) -> None:
            begun = time.thread_time()
            plain(stream, nbytes)
            self.seconds += time.thread_time() - begun

        monkeypatch.setattr(TlsStream, "buffer_updated", timed)


async def test_new_keys_again_and_again_are_the_peers_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving(tmp_path) as received:
        await received.connection
        watch = Watch(monkeypatch)
        sending = send_soon(received, received.records.key_updates(4000))
        error = await asyncio.wait_for(received.end, WAIT_S)
        assert isinstance(error, MalformedMessage) and "without any" in str(error)
        assert watch.seconds < 0.02, "the first few dozen were looked at"
        received.sender.socket.close()
        await sending


async def test_a_few_new_keys_and_data_in_between_pass(tmp_path: Path) -> None:
    async with receiving(tmp_path, reads=False) as received:
        connection = await received.connection
        made = received.records
        frame = HEAD.pack(3) + b"abc"
        await send_soon(received, made.key_updates(3) + made.sealed(frame) + made.key_updates(2) + made.sealed(frame))
        assert [await asyncio.wait_for(connection.receive(), WAIT_S) for _ in range(2)] == [b"abc"] * 2


@pytest.mark.parametrize("what", ["records", "frames"])
async def test_records_of_a_byte_take_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    async with receiving(tmp_path) as received:
        await received.connection
        made = received.records
        if what == "records":
            data = b"".join(made.sealed(piece) for piece in [HEAD.pack(600_000)] + [b"x"] * 600_000)
        else:
            frames = (HEAD.pack(1) + b"x") * 3200
            data = b"".join(made.sealed(frames) for _ in range(400))
        watch, begun = Watch(monkeypatch), time.monotonic()
        sending = send_soon(received, data)
        await asyncio.sleep(2.0)
        assert FairShare.SHARE <= 0.05
        allowed_s = 0.05 * (time.monotonic() - begun) + FairShare.BURST_S
        assert watch.seconds < allowed_s + 0.05, "one read more"
        received.sender.socket.close()
        await sending


async def test_what_waits_is_counted_as_it_lies_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of two bytes take twenty times as much while they wait."""
    monkeypatch.setattr(FairShare, "pause_s", lambda *_: 0.0)  # it would stop such a sender before memory does
    async with receiving(tmp_path, reads=False) as received:
        await received.connection
        frames = (HEAD.pack(2) + b"xy") * 2700
        records = [received.records.sealed(frames) for _ in range(1000)]  # more than the kernel's buffers take
        sent, before = 0, -1

        def send() -> None:
            nonlocal sent
            with suppress(OSError):
                for record in records:
                    received.sender.socket.sendall(record)
                    sent += 1

        received.sender.socket.settimeout(WAIT_S)
        tracemalloc.start()
        try:
            sending = asyncio.get_running_loop().run_in_executor(None, send)
            while before != sent < len(records):
                before = sent
                await asyncio.sleep(0.5)
            assert sent < len(records), "the sender was stopped"
            assert tracemalloc.get_traced_memory()[1] < 6 * UNREAD_BYTES_MAX, "and the rest of a read"
        finally:
            tracemalloc.stop()
        received.sender.socket.shutdown(socket.SHUT_RDWR)
        await sending


async def test_a_host_from_which_a_banned_peer_comes_again_is_refused_before_its_handshake(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as f:
        victim = f.members[1]
        credentials, bulk = await hostile(f, victim)
        await bulk.send(b"\xff\xff not a message")
        await until(lambda: credentials.peer_id in victim.node.bans.found, "it is banned")
        await bulk.close()
        again = Transport(credentials)
        late = await again.dial(address_of(victim.node), victim.node.peer_id)
        assert await asyncio.wait_for(late.receive(), WAIT_S) is None
        await late.close()
        connections = victim.node._connections
        assert not connections._is_refused("127.0.0.1"), "an honest peer is linked from there"
        connections.links.clear()
        assert connections._is_refused("127.0.0.1") and not connections._is_refused("127.0.0.2")


def test_hosts_of_banned_peers_are_forgotten_and_of_the_peers_the_oldest() -> None:
    bans = Bans()
    bans.refuse(f"10.0.{number >> 8}.{number & 255}" for number in range(3000))
    assert not bans.is_refused("10.0.0.1") and bans.is_refused("10.0.11.183")
    for number in range(BANS_MAX + 1):
        bans.accuse(PeerId(str(number)), "it lies", is_ban=True)
    assert PeerId("0") not in bans and PeerId("1") in bans and len(bans.found) == BANS_MAX

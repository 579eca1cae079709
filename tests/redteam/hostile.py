"""What a hostile client needs: raw TLS and HTTP/2 that keeps no rule, idle connections, and the cost that it causes.

Only loopback; every attack is bounded in count and ends with its context.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echo2.base.errors import Unreachable
from echo2.trust import tls
from echo2.trust.enrolment import enrol
from echo2.trust.identity import Identity, JoinLink, Role
from echo2.trust.tls import Credentials
from tests.e2e.cluster import Cluster, small_run

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, WINDOW_UPDATE, HEADERS, DATA, PING, RST_STREAM = 4, 8, 1, 0, 6, 3


@contextlib.contextmanager
def idle_connections(port: int, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """TCP connections that say nothing. Those that are refused are left out; none comes once the host is shut out."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=2, source_address=(source, 0)))
            except TimeoutError:  # the kernel drops what comes from here
                break
            except OSError:
                continue
        yield held
    finally:
        for one in held:
            one.close()


def still_open(sockets: list[socket.socket]) -> int:
    return sum(is_open(one) for one in sockets)


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def tls_to(port: int, credentials: Credentials | None = None, source: str = "127.0.0.1") -> ssl.SSLSocket:
    """A TLS connection with or without a certificate of the run."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if credentials is not None:
        with _as_file(credentials.tls_key_pem) as key, _as_file(credentials.certificate.pem) as certificate:
            context.load_cert_chain(certificate, key)
    raw = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0))
    return context.wrap_socket(raw)


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """ssl reads keys from files alone; this one is in memory."""
    fd = os.memfd_create("key")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def head_of(path: str) -> bytes:
    return b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in (
            (":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "x"),
            ("content-type", "application/grpc"), ("te", "trailers"),
        )
    )  # fmt: skip


class Stalled:
    """Calls over one connection, each of which announces a message and never sends its last byte."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self.connection = connection
        self.sent_bytes = 0
        self._next = 1
        self._windows: dict[int, int] = {}
        self._initial, self._whole = 65_535, 65_535
        self._buffer = b""
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))

    def begin(self, path: str) -> int:
        stream, self._next = self._next, self._next + 2
        self.connection.sendall(frame(HEADERS, 4, stream, head_of(path)))
        self._windows[stream] = self._initial
        return stream

    def push(self, stream: int, size: int, announced: int, seconds: float) -> None:
        """Sends up to `size` bytes of a message said to have `announced`, as the windows allow."""
        self.send(stream, b"\x00" + struct.pack(">I", announced) + bytes(size), seconds)

    def send(self, stream: int, data: bytes, seconds: float) -> None:
        """As the windows allow, for so long."""
        left, until = memoryview(data), time.monotonic() + seconds
        while left and time.monotonic() < until:
            room = min(len(left), self._windows.get(stream, 0), self._whole, 16_384)
            if room <= 0:
                if not self.hear(0.2):
                    return
                continue
            self.connection.sendall(frame(DATA, 0, stream, bytes(left[:room])))
            left = left[room:]
            self.sent_bytes += room
            self._whole -= room
            self._windows[stream] -= room
            self.hear(0.0)

    def hear(self, timeout_s: float) -> bool:
        """Takes windows and settings in; whether the connection lives."""
        self.connection.settimeout(timeout_s or 0.0001)
        try:
            data = self.connection.recv(1 << 16)
        except (TimeoutError, ssl.SSLWantReadError):
            return True
        finally:
            self.connection.settimeout(5)
        if not data:
            return False
        self._buffer += data
        while len(self._buffer) >= 9 and len(self._buffer) >= (end := 9 + int.from_bytes(self._buffer[:3], "big")):
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big") & 0x7FFFFFFF
            payload, self._buffer = self._buffer[9:end], self._buffer[end:]
            if kind == WINDOW_UPDATE:
                more = int.from_bytes(payload, "big")
                if stream:
                    self._windows[stream] = self._windows.get(stream, 0) + more
                else:
                    self._whole += more
            elif kind == SETTINGS and not flags & 1:
                for at in range(0, len(payload), 6):
                    name, value = struct.unpack(">HI", payload[at : at + 6])
                    if name == 4:
                        for one in self._windows:
                            self._windows[one] += value - self._initial
                        self._initial = value
                self.connection.sendall(frame(SETTINGS, 1, 0, b""))
            elif kind == PING and not flags & 1:
                self.connection.sendall(frame(PING, 1, 0, payload))
        return True


# ---- the daemon under attack: a real coordinator process with few descriptors, and what it costs it

DESCRIPTORS = 1024
JOIN_S = 120.0
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
"""Honest callers come from one address, hostile ones from another, unless a test is about them sharing it."""


class Target:
    """A coordinator of a run on one machine; `more` are options at the end of its configuration."""

    def __init__(self, folder: Path, more: str = "") -> None:
        text = small_run(folder, folder / "no-model").replace("[coordinator]", "[coordinator]\n" + more)
        self.config: dict[str, Any] = tomllib.loads(text)
        self.cluster = Cluster(folder, text, workers=0)
        self.cluster.placed = lambda name, argv: ["/bin/sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', name, *argv]
        self.links = self.cluster.run_folder / "links"

    @property
    def pid(self) -> int:
        return self.cluster.processes["coordinator"].pid

    def port(self, name: str) -> int:
        return int(self.config["coordinator"][name])

    def log(self) -> str:
        return self.cluster.log("coordinator")

    def is_alive(self) -> bool:
        return self.cluster.processes["coordinator"].poll() is None

    def link(self, role: Role = Role.WORKER) -> JoinLink:
        return JoinLink.parse((self.links / f"{role.value}.link").read_text().strip())

    def join(self, role: Role = Role.WORKER) -> tls.Credentials:
        """An honest newcomer's certificate, from here; it tries again as workers do."""
        until = time.monotonic() + JOIN_S
        while True:
            try:
                return asyncio.run(enrol(self.link(role), Identity.generate(), role, timeout_s=5))
            except Unreachable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.25)  # a real process has no virtual clock


@contextlib.contextmanager
def coordinator(folder: Path, more: str = "") -> Iterator[Target]:
    target = Target(folder, more)
    with target.cluster:
        target.cluster.start("coordinator")
        target.cluster.wait_until(lambda: "dashboard at" in target.log(), "the coordinator")
        yield target

"""What the kernel tells of connections: loopback is nobody's uplink, rubbish descriptors do no harm."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from echo2.broadcast.runtime import sockets
from echo2.broadcast.runtime.sockets import SocketWatch


def test_loopback_connections_have_no_uplink_to_protect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            watch = SocketWatch()
            watch.look()
            client.sendall(bytes(100_000))
            accepted.recv(1)
            assert watch.look().delivered_bytes == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's tcp_info")
def test_bytes_that_the_peer_confirmed_and_the_round_trip_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "is_loopback", lambda host: False)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
            watch = SocketWatch()
            watch.look()
            client.sendall(bytes(50_000))
            left = 50_000
            while left:
                left -= len(accepted.recv(left))
            client.sendall(b"y")
            assert accepted.recv(1) == b"y"
            seen = watch.look()
            assert seen.delivered_bytes >= 50_000
            assert 0 <= seen.queue_s < 1


def test_descriptors_that_are_no_connections_are_passed_over() -> None:
    reading, writing = os.pipe()
    try:
        assert sockets._tcp_info(reading) is None
        assert sockets._tcp_info(10**6) is None
        os.fstat(reading)  # still open
    finally:
        os.close(reading)
        os.close(writing)

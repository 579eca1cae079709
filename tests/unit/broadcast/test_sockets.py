"""What the kernel tells of connections: loopback is nobody's uplink, rubbish descriptors do no harm."""

from __future__ import annotations

import os
import resource
import socket
import sys

import pytest

from echo2.broadcast import uplink
from echo2.broadcast.pace import Control
from echo2.broadcast.uplink import SocketWatch


def test_loopback_connections_have_no_uplink_to_protect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            watch = SocketWatch()
            watch.look()
            client.sendall(bytes(100_000))
            accepted.recv(1)
            assert watch.look().delivered_bytes == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's descriptors")
def test_a_connection_is_found_behind_very_many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"this machine gives a process {hard} descriptors at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)]
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            assert uplink.local_end(server.getsockname()[1]) == client.getsockname()
    finally:
        for other in others:
            os.close(other)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's tcp_info")
def test_bytes_that_the_peer_confirmed_and_the_round_trip_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "is_loopback", lambda host: False)
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
            assert seen.paths[server.getsockname()].delivered_bytes == seen.delivered_bytes
            assert 0 <= seen.queue_s < 1


def test_descriptors_that_are_no_connections_are_passed_over() -> None:
    reading, writing = os.pipe()
    try:
        assert uplink._tcp_info(reading) is None
        assert uplink._tcp_info(10**6) is None
        os.fstat(reading)  # still open
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets Linux's TCP_CONGESTION")
def test_connections_change_their_congestion_control_and_get_their_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "is_loopback", lambda host: False)

    def control_of(connection: socket.socket) -> bytes:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        watch = SocketWatch()
        watch.look()
        watch.use(Control.FAST)
        assert control_of(client) == (b"bbr" if watch.is_fast_offered else b"reno")
        watch.use(Control.USUAL)
        assert control_of(client) == b"reno"
        watch.use(Control.FAST)
        with socket.create_connection(server.getsockname()) as later:
            watch.expect_new()
            watch.look()
            assert control_of(later) == control_of(client)


def test_a_kernel_without_the_fast_control_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "is_loopback", lambda host: False)
    asked: list[int] = []

    def refuse(fd: int, option: int, value: bytes) -> bool:
        asked.append(fd)
        return False

    monkeypatch.setattr(uplink, "_set", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        watch = SocketWatch()
        watch.look()
        for control in (Control.FAST, Control.USUAL, Control.FAST):
            watch.use(control)
    assert not watch.is_fast_offered
    assert len(asked) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets Linux's TCP_NOTSENT_LOWAT")
def test_the_kernel_holds_little_unsent_of_connections_whose_uplink_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "is_loopback", lambda host: False)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        limit_of = lambda: client.getsockopt(socket.IPPROTO_TCP, 25)  # noqa: E731
        watch, before = SocketWatch(), limit_of()
        watch.look()
        watch.limit_unsent(0.0)
        assert limit_of() == before
        for rate, limit in ((10e6, 150_000), (10.5e6, 150_000), (20e6, 300_000), (1e5, uplink.UNSENT_BYTES_MIN)):
            watch.limit_unsent(rate)
            assert limit_of() == limit

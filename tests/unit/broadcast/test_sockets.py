"""What the kernel tells of connections, and is told: loopback is nobody's uplink, rubbish descriptors do no harm."""

import os
import resource
import socket
import sys
from collections.abc import Iterator

import pytest

from echo2.broadcast import uplink
from echo2.broadcast.uplink import SocketWatch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's descriptors and tcp_info")
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a connection, the dialler's first."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if loopback led to other machines."""
    monkeypatch.setattr(uplink, "is_loopback", lambda host: False)


def passed(pair: Pair, count: int) -> None:
    client, accepted = pair
    client.sendall(bytes(count))
    while count:
        count -= len(accepted.recv(count))


def test_loopback_connections_have_no_uplink_to_protect_and_what_is_no_connection_is_passed_over(pair: Pair) -> None:
    watch, (reading, writing) = SocketWatch(), os.pipe()
    watch.look()
    passed(pair, 100_000)
    assert watch.look().delivered_bytes == 0
    os.fstat(reading)  # still open
    for end in (reading, writing):
        os.close(end)


def test_a_descriptor_that_is_now_another_kind_of_socket_is_passed_over() -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(b"\0echo2-" + os.urandom(8))
        server.listen()
        client.connect(server.getsockname())
        assert uplink._tcp_info(client.fileno()) is None


def test_a_connection_is_found_behind_very_many_descriptors(pair: Pair) -> None:
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


def test_bytes_that_the_peer_confirmed_and_the_round_trip_are_read(pair: Pair, far: None) -> None:
    watch = SocketWatch()
    passed(pair, 1)
    watch.look()
    passed(pair, 50_000)
    passed(pair, 1)
    seen = watch.look()
    assert seen.delivered_bytes >= 50_000 and 0 <= seen.queue_s < 1
    there = pair[1].getsockname()
    assert seen.paths[there].delivered_bytes == seen.delivered_bytes
    assert 0 < watch.least_rtt_s(frozenset({there})) < 1 and watch.least_rtt_s(frozenset({("h", 1)})) == 0.0


def test_connections_change_their_congestion_control_and_get_their_own_back(pair: Pair, far: None) -> None:
    def control_of(connection: socket.socket) -> bytes:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    client = pair[0]
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    watch = SocketWatch()
    watch.look()
    watch.make_fast(True)
    assert control_of(client) == (b"bbr" if watch.is_fast_offered else b"reno")
    watch.make_fast(False)
    assert control_of(client) == b"reno"
    watch.make_fast(True)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as later:
        watch.look(expects_new=True)
        assert control_of(later) == control_of(client)


def test_a_kernel_without_the_fast_control_is_asked_once(
    pair: Pair, far: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(uplink, "_set", lambda fd, *how: asked.append(fd))
    watch = SocketWatch()
    watch.look()
    for is_fast in (True, False, True):
        watch.make_fast(is_fast)
    assert not watch.is_fast_offered and len(asked) == 1


def test_the_kernel_holds_little_unsent_and_sends_no_bursts_over_connections_whose_uplink_is_known(
    pair: Pair, far: None
) -> None:
    limit_of = lambda: pair[0].getsockopt(socket.IPPROTO_TCP, 25)  # noqa: E731
    watch, before = SocketWatch(), limit_of()
    watch.look()
    watch.limit(0.0)
    assert limit_of() == before
    for rate, limit in ((10e6, 150_000), (10.5e6, 150_000), (20e6, 300_000), (1e5, uplink.UNSENT_BYTES_MIN)):
        watch.limit(rate)
        assert limit_of() == limit
    assert pair[0].getsockopt(socket.SOL_SOCKET, uplink.SO_MAX_PACING_RATE) == pytest.approx(uplink.PACED_SHARE * 1e5)

"""Every port on which a daemon of a run listens, as the kernel lists them: who says nothing, half of something, or one byte after
another is ended in time, a crowd of such callers has its share, and messages of nothing but empty submessages cost little.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import shutil
import socket
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator

import psutil
import pytest

from echo2.trust import tls
from tests.e2e.cluster import ROOT, Cluster
from tests.patience import WAIT_S
from tests.ports import choose_ports
from tests.redteam.cost import idle_run
from tests.redteam.hostile import ELSEWHERE, HEADERS, RST_STREAM, Stalled, idle_connections, still_open, tls_to
from tests.redteam.scene import Scene, scene_of

DEADLINE_S = 25.0
"""For a caller of no proof. A unary call's message has 20 s, all else less."""
CROWD, CROWD_LEFT = 120, 64
TRIES = 3
HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "
HELLO = bytes.fromhex("16030102000100") + b"\x01\xfc\x03\x03" + bytes(64)
"""The first bytes of a TLS hello that announces 512."""
LIBP2P = b"\x13/multistream/1.0.0\n"[:9]


def outward() -> str:
    """An address of this machine that is not loopback: with one, the run has relays."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.200", 9))  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def listening(pid: int) -> set[int]:
    """TCP ports of one process, whatever address they are bound to."""
    sockets = psutil.Process(pid).net_connections("tcp")
    return {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    host = outward()
    if not host:
        pytest.skip("this machine has no address but loopback, so that no relay would start")
    folder = tmp_path_factory.mktemp("ports")
    config = idle_run(folder)
    metrics, gateway = choose_ports((0, 0))
    addresses = f'host = "0.0.0.0"\nadvertise = "{host}"\ndashboard_host = "127.0.0.1"'
    config = config.replace("[coordinator]", f"[coordinator]\n{addresses}")
    config += f'[agent]\nharness = "agent:play"\nlisten = "127.0.0.1:{gateway}"\nturns = 1\n'
    with Cluster(folder, config, workers=1) as cluster:
        shutil.copy(ROOT / "examples" / "agent.py", cluster.run_folder)
        cluster.commands["learner"] += ["--metrics-port", str(metrics)]
        cluster.start_all()
        cluster.wait_until(lambda: cluster.step() >= 1, "the first step")
        cluster.wait_until(lambda: "libp2p listens" in cluster.log("w0"), "the worker's libp2p")
        yield cluster


@pytest.fixture(scope="module")
def scene(cluster: Cluster) -> Scene:
    return asyncio.run(scene_of(cluster.run_folder))


def all_of(cluster: Cluster) -> dict[str, int]:
    pids = {name: process.pid for name, process in cluster.processes.items()}
    return {f"{name}:{port}": port for name, pid in pids.items() for port in sorted(listening(pid))}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def ended_after_s(port: int, said: bytes, drip: bytes = b"") -> float:
    """Of a connection that says so much, then one byte of `drip` every half second, or no more."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as one:
        rest = iter(drip * 200)
        with contextlib.suppress(OSError):
            one.sendall(said)
            while time.monotonic() - began < 2 * DEADLINE_S:
                one.settimeout(0.5)
                try:
                    if one.recv(4096) == b"":
                        break
                except TimeoutError:
                    if drip:
                        one.sendall(bytes((next(rest),)))
    return time.monotonic() - began


def call_ended_after_s(port: int, credentials: tls.Credentials | None, path: str) -> float:
    """Of a TLS connection with a call that has no message; without a path, with no call."""
    began = time.monotonic()
    with tls_to(port, credentials) as connection:
        attack = Stalled(connection)
        if path:
            attack.begin(path)
        connection.settimeout(1.0)
        while time.monotonic() - began < 2 * DEADLINE_S:
            with contextlib.suppress(TimeoutError):
                try:
                    data = connection.recv(1 << 16)
                except ConnectionError:
                    break
                if data == b"" or (path and ends_a_call(data)):
                    break
    return time.monotonic() - began


def ends_a_call(data: bytes) -> bool:
    """Whether the call's last headers or its reset are in it."""
    at = 0
    while at + 9 <= len(data):
        kind, flags = data[at + 3], data[at + 4]
        if kind == RST_STREAM or (kind == HEADERS and flags & 1):
            return True
        at += 9 + int.from_bytes(data[at : at + 3], "big")
    return False


def test_each_port_ends_who_says_nothing_or_little_and_who_works_stays(cluster: Cluster, scene: Scene) -> None:
    """Strangers at every port, a member without a call, and one whose call has no message."""
    every = all_of(cluster)
    by_daemon = {name: sum(one.startswith(name) for one in every) for name in cluster.processes}
    assert by_daemon == {"coordinator": 5, "learner": 6, "w0": 2}, every
    member, steps = scene.identity(), cluster.step()
    coordinator, learner = port_of(scene.coordinator.address), port_of(scene.learner.address)
    asked: dict[str, Callable[[], float]] = {
        f"{name} {what}": functools.partial(ended_after_s, port, said, drip)
        for name, port in every.items()
        for what, said, drip in (
            ("silent", b"", b""),
            ("half a TLS hello", HELLO, b""),
            ("a TLS hello in drips", HELLO, b"\x00"),
            ("half a head", HEAD, b""),
            ("a head in drips", HEAD, b"a"),
            ("half a libp2p hello", LIBP2P, b""),
        )
    }
    for what, port, credentials, path in (
        ("a stranger without a call", port_of(scene.enrolment), None, ""),
        ("coordinator: no call", coordinator, member, ""),
        ("learner: no call", learner, member, ""),
        ("coordinator: no message", coordinator, member, "/echo2.v1.Operator/GetStatus"),
        ("learner: no message", learner, member, "/echo2.v1.Ingest/GetPartials"),
    ):
        asked[what] = functools.partial(call_ended_after_s, port, credentials, path)
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        taken = dict(zip(asked, pool.map(lambda one: one(), asked.values()), strict=True))
    print({what: round(seconds, 1) for what, seconds in taken.items()})
    assert not {what: seconds for what, seconds in taken.items() if seconds > DEADLINE_S}
    assert cluster.step() > steps, "honest members have worked on"


def test_each_port_gives_a_crowd_of_half_hellos_its_share_and_answers_others(cluster: Cluster, scene: Scene) -> None:
    honest = honest_callers(cluster, scene)

    def left(port: int) -> int:
        for _ in range(TRIES):  # of a process that had no core meanwhile; one without the bound never passes
            if (count := left_of_a_crowd(port, honest.get(port))) <= CROWD_LEFT:
                break
        return count

    every = all_of(cluster)
    with concurrent.futures.ThreadPoolExecutor(len(every)) as pool:
        counts = dict(zip(every, pool.map(left, every.values()), strict=True))
    print(counts)
    assert max(counts.values()) <= CROWD_LEFT, counts


def left_of_a_crowd(port: int, honest: Callable[[], object] | None) -> int:
    """How many of CROWD connections with half a hello stand after 4 s at most; meanwhile the honest caller is answered."""
    with idle_connections(port, CROWD, ELSEWHERE) as crowd:
        for one in crowd:
            with contextlib.suppress(OSError):
                one.send(HELLO)
        until = time.monotonic() + 4.0
        while (count := still_open(crowd)) > CROWD_LEFT and time.monotonic() < until:
            time.sleep(0.1)  # real processes have no virtual clock
        if honest is not None:
            honest()
        return count


def honest_callers(cluster: Cluster, scene: Scene) -> dict[int, Callable[[], object]]:
    """A caller from another address than the crowd's, at ports that have one within a second or two."""
    gateway = tomllib.loads((cluster.run_folder / "run.toml").read_text())["agent"]["listen"]
    key = (cluster.run_folder / "learner" / "gateway.key").read_text().strip()
    count = urllib.request.Request(f"http://{gateway}/v1/sessions", headers={"authorization": f"Bearer {key}"})
    page, enrol = f"http://127.0.0.1:{scene.page_port}/healthz", port_of(scene.enrolment)
    return {
        port_of(gateway): lambda: urllib.request.urlopen(count, timeout=WAIT_S).close(),
        scene.page_port: lambda: urllib.request.urlopen(page, timeout=WAIT_S).close(),
        enrol: lambda: tls_to(enrol).close(),
    }

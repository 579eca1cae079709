"""Every port on which a daemon of a run listens, as the kernel lists them: who says nothing, half of something, or one byte after
another is ended in time, a crowd of such callers has its share, and messages of nothing but empty submessages cost little.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import ssl
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echo2.trust.identity import Role
from tests.e2e.cluster import Cluster
from tests.patience import WAIT_S
from tests.ports import choose_ports
from tests.redteam.cost import cpu_s
from tests.redteam.hostile import Stalled, is_open, tls_to
from tests.redteam.scene import Scene, idle_run, scene_of
from tests.redteam.target import ELSEWHERE

DEADLINE_S = 25.0
"""For a caller of no proof. A unary call's message has 20 s, all else less."""
CROWD, CROWD_LEFT = 120, 64
TRIES = 3
EMPTY_BYTES_MAX = 64 << 20
HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "
HELLO = bytes.fromhex("16030102000100") + b"\x01\xfc\x03\x03" + bytes(64)
"""The first bytes of a TLS hello that announces 512."""
LIBP2P = b"\x13/multistream/1.0.0\n"[:9]


class Ports:
    """What listens, and who listens there."""

    def __init__(self, cluster: Cluster, host: str) -> None:
        self.cluster, self.host = cluster, host


def outward() -> str:
    """An address of this machine that is not loopback: with one, the run has relays."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.200", 9))  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def listening(pid: int) -> set[int]:
    """TCP ports of one process, whatever address they are bound to."""
    owned = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            owned.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in owned:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    host = outward()
    if not host:
        pytest.skip("this machine has no address but loopback, so that no relay would start")
    folder = tmp_path_factory.mktemp("ports")
    config = idle_run(folder)
    metrics, gateway = choose_ports((0, 0))
    config = config.replace(
        "[coordinator]",
        f'[coordinator]\nhost = "0.0.0.0"\nadvertise = "{host}"\ndashboard_host = "127.0.0.1"',
    )
    config += f'[agent]\nharness = "tests.redteam.one_call:play"\nlisten = "127.0.0.1:{gateway}"\nturns = 1\n'
    with Cluster(folder, config, workers=1) as cluster:
        cluster.commands["learner"] += ["--metrics-port", str(metrics)]
        cluster.start_all()
        cluster.wait_until(lambda: cluster.step() >= 1, "the first step")
        cluster.wait_until(lambda: "libp2p listens" in cluster.log("w0"), "the worker's libp2p")
        yield Ports(cluster, host)


def all_of(ports: Ports) -> dict[str, int]:
    return {
        f"{name}:{port}": port
        for name, process in ports.cluster.processes.items()
        for port in sorted(listening(process.pid))
    }


def ended_after_s(port: int, said: bytes, drip: bytes = b"", source: str = "127.0.0.1") -> float:
    """Of a connection that says so much, then one byte of `drip` every half second, or no more."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S, source_address=(source, 0)) as one:
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


def test_each_port_of_each_daemon_ends_who_says_nothing_half_or_one_byte_after_another(ports: Ports) -> None:
    every = all_of(ports)
    by_daemon = {name: sum(one.startswith(name) for one in every) for name in ports.cluster.processes}
    assert by_daemon == {"coordinator": 5, "learner": 6, "w0": 2}, every
    asked = [
        (f"{name} {what}", port, said, drip)
        for name, port in every.items()
        for what, said, drip in (
            ("silent", b"", b""),
            ("half a TLS hello", HELLO, b""),
            ("a TLS hello in drips", HELLO, b"\x00"),
            ("half a head", HEAD, b""),
            ("a head in drips", HEAD, b"a"),
            ("half a libp2p hello", LIBP2P, b""),
        )
    ]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        taken = dict(zip([one[0] for one in asked], pool.map(lambda one: ended_after_s(*one[1:]), asked), strict=True))
    print({what: round(seconds, 1) for what, seconds in taken.items()})
    assert not {what: seconds for what, seconds in taken.items() if seconds > DEADLINE_S}


def test_each_port_gives_a_crowd_of_half_hellos_its_share_and_answers_others(ports: Ports) -> None:
    honest = honest_callers(ports)
    left: dict[str, int] = {}
    for name, port in all_of(ports).items():
        for _ in range(
            TRIES
        ):  # a process that had no core meanwhile is asked again; one without the bound never passes
            left[name] = left_of_a_crowd(port, honest.get(port))
            if left[name] <= CROWD_LEFT:
                break
    print(left)
    assert max(left.values()) <= CROWD_LEFT, left


def left_of_a_crowd(port: int, honest: Callable[[], object] | None) -> int:
    """How many of CROWD connections with half a hello stand after 4 s at most; meanwhile the honest caller is answered."""
    crowd: list[socket.socket] = []
    try:
        for _ in range(CROWD):
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", port), timeout=2, source_address=(ELSEWHERE, 0))
                crowd.append(one)
                one.send(HELLO)
        until = time.monotonic() + 4.0
        while (count := sum(is_open(one) for one in crowd)) > CROWD_LEFT and time.monotonic() < until:
            time.sleep(0.1)  # real processes have no virtual clock
        if honest is not None:
            honest()
        return count
    finally:
        for one in crowd:
            one.close()


def honest_callers(ports: Ports) -> dict[int, Callable[[], object]]:
    """A caller from another address than the crowd's, at ports that have one within a second or two."""
    asked = tomllib.loads((ports.cluster.run_folder / "run.toml").read_text())
    page = int(asked["coordinator"]["dashboard_port"])
    enrol = int(asked["coordinator"]["enrol_port"])
    gateway = asked["agent"]["listen"]
    key = (ports.cluster.run_folder / "learner" / "gateway.key").read_text().strip()
    count = urllib.request.Request(f"http://{gateway}/v1/sessions", headers={"authorization": f"Bearer {key}"})
    return {
        int(gateway.rpartition(":")[2]): lambda: urllib.request.urlopen(count, timeout=WAIT_S).close(),
        page: lambda: urllib.request.urlopen(f"http://127.0.0.1:{page}/healthz", timeout=WAIT_S).close(),
        enrol: lambda: tls_to(enrol).close(),
    }


@pytest.fixture(scope="module")
def scene(ports: Ports) -> Scene:
    return asyncio.run(scene_of(ports.cluster.run_folder))


def ports_of_members(scene: Scene) -> dict[str, tuple[int, str, bytes]]:
    """Port, call and the two bytes of an empty submessage of its messages."""

    def port(address: str) -> int:
        return int(address.rpartition(":")[2])

    return {
        "coordinator": (port(scene.coordinator.address), "/echo2.v1.Coordinator/WorkerSession", b"\x5a\x00"),
        "learner": (port(scene.learner.address), "/echo2.v1.Ingest/Report", b"\x22\x00"),
    }


def test_a_call_without_its_message_and_who_makes_no_call_are_ended_and_who_works_stays(
    ports: Ports, scene: Scene
) -> None:
    enrol, steps = int(scene.enrolment.rpartition(":")[2]), ports.cluster.step()
    calls = {
        "coordinator": "/echo2.v1.Operator/GetStatus",
        "learner": "/echo2.v1.Ingest/GetPartials",
    }

    def without_message(one: tuple[int, str]) -> float:
        began = time.monotonic()
        with tls_to(one[0], scene.identity(Role.WORKER)) as connection:
            attack = Stalled(connection)
            attack.begin(one[1])
            while time.monotonic() - began < 2 * DEADLINE_S and not said_end(connection):
                pass
        return time.monotonic() - began

    def without_call(port: int) -> float:
        """Of a member; at the enrolment port, of a stranger."""
        began = time.monotonic()
        with tls_to(port, None if port == enrol else scene.identity(Role.WORKER)) as connection:
            Stalled(connection)
            while time.monotonic() - began < 2 * DEADLINE_S and said(connection) != b"":
                pass
        return time.monotonic() - began

    members = ports_of_members(scene)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked_nothing = {"stranger": enrol} | {name: port for name, (port, _, _) in members.items()}
        silent = dict(zip(asked_nothing, pool.map(without_call, asked_nothing.values()), strict=True))
        asked = [(members[name][0], path) for name, path in calls.items()]
        stalled = dict(zip(calls, pool.map(without_message, asked), strict=True))
    print(silent, stalled)
    assert max(silent.values()) <= DEADLINE_S, silent
    assert max(stalled.values()) <= DEADLINE_S, stalled
    assert ports.cluster.step() > steps, "honest members have worked on"


def said(connection: ssl.SSLSocket) -> bytes | None:
    """What comes within a second; None for nothing, empty for the end."""
    connection.settimeout(1.0)
    try:
        return connection.recv(1 << 16)
    except TimeoutError:
        return None
    except OSError:
        return b""


def said_end(connection: ssl.SSLSocket) -> bool:
    """Whether the call's last headers, or its reset, or the connection's end came."""
    data = said(connection)
    if data == b"":
        return True
    at = 0
    while data is not None and at + 9 <= len(data):
        kind, flags = data[at + 3], data[at + 4]
        if kind == 3 or (kind == 1 and flags & 1):
            return True
        at += 9 + int.from_bytes(data[at : at + 3], "big")
    return False


def test_reports_of_empty_submessages_cost_what_they_weigh(ports: Ports, scene: Scene) -> None:
    """Four at once, each as large as the port takes; parsed they would be 500 MB each. To a coordinator: test_connections."""
    port, path, empty = ports_of_members(scene)["learner"]
    pid, size = ports.cluster.processes["learner"].pid, 7 << 20
    message = b"\x00" + size.to_bytes(4, "big") + empty * (size // 2)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the highest so far is what it has now
    before, worked = highest_bytes(pid), cpu_s(pid)
    with contextlib.ExitStack() as open_ones:
        for _ in range(4):
            connection = open_ones.enter_context(tls_to(port, scene.identity(Role.WORKER)))
            attack = Stalled(connection)
            with contextlib.suppress(OSError):  # it may have enough before the end
                attack.send(attack.begin(path), message, 8.0)
        time.sleep(3.0)  # real processes have no virtual clock
    grown, worked = highest_bytes(pid) - before, cpu_s(pid) - worked
    print(f"at most {grown >> 20} MiB more, {worked:.1f} s of CPU")
    assert grown < EMPTY_BYTES_MAX + 4 * size
    assert ports.cluster.processes["learner"].poll() is None
    assert "Traceback" not in ports.cluster.log("learner")


def highest_bytes(pid: int) -> int:
    """The most that it had in RAM since it was asked to begin anew."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel says no VmHWM")

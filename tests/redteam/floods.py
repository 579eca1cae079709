"""Attackers that need no message: connections that say nothing, TLS hellos, streams that stall, heads sent byte by byte.

Bounded in count; every one comes from an address of its own (127.0.0.2), as an attacker does.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

from tests.redteam.hostile import ELSEWHERE, HEADERS, RST_STREAM, Stalled, frame, head_of, is_open, tls_to
from tests.redteam.scene import Scene, attacker

IDLE = 600
OPENED_AT_ONCE = 60
TURN_S = 0.05
STALLED_BYTES = 15 << 20
STREAMS = 3


async def _idle(port: int, until: float, first_words: bytes = b"") -> int:
    """As many connections as one may hold, each opened anew when it is ended. How many there were."""
    loop, opened, held = asyncio.get_running_loop(), 0, list[socket.socket]()
    try:
        while loop.time() < until:
            for one in [one for one in held if not is_open(one)]:
                held.remove(one)
                one.close()
            for _ in range(min(OPENED_AT_ONCE, IDLE - len(held))):
                with contextlib.suppress(OSError):
                    one = socket.create_connection(("127.0.0.1", port), timeout=1, source_address=(ELSEWHERE, 0))
                    held.append(one)
                    opened += 1
                    one.send(first_words)
            await asyncio.sleep(TURN_S)
    finally:
        for one in held:
            one.close()
    return opened


PORTS: dict[str, Callable[[Scene], int]] = {
    "enrolment": lambda scene: _port(scene.enrolment),
    "services": lambda scene: _port(scene.coordinator.address),
    "page": lambda scene: scene.page_port,
    "learner": lambda scene: _port(scene.learner.address),
    "worker": lambda scene: _port(scene.worker.address),
}
"""Of a run on one machine, which starts no relay (tests/redteam/test_pipes.py has that one)."""
for _name, _port_of in PORTS.items():
    attacker(f"flood of idle connections, {_name}")(lambda scene, until, of=_port_of: _idle(of(scene), until))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


HEAD = b"GET / HTTP/1.1\r\nhost: local"
attacker("slow heads on the page")(lambda scene, until: _idle(scene.page_port, until, HEAD))


async def _in_thread(work: Callable[[float], int], until: float) -> int:
    left_s = until - asyncio.get_running_loop().time()
    return await asyncio.to_thread(work, left_s)


@attacker("flood of TLS hellos by a stranger")
async def hellos(scene: Scene, until: float) -> int:
    """Whole handshakes, of which nothing follows, at the ports that ask for a certificate and at the one that does not."""

    def work(seconds: float) -> int:
        end, count = time.monotonic() + seconds, 0
        ports = [PORTS[name](scene) for name in ("enrolment", "services", "learner")]
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ssl.SSLError):
                tls_to(ports[count % len(ports)], None, ELSEWHERE).close()
            count += 1
        return count

    return await _in_thread(work, until)


def _stalled_streams(name: str, port: str, path: str) -> None:
    """Registers who never sends the last byte of its messages."""

    def work(scene: Scene, seconds: float) -> int:
        end, count = time.monotonic() + seconds, 0
        member = scene.identity() if "member" in name else None
        with contextlib.ExitStack() as open_ones:
            while time.monotonic() < end and count < 200:
                with contextlib.suppress(OSError):
                    attack = Stalled(open_ones.enter_context(tls_to(PORTS[port](scene), member, ELSEWHERE)))
                    for _ in range(STREAMS):
                        attack.push(attack.begin(path), STALLED_BYTES - 1, STALLED_BYTES, 0.5)
                        count += 1
        return count

    attacker(f"{name}, {port}")(lambda scene, until: _in_thread(partial(work, scene), until))


_stalled_streams("stalled streams of a stranger", "enrolment", "/echo2.v1.Enrolment/Enrol")
_stalled_streams("stalled streams of a member", "services", "/echo2.v1.Coordinator/WorkerSession")
_stalled_streams("stalled streams of a member", "learner", "/echo2.v1.Ingest/Report")


@attacker("flood of calls that are reset at once, learner")
async def resets(scene: Scene, until: float) -> int:
    """Each a head and its reset, so that no count of open streams stops it."""

    def work(seconds: float) -> int:
        end, count, head = time.monotonic() + seconds, 0, head_of("/echo2.v1.Ingest/Report")
        member = scene.identity()
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                with tls_to(_port(scene.learner.address), member, ELSEWHERE) as connection:
                    attack = Stalled(connection)
                    for number in range(1, 20_001, 2):
                        call = frame(HEADERS, 4, number, head) + frame(RST_STREAM, 0, number, b"\0\0\0\x08")
                        connection.sendall(call)
                        count += 1
                        if number % 64 == 1:
                            attack.hear(0.0)
                            if time.monotonic() > end:
                                break
        return count

    return await _in_thread(work, until)

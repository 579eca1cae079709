"""A gateway on a real port of loopback, in a thread of its own, for hostile clients. Its fleet answers at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from echo2.gateway.episodes import Episodes, Session
from echo2.gateway.tree import ChatCodec
from echo2.trust.ports import GATEWAY, HttpLimits
from tests.unit.gateway.fakes import LetterCodec, RecordingFleet, completion, on_port

TICK_S = 0.005


@dataclass
class Served:
    """`session`: its one episode. `longest_hold_s`: for which the loop did nothing else, since it was last set to 0."""

    episodes: Episodes
    fleet: RecordingFleet
    port: int
    session: Session
    longest_hold_s: float = 0.0

    @property
    def key(self) -> str:
        return self.session.key

    def connect(self, source: str = "127.0.0.1", timeout: float = 10.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout, source_address=(source, 0))

    def head(self, length: int, key: str | None = None, kind: str = "application/json", path: str = "") -> bytes:
        """Of a POST. `key` None: none is shown."""
        lines = [
            f"POST {path or '/v1/chat/completions'} HTTP/1.1", "host: x", f"content-type: {kind}",
            f"content-length: {length}", *([] if key is None else [f"authorization: Bearer {key}"]),
        ]  # fmt: skip
        return "\r\n".join([*lines, "", ""]).encode()

    def post(self, body: Any, path: str = "", key: str | None = None, timeout: float = 30.0) -> tuple[int, Any]:
        """Status and answer, by the episode's key unless another is given. `body`: JSON, or its bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.connect(timeout=timeout) as connection:
            connection.sendall(self.head(len(data), key or self.key, path=path) + data)
            return answer_of(connection)


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    """Status and body of the next answer, which is JSON."""
    said = b""
    while b"\r\n\r\n" not in said:
        part = connection.recv(1 << 16)
        if not part:
            return 0, None
        said += part
    head, _, body = said.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(1 << 16)
    return int(head.split()[1]), json.loads(body)


@contextlib.contextmanager
def served(
    codec: Callable[[], ChatCodec] = LetterCodec, port_limits: HttpLimits = GATEWAY, **limits: Any
) -> Iterator[Served]:
    found: list[Served] = []
    is_ready, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        fleet = RecordingFleet()
        given = {"context_tokens": 400, "max_new_tokens": 50, **limits}
        async with on_port(fleet, codec(), "", port_limits, **given) as (episodes, port):
            fleet.on_lease = lambda group_id: loop.call_soon(episodes.on_completion, group_id, completion("ok"))
            episodes.open_problem("a1", 1, {})
            found.append(Served(episodes, fleet, int(port.url.rpartition(":")[2]), episodes.take_seat("")))
            is_ready.set()
            while not is_over.is_set():
                before = time.monotonic()
                await asyncio.sleep(TICK_S)
                found[0].longest_hold_s = max(found[0].longest_hold_s, time.monotonic() - before - TICK_S)

    is_over = threading.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert is_ready.wait(20)
    try:
        yield found[0]
    finally:
        is_over.set()
        thread.join(20)
        loop.close()

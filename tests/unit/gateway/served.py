"""A gateway on a real port of loopback, in a thread of its own, for hostile clients. Its fleet answers at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from echo2.gateway import events as e
from echo2.gateway.limits import GatewayLimits
from echo2.gateway.runtime.app import GatewayApp
from echo2.gateway.runtime.desk import GatewayDesk
from echo2.gateway.runtime.server import GatewayPort
from echo2.gateway.sessions import ModelReading, Sessions
from echo2.trust.runtime.port_limits import GATEWAY, HttpLimits
from tests.unit.gateway.test_sessions import Letters

TICK_S = 0.005


@dataclass
class ReadyFleet:
    """Answers in the loop's next turn with "ok"; `broken`: what it raises instead."""

    desk: GatewayDesk | None = None
    broken: Exception | None = None
    asked: list[e.Ask] = field(default_factory=list)
    depths: dict[int, int] = field(default_factory=dict)

    def ask(self, asked: e.Ask) -> tuple[str, int]:
        if self.broken is not None:
            raise self.broken
        self.asked.append(asked)
        chain = len(self.depths) if asked.chain is None else asked.chain
        self.depths[chain] = self.depths.get(chain, 0) + 1
        group_id = f"{asked.root}.{chain}.{self.depths[chain]}"
        tokens = tuple(map(ord, "ok"))
        assert self.desk is not None
        told = e.CallTokens(group_id, tokens, (-0.5,) * len(tokens), (0,) * len(tokens), is_cut=False)
        asyncio.get_running_loop().call_soon(self.desk.tell, told)
        return group_id, chain

    def ended(self, ended: e.EndEpisode) -> None: ...

    async def score(self, root: str, token_ids: tuple[int, ...]) -> str:
        return "no task"


@dataclass
class Served:
    """`key`: of its one episode. `longest_hold_s`: for which the loop did nothing else, since it was last set to 0."""

    desk: GatewayDesk
    fleet: ReadyFleet
    port: int
    key: str
    longest_hold_s: float = 0.0

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
    reading: Callable[[], ModelReading] = Letters, port_limits: HttpLimits = GATEWAY, **limits: Any
) -> Iterator[Served]:
    given: dict[str, Any] = {
        "context_tokens": 400,
        "max_new_tokens": 50,
        "vocabulary_size": 200_000,
        "token_bytes_max": 4,
        **limits,
    }
    found: list[Served] = []
    is_ready, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        fleet = ReadyFleet()
        sessions = Sessions(GatewayLimits(**given), reading(), lambda: "secret", has_harness=False)
        desk = fleet.desk = GatewayDesk(sessions, fleet, loop.time)
        port = GatewayPort("", limits=port_limits)
        serving = asyncio.create_task(port.run(GatewayApp(desk, "policy", "master", chr).application()))
        desk.tell(e.ProblemOpened("a1", 1, {}))
        seated = await desk.seat("")
        assert isinstance(seated, e.Seated)
        found.append(Served(desk, fleet, int(port.url.rpartition(":")[2]), seated.key))
        is_ready.set()
        try:
            while not is_over.is_set():
                before = time.monotonic()
                await asyncio.sleep(TICK_S)
                found[0].longest_hold_s = max(found[0].longest_hold_s, time.monotonic() - before - TICK_S)
        finally:
            await desk.close()
            await port.stop(serving)

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

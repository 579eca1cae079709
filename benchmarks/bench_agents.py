"""Agents: make bench-agents, or `python -m benchmarks.bench_agents --only PART`, which keeps the other parts' rows.

`learning` and `cache` are real runs (agent_runs.py). `gateway`: what it adds to an agent's call, with a fleet that answers at once.

Sessions, HTTP and chat template are the product's; the fleet is replaced by one that samples nothing, so that what is timed is
the gateway and a client on a plain socket. 2,000 sessions are open; six turns each of 64 sessions, one call at a time, then
64 at a time. The share of tokens that stood in the tree is the gateway's own; what workers keep of it is `cache`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.agent_runs import Row, cache, learning
from benchmarks.priority import lift
from echo2.gateway.app import GatewayApp, GatewayPort
from echo2.gateway.episodes import Episodes, GatewayLimits
from echo2.tasks.chat_format import ChatFormat, StopStrings
from tests.unit.gateway.fakes import RecordingFleet, whole_rollout
from tests.unit.tasks.families import tokenizer_of

RESULTS = Path(__file__).parent / "results" / "agents.json"
SESSIONS, PLAYING, TURNS, TOKENS = 2_000, 64, 6, 64


@dataclass(frozen=True)
class AgentRow:
    name: str
    value: float
    unit: str
    target: float | None
    better: str


class PlainClient:
    """HTTP on one kept connection."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").partition(":")

    async def open(self) -> PlainClient:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        return self

    async def post(self, path: str, key: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length: ")[2].partition("\r\n")[0])
        return json.loads(await self._reader.readexactly(length))

    def close(self) -> None:
        self._writer.close()


async def play(client: PlainClient, key: str) -> list[float]:
    """Six turns of one session; seconds of each."""
    messages: list[Any] = [{"role": "user", "content": "the abc " * 40}]
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        reply = await client.post("/v1/chat/completions", key, {"model": "m", "messages": messages})
        times.append(time.perf_counter() - began)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
    return times


async def measured() -> list[AgentRow]:
    tokenizer = tokenizer_of("qwen3")
    token_ids = tuple(tokenizer.encode("abc the 12 " * 40, add_special_tokens=False)[:TOKENS])
    answer = whole_rollout(token_ids)
    loop = asyncio.get_running_loop()
    fleet = RecordingFleet(lambda group_id: loop.call_soon(episodes.on_completion, group_id, answer))
    keys = iter(range(1 << 30))
    limits = GatewayLimits(8192, 128, len(tokenizer), 32)
    episodes = Episodes(limits, ChatFormat(tokenizer), fleet, time.monotonic, lambda: f"{next(keys):032x}")
    port = GatewayPort("")
    serving = asyncio.create_task(
        port.run(GatewayApp(episodes, "m", "master", StopStrings(tokenizer).bytes_of).application())
    )
    for number in range(SESSIONS // 8):
        episodes.open_problem(f"a{number:08d}", 8, {})
    client = await PlainClient(port.url).open()
    keys_held = [(await client.post("/v1/sessions", "master", {}))["key"] for _ in range(SESSIONS)]
    held = len(episodes.sessions)
    alone = [took for key in keys_held[:PLAYING] for took in await play(client, key)]
    clients = [await PlainClient(port.url).open() for _ in range(PLAYING)]
    began = time.perf_counter()
    await asyncio.gather(*(play(one, key) for one, key in zip(clients, keys_held[PLAYING:], strict=False)))
    together_s = time.perf_counter() - began
    counts = episodes.counts
    for one in (client, *clients):
        one.close()
    await episodes.close()
    await port.stop(serving)
    centiles = statistics.quantiles(alone, n=100)
    return [
        AgentRow("gateway, a turn p50", round(1e3 * centiles[49], 2), "ms", 5.0, "lower"),
        AgentRow("gateway, a turn p99", round(1e3 * centiles[98], 2), "ms", 25.0, "lower"),
        AgentRow("gateway, 64 sessions at once", round(PLAYING * TURNS / together_s), "calls/s", None, "higher"),
        AgentRow("sessions held open", held, "sessions", 2_000, "higher"),
        AgentRow("branches of histories that repeat", counts.branches, "chains", 0, "lower"),
        AgentRow(
            "prompt tokens that stood in the tree",
            round(counts.kept_tokens / counts.prompt_tokens, 3),
            "share",
            None,
            "higher",
        ),
    ]


def gateway() -> list[Row]:
    lift()
    rows = [asdict(row) for row in asyncio.run(measured())]
    for row in rows:
        print(f"{row['name']:75} {row['value']} {row['unit']} (asked: {row['target']})")
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {"gateway": gateway, "learning": learning, "cache": cache}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_agents", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be repeated")
    for part in parser.parse_args().only or PARTS:
        made = [{**row, "part": part} for row in PARTS[part]()]
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        rows = [*(row for row in kept if row["part"] != part), *made]
        rows.sort(key=lambda row: list(PARTS).index(row["part"]))
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

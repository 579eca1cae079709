"""What token-level generation adds to a call: make bench-doors.

Pool, admission and HTTP are the product's, on a real port; the fleet is replaced by one that reports each completion at once, so
what is timed is the door. 64 clients in a process of their own, each with a plain socket, ask for one completion at a time: 512
tokens of prompt, 128 sampled, with log-probabilities. Every token, log-probability and version is compared with what the fleet
reported.

    python -m benchmarks.bench_doors [--calls 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.config.run import RunConfig
from echo2.gateway.app import GatewayPort
from echo2.gateway.generate import GenerateApp, TokenAnswer, TokenRequest
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.request_pool import RequestPool

RESULTS = Path(__file__).parent / "results" / "doors.json"
CLIENTS, PROMPT, SAMPLED, VOCABULARY = 64, 512, 128, 150_000
PAUSE_S = 0.5  # of a client between two calls, on average: 100 calls a second together
TARGET_P50_MS, TARGET_P99_MS = 5.0, 25.0


def sampled(prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """What the fleet samples for a prompt: tokens and log-probabilities that follow from it."""
    draw = random.Random(prompt[0] * 1_000_003 + prompt[-1])
    return [draw.randrange(VOCABULARY) for _ in range(SAMPLED)], [-draw.random() for _ in range(SAMPLED)]


class InstantFleet:
    """The coordinator, the workers and the sampler in one: what is offered is reported in the next turn of the loop."""

    newest_version, routing_shape = 0, None

    def __init__(self) -> None:
        run = SamplingParams(max_new_tokens=SAMPLED)
        prompts: Any = SimpleNamespace(
            sampling=run, context_tokens=PROMPT + SAMPLED, vocabulary_size=VOCABULARY, secret_seed=lambda name: hash(name) & 0xFFFF,
            stop_strings=SimpleNamespace(pieces_of=lambda texts: ((), ())),
        )  # fmt: skip
        nothing: Any = SimpleNamespace(
            questions=0, is_driven=False, rewards={}, append=lambda record: None, commit=lambda: asyncio.sleep(0)
        )
        history: Any = SimpleNamespace(cursor=0, opened_in={})
        groups = OpenGroups(RunConfig(), VOCABULARY)
        self.pool = RequestPool(groups, nothing, history, prompts, nothing, self)
        self.pool.resume()

    def offer(self, specs: Sequence[GroupSpec]) -> None:
        for spec in specs:
            asyncio.get_running_loop().call_soon(lambda spec=spec: asyncio.ensure_future(self._report(spec)))

    async def _report(self, spec: GroupSpec) -> None:
        tokens, logprobs = sampled(spec.prompt_token_ids)
        spans = (VersionSpan(Version(0), SAMPLED),)
        numbers = tuple(logprobs)
        whole = Rollout(spec.group_id, 0, tuple(tokens), numbers, numbers, spans, FinishReason.LENGTH)
        await self.pool.report([whole], 1, PeerId("worker"))

    def close(self, group_ids: Sequence[GroupId], reason: str) -> None: ...
    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None: ...
    def on_answer(self, group: object) -> None: ...
    def on_evaluation(self, row: object) -> None: ...
    def fail(self, error: BaseException) -> None:
        raise error

    def generate(self, request: TokenRequest) -> TokenAnswer:
        return self.pool.generate(request)

    def leave(self, answer: TokenAnswer) -> None:
        self.pool.leave(answer)

    def status(self) -> dict[str, object]:
        return {}

    async def publish(self, version: int, folder: str, is_last: bool) -> None: ...


async def client(port: int, number: int, calls: int, seconds: list[float]) -> int:
    """One client's calls; returns how many answers were what the fleet sampled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    draw, right = random.Random(number), 0
    for _ in range(calls):
        await asyncio.sleep(draw.expovariate(1 / PAUSE_S))
        prompt = [draw.randrange(VOCABULARY) for _ in range(PROMPT)]
        told = {"token_ids": prompt, "sampling_params": {"max_tokens": SAMPLED, "logprobs": 1}}
        body = json.dumps(told).encode()
        head = (
            "POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        writer.write(head.encode() + body)
        answered = await reader.readuntil(b"\r\n\r\n")
        length = int(answered.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        data = await reader.readexactly(length)
        seconds.append(time.perf_counter() - began)
        choice = json.loads(data)["choices"][0]
        found = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
        right += found == sampled(prompt) and choice["versions"] == [0] * SAMPLED
    writer.close()
    return right


async def play(port: int, calls: int) -> None:
    seconds: list[float] = []
    await client(port, CLIENTS, 3, [])  # the first calls import
    right = await asyncio.gather(*(client(port, number, calls, seconds) for number in range(CLIENTS)))
    print(json.dumps({"seconds": seconds, "right": sum(right)}))


async def measure(calls: int) -> dict[str, Any]:
    port = GatewayPort("")
    serving = asyncio.create_task(
        port.run(GenerateApp(InstantFleet(), "policy", PROMPT + SAMPLED, "key").application())
    )
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_doors",
        "--play",
        port.url.rpartition(":")[2],
        "--calls",
        str(calls),
    ]
    clients = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    said, _ = await clients.communicate()
    await port.stop(serving)
    found: dict[str, Any] = json.loads(said)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20, help="of each client")
    parser.add_argument("--play", type=int, default=0, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.play:
        asyncio.run(play(own.play, own.calls))
        return
    found = asyncio.run(measure(own.calls))
    ms = sorted(1000 * second for second in found["seconds"])
    right = 100 * found["right"] / len(ms)
    rows = [
        {"name": f"a call, {CLIENTS} clients: {name}", "value": value, "unit": "ms", "target": target, "better": "lower"}
        for name, value, target in (
            ("p50", statistics.median(ms), TARGET_P50_MS), ("p99", ms[int(0.99 * len(ms))], TARGET_P99_MS)
        )
    ]  # fmt: skip
    rows.append(
        {"name": "answers as sampled", "value": right, "unit": "%", "target": 100.0, "better": "higher"}
    )  # fmt: skip
    for row in rows:
        print(f"{row['name']:<40} {row['value']:>8.2f} {row['unit']:<3} (target {row['target']:g})")
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

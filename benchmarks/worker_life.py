"""A worker's life in a process of its own: join to first token, what reporting costs, leaving, being killed; and a soak.

A small real run (coordinator, learner, broadcast over mutual TLS on loopback) lives in this process. What reporting,
streaming and everything else beside generation cost is the CPU time of all the worker's threads but the engine's, as
a share of the whole, so other work on the machine moves it little.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.worker_scene import CONFIG, Row, row
from echo2.base.ids import GroupId
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.worker.weights import model_digest
from tests.contract.test_engine_soak import SLOPE_BYTES_PER_SWAP_MAX, SWAP_COUNT, swaps_under_load
from tests.unit.worker.peers import SmallRun

WINDOW_S = 15.0
REPORT_INTERVAL_S = 2.0


def thread_cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of each thread of a process, to the nanosecond: most threads use less than a tick of the clock."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}


async def prepare(run: SmallRun) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    run.model_config_json = json.dumps(CONFIG).encode()
    run.model_digest = model_digest(
        run.model_config_json, [(name, tuple(p.shape), "bfloat16") for name, p in model.named_parameters()]
    )
    run.coordinator.learner = run.whereabouts
    run.coordinator.report_interval_s = REPORT_INTERVAL_S
    run.coordinator.heartbeat_interval_s = 1.0
    sampling = SamplingParams(max_new_tokens=256, seed=3)
    run.coordinator.groups = [GroupSpec(GroupId(f"g{i}"), (5, 6, 7, 8), 8, sampling, 0) for i in range(4000)]
    await run.publish(0, model)


async def beside_generation(run: SmallRun, pid: int, window_s: float) -> tuple[float, float]:
    """Share of the worker's CPU time spent beside its engine, and its tokens per engine CPU second."""
    before, tokens_before = thread_cpu_s(pid), run.coordinator.heartbeats[-1].sampled_tokens
    await asyncio.sleep(window_s)
    after, tokens_after = thread_cpu_s(pid), run.coordinator.heartbeats[-1].sampled_tokens
    spent = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in after.items()}
    engine_s = max(spent.values())
    return 1.0 - engine_s / sum(spent.values()), (tokens_after - tokens_before) / engine_s


@asynccontextmanager
async def worker(run: SmallRun, folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, float]]:
    """A worker that has sampled its first tokens and reported some, and the seconds from its start to the first."""
    run.learner.reports.clear()
    run.coordinator.heartbeats.clear()
    begun = time.monotonic()
    arguments = ["-m", "benchmarks.worker_process", run.link(), str(folder), "1", "32"]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        await run.coordinator.until(lambda it: it.heartbeats and it.heartbeats[-1].sampled_tokens > 0, within_s=120.0)
        joined_s = time.monotonic() - begun
        await run.learner.until(lambda it: len(it.reports) > 4, within_s=120.0)
        yield process, joined_s
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def life_and_leave(run: SmallRun, folder: Path, window_s: float) -> list[Row]:
    async with worker(run, folder) as (process, joined_s):
        beside, tokens_per_s = await beside_generation(run, process.pid, window_s)
        run.coordinator.ended.clear()
        run.coordinator.groups.clear()
        held = run.coordinator.heartbeats[-1].running_sequences
        left_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        await run.coordinator.until(lambda it: it.leavings, within_s=30.0)
        left_s = time.monotonic() - left_at
        await asyncio.wait_for(process.wait(), 30.0)
    print(f"{tokens_per_s:.0f} tokens per engine CPU second; {held} sequences ran when it was asked to leave")
    return [
        row("join to first token", joined_s, "s", 10.0),
        row("CPU beside generation", beside, "share", 0.03),
        row("SIGTERM to partials handed back", left_s, "s", 2.0),
    ]


async def loss_by_kill(run: SmallRun, folder: Path, window_s: float) -> list[Row]:
    """How much of what was sampled until SIGKILL the learner does not hold, in seconds of sampling.

    What was sampled is the last heartbeat's count, carried on at the rate between it and one `window_s` earlier.
    """
    held_before = reported_tokens(run)
    async with worker(run, folder) as (process, _):
        begun, first = time.monotonic(), run.coordinator.heartbeats[-1].sampled_tokens
        await asyncio.sleep(window_s)
        count = len(run.coordinator.heartbeats)
        await run.coordinator.until(lambda it: len(it.heartbeats) > count, within_s=30.0)
        beat_at, beat = time.monotonic(), run.coordinator.heartbeats[-1].sampled_tokens
        await asyncio.sleep(0.5)
        process.kill()
        killed_at = time.monotonic()
        await process.wait()
    rate = (beat - first) / (beat_at - begun)
    await asyncio.sleep(0.5)  # what is on its way
    sampled = beat + rate * (killed_at - beat_at)
    lost = sampled - (reported_tokens(run) - held_before)
    print(f"SIGKILL: {lost:.0f} tokens lost of {sampled:.0f}, at {rate:.0f} tokens/s")
    return [row("kill -9: tokens lost, in seconds of sampling", max(0.0, lost / rate), "s", REPORT_INTERVAL_S)]


def reported_tokens(run: SmallRun) -> int:
    return sum(len(segment.token_ids) for segments in run.learner.held.values() for segment in segments)


def life(is_quick: bool) -> list[Row]:
    """Two workers, one after the other: one is asked to leave, one is killed."""
    window_s = 4.0 if is_quick else WINDOW_S

    async def measure() -> list[Row]:
        with tempfile.TemporaryDirectory() as folder:
            async with SmallRun(Path(folder) / "run") as run:
                await prepare(run)
                groups = list(run.coordinator.groups)
                rows = await life_and_leave(run, Path(folder) / "worker", window_s)
                run.coordinator.groups = groups[len(groups) // 2 :]
                return rows + await loss_by_kill(run, Path(folder) / "other", window_s / 3)

    return asyncio.run(measure())


def soak(is_quick: bool) -> list[Row]:
    """Growth of resident memory and sequences that did not end, over 200 swaps under load in all three modes."""
    swaps = SWAP_COUNT // 4 if is_quick else SWAP_COUNT
    slope, finished, stuck = swaps_under_load(swaps)
    print(f"{swaps} swaps, {finished} sequences, resident memory grows by {slope:.0f} bytes a swap")
    return [
        row(f"soak of {swaps} swaps: growth of memory a swap", slope, "bytes", float(SLOPE_BYTES_PER_SWAP_MAX)),
        row(f"soak of {swaps} swaps: sequences that did not end", stuck, "sequences", 0),
    ]

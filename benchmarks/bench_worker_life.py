"""A worker's life in a process of its own: join to first token, what reporting costs, leaving.

A small real run (coordinator, learner, broadcast over mutual TLS on loopback) lives in this process. What reporting,
streaming and everything else beside generation cost is the CPU time of all the worker's threads but the engine's, as
a share of the whole, so other work on the machine moves it little.

    python -m benchmarks.bench_worker_life
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.ids import GroupId
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.worker.model_digest import model_digest
from tests.unit.worker.peers import SmallRun

RESULTS = Path(__file__).parent / "results" / "worker_life.json"
WINDOW_S = 15.0
CONFIG: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
Row = dict[str, object]


def row(name: str, value: float, unit: str, target: float) -> Row:
    return {"name": name, "value": round(value, 4), "unit": unit, "target": target, "better": "lower"}


def thread_cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of each thread of a process."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[task.name] = (int(fields[11]) + int(fields[12])) / tick
    return found


async def prepare(run: SmallRun) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    run.model_config_json = json.dumps(CONFIG).encode()
    run.model_digest = model_digest(
        run.model_config_json, [(name, tuple(p.shape), "bfloat16") for name, p in model.named_parameters()]
    )
    run.coordinator.learner = run.whereabouts
    run.coordinator.report_interval_s = 2.0
    run.coordinator.heartbeat_interval_s = 1.0
    sampling = SamplingParams(max_new_tokens=256, seed=3)
    run.coordinator.groups = [GroupSpec(GroupId(f"g{i}"), (5, 6, 7, 8), 8, sampling, 0) for i in range(4000)]
    await run.publish(0, model)


async def beside_generation(run: SmallRun, pid: int) -> tuple[float, float]:
    """Share of the worker's CPU time spent beside its engine, and its tokens per engine CPU second."""
    before, tokens_before = thread_cpu_s(pid), run.coordinator.heartbeats[-1].sampled_tokens
    await asyncio.sleep(WINDOW_S)
    after, tokens_after = thread_cpu_s(pid), run.coordinator.heartbeats[-1].sampled_tokens
    spent = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in after.items()}
    engine_s = max(spent.values())
    return 1.0 - engine_s / sum(spent.values()), (tokens_after - tokens_before) / engine_s


async def one_life(run: SmallRun, folder: Path) -> list[Row]:
    run.learner.reports.clear()
    begun = time.monotonic()
    arguments = ["-m", "tests.unit.worker.worker_process", run.link(), str(folder), "1", "32"]
    worker = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        await run.coordinator.until(lambda it: it.heartbeats and it.heartbeats[-1].sampled_tokens > 0, within_s=120.0)
        joined_s = time.monotonic() - begun
        await run.learner.until(lambda it: len(it.reports) > 4, within_s=120.0)
        beside, tokens_per_s = await beside_generation(run, worker.pid)
        run.coordinator.ended.clear()
        run.coordinator.groups.clear()
        held = run.coordinator.heartbeats[-1].running_sequences
        left_at = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        await run.coordinator.until(lambda it: it.leavings, within_s=30.0)
        left_s = time.monotonic() - left_at
        await asyncio.wait_for(worker.wait(), 30.0)
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
    print(f"{tokens_per_s:.0f} tokens per engine CPU second; {held} sequences ran when it was asked to leave")
    return [
        row("join to first token", joined_s, "s", 10.0),
        row("CPU beside generation", beside, "share", 0.03),
        row("SIGTERM to partials handed back", left_s, "s", 2.0),
    ]


async def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        async with SmallRun(Path(folder) / "run") as run:
            await prepare(run)
            return await one_life(run, Path(folder) / "worker")


def main() -> int:
    rows = asyncio.run(measure())
    for each in rows:
        print(f"{each['name']:<34} {each['value']:>9} {each['unit']:<6} target {each['target']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What real sizes take: sequences by kind of machine, and memory of a worker's engine that takes a keyframe and generates.

    python -m benchmarks.bench_scale [--only PART ...]

Writes benchmarks/results/scale.json, one row a claim. `sizing` needs nothing; `engine` and `keyframe` measure processes of
their own, an embedded engine beside the host's copy, with random weights of SmolLM2-135M's shape (and Qwen3-0.6B's for the
keyframe). A worker's process has some 0.1 GB of sockets and codec on top. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "scale.json"
PARTS = ("sizing", "engine", "keyframe")
MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-32b")
LONGEST = 2560
SEQUENCES, TOKENS, PROMPT = 32, 80, 40
ENGINE_BYTES_MAX = 1.5e9
Row = dict[str, object]


def _row(part: str, name: str, value: float, unit: str, target: float | None = None) -> Row:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": "lower", "part": part}


def sizing() -> list[Row]:
    """Sequences of 2,560 tokens by model and memory of the GPU, on as few GPUs as the rule takes."""
    from echo2.base.errors import ResourceError
    from echo2.coordinator.runtime.catalogue import built_in_models
    from echo2.cost_model.sizing import RunLengths, gpu_fit

    rows: list[Row] = []
    for name in MODELS:
        for gib in (24, 48, 80):
            for count in (1, 2, 4, 8):
                try:
                    fit = gpu_fit(built_in_models()[name], [gib << 30] * count, RunLengths(LONGEST))
                except ResourceError:
                    continue
                where = f"{count} x {gib} GiB"
                whole = f"{fit.whole_sequences} at full length"
                rows.append(
                    _row("sizing", f"{name} on {where}: sequences of {LONGEST} tokens ({whole})", fit.sequences, "")
                )
                break
    return rows


def apart(part: str, model: str) -> Row:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_scale", "--inside", part, model]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def config_of(model: str) -> dict[str, object]:
    import tomllib
    from importlib.resources import files

    tables = tomllib.loads((files("echo2.cost_model") / "models.toml").read_text(encoding="utf-8"))
    return dict(tables[model])


def peak_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


async def inside(part: str, model: str) -> Row:
    """The engine takes a whole version from the host's copy; `engine` generates by it, too."""
    import torch

    from echo2.base.ids import Version
    from echo2.base.rollout import FinishReason, SamplingParams
    from echo2.weights import HostWeights
    from echo2.worker.engine import GenerateRequest, SwapMode
    from echo2.worker.runtime.engines.embedded import EmbeddedEngine
    from echo2.worker.runtime.weights import HostSnapshot

    engine = EmbeddedEngine(
        config_of(model), slot_count=SEQUENCES, context_tokens=TOKENS, cache_tokens=SEQUENCES * TOKENS
    )
    await engine.start()
    live = engine._weights.tensors  # type: ignore[attr-defined]
    torch.manual_seed(0)
    tensors = {name: torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(std=0.02) for name, tensor in live.items()}
    for tensor in live.values():
        tensor.fill_(1.0)  # the engine's own weights are there before, so that what comes on top is the hand-over's
    host = HostWeights.from_tensors(tensors, Version(0), copy=False)
    published = sum(2 * tensor.numel() for tensor in tensors.values())
    before = peak_bytes()
    await engine.swap(HostSnapshot(host), SwapMode.RECOMPUTE_KV)
    if part == "keyframe":
        over = (peak_bytes() - before) / published
        await engine.stop()
        name = (
            f"{model}: peak of taking a keyframe beside the engine's weights and the host copy, of the published bytes"
        )
        return _row(part, name, round(over, 4), "x", 0.3)
    began = time.monotonic()
    for number in range(SEQUENCES):
        sampling = SamplingParams(max_new_tokens=TOKENS - PROMPT, seed=number)
        engine.submit(GenerateRequest(f"r{number}", tuple(range(10, 10 + PROMPT)), (), sampling, f"p{number // 8}"))
    left = SEQUENCES
    while left:
        for chunk in await engine.next_chunks():
            left -= chunk.finish_reason is not FinishReason.UNFINISHED
    wall_s = time.monotonic() - began
    await engine.stop()
    told = f"{wall_s:.0f} s at a load of {os.getloadavg()[0]:.1f}"
    name = f"{model}: peak of engine and host copy, {SEQUENCES} sequences of {TOKENS} tokens ({told})"
    return _row(part, name, round(peak_bytes() / 1e9, 3), "GB", ENGINE_BYTES_MAX / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="repeat for several parts")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.inside:
        print(json.dumps(asyncio.run(inside(*own.inside))))
        return
    parts = own.only or list(PARTS)
    rows = sizing() if "sizing" in parts else []
    rows += [apart("engine", "smollm2-135m")] if "engine" in parts else []
    rows += [apart("keyframe", model) for model in ("smollm2-135m", "qwen3-0.6b")] if "keyframe" in parts else []
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    kept = [row for row in kept if row["part"] not in parts]
    RESULTS.write_text(json.dumps({"rows": kept + rows}, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()

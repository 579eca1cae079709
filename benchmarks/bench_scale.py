"""What real sizes take, one row a claim.

    python -m benchmarks.bench_scale [--only PART ...]

Writes benchmarks/results/scale.json after each part; each runs in processes of its own, within its own time limit.

    sizing     sequences by model and GPU
    engine     memory of the embedded engine beside the host's copy, SmolLM2-135M's shape (a worker's process has some 0.1 GB
               of sockets and codec on top)
    keyframe   what the engine takes beside the weights while a keyframe goes in
    pull       what fetching 165,000 chunks costs the session core (the figures of bench_pull)
    newcomer   bytes from peers for a worker that has the base, at version 200 (scale_newcomer)
    merged     the same by the share of weights that differ, and what no lossless delta is below (scale_codec)
    processes  a learner and workers, two steps on random weights (scale_processes); reduced where memory is short, and said
    evaluation rollouts and tokens that evaluations add to those that are trained on, of the shipped examples
    audit      the audit's seconds and tokens, of the shipped examples and as bench_audit last measured them
    spread     a keyframe and a delta of Qwen3-4B's shape to three node processes, and a restart on the store (scale_spread)

GB are 10^9 bytes; a row of seconds tells the machine's load beside it. Another part is a function that returns rows and an
entry in PARTS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "scale.json"
MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-32b")
LONGEST = 2560
SEQUENCES, TOKENS, PROMPT = 32, 80, 40
ENGINE_BYTES_MAX = 1.5e9
Row = dict[str, object]


SPREAD_WITHIN_S, NEWCOMER_WITHIN_S, PROCESSES_WITHIN_S = 900, 1200, 1800
LEARNER_OFF_MAX = 0.1


def _row(part: str, name: str, value: float, unit: str, target: float | None = None, better: str = "lower") -> Row:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better, "part": part}


def sizing() -> list[Row]:
    """Sequences of 2,560 tokens by model and memory of the GPU, on as few GPUs as the rule takes."""
    from echo2.base.errors import ResourceError
    from echo2.coordinator.money.market import built_in_models
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
                told = f"{name} on {where}: sequences of {LONGEST} tokens ({whole})"
                rows.append(_row("sizing", told, fit.sequences, "", better="higher"))
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
    from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
    from echo2.worker.engines.engine import GenerateRequest, SwapMode
    from echo2.worker.weights import HostSnapshot

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


def engine() -> list[Row]:
    return [apart("engine", "smollm2-135m")]


def keyframe() -> list[Row]:
    return [apart("keyframe", model) for model in ("smollm2-135m", "qwen3-0.6b")]


def pull() -> list[Row]:
    """As bench_pull last measured them."""
    found: list[Row] = json.loads((RESULTS.parent / "pull.json").read_text())
    return [{**row, "part": "pull"} for row in found if str(row["name"]).startswith("165,000 chunks of 64 KiB, ")]


def told_by(module: str, within_s: float, *arguments: str) -> Any:
    """The JSON that a benchmark of its own prints."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=within_s)
    return json.loads(done.stdout.splitlines()[-1])


def newcomer() -> list[Row]:
    return newcomer_rows(told_by("scale_newcomer", NEWCOMER_WITHIN_S))


def newcomer_rows(found: dict[str, Any]) -> list[Row]:
    fetched, whole = sum(found["bytes"]), found["keyframe_bytes"]
    way = ", ".join(f"{parent}->{version}" for parent, version in found["way"])
    name = (
        f"a newcomer with the base at version 200, learning rate 1e-6, a 7M model: bytes from peers ({way}; "
        f"{found['changed']:.1%} of the weights differ from the base), of a keyframe"
    )
    return [_row("newcomer", name, round(100 * fetched / whole, 2), "%", 3.0)]


def merged() -> list[Row]:
    """What bounds a newcomer's bytes."""
    rows = []
    for one in told_by("scale_codec", NEWCOMER_WITHIN_S):
        where = f"a delta from the base of which {one['changed']:.1%} differ, of a keyframe"
        rows.append(_row("merged", where, round(100 * one["coded"], 2), "%"))
        rows.append(_row("merged", f"{where}: at least, by entropy", round(100 * one["bound"], 2), "%"))
    return rows


def processes() -> list[Row]:
    """What the first model took is kept whatever becomes of the second."""
    rows: list[Row] = []
    for model in ("smollm2-135m", "qwen3-0.6b"):
        rows += process_rows(model, told_by("scale_processes", PROCESSES_WITHIN_S, model))
        keep("processes", rows)
    return rows


def process_rows(model: str, found: dict[str, Any]) -> list[Row]:
    needed = found["needed"]
    if "missing" in found:
        told = (
            f"{model}: two steps, {found['way']}, need by the sizing rule (not run: {found['free'] / 1e9:.1f} GB free)"
        )
        return [_row("processes", told, round(needed["together"] / 1e9, 1), "GB")]
    peaks = found["peaks"]
    count = f"{found['workers']} workers" if found["workers"] > 1 else "one worker"
    instead = f"; not run, for want of memory: {', '.join(found['missed'])}" if found["missed"] else ""
    where = f"{model}, {found['steps']} steps with {count}, real processes ({found['way']}{instead})"
    target = ENGINE_BYTES_MAX / 1e9 if model == "smollm2-135m" else None
    worker = max(peak for name, peak in peaks.items() if name.startswith("w"))
    rows = [
        _row(
            "processes",
            f"{where}: peak of a worker, {SEQUENCES} sequences of {TOKENS} tokens",
            round(worker / 1e9, 3),
            "GB",
            target,
        )
    ]
    rows.append(_row("processes", f"{where}: peak of the learner", round(peaks["learner"] / 1e9, 2), "GB"))
    if found["rank"]:  # what echo2 plan tells is a learner of all weights
        wall = f"{where}: wall clock, at a load of {found['load']:.0f}"
        return [*rows, _row("processes", wall, round(found["wall_s"]), "s")]
    off = abs(peaks["learner"] / needed["learner"] - 1)
    told = f"{where}: how far the learner's peak is from the {needed['learner'] / 1e9:.2f} GB told by echo2 plan"
    rows.append(_row("processes", told, round(100 * off, 1), "%", 100 * LEARNER_OFF_MAX))
    return [
        *rows,
        _row("processes", f"{where}: wall clock, at a load of {found['load']:.0f}", round(found["wall_s"]), "s"),
    ]


def spread() -> list[Row]:
    return spread_rows("qwen3-4b", told_by("scale_spread", SPREAD_WITHIN_S, "qwen3-4b"))


def spread_rows(model: str, found: list[dict[str, Any]]) -> list[Row]:
    keyframe, delta, peaks, restart = found
    rows = []
    for each in (keyframe, delta):
        gb, kind = each["bytes"] / 1e9, each["kind"]
        told = f"{each['weights_bytes'] / 1e9:.2f} GB of weights, {gb:.3f} GB coded, at a load of {each['load']:.0f}"
        where = f"{model}-shaped {kind} to three node processes on loopback, every element checked ({told})"
        rows.append(_row("spread", f"{where}: seconds", round(each["seconds"], 1), "s"))
        rate = 3 * each["weights_bytes"] / 1e9 / each["seconds"]
        rows.append(_row("spread", f"{where}: weights delivered", round(rate, 3), "GB/s", better="higher"))
    rows.append(_row("spread", f"{model}-shaped: peak of the publisher", round(peaks["publisher"]), "MiB"))
    rows.append(_row("spread", f"{model}-shaped: largest peak of the fetchers", round(max(peaks["fetchers"])), "MiB"))
    name = f"{model}: a node starts again on its store of {restart['bytes'] / 1e9:.2f} GB, every chunk verified"
    return [*rows, _row("spread", name, round(restart["start_s"], 1), "s")]


def evaluation() -> list[Row]:
    """By the examples' own settings: held-out prompts are leases like others."""
    rows = []
    for name, config in examples():
        given, task = config.learner, config.task
        sets = task.eval_prompts * task.eval_samples
        trained = given.prompts_per_step * given.rollouts_per_prompt * task.eval_every_steps
        told = f"{name}: rollouts of evaluations, of those trained on (computed from its config)"
        rows.append(_row("evaluation", told, round(100 * sets / trained, 1), "%"))
    return rows


def audit() -> list[Row]:
    """Foretold as by echo2 plan, and measured as bench_audit last did."""
    from echo2.cli.plan import question_of
    from echo2.cli.sizing import audit_s_per_step
    from echo2.coordinator.money.market import built_in_catalogue

    rows = []
    for name, config in examples():
        question, _ = question_of(config, {}, built_in_catalogue())
        prompt = config.sampling.max_prompt_tokens / 2
        own_s = audit_s_per_step(config, prompt, question.tokens.mean, question.learner.train_s)
        if own_s is None:
            continue
        share = 100 * own_s / question.learner.train_s
        rows.append(_row("audit", f"{name}: learner's scoring, of a step (computed)", round(share, 2), "%", 10.0))
    kept = json.loads((RESULTS.parent / "audit.json").read_text())["rows"]
    return [*rows, *({**row, "part": "audit"} for row in kept if "an audited rollout" in str(row["name"]))]


def examples() -> list[tuple[str, Any]]:
    """The shipped ones of Qwen3, by file name."""
    from echo2.config.load import load_config

    folder = Path(__file__).parents[1] / "examples" / "configs"
    return [(file.stem, load_config([file], None, {})) for file in sorted(folder.glob("math-qwen3-*.toml"))]


PARTS: dict[str, Callable[[], list[Row]]] = {
    "sizing": sizing, "engine": engine, "keyframe": keyframe, "pull": pull, "newcomer": newcomer, "merged": merged,
    "processes": processes, "evaluation": evaluation, "audit": audit, "spread": spread,
}  # fmt: skip


def keep(part: str, rows: list[Row]) -> None:
    """In the place of what was measured of that part before."""
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    of_part = {name: [row for row in kept if row["part"] == name] for name in PARTS} | {part: rows}
    RESULTS.write_text(json.dumps({"rows": [row for name in PARTS for row in of_part[name]]}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(PARTS), default=[], help="repeat for several parts")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.inside:
        print(json.dumps(asyncio.run(inside(*own.inside))))
        return
    for part in own.only or list(PARTS):
        rows = PARTS[part]()
        keep(part, rows)
        for row in rows:
            print(row, flush=True)


if __name__ == "__main__":
    main()

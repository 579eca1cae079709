"""The worker's figures: one command, each part in a process of its own, every row written by what measured it.

    python -m benchmarks.bench_worker [--quick] [--only PART ...]

Parts: `speed` (against transformers; streaming's share), `bf16` (at SmolLM2's shape), `swaps`, `agreement` (of
log-probabilities), `life` (join, cost beside generation, SIGTERM, kill -9, in a small real run on loopback), `soak` (200
swaps under load). `--only` replaces the rows of its parts and leaves the others; `--quick` measures less and writes no
results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.worker_scene import Row

RESULTS = Path(__file__).parent / "results" / "worker.json"
PARTS = {
    "speed": "benchmarks.worker_speed:speed",
    "bf16": "benchmarks.worker_narrow:narrow",
    "swaps": "benchmarks.worker_swaps:swaps",
    "agreement": "benchmarks.worker_swaps:agreement",
    "life": "benchmarks.worker_life:life",
    "soak": "benchmarks.worker_life:soak",
}


def measure(part: str, is_quick: bool) -> list[Row]:
    """In a process of the part's own."""
    import torch

    torch.set_num_threads(1)
    module, _, function = PARTS[part].partition(":")
    rows: list[Row] = getattr(importlib.import_module(module), function)(is_quick)
    print(f"{part}: peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", flush=True)
    return [each | {"part": part} for each in rows]


def apart(part: str, is_quick: bool, folder: str) -> list[Row]:
    """The same in another process: no part measures beside what an earlier one left."""
    rows = Path(folder) / f"{part}.json"
    command = [sys.executable, "-m", "benchmarks.bench_worker", "--only", part, "--rows", str(rows)]
    subprocess.run(
        [*command, *(["--quick"] if is_quick else [])], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found: list[Row] = json.loads(rows.read_text())
    return found


def keep(rows: list[Row], parts: list[str]) -> None:
    """Writes the results; measured parts replace all of their rows."""
    known: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [each for each in known if each.get("part") in PARTS.keys() - set(parts)]
    order = list(PARTS)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps(sorted(kept + rows, key=lambda each: order.index(str(each["part"]))), indent=1) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything; writes no results")
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="repeat for several parts")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    own = parser.parse_args()
    parts = own.only or list(PARTS)
    if own.rows:
        Path(own.rows).write_text(json.dumps(measure(parts[0], own.quick)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [each for part in parts for each in apart(part, own.quick, folder)]
    print(f"\n{'what':<72} {'value':>12} {'unit':<10} target")
    for each in rows:
        print(
            f"{each['name']:<72} {each['value']:>12} {each['unit']:<10} {'' if each['target'] is None else each['target']}"
        )
    if not own.quick:
        keep(rows, parts)


if __name__ == "__main__":
    main()

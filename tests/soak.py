"""`make soak`: the virtual world, chaos on real processes and the fuzzers for a stated time; docs/reliability.md's table.

`python -m tests.soak --seconds 1800 --first-seed 1000`; the parts share the time by SHARES, `--only sim` runs one part alone.
Results are added every minute or so to the record (`soak_record`), by part and commit, and the page is written from all of
it; `--seconds 0` only writes the page.
Whatever fails is printed with the command that replays it, and the exit code is 1.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from benchmarks import bench_audit
from echo2.sim.storm import outcome_of
from tests.fuzz_targets import TARGETS, Fuzzer
from tests.soak_record import RECORD, ROOT, Entry, add, commit_of_tree, entries, write_page

SLICE_S = 60.0
"""What was found is put on record so often: a soak that is cut off has lost no more."""
FUZZ_BATCH = 100
FUZZ_TURN_S = 2.0
CHAOS_TEST = "tests/e2e/test_chaos.py::test_long_chaos"
CHAOS_GRACE_S = 150
CHAOS_RUN_S = 120
"""A run is not begun with less time: it could not come to its last step."""
SHARES = {"sim": 2.0, "fuzz": 1.0, "chaos": 1.0, "audit": 0.5}
TEXT_MAX = 300


def simulate(first_seed: int, until: float) -> Iterator[Entry]:
    """A slice after the other."""
    seeds = count(first_seed)
    while time.monotonic() < until:
        counts, failed, run, began = Counter[str](), list[str](), 0, time.monotonic()
        while time.monotonic() < min(until, began + SLICE_S):
            outcome = outcome_of(next(seeds))
            run += 1
            counts.update({"virtual seconds": round(outcome.virtual_s), "optimiser steps": outcome.steps})
            counts.update({f"checks of invariant {number}": times for number, times in outcome.checks.items()})
            counts.update({f"fault: {name}": times for name, times in outcome.faults.items()})
            counts.update({f"restart: {name}": times for name, times in outcome.restarts.items()})
            if outcome.failure:
                failed.append(f"make sim SEED={outcome.seed}: {outcome.failure}"[:TEXT_MAX])
        yield Entry("sim", "", time.monotonic() - began, run, counts, failed)


def chaos(first_seed: int, until: float) -> Iterator[Entry]:
    """A run after the other; each is given what time is left."""
    for seed in count(first_seed):
        left_s = until - time.monotonic()
        if left_s <= CHAOS_GRACE_S + CHAOS_RUN_S:
            return
        began = time.monotonic()
        within_s = f"{left_s - CHAOS_GRACE_S:.0f}"
        environment = {**os.environ, "CHAOS_SEED": str(seed), "CHAOS_WITHIN_S": within_s}
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "soak", CHAOS_TEST]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
        found = Entry("chaos", "", units=1)
        if done.returncode != 0:
            print(done.stdout[-6000:], flush=True)
            last = [line for line in done.stdout.splitlines() if line.startswith("E  ")][:1] or [""]
            steps = os.environ.get("CHAOS_STEPS", "")
            found.failed.append(f"CHAOS_SEED={seed} CHAOS_STEPS={steps}: {last[0][1:].strip()}"[:TEXT_MAX])
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                found.counts.update(json.loads(line))
        found.seconds = time.monotonic() - began
        yield found


def fuzz(first_seed: int, until: float) -> Iterator[Entry]:
    """Every target in turn."""
    logging.disable(logging.WARNING)  # the journal tells of every torn end
    for seed in count(first_seed):
        found, began = Entry("fuzz", ""), time.monotonic()
        for name, target in TARGETS.items():
            if time.monotonic() >= until:
                break
            fuzzer, turn_began = Fuzzer(target, seed), time.monotonic()
            try:
                while time.monotonic() - turn_began < FUZZ_TURN_S:
                    fuzzer.run(FUZZ_BATCH)
            except Exception as error:  # noqa: BLE001  what a decoder raises is the finding
                notes = getattr(error, "__notes__", "")
                found.failed.append(f"{name}, seed {seed}: {type(error).__name__}: {error} {notes}"[:TEXT_MAX])
            executed = fuzzer.outcomes.total()
            found.units += executed
            found.counts[f"executed: {name}"] += executed
            found.counts[f"refused: {name}"] += executed - fuzzer.outcomes["accepted"]
        found.seconds = time.monotonic() - began
        yield found
        if time.monotonic() >= until:
            return


def audit(first_seed: int, until: float) -> Iterator[Entry]:
    """Honest workers of each kind and liars of each kind, on a real small policy; each with random numbers of its own."""
    with tempfile.TemporaryDirectory() as folder:
        bench = bench_audit.make_bench(Path(folder))
        honest, liars = bench_audit.honest_kinds(bench), bench_audit.lies(bench)
        for seed in count(first_seed):
            for kind in (*honest, *liars):
                if time.monotonic() >= until:
                    return
                began = time.monotonic()
                if kind in honest:
                    _, accusation = bench_audit.watch_newcomer(bench, honest[kind], seed)
                else:
                    groups = bench_audit.GROUPS_MAX
                    noise = bench_audit.fleet_noise(bench_audit.KIND, bench_audit.FLEET_NOISE_NATS)
                    _, _, accusation = bench_audit.watched(
                        bench, liars[kind], groups, first_group=1000 * seed, noise=noise
                    )
                found = Entry("audit", "", units=1)
                found.counts[f"watched: {kind}"] += 1
                found.counts[f"accused: {kind}"] += accusation is not None
                if (accusation is not None) == (kind in honest):
                    said = accusation.text if accusation is not None else "not accused"
                    found.failed.append(f"{kind}, number {seed}: {said}"[:TEXT_MAX])
                found.seconds = time.monotonic() - began
                yield found


PARTS: dict[str, Callable[[int, float], Iterator[Entry]]] = {
    "sim": simulate, "fuzz": fuzz, "chaos": chaos, "audit": audit,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--only", choices=list(PARTS))
    given = parser.parse_args()
    commit, is_clean = commit_of_tree(), True
    parts = [given.only] if given.only else list(PARTS)
    whole = sum(SHARES[part] for part in parts)
    for part in parts if given.seconds > 0 else []:
        until = time.monotonic() + given.seconds * SHARES[part] / whole
        for found in PARTS[part](given.first_seed, until):
            found.commit = commit
            add(RECORD, found)
            is_clean = is_clean and not found.failed
            for text in found.failed:
                print(text, flush=True)
    write_page(entries(RECORD))
    print("nothing failed" if is_clean else "there are failures")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

"""`make soak`: the cluster simulator, chaos on real processes and the fuzzers for a stated time; docs/reliability.md's table.

`python -m tests.soak --seconds 1800 --first-seed 1000`. Shares of the time: half for the simulator, a quarter each for
chaos and fuzz; `--parts` chooses some of them, `--add` adds to the figures of the last soak, kept in `build/soak.json`.
Whatever fails is printed with the command that replays it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path

from echo2.sim.cluster_run import Tally, outcome_of
from tests.fuzz_targets import TARGETS, Fuzzer

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
FUZZ_BATCH = 2000
CHAOS_TEST = "tests/e2e/test_chaos.py::test_long_chaos"
CHAOS_S_MAX = 900
KEPT = ROOT / "build" / "soak.json"
SHARES = {"sim": 2.0, "fuzz": 1.0, "chaos": 1.0}


@dataclass(slots=True)
class Results:
    tally: Tally = field(default_factory=Tally)
    chaos: Counter[str] = field(default_factory=Counter)
    chaos_runs: int = 0
    chaos_failed: list[str] = field(default_factory=list)
    fuzzed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    fuzz_failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.tally.failed or self.chaos_failed or self.fuzz_failed)


def kept_results() -> Results:
    """Those of the last soak."""
    kept = json.loads(KEPT.read_text())
    tally = kept.pop("tally")
    counters = {name: Counter(kept.pop(name)) for name in ("chaos", "fuzzed", "refused")}
    checks = Counter({int(number): times for number, times in tally.pop("checks").items()})
    faults, restarts = Counter(tally.pop("faults")), Counter(tally.pop("restarts"))
    return Results(Tally(**tally, checks=checks, faults=faults, restarts=restarts), **counters, **kept)


def keep(results: Results) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    tally = {one.name: getattr(results.tally, one.name) for one in fields(Tally)}
    KEPT.write_text(json.dumps({one.name: getattr(results, one.name) for one in fields(Results)} | {"tally": tally}))


def simulate(results: Results, first_seed: int, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    for seed in count(first_seed):
        if time.monotonic() >= until:
            return
        outcome = outcome_of(seed)
        results.tally.add(outcome)
        if outcome.failure:
            print(f"make sim SEED={seed}: {outcome.failure}", flush=True)


def chaos(results: Results, first_seed: int, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    for seed in count(first_seed):
        if time.monotonic() >= until:
            return
        environment = {**os.environ, "CHAOS_SEED": str(seed)}
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "soak", CHAOS_TEST]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=CHAOS_S_MAX
        )
        results.chaos_runs += 1
        if done.returncode != 0:
            results.chaos_failed.append(f"CHAOS_SEED={seed} pytest -m soak {CHAOS_TEST}")
            print(results.chaos_failed[-1], done.stdout[-3000:], flush=True)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                results.chaos.update(json.loads(line))


def fuzz(results: Results, first_seed: int, limit_s: float) -> None:
    logging.disable(logging.WARNING)  # the journal tells of every torn end
    until = time.monotonic() + limit_s
    for seed in count(first_seed):
        for name, target in TARGETS.items():
            if time.monotonic() >= until:
                logging.disable(logging.NOTSET)
                return
            fuzzer = Fuzzer(target, seed)
            began = time.monotonic()
            try:
                while time.monotonic() - began < 2.0:
                    fuzzer.run(FUZZ_BATCH // 20)
            except Exception as error:  # noqa: BLE001  what a decoder raises is the finding
                results.fuzz_failed.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
                print(results.fuzz_failed[-1], getattr(error, "__notes__", ""), flush=True)
            results.fuzzed[name] += fuzzer.outcomes.total()
            results.refused[name] += fuzzer.outcomes.total() - fuzzer.outcomes["accepted"]


def page_of(results: Results, seconds: float) -> str:
    """The generated part of the page."""
    tally = results.tally
    lines = [
        f"One soak of {seconds / 60:.0f} minutes on {os.cpu_count()} cores ({platform.machine()}, Python "
        f"{platform.python_version()}); `make soak` writes this part anew.",
        "",
        "| simulated cluster | |",
        "|---|---|",
        f"| seeds run | {tally.seeds} |",
        f"| seeds that failed | {len(tally.failed)} |",
        f"| virtual hours, optimiser steps | {tally.virtual_s / 3600:.1f}, {tally.steps} |",
    ]
    lines += [f"| checks of invariant {number} | {checks} |" for number, checks in sorted(tally.checks.items())]
    lines += ["", "| fault in the simulator | times |", "|---|---|"]
    lines += [f"| {name} | {times} |" for name, times in sorted(tally.faults.items())]
    lines += ["", "| process that ended by an error and came back | times |", "|---|---|"]
    lines += [f"| {name} | {times} |" for name, times in sorted(tally.restarts.items())]
    lines += [
        "",
        f"| real processes, {results.chaos_runs} runs, {len(results.chaos_failed)} failed | times |",
        "|---|---|",
    ]
    lines += [f"| {name} | {times} |" for name, times in sorted(results.chaos.items())]
    lines += ["", f"| fuzz target, {len(results.fuzz_failed)} failures | executions | refused |", "|---|---|---|"]
    lines += [f"| {name} | {times} | {results.refused[name]} |" for name, times in sorted(results.fuzzed.items())]
    lines += [f"| all | {results.fuzzed.total()} | {results.refused.total()} |"]
    return "\n".join(lines)


def write_page(text: str) -> None:
    page = PAGE.read_text()
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--add", action="store_true")
    given = parser.parse_args()
    results = kept_results() if given.add else Results()
    whole = sum(SHARES[part] for part in given.parts)
    for part in given.parts:
        began = time.monotonic()
        {"sim": simulate, "fuzz": fuzz, "chaos": chaos}[part](
            results, given.first_seed, given.seconds * SHARES[part] / whole
        )
        results.seconds += time.monotonic() - began
        keep(results)
        write_page(page_of(results, results.seconds))
    print(f"{PAGE}: {'nothing failed' if results.is_clean else 'there are failures'}")
    return 0 if results.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

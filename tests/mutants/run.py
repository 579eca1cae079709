"""`python -m tests.mutants.run`: plants each defect in a copy of the product and says what was caught and what was missed.

Writes benchmarks/results/mutants.json. `--only TEXT` runs those whose name has it; `--seeds N` is how many seeds of the
virtual world a defect without a test of its own is given. The exit code is 1 when one was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.fields import dropped_fields
from tests.mutants.planted import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
COPIED = ("echo2", "tests", "proto", "docs", "deploy", "pyproject.toml", "CHANGELOG.md", "README.md")
ALL = (*MUTANTS, *dropped_fields())
LIMIT_S = 1200.0
SEEDS = 40


def planted(mutant: Mutant, scratch: Path) -> None:
    """The product with the defect, in `scratch`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, scratch / name)
    path = scratch / "echo2" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: expected its line once in {mutant.file}"
    path.write_text(text.replace(mutant.old, mutant.new))


def command_of(mutant: Mutant, seeds: int) -> list[str]:
    if mutant.tests:
        return [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    return [sys.executable, "-m", "echo2.sim.world_run", "--seed", "1", "--count", str(seeds), "--stop"]


def run(mutant: Mutant, seeds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="echo2-mutant-") as folder:
        planted(mutant, Path(folder))
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command_of(mutant, seeds), check=False, cwd=folder, env=environment, capture_output=True, text=True,
                timeout=LIMIT_S,
            )  # fmt: skip
            code, said = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            code, said = 0, "too slow"
        words = ("FAILED", "ERROR", "seed ")
        lines = [line for line in said.splitlines() if line.startswith(words) and "everything held" not in line]
        if code and not lines:
            raise RuntimeError(f"{mutant.name}: expected a verdict, the run ended with {code}: {said[-500:]}")
        by = lines[0][:200] if lines else ""
        return {
            "name": mutant.name, "file": mutant.file, "is_caught": code != 0, "by": by,
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants.run", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--missing", action="store_true", help="only those that are not on record as caught")
    given = parser.parse_args(arguments)
    rows = {row["name"]: row for row in (json.loads(RESULTS.read_text())["mutants"] if RESULTS.exists() else [])}
    missed = 0
    for mutant in ALL:
        if given.only not in mutant.name or (given.missing and rows.get(mutant.name, {}).get("is_caught")):
            continue
        row = rows[mutant.name] = run(mutant, given.seeds)
        missed += not row["is_caught"]
        print(
            f"{'caught' if row['is_caught'] else 'MISSED'}  {mutant.name}: {row['by']} ({row['seconds']} s)", flush=True
        )
        known = [rows[one.name] for one in ALL if one.name in rows]
        caught = sum(bool(row["is_caught"]) for row in known)
        sums = [
            {"name": "defects planted and run", "value": len(known), "unit": "defects"},
            {"name": "defects caught", "value": caught, "unit": "defects", "target": len(known), "better": "higher"},
        ]
        table = {"rows": sums, "mutants": known}
        RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

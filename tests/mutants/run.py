"""`python -m tests.mutants.run`: plants each defect in a copy of the product and says what was caught and what was missed.

Writes benchmarks/results/mutants.json and the table of docs/reliability.md. `--only TEXT` runs those whose name has it;
`--missing` those that are not on record as caught in the file where they now are; `--seeds N` is how many seeds of the
virtual world are run where no test is aimed at a defect, or none finds it. The exit code is 1 when one was missed.

Each defect has a process of its own, forked from this one: it has imported the libraries, and nothing of the product.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.mutants.fields import dropped_fields
from tests.mutants.page import write_page
from tests.mutants.planted import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
COPIED = ("echo2", "tests", "proto", "docs", "deploy", "pyproject.toml", "README.md", "ARCHITECTURE.md",
          "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "examples")  # fmt: skip
ALL = (*MUTANTS, *dropped_fields())
LIMIT_S = 1200.0
SEEDS = 40
_TIMES = itertools.count(1_000_000_000, 2)  # of changed files: no two of one file are the same
LIBRARIES = ("torch", "grpc.aio", "pytest", "numpy", "cryptography.x509", "sqlalchemy", "safetensors")


def copied(scratch: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, scratch / name)


@contextlib.contextmanager
def planted(mutant: Mutant, scratch: Path) -> Iterator[None]:
    """The copy has the defect. What was compiled of the other files is used again, of this one it is not."""
    path, times = scratch / "echo2" / mutant.file, next(_TIMES)
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: expected its line once in {mutant.file}"
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        os.utime(path, (times, times))
        yield
    finally:
        path.write_text(text)
        os.utime(path, (times + 1, times + 1))


def _tested(tests: tuple[str, ...]) -> int:
    os.environ["ECHO2_NO_SHRINK"] = "1"  # that a test fails is enough; to find its least example takes minutes
    pytest = importlib.import_module("pytest")
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def _seeded(seeds: int) -> int:
    storm = importlib.import_module("echo2.sim.storm")
    return int(storm.main(["--seed", "1", "--count", str(seeds), "--stop"]))


def forked(folder: Path, work: Callable[[], int]) -> tuple[int, str]:
    """Exit code and output of `work`, done in `folder` by a process that has nothing of this tree in memory."""
    output = folder / "output"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(folder)
            said = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            for name in [name for name in sys.modules if name.split(".")[0] in ("echo2", "tests")]:
                del sys.modules[name]
            sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
            importlib.invalidate_caches()
            os.environ["PYTHONPATH"] = str(folder)
            code = work()
        except BaseException as error:  # noqa: BLE001  (a process of its own: it is told as its exit code)
            print(f"did not start: {error!r}")
        finally:
            sys.stdout.flush()
            os._exit(code)
    return _waited_for(child), output.read_text(errors="replace")


def _waited_for(child: int) -> int:
    """Its exit code; 0 where it took too long: nothing was caught."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0


def run(mutant: Mutant, seeds: int, scratch: Path) -> dict[str, object]:
    """The tests aimed at it first, seeds where those miss it."""
    works = [lambda: _tested(mutant.tests)] if mutant.tests else []
    code, by, began = 0, "", time.monotonic()
    for work in (*works, *([lambda: _seeded(seeds)] if seeds else ())):
        with planted(mutant, scratch):
            code, said = forked(scratch, work)
        words = ("FAILED", "seed ")  # a test that could not be set up says nothing about the defect
        lines = [line for line in said.splitlines() if line.startswith(words) and "everything held" not in line]
        if code and not lines:
            raise RuntimeError(f"{mutant.name}: expected a verdict, the run ended with {code}: {said[-500:]}")
        if code:
            by = lines[0][:200]
            break
    return {
        "name": mutant.name, "file": mutant.file, "is_caught": code != 0, "by": by,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants.run", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--missing", action="store_true", help="only those that are not on record as caught where they now are"
    )
    given = parser.parse_args(arguments)
    for library in LIBRARIES:
        importlib.import_module(library)
    rows = {row["name"]: row for row in (json.loads(RESULTS.read_text())["mutants"] if RESULTS.exists() else [])}
    missed = 0
    with tempfile.TemporaryDirectory(prefix="echo2-mutants-") as folder:
        copied(Path(folder))
        for mutant in ALL:
            known = rows.get(mutant.name, {})
            is_known = known.get("is_caught") and known.get("file") == mutant.file
            if given.only not in mutant.name or (given.missing and is_known):
                continue
            row = rows[mutant.name] = run(mutant, given.seeds, Path(folder))
            missed += not row["is_caught"]
            verdict = "caught" if row["is_caught"] else "MISSED"
            print(f"{verdict}  {mutant.name}: {row['by']} ({row['seconds']} s)", flush=True)
            write([rows[one.name] for one in ALL if one.name in rows])
    return 1 if missed else 0


def write(known: list[dict[str, object]]) -> None:
    caught = sum(bool(row["is_caught"]) for row in known)
    sums = [
        {"name": "defects planted and run", "value": len(known), "unit": "defects"},
        {"name": "defects caught", "value": caught, "unit": "defects", "target": len(known), "better": "higher"},
    ]
    RESULTS.write_text(json.dumps({"rows": sums, "mutants": known}, indent=1) + "\n")
    write_page(known)


if __name__ == "__main__":
    sys.exit(main())

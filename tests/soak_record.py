"""What soaks have found so far, by part and commit: one JSON file that grows, and the table of docs/reliability.md from it.

Guarantees: what is added is never subtracted: a failure stays on record under the commit that had it; several processes
may add at a time. Leaves to others: running anything (soak).
"""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import gettempdir

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "soak.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
WORDS = {
    "sim": "seeds of the virtual world", "drivers": "seeds of an earlier simulator (drivers around the cores)",
    "chaos": "runs of real processes", "fuzz": "inputs to decoders", "audit": "workers watched by the audit",
}  # fmt: skip


@dataclass(slots=True)
class Entry:
    """All of one part (a key of WORDS) at one commit. `units`: seeds, runs, inputs or workers; `counts`: by name.

    `failed`: how to see each failure again, and what it said.
    """

    part: str
    commit: str
    seconds: float = 0.0
    units: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Entry) -> None:
        assert (self.part, self.commit) == (other.part, other.commit), "only equals are added"
        self.seconds += other.seconds
        self.units += other.units
        self.counts += other.counts
        self.failed += other.failed


def commit_of_tree() -> str:
    """The commit of this checkout, marked where it was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip() or "unknown"


def entries(record: Path) -> list[Entry]:
    """What is on record; nothing if there is none."""
    if not record.exists():
        return []
    kept = json.loads(record.read_text())["entries"]
    return [Entry(**{**one, "counts": Counter(one["counts"])}) for one in kept]


def add(record: Path, found: Entry) -> None:
    """Adds to the record, whoever else adds at the same time."""
    record.parent.mkdir(parents=True, exist_ok=True)
    with (Path(gettempdir()) / f"echo2-{record.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = entries(record)
        same = [one for one in kept if (one.part, one.commit) == (found.part, found.commit)]
        same[0].add(found) if same else kept.append(found)
        rows = [{one.name: getattr(entry, one.name) for one in fields(Entry)} for entry in kept]
        text = json.dumps({"entries": rows}, indent=1, sort_keys=True)
        fresh = record.with_suffix(".new")
        fresh.write_text(text + "\n")
        fresh.replace(record)


def _sum(kept: list[Entry], part: str) -> Entry:
    total = Entry(part, "all")
    for one in kept:
        if one.part == part:
            total.seconds += one.seconds
            total.units += one.units
            total.counts += one.counts
            total.failed += one.failed
    return total


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    head = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _counted(total: Entry, prefix: str) -> list[list[str]]:
    return [
        [name.removeprefix(prefix), f"{times:,}"]
        for name, times in sorted(total.counts.items())
        if name.startswith(prefix)
    ]


def page_of(kept: list[Entry]) -> str:
    """The generated part of the page."""
    lines = [f"Made by `make soak` from `docs/soak.json`, which grows with each soak "
             f"({platform.machine()}, Python {platform.python_version()}).", ""]  # fmt: skip
    lines += _table(
        ["part", "commit", "minutes", "how many", "failed"],
        [
            [WORDS[one.part], one.commit, f"{one.seconds / 60:.0f}", f"{one.units:,}", str(len(one.failed))]
            for one in sorted(kept, key=lambda one: list(WORDS).index(one.part))
        ],
    )
    sim, _, chaos, fuzz, audit = (_sum(kept, part) for part in WORDS)
    hours, steps = sim.counts["virtual seconds"] / 3600, sim.counts["optimiser steps"]
    rows = [["seeds run", f"{sim.units:,}"], ["seeds that failed", str(len(sim.failed))],
            ["virtual hours, optimiser steps", f"{hours:.1f}, {steps:,}"]]  # fmt: skip
    lines += _table(["virtual world", ""], rows + _counted(sim, "checks of "))
    lines += _table(["fault in the virtual world", "times"], _counted(sim, "fault: "))
    lines += _table(["process in it that ended by an error and came back", "times"], _counted(sim, "restart: "))
    lines += _table([f"real processes, {chaos.units} runs, {len(chaos.failed)} failed", "times"], _counted(chaos, ""))
    rows = [[name, times, f"{fuzz.counts['refused: ' + name]:,}"] for name, times in _counted(fuzz, "executed: ")]
    refused = sum(times for name, times in fuzz.counts.items() if name.startswith("refused: "))
    lines += _table(
        [f"fuzz target, {len(fuzz.failed)} failures", "executions", "refused"],
        [*rows, ["all", f"{fuzz.units:,}", f"{refused:,}"]],
    )
    rows = [[name, times, f"{audit.counts['accused: ' + name]:,}"] for name, times in _counted(audit, "watched: ")]
    lines += _table([f"audit, {len(audit.failed)} wrong verdicts: worker", "watched", "accused"], rows)
    failed = [[f"`{text}`", one.commit] for one in kept for text in one.failed]
    if failed:
        head = "What failed, and under which commit (seeds up to 7195725 are of the earlier simulator):"
        lines += [head, "", *_table(["failure", "commit"], failed)]
    return "\n".join(lines).rstrip()


def write_page(kept: list[Entry], page: Path = PAGE) -> None:
    text = page.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n\n{page_of(kept)}\n\n{END}{tail}")

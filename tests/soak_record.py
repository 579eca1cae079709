"""What soaks have found so far, by part and commit: one JSON file that grows, and the table of docs/reliability.md from it.

Guarantees: what is added is never subtracted: a failure stays on record under the commit that had it. Leaves to others: running
anything (soak).
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "soak.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
WORDS = {
    "sim": "seeds of the virtual world",
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
    kept = entries(record)
    same = [one for one in kept if (one.part, one.commit) == (found.part, found.commit)]
    same[0].add(found) if same else kept.append(found)
    rows = [{name: getattr(entry, name) for name in Entry.__slots__} for entry in kept]
    fresh = record.with_suffix(".new")
    fresh.write_text(json.dumps({"entries": rows}, indent=1, sort_keys=True) + "\n")
    fresh.replace(record)


def page_of(kept: list[Entry]) -> str:
    """The generated part of the page."""
    lines = ["Made by `make soak` from `docs/soak.json`, which grows with each soak.", "",
             "| part | commits | minutes | how many | failed |", "|---|---|---|---|---|"]  # fmt: skip
    sums = {part: Entry(part, "all") for part in WORDS}
    for one in kept:
        sums[one.part].add(one)
    for part, total in sums.items():
        commits = len({one.commit.removesuffix("-dirty") for one in kept if one.part == part})
        numbers = f"{total.seconds / 60:.0f} | {total.units:,} | {len(total.failed)}"
        lines.append(f"| {WORDS[part]} | {commits} | {numbers} |")
    sim, chaos, _, _ = sums.values()
    hours, steps = sim.counts["virtual seconds"] / 3600, sim.counts["optimiser steps"]
    checks, faults = (
        sum(n for name, n in sim.counts.items() if name.startswith(of)) for of in ("checks of ", "fault: ")
    )
    lines += [
        "",
        f"The virtual world: {hours:.1f} hours, {steps:,} optimiser steps, {checks:,} checks, {faults:,} events and faults. "
        f"Real processes: {chaos.counts['optimiser steps']:,} optimiser steps, {chaos.counts['restarts']:,} restarts. "
        "The file names each kind, and each failure with its commit and seed.",
    ]
    return "\n".join(lines)


def write_page(kept: list[Entry], page: Path = PAGE) -> None:
    text = page.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n\n{page_of(kept)}\n\n{END}{tail}")

"""The table of planted defects in docs/reliability.md, from benchmarks/results/mutants.json.

Guarantees: nothing on it that is not on record. Leaves to others: running anything (run).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
NAMED = (
    "intake answers ADMITTED before the journal is synced",
    "hub sends before it keeps",
    "the coordinator drops a heartbeat's memory",
)
"""Once a scratch copy had these three, and every test there was stayed green."""


def page_of(rows: list[dict[str, Any]]) -> str:
    total, tests, seeds = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        where = str(row["file"]).partition("/")[0]
        total[where] += 1
        if row["is_caught"]:
            (seeds if _is_seed(row) else tests)[where] += 1
    lines = ["| in | planted | caught by a test | caught by a seed | missed |", "|---|---|---|---|---|"]
    lines += [_row(f"`echo2/{w}`", total[w], tests[w], seeds[w]) for w in sorted(total)]
    lines += [_row("all", total.total(), tests.total(), seeds.total()), ""]
    lines += ["| defect | caught by |", "|---|---|"]
    shown = [row for row in rows if row["name"] in NAMED or _is_seed(row) or not row["is_caught"]]
    lines += [f"| {row['name']} | {_by(row)} |" for row in shown]
    return "\n".join(lines)


def _row(name: str, planted: int, tests: int, seeds: int) -> str:
    return f"| {name} | {planted} | {tests} | {seeds} | {planted - tests - seeds} |"


def _is_seed(row: dict[str, Any]) -> bool:
    return str(row["by"]).startswith("seed ")


def _by(row: dict[str, Any]) -> str:
    if not row["is_caught"]:
        return "missed"
    words = str(row["by"]).removeprefix("FAILED ")
    if not _is_seed(row):
        return f"`{words.partition('::')[0]}`"
    return f"`make sim SEED={words.split()[1].rstrip(':')}`: {words.partition(': ')[2].partition(';')[0]}"


def write_page(rows: list[dict[str, Any]]) -> None:
    text = PAGE.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n\n{page_of(rows)}\n\n{END}{tail}")

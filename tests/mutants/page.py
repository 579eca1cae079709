"""The table of planted defects in docs/reliability.md, from benchmarks/results/mutants.json.

Guarantees: nothing on it that is not on record. Leaves to others: running anything (run).
"""

from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


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
    missed = [f"- missed: {row['name']}" for row in rows if not row["is_caught"]]
    return "\n".join([*lines, *missed])


def _row(name: str, planted: int, tests: int, seeds: int) -> str:
    return f"| {name} | {planted} | {tests} | {seeds} | {planted - tests - seeds} |"


def _is_seed(row: dict[str, Any]) -> bool:
    return str(row["by"]).startswith("seed ")


def write_page(rows: list[dict[str, Any]]) -> None:
    text = PAGE.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n\n{page_of(rows)}\n\n{END}{tail}")

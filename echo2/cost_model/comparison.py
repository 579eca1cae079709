"""Predicted against measured over a run, from the rows of its `metrics.jsonl`.

Guarantees: pure; rows without both numbers are left out and counted. Leaves to others: reading the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

PAIRS = {
    "utilisation": ("utilisation/predicted", "utilisation"),
    "broadcast_s": ("predicted_broadcast_s", "measured_broadcast_s"),
}


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Of one quantity: rows that had both numbers, their means, and the errors (measured minus predicted)."""

    name: str
    rows: int
    rows_without: int
    predicted_mean: float
    measured_mean: float
    bias: float
    mean_absolute_error: float


def compare_run(lines: Iterable[str], skip_rows: int = 0) -> list[RunComparison]:
    """One comparison for each of `PAIRS`; `skip_rows` leaves out the start of the run. Broken lines do not count."""
    rows = parsed_rows(lines)[skip_rows:]
    found = []
    for name, (predicted_name, measured_name) in PAIRS.items():
        both = [
            (row[predicted_name], row[measured_name]) for row in rows if predicted_name in row and measured_name in row
        ]
        if both:
            count = len(both)
            errors = [measured - predicted for predicted, measured in both]
            found.append(
                RunComparison(
                    name, count, len(rows) - count, sum(one for one, _ in both) / count,
                    sum(one for _, one in both) / count, sum(errors) / count, sum(map(abs, errors)) / count,
                )
            )  # fmt: skip
    return found


def parsed_rows(lines: Iterable[str]) -> list[dict[str, float]]:
    """The finite numbers of each whole row."""
    return [row for row in map(_parsed, lines) if row is not None]


def _parsed(line: str) -> dict[str, float] | None:
    """The finite numbers of one row; None when it is no JSON object (a line cut off by a kill)."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return None
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}

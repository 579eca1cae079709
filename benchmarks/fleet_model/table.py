"""Prints the reports of the fleet model as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.fleet_model.report import FleetReport


def print_reports(reports: Sequence[tuple[int, FleetReport]]) -> None:
    """Prints one column per report, then the reason for each report's last plan."""
    console = Console(highlight=False)
    table = Table(title="fleet simulation")
    for name in ("", *(one.name for _, one in reports)):
        table.add_column(name, overflow="fold")
    columns = [_cells(bound, one) for bound, one in reports]
    for index, (name, _) in enumerate(columns[0]):
        table.add_row(name, *(column[index][1] for column in columns))
    console.print(table)
    for bound, one in reports:
        console.print(f"{one.name}, S={bound}: {one.reason}")


def _cells(bound: int, one: FleetReport) -> list[tuple[str, str]]:
    return [
        ("S", str(bound)),
        ("kappa", str(one.kappa)),
        ("workers in the pool", str(one.pool)),
        ("seconds a step", f"{one.step_s:.1f}"),
        ("utilisation, simulated", f"{one.utilisation:.3f}"),
        ("utilisation, predicted", f"{one.predicted_utilisation:.3f}"),
        ("T_bcast s, simulated", f"{one.broadcast_s:.1f}"),
        ("T_bcast s, predicted", f"{one.predicted_broadcast_s:.1f}"),
        ("USD a step, learner included", f"{one.usd_per_step:.3f}"),
        ("pool, USD/h", f"{one.pool_usd_per_hour:.2f}"),
        ("saving against the baseline", "-" if one.saving is None else f"{one.saving:.1%}"),
        ("rollouts dropped", f"{one.dropped_share:.1%}"),
        ("preemptions", str(one.preemptions)),
        ("activations per worker-hour", f"{one.activations_per_worker_hour:.3f}"),
        ("hours simulated", f"{one.hours:.2f}"),
    ]

"""Reports of `echo2 sim` as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from echo2.sim.fleet_report import FleetReport


def print_reports(reports: Sequence[tuple[int, FleetReport]]) -> None:
    console = Console(highlight=False)
    table = Table(title="fleet simulation")
    for column in (
        "scenario", "S", "kappa", "pool", "step s", "utilisation", "predicted", "USD/step", "saving", "dropped",
        "preemptions", "activations/worker h",
    ):  # fmt: skip
        table.add_column(column, overflow="fold")
    for bound, one in reports:
        table.add_row(
            one.name, str(bound), str(one.kappa), str(one.pool), f"{one.step_s:.1f}", f"{one.utilisation:.3f}",
            f"{one.predicted_utilisation:.3f}", f"{one.usd_per_step:.3f}",
            "-" if one.saving is None else f"{one.saving:.1%}", f"{one.dropped_share:.1%}", str(one.preemptions),
            f"{one.activations_per_worker_hour:.3f}",
        )  # fmt: skip
    console.print(table)
    for bound, one in reports:
        console.print(f"{one.name}, S={bound}: {one.reason}")

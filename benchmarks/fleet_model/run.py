"""Simulates scenarios with the real planner, staleness rule and ledger, on a virtual clock.

python -m benchmarks.fleet_model.run benchmarks/scenarios/slow-uplink.toml [--staleness 2 --staleness 6]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fleet_model.files import scenario_of
from benchmarks.fleet_model.report import FleetReport, simulate
from benchmarks.fleet_model.table import print_reports
from echo2.cli.plan import load_catalogue
from echo2.config.load import read_toml
from echo2.coordinator.planning.pool_plan import quiet_solver


def reports_of(
    path: Path, bounds: Sequence[int] = (), steps: int | None = None, seed: int | None = None
) -> list[tuple[int, FleetReport]]:
    """One report a staleness bound; what is not given is the scenario's."""
    scenario = scenario_of(read_toml(path), path.stem, load_catalogue(None))
    if steps is not None:
        scenario = replace(scenario, steps=steps, warmup_steps=min(scenario.warmup_steps, steps // 3))
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    reports = []
    for bound in bounds or [scenario.config.staleness_bound]:
        kappa = min(scenario.config.fixed_kappa, bound)
        config = replace(scenario.config, staleness_bound=bound, fixed_kappa=kappa)
        with quiet_solver():
            reports.append((bound, simulate(replace(scenario, config=config))))
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="SCENARIO.toml")
    parser.add_argument("--steps", type=int, help="steps to simulate, instead of the scenario's")
    parser.add_argument("--seed", type=int, help="seed, instead of the scenario's")
    parser.add_argument("--staleness", type=int, action="append", default=[], metavar="S", help="may be repeated")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    own = parser.parse_args()
    reports = [report for path in own.files for report in reports_of(path, own.staleness, own.steps, own.seed)]
    if own.json:
        print(json.dumps([{"S": bound, **dataclasses.asdict(report)} for bound, report in reports], indent=2))
    else:
        print_reports(reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())

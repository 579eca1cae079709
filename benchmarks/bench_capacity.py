"""The capacity model against simulation, brute force and the clock.

    python -m benchmarks.bench_capacity [--quick] [--only PART ...]

`--quick` takes a part of each grid, `--only` some parts: `time` and `fleets` depend on the machine (CPU seconds of one
core, planning times the median of eight runs after one that warms up), all others on nothing but the seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.fleet_model.files import scenario_of
from benchmarks.fleet_model.fleet import FleetSim
from benchmarks.fleet_model.lengths import LengthDistribution
from benchmarks.fleet_model.planner import FixedPlanner
from benchmarks.fleet_model.report import report_of, simulate
from benchmarks.fleet_model.scenario import FleetScenario, WorkerTruth
from echo2.base.ids import PeerId
from echo2.cli.plan import load_catalogue
from echo2.config.load import read_toml
from echo2.cost_model.planner import plan
from echo2.cost_model.rehearsal import confirmed
from echo2.cost_model.relations import FleetModel
from echo2.cost_model.snapshot import (
    ROLLOUTS_MAX,
    FleetSnapshot,
    LearnerEstimate,
    LinkEstimate,
    PlanConfig,
    WorkerEstimate,
)

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "capacity.json"
SCENARIOS = ROOT / "benchmarks" / "scenarios"
TRAIN_S = 100.0


@dataclass(frozen=True)
class Row:
    """One figure beside what is asked of it; `target` None: reported only."""

    name: str
    value: float
    unit: str
    target: float | None
    better: str


# ---- predicted against simulated


def grid_scenario(bound: int, kappa: int, ratio: float, steps: int = 150) -> FleetScenario:
    """T_bcast = ratio*T_train, mu = 1.25 R/T_train, log-normal lengths (sigma 0.8) of 0.3*T_train on average."""
    lengths = LengthDistribution(median_tokens=1000, sigma=0.8, max_tokens=8192)
    speed = lengths.mean_tokens / (0.3 * TRAIN_S)
    slots = int(1.25 * 256 * 0.3 / 8) + 1
    workers = tuple(WorkerTruth(f"w{i}", slots, speed, 1.0, LinkEstimate(1e9, 1e12)) for i in range(8))
    learner = LearnerEstimate(
        256, TRAIN_S, LinkEstimate(1e6, 1e9), 1e6 * ratio * TRAIN_S, 1e12, rollouts_per_group=8, delta_growth=0.0
    )
    config = PlanConfig(bound, fixed_kappa=kappa, broadcast_efficiency=1.0)
    return FleetScenario("grid", learner, config, lengths, workers, steps, warmup_steps=steps // 5)


def simulated(scenario: FleetScenario) -> tuple[float, float]:
    """Utilisation simulated and predicted with everybody at work."""
    sim = FleetSim(scenario, FixedPlanner(scenario.config))
    sim.run()
    return report_of(sim).utilisation, sim.plan.predicted_utilisation


def grid(quick: bool) -> list[Row]:
    errors: list[tuple[float, str]] = []
    for bound in (1, 2, 4) if quick else (1, 2, 3, 4, 6, 8, 11):
        for kappa, ratio in itertools.product(range(1, bound + 1), (0.2, 0.5, 1.0, 2.0, 3.0)):
            measured, predicted = simulated(grid_scenario(bound, kappa, ratio, 80 if quick else 150))
            errors.append((abs(measured - predicted), f"S={bound} kappa={kappa} T_bcast={ratio}*T_train"))
    worst = max(errors)
    print(f"grid: {len(errors)} cells, worst {worst[0]:.4f} at {worst[1]}")
    return [
        Row("predicted against simulated utilisation, worst cell", worst[0], "absolute", 0.02, "lower"),
        Row("predicted against simulated utilisation, mean", sum(e for e, _ in errors) / len(errors), "absolute",
            0.02, "lower"),
    ]  # fmt: skip


def slow_network() -> list[Row]:
    """S = 6, T_bcast = 3*T_train: the planner's kappa against the paper's default."""
    base = grid_scenario(6, 1, 3.0)
    lengths = LengthDistribution(median_tokens=1000, sigma=0.8, max_tokens=4096)
    speed = lengths.mean_tokens / (0.12 * TRAIN_S)
    workers = tuple(
        WorkerTruth(f"w{i}", int(1.25 * 256 * 0.12 / 8) + 1, speed, 1.0, LinkEstimate(1e9, 1e12)) for i in range(12)
    )
    base = replace(base, workers=workers, lengths=lengths)
    chosen = simulate(replace(base, config=replace(base.config, fixed_kappa=0)))
    kappa = 6 - 1  # the paper's default: S - 1
    measured, predicted = simulated(replace(base, config=replace(base.config, fixed_kappa=kappa)))
    print(
        f"slow network: plan kappa={chosen.kappa} {chosen.utilisation:.3f} ({chosen.predicted_utilisation:.3f} "
        f"predicted), default kappa={kappa} {measured:.3f} ({predicted:.3f} predicted)"
    )
    return [
        Row("S=6, T_bcast=3*T_train: utilisation of the plan", chosen.utilisation, "share", 0.98, "higher"),
        Row("S=6, T_bcast=3*T_train: utilisation at kappa=S-1", measured, "share", 0.8, "lower"),
    ]


# ---- optimality


def random_fleet(count: int, seed: int) -> FleetSnapshot:
    """A mixed fleet whose demand is about two fifths of it."""
    rng = random.Random(seed)
    workers = []
    for index in range(count):
        rate = rng.choice([0.5, 1.0, 1.6, 3.0]) * rng.uniform(0.8, 1.2)
        link = LinkEstimate(rng.choice([2e6, 5e6, 2e7, 6e7]), rng.choice([1e7, 2e7, 1e8]), rng.uniform(0.01, 0.1))
        tail_s = rng.choice([50.0, 60.0, 75.0, 90.0])
        workers.append(
            WorkerEstimate(
                PeerId(f"w{index:05d}"), rate, rate * rng.uniform(0.2, 0.6), link, 30.0, tail_s,
                rollout_s_max=1.3 * tail_s, hazard_per_hour=rng.choice([0.0, 0.1, 0.5]),
            )
        )  # fmt: skip
    train_s = rng.choice([60.0, 100.0, 200.0])
    batch = max(16, int(train_s * 0.55 * count) // 16 * 16)
    learner = LearnerEstimate(
        batch, train_s, LinkEstimate(4e7, 1e8, 0.02), rng.choice([1.2e8, 1.2e9]), 1.6e10, rollouts_per_group=16
    )
    return FleetSnapshot(0.0, learner, tuple(workers))


def brute_force(snapshot: FleetSnapshot, config: PlanConfig) -> float:
    """The least price over every subset and period that keeps the relations and whose utilisation reaches the target."""
    fleet = FleetModel.of(snapshot, config)
    subsets = np.array(list(itertools.product([False, True], repeat=len(fleet))))
    prices, rates = subsets @ fleet.price, subsets @ fleet.rate
    order = np.argsort(prices, kind="stable")
    best = math.inf
    for kappa in config.kappas:
        for row in order[(rates[order] >= fleet.rate_needed * 0.999) & (prices[order] < best)].tolist():
            found = fleet.evaluate(kappa, subsets[row])
            if found.keeps_relations(fleet.rate_needed) and confirmed(fleet, found).utilisation >= 0.975:
                best = min(best, found.usd_per_hour)
                break
    return best


def optimality(quick: bool) -> list[Row]:
    """The plan over brute force."""
    over, missed, feasible = [], 0, 0
    for seed in range(40 if quick else 200):
        fleet, bound = random_fleet(6 + seed % 9, seed), 1 + seed % 6
        config = PlanConfig(bound)
        least, chosen = brute_force(fleet, config), plan(fleet, config)
        # Of pools that do, one without the margin is taken where none has it.
        is_possible = math.isfinite(least) or math.isfinite(brute_force(fleet, replace(config, add_margin=0.0)))
        feasible += is_possible
        missed += chosen.is_feasible != is_possible
        if chosen.is_feasible and math.isfinite(least):
            over.append(chosen.usd_per_hour / least - 1)
    print(f"optimality: {feasible} fleets feasible by brute force; over 1 %: {sum(one > 0.01 for one in over)}")
    return [
        Row("plan over brute-force optimum, worst of the fleets", max(over), "share", 0.01, "lower"),
        Row("plan over brute-force optimum, mean", float(np.mean(over)), "share", None, "lower"),
        Row("plan: fleets whose feasibility brute force judges differently", missed, "fleets", 0, "lower"),
    ]


# ---- money


def saving(quick: bool) -> list[Row]:
    catalogue = load_catalogue(None)
    rows = []
    for name in ("paper-8b",) if quick else ("paper-4b", "paper-8b", "paper-32b"):
        report = simulate(_short(scenario_of(read_toml(SCENARIOS / f"{name}.toml"), name, catalogue)))
        assert report.saving is not None
        rows.append(Row(f"{name}: saving against the co-located baseline", report.saving, "share", 0.33, "higher"))
        if name == "paper-8b":
            usd_hour = report.pool_usd_per_hour
            print(f"paper-8b: {usd_hour:.2f} USD/h pool, {report.usd_per_step:.3f} USD/step, paper claims 33-36 %")
    base = _short(scenario_of(read_toml(SCENARIOS / "paper-8b.toml"), "paper-8b", catalogue))
    print("sensitivity of the paper-8b saving, one assumption at a time:")
    for name, scenario in _varied(base):
        report = simulate(scenario)
        assert report.saving is not None
        print(f"  {name:44s} {report.saving:7.1%}   utilisation {report.utilisation:.3f}, kappa {report.kappa}")
        rows.append(Row(f"saving with {name}", report.saving, "share", None, "higher"))
    return rows


def _short(scenario: FleetScenario) -> FleetScenario:
    return replace(scenario, steps=14, warmup_steps=4)


def _varied(base: FleetScenario) -> list[tuple[str, FleetScenario]]:
    def workers(scenario: FleetScenario, **factors: float) -> FleetScenario:
        changed = tuple(
            replace(one, **{name: getattr(one, name) * factor for name, factor in factors.items()})  # type: ignore[arg-type]
            for one in scenario.workers
        )
        return replace(scenario, workers=changed)

    def learner(**values: object) -> FleetScenario:
        return replace(base, learner=replace(base.learner, **values))  # type: ignore[arg-type]

    def bound(value: int) -> FleetScenario:
        return replace(base, config=replace(base.config, staleness_bound=value))

    def baseline(**values: float) -> FleetScenario:
        assert base.baseline is not None
        return replace(base, baseline=replace(base.baseline, **values))  # type: ignore[arg-type]

    told = base.learner
    link = told.link
    assert base.baseline is not None
    own_s, own_usd = 0.25 * base.baseline.step_s, base.baseline.gpu_count * base.baseline.gpu_usd_per_hour
    found = [
        ("the learner on the baseline's own GPUs", learner(train_s=own_s, price_usd_per_hour=own_usd)),
        ("as the scenario has it", base),
        ("worker prices 30 % lower", workers(base, price_usd_per_hour=0.7)),
        ("worker prices 30 % higher", workers(base, price_usd_per_hour=1.3)),
        ("worker rates 30 % lower", workers(base, sequence_tokens_per_s=0.7)),
        ("worker rates 30 % higher", workers(base, sequence_tokens_per_s=1.3)),
        ("losses 10 times as frequent", workers(base, hazard_per_hour=10.0)),
        ("generation 60 % of the co-located step", learner(train_s=told.train_s * 0.40 / 0.25)),
        ("generation 85 % of the co-located step", learner(train_s=told.train_s * 0.15 / 0.25)),
        ("learner price 50 % higher", learner(price_usd_per_hour=told.price_usd_per_hour * 1.5)),
        ("baseline A100 at 1.00 USD/h", baseline(gpu_usd_per_hour=1.0)),
        ("baseline A100 at 1.80 USD/h", baseline(gpu_usd_per_hour=1.8)),
        ("learner uplink 50 Mbit/s", learner(link=replace(link, uplink_bytes_per_s=6.25e6))),
        ("whole snapshots instead of deltas", learner(delta_bytes=told.full_snapshot_bytes)),
    ]
    return found + [(f"S = {value}", bound(value)) for value in (1, 2, 3, 11)]


# ---- large fleets


def fleets() -> list[Row]:
    """1,000 and 10,000 workers simulated under planner, lease book, ledger and broadcast planner."""
    rows = []
    for name in ("fleet-1000", "fleet-10000"):
        scenario = scenario_of(read_toml(SCENARIOS / f"{name}.toml"), name, load_catalogue(None))
        begun = time.process_time()
        report = simulate(scenario)
        spent_s = time.process_time() - begun
        print(f"{name}: {scenario.steps} steps, {report.hours:.2f} h simulated in {spent_s:.1f} s; {report.reason}")
        rows += [
            Row(f"{name}: CPU seconds of the simulation", spent_s, "s", None, "lower"),
            Row(f"{name}: utilisation simulated", report.utilisation, "share", 0.98, "higher"),
            Row(f"{name}: predicted minus simulated utilisation", report.predicted_utilisation - report.utilisation,
                "absolute", None, "lower"),
        ]  # fmt: skip
    return rows


# ---- time and motion


def planning_time() -> list[Row]:
    rows = []
    for count, target_ms in ((1000, 200.0), (10000, 200.0)):
        for case, train_s, delta in (
            ("all fit in", 200.0, 1.2e8),
            ("some too slow", 60.0, 1.2e8),
            ("infeasible", 60.0, 1.2e9),
        ):
            fleet = random_fleet(count, 1)
            batch = min(int(train_s * 0.55 * count), ROLLOUTS_MAX) // 16 * 16
            seat = replace(fleet.learner, train_s=train_s, rollouts_per_step=batch, delta_bytes=delta)
            fleet, took = replace(fleet, learner=seat), []
            for _ in range(9):
                begun = time.process_time()
                chosen = plan(fleet, PlanConfig(4))
                took.append(time.process_time() - begun)
            middle_s = statistics.median(took[1:])
            print(f"planning: {count} workers, {case}: {middle_s * 1000:.1f} ms; {chosen.reason}")
            rows.append(Row(f"planning time, {count} workers, {case}", middle_s * 1000, "ms", target_ms, "lower"))
    return rows


def flapping(quick: bool) -> list[Row]:
    """A simulated day with 5 % noise on every estimate, replanned at each version; no machine is ever lost."""
    catalogue = load_catalogue(None)
    base = scenario_of(read_toml(SCENARIOS / "paper-8b.toml"), "paper-8b", catalogue)
    calm = tuple(replace(one, hazard_per_hour=0.0) for one in base.workers)
    steps = int((6 if quick else 24) * 3600 / base.learner.train_s)
    day = replace(base, workers=calm, estimate_noise=0.05, steps=steps, warmup_steps=10)
    small = replace(day, learner=replace(day.learner, rollouts_per_step=512))
    report = simulate(small)
    print(f"a day with 5 % noise: {report.plans} plans, {report.activations} activations, pool {report.pool}")
    return [
        Row("activations per worker-hour, 5 % noise", report.activations_per_worker_hour, "1/h", 0.2, "lower"),
        Row("utilisation, 5 % noise", report.utilisation, "share", None, "higher"),
    ]


def main() -> None:
    parts: dict[str, Callable[[bool], list[Row]]] = {
        "time": lambda _: planning_time(), "slow": lambda _: slow_network(), "flapping": flapping,
        "optimality": optimality, "saving": saving, "fleets": lambda _: fleets(), "grid": grid,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=sorted(parts), default=[], help="repeat for several parts")
    own = parser.parse_args()
    rows = [row for name, part in parts.items() if not own.only or name in own.only for row in part(own.quick)]
    show(rows)
    if not own.quick:
        keep(rows, is_whole=not own.only)


def show(rows: Sequence[Row]) -> None:
    """The table, with what missed its target."""
    print(f"\n{'figure':72s} {'value':>10s} {'target':>10s}")
    for row in rows:
        target = "-" if row.target is None else f"{row.target:g}"
        held = "" if row.target is None or _is_met(row) else "  MISSED"
        print(f"{row.name:72s} {row.value:10.4f} {target:>10s} {row.unit}{held}")


def keep(rows: Sequence[Row], is_whole: bool, path: Path = RESULTS) -> None:
    """Writes the results; a part replaces its own rows and leaves the others."""
    known = [] if is_whole or not path.exists() else json.loads(path.read_text(encoding="utf-8"))
    by_name = {row["name"]: row for row in known} | {row.name: vars(row) for row in rows}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(list(by_name.values()), indent=1) + "\n", encoding="utf-8")


def _is_met(row: Row) -> bool:
    assert row.target is not None
    return row.value <= row.target if row.better == "lower" else row.value >= row.target


if __name__ == "__main__":
    main()

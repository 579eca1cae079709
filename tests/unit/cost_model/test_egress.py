"""Plans that pay for traffic: the cheapest of all periods and pools by brute force, and the plan's own where nothing is charged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.bench_market import brute_force_usd, egress_case
from echo2.base.ids import PeerId
from echo2.cost_model.planner import plan, priced, sent_gib_per_hour
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig
from tests.unit.cost_model.fleets import learner, worker


def test_a_worker_pays_for_one_version_a_period() -> None:
    told = learner(delta_bytes=float(1 << 30), train_s=60.0)
    assert sent_gib_per_hour(told, 1) == pytest.approx(60.0)
    assert sent_gib_per_hour(told, 4) == pytest.approx(60.0 * 4**0.75 / 4)
    one = priced(FleetSnapshot(0.0, told, (worker("w", egress_usd_per_gib=0.1),)), 1).workers[0]
    assert one.price_usd_per_hour == pytest.approx(0.4 + 6.0) and one.egress_usd_per_gib == 0.0


def test_traffic_that_costs_more_than_machines_makes_periods_longer_and_other_providers_cheaper() -> None:
    told = learner(delta_bytes=4e8)
    free = FleetSnapshot(0.0, told, tuple(worker(f"w{index}", 1.0, 0.4) for index in range(6)))
    dear = replace(free, workers=tuple(replace(one, egress_usd_per_gib=0.09) for one in free.workers))
    paid = plan(dear, PlanConfig(4))
    assert paid.is_feasible and paid.kappa > plan(free, PlanConfig(4)).kappa
    others = (replace(one, worker_id=PeerId(f"z{one.worker_id}"), price_usd_per_hour=0.9) for one in free.workers)
    mixed = replace(free, workers=(*dear.workers, *others))
    assert all(name.startswith("z") for name in plan(mixed, PlanConfig(4, fixed_kappa=1)).pool)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 12))])
def test_the_plan_is_within_a_hundredth_of_brute_force(seed: int) -> None:
    snapshot, config = egress_case(seed)
    best = brute_force_usd(snapshot, config)
    made = plan(snapshot, config)
    assert made.is_feasible == (best is not None)
    assert best is None or made.usd_per_hour <= best * 1.01


def test_a_run_that_goes_on_pays_for_traffic_as_well_and_says_how_much() -> None:
    told, config = learner(delta_bytes=4e8), PlanConfig(4)
    dear = tuple(worker(f"w{index}", 1.0, 0.4, egress_usd_per_gib=0.09) for index in range(6))
    others = tuple(worker(f"z{index}", 1.0, 0.9) for index in range(6))
    snapshot = FleetSnapshot(0.0, told, (*dear, *others))
    made = plan(snapshot, config)
    assert made.kappa == plan(snapshot, config).kappa and made.is_feasible
    paid = [one for one in dear if one.worker_id in made.pool]
    machines = sum(one.price_usd_per_hour for one in snapshot.workers if one.worker_id in made.pool)
    assert made.usd_per_hour == pytest.approx(machines + made.egress_usd_per_hour)
    assert made.egress_usd_per_hour == pytest.approx(len(paid) * 0.09 * sent_gib_per_hour(told, made.kappa))
    again = plan(snapshot, config, made)
    assert (again.pool, again.kappa) == (made.pool, made.kappa)

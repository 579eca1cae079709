"""Plans and predictions judged by a world that knows nothing of the planner (benchmarks/market_world); `make bench-market` asks
the same of hundreds of fleets."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.bench_market import (
    adding_trial,
    best_simulated,
    brute_force_usd,
    egress_case,
    hard_case,
    infeasible_case,
    is_worse,
    setting,
)
from benchmarks.market_fleets import told, wishes
from benchmarks.market_world import Machine, World, simulate, usual_cap
from echo2.cost_model.planner import plan

USUAL = Machine(8, 30.0, 0.4, 5e7, 2e8)
TRAIN_S = 60.0


def world(**others: object) -> World:
    """S = 4, R = 64 in groups of 8, 60 s a step: four usual machines are enough. Short transfers, unless `others` say so."""
    fields: dict[str, object] = {
        "bound": 4, "batch": 64, "group": 8, "train_s": TRAIN_S, "up": 2e7, "delta": 1e8, "whole": 1e9, "sigma": 0.8,
        "cut": 4.0, **others,
    }  # fmt: skip
    return World(**fields)  # type: ignore[arg-type]


def soaked(*seeds: int) -> list[object]:
    return [pytest.param(seed, marks=pytest.mark.soak) for seed in seeds]


@pytest.mark.parametrize("seed", [2, 11])
def test_best_effort_is_within_a_fiftieth_of_the_best_pool_simulated(seed: int) -> None:
    """2 has a cap; the best pool of 11 was unlucky in its first rehearsal."""
    case = infeasible_case(seed)
    assert case.judged() >= 0.98 * best_simulated(case)


def test_a_long_period_that_the_relations_think_little_of_is_found() -> None:
    """Six machines, S = 5: the relations see 0.12 where the best pool reaches 0.253 with four steps a version."""
    assert infeasible_case(95).judged() >= 0.98 * 0.253


@pytest.mark.parametrize(("seed", "best"), [(49, 0.683), (66, 0.493)])
def test_a_best_effort_finds_the_pool_one_machine_away_from_what_the_relations_prefer(seed: int, best: float) -> None:
    for made in adding_trial(seed)[:2]:
        assert made.predicted_utilisation >= 0.98 * best


@pytest.mark.parametrize(("make", "seed"), [(setting, 0), (setting, 7), (setting, 9), (hard_case, 7), (hard_case, 11)])
def test_prediction_is_near_what_is_simulated(make, seed: int) -> None:  # type: ignore[no-untyped-def]
    """Hard case 11: two machines that are seldom lost cost little; by a normal distribution it seemed 7 %."""
    case = make(seed)
    assert case.made.predicted_utilisation == pytest.approx(case.judged(), abs=0.03)


@pytest.mark.parametrize("seed", [*soaked(39, 376), 507, 0])
def test_one_more_machine_never_makes_a_plan_worse(seed: int) -> None:
    before, after, train_s = adding_trial(seed)
    assert not is_worse(before, after, train_s), f"{before.reason} -> {after.reason}"


@pytest.mark.parametrize("seed", [*soaked(0), 1])
def test_a_plan_that_pays_for_traffic_is_within_a_hundredth_of_brute_force_and_is_kept(seed: int) -> None:
    snapshot, config = egress_case(seed)
    best, made = brute_force_usd(snapshot, config), plan(snapshot, config)
    assert made.is_feasible == (best is not None)
    assert best is None or made.usd_per_hour <= best * 1.01
    pool = [one for one in snapshot.workers if one.worker_id in made.pool]
    machines, charges = (sum(getattr(one, of) for one in pool) for of in ("price_usd_per_hour", "egress_usd_per_gib"))
    assert made.egress_usd_per_hour == pytest.approx(charges * snapshot.learner.sent_gib_per_hour(made.kappa))
    assert made.usd_per_hour == pytest.approx(machines + made.egress_usd_per_hour)
    again = plan(snapshot, config, made)
    assert (again.pool, again.kappa) == (made.pool, made.kappa)


def test_a_machine_that_the_cap_does_not_allow_is_passed_over() -> None:
    """The least USD for its rate, and dearer than the cap: it once emptied every pool that was looked at."""
    bargain = Machine(400, 30.0, 2.0, 5e7, 2e8)
    cheap = [dataclasses.replace(USUAL, usd_per_hour=0.17) for _ in range(3)]
    made = plan(told(world(), [*cheap, bargain]), wishes(world(), usd_per_hour_cap=0.6))
    assert made.pool == ("w0000", "w0001", "w0002") and not made.is_feasible
    reached = simulate(world(), cheap, made.kappa, made.in_flight_cap_rollouts)
    assert made.predicted_utilisation == pytest.approx(reached, abs=0.03) and reached > 0.7
    many = [dataclasses.replace(USUAL, usd_per_hour=0.17) for _ in range(80)]
    large = world(batch=2048, train_s=TRAIN_S * 2)
    of_many = plan(told(large, [*many, bargain]), wishes(large, usd_per_hour_cap=1.5))
    assert len(of_many.pool) == 8 and "w0080" not in of_many.pool and of_many.usd_per_hour <= 1.5


def test_a_slow_uplink_gets_the_period_that_keeps_the_learner_busiest() -> None:
    """A transfer of 1.5 steps: the period that keeps up, 6, would reach 0.5 where 1 reaches 0.85."""
    slow = world(bound=6, up=2e6, delta=1.5 * TRAIN_S * 2e6 * 0.8, whole=1e12)
    machines = [USUAL] * 5
    made = plan(told(slow, machines), wishes(slow))
    pool = machines[: len(made.pool)]
    by_period = [simulate(slow, machines, kappa, usual_cap(slow, machines)) for kappa in range(1, 7)]
    assert simulate(slow, pool, made.kappa, made.in_flight_cap_rollouts) >= 0.95 * max(by_period) > 1.3 * by_period[5]

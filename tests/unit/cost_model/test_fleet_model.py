from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet_model.files import scenario_of
from benchmarks.fleet_model.fleet import FleetSim
from benchmarks.fleet_model.lengths import LengthDistribution
from benchmarks.fleet_model.planner import FixedPlanner, LivePlanner
from benchmarks.fleet_model.report import FleetReport, report_of
from benchmarks.fleet_model.run import reports_of
from benchmarks.fleet_model.scenario import ColocatedCluster, FleetScenario, WorkerTruth
from echo2.cli.plan import load_catalogue
from echo2.config.load import read_toml
from echo2.coordinator.leases.lease import GroupPhase
from echo2.cost_model.snapshot import LearnerEstimate, LinkEstimate, PlanConfig

SCENARIOS = sorted((Path(__file__).parents[3] / "benchmarks" / "scenarios").glob("*.toml"))
TRAIN_S = 100.0
LENGTHS = LengthDistribution(median_tokens=1000, sigma=0.8, max_tokens=8192)


def scenario(bound: int = 4, kappa: int = 0, ratio: float = 0.5, count: int = 8, **others: object) -> FleetScenario:
    """R = 128 in groups of 8; eight workers give 1.25 R/T_train; T_bcast = ratio*T_train."""
    speed = LENGTHS.mean_tokens / (0.3 * TRAIN_S)
    truth = WorkerTruth("w", int(1.25 * 128 * 0.3 / 8) + 1, speed, 1.0, LinkEstimate(1e9, 1e12))
    learner = LearnerEstimate(
        128, TRAIN_S, LinkEstimate(1e6, 1e9), 1e6 * ratio * TRAIN_S, 1e12, rollouts_per_group=8, delta_growth=0.0
    )
    fields: dict[str, object] = {
        "name": "test", "learner": learner, "config": PlanConfig(bound, fixed_kappa=kappa, broadcast_efficiency=1.0),
        "lengths": LENGTHS, "workers": tuple(replace(truth, name=f"w{i}") for i in range(count)),
        "steps": 60, "warmup_steps": 12,
        **others,
    }  # fmt: skip
    return FleetScenario(**fields)  # type: ignore[arg-type]


def fixed(told: FleetScenario) -> tuple[FleetReport, FleetSim]:
    sim = FleetSim(told, FixedPlanner(told.config))
    sim.run()
    return report_of(sim), sim


@pytest.mark.parametrize(("bound", "kappa", "ratio"), [(1, 1, 0.2), (2, 2, 2.0), (4, 3, 1.0)])
def test_predicted_and_simulated_utilisation_agree(bound: int, kappa: int, ratio: float) -> None:
    report, sim = fixed(scenario(bound, kappa, ratio))
    assert report.utilisation == pytest.approx(sim.plan.predicted_utilisation, abs=0.03)


def test_in_flight_rollouts_never_pass_the_cap_nor_trained_ones_the_bound() -> None:
    told = scenario(2, 2, 1.5)
    sim = FleetSim(told, FixedPlanner(told.config))
    most = 0
    offer = sim.generation.offer

    def watched(next_step: int, cap_rollouts: int) -> None:
        nonlocal most
        offer(next_step, cap_rollouts)
        most = max(most, sim.generation.outstanding_groups * 8)

    sim.generation.offer = watched  # type: ignore[method-assign]
    sim.run()
    assert 128 <= most <= sim.plan.in_flight_cap_rollouts
    assert max(sim.ledger.tokens_by_lag) <= 2 and sim.counters.trained_rollouts == 60 * 128, "each once, none too old"


def test_lease_book_agrees_with_what_was_generated() -> None:
    told = scenario(4, count=12, steps=24, warmup_steps=6)
    shaky = tuple(replace(one, hazard_per_hour=3.0, join_s=30.0) for one in told.workers)
    sim = FleetSim(replace(told, workers=shaky), LivePlanner(0))
    sim.run()
    book, counters = sim.generation.book, sim.counters
    report = report_of(sim)
    assert report.preemptions > 5 and report.utilisation > 0.8 and report.over_stale_tokens == 0
    assert set(book.groups) == set(sim.generation.groups)
    assert book.counts.finished * 8 >= counters.trained_rollouts
    assert book.counts.continued > 0 and book.counts.expired == 0
    assert book.counts.granted == book.counts.finished + len(book.leases) + book.counts.handed_back + lost_leases(sim)


def lost_leases(sim: FleetSim) -> int:
    """Leases that ended with their worker: each made its group's next lease a continuation, or left it queued."""
    book = sim.generation.book
    queued_again = sum(group.is_continuation for group in book.groups.values() if group.phase is GroupPhase.QUEUED)
    return book.counts.continued + queued_again - book.counts.handed_back


def test_money_is_pool_and_learner_over_the_measured_steps() -> None:
    told = scenario(4, 1, 0.2, baseline=ColocatedCluster(8, 2.0, 1000.0))
    seat = replace(told.learner, price_usd_per_hour=3.6)
    report, _ = fixed(replace(told, learner=seat))
    assert report.usd_per_step == pytest.approx((8 * 1.0 + 3.6) * report.step_s / 3600, rel=1e-6)
    assert report.saving == pytest.approx(1 - report.usd_per_step / (8 * 2.0 * 1000 / 3600))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_of_the_repository_reads(path: Path) -> None:
    scenario = scenario_of(read_toml(path), path.stem, load_catalogue(None))
    assert scenario.workers and scenario.steps > scenario.warmup_steps


def test_a_told_rate_is_paid_for_as_one_card_unless_the_table_says_more() -> None:
    """Price times two for a rate of one card made a saving of 42 % one of 13 %."""
    tables = read_toml(next(path for path in SCENARIOS if path.stem == "paper-8b"))
    for worker in tables["worker"]:  # type: ignore[attr-defined]
        del worker["gpus"]
    (cheapest, *_) = scenario_of(tables, "paper-8b", load_catalogue(None)).workers
    assert (cheapest.gpu, cheapest.price_usd_per_hour, cheapest.slots) == ("RTX4090", 0.35, 7)
    tables = read_toml(next(path for path in SCENARIOS if path.stem == "paper-32b"))
    (four, *_) = scenario_of(tables, "paper-32b", load_catalogue(None)).workers
    assert four.price_usd_per_hour == pytest.approx(1.4)


@pytest.mark.soak
def test_the_papers_saving_is_reached() -> None:
    ((_, report),) = reports_of(next(path for path in SCENARIOS if path.stem == "paper-8b"))
    assert report.saving is not None and 0.33 <= report.saving <= 0.6

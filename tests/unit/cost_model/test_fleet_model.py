"""The scenarios of the benchmark's model of a fleet: all can be read, cards are paid once, and the paper's saving is reached."""

from pathlib import Path

import pytest

from benchmarks.fleet_model.files import scenario_of
from benchmarks.fleet_model.run import reports_of
from echo2.cli.plan import load_catalogue
from echo2.config.load import read_toml

SCENARIOS = sorted((Path(__file__).parents[3] / "benchmarks" / "scenarios").glob("*.toml"))


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

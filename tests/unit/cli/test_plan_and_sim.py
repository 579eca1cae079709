from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.cli.plan import add_plan_command, load_catalogue, read_toml
from echo2.cli.sim import add_sim_command, scenario_of

SCENARIOS = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.toml"))
LONG = "--sampling.max_new_tokens=8192"


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_plan_command(commands)
    add_sim_command(commands)
    own, rest = parser.parse_known_args(arguments)
    return int(own.command(own, rest))


def test_plan_as_json_says_pool_terms_and_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--json", LONG, "--learner.prompts_per_step=128", "--what-if", "uplink=1gbit,S=4") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["is_feasible"] and told["staleness_bound"] == 4
    assert sum(told["pool_by_kind"].values()) == len(told["pool"]) > 0
    assert {"cheapest", "fastest", "fewest workers"} <= set(told["alternatives"])
    assert told["alternatives"]["cheapest"]["usd_per_hour"] <= told["alternatives"]["fastest"]["usd_per_hour"] + 1e-9
    assert told["alternatives"]["fewest workers"]["workers"] <= told["alternatives"]["cheapest"]["workers"]


def test_plan_prints_the_inequality_the_sums_and_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        '[model]\nbillions = 4\n[learner]\ntrain = "60s"\nuplink = "20mbit"\n'
        '[[worker]]\ngpu = "RTX4090"\ncount = 2\nuplink = "20mbit"\n'
    )
    assert run("plan", "--fleet", str(fleet), "--explain", LONG, "--learner.prompts_per_step=128") == 0
    printed = capsys.readouterr().out
    for said in ("terms of the inequality", "alternatives", "(3)", "not feasible", "would do alone"):
        assert said in printed


def test_plot_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("plan", "--plot", str(tmp_path / "plan.png"), LONG, "--json", "--staleness.bound=2")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[worker]]\ngpu = "GTX"\n', "gpu: expected one of"),
        ("[[worker]]\nprice_usd_per_hour = -1\n", "price_usd_per_hour"),
        ("[[worker]]\ncolour = 1\n", "no such field: colour"),
        ("[learner]\ntrain = true\n", "train: expected a number"),
        ('[[worker]]\nuplink = "fast"\n', "worker 0: uplink: .*expected"),
        ('[learner]\ntrain = "nan"\n', "learner: train: .*expected"),
        ("worker = 3\n", "worker: expected"),
        ("[[", "expected TOML"),
    ],
)
def test_bad_fleet_files_are_refused_by_name(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        run("plan", "--fleet", str(path), "--json")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_of_the_repository_reads(path: Path) -> None:
    scenario = scenario_of(read_toml(path), path.stem, load_catalogue(None))
    assert scenario.workers and scenario.steps > scenario.warmup_steps


def test_sim_runs_a_scenario_for_several_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in SCENARIOS if path.stem == "slow-uplink")
    assert run("sim", str(path), "--steps", "12", "--staleness", "2", "--staleness", "6", "--json") == 0
    narrow, wide = json.loads(capsys.readouterr().out)
    assert narrow["S"] == 2 and wide["S"] == 6
    assert wide["utilisation"] >= narrow["utilisation"] - 0.02
    assert wide["over_stale_tokens"] == 0


def test_help_is_printed_without_loading_the_planner() -> None:
    heavy = {"numpy", "scipy", "torch", "rich"}
    code = f"import sys; from echo2.cli.main import _parser; _parser(); print({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.cli.main import make_parser
from echo2.cli.plan import evaluation_rollouts, load_catalogue, question_of
from echo2.cli.plan_text import PlannedRun, alternatives, as_json, planned, pool_by_kind
from echo2.cli.sizing import audit_s_per_step, model_of
from echo2.config.load import load_config
from echo2.config.run import RunConfig
from echo2.cost_model.planner import CHEAPEST
from echo2.cost_model.question import PoolOffer
from echo2.cost_model.relations import FleetModel
from echo2.cost_model.snapshot import LinkEstimate, PlanConfig
from echo2.cost_model.solver import Solver
from tests.patience import WAIT_S
from tests.unit.cost_model.fleets import learner
from tests.unit.cost_model.test_planner import question

EXAMPLE_8B = Path(__file__).parents[3] / "examples" / "configs" / "math-qwen3-8b.toml"
LONG = "--sampling.max_new_tokens=8192"
EIGHT = ("--billions", "8")


def run(*arguments: str) -> int:
    own, rest = make_parser().parse_known_args(arguments)
    return int(resolve_name(own.command)(own, rest))


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The plan of 8 billion parameters with long completions, or of another run that the arguments name."""
    asked = arguments if "--fleet" in arguments else (*EIGHT, LONG, "--learner.prompts_per_step=128", *arguments)
    assert run("plan", *asked, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def fleet(tmp_path: Path) -> tuple[str, ...]:
    """Some machines of two kinds, for a model of 8 billion parameters with long completions."""
    path = tmp_path / "some.toml"
    path.write_text('[[worker]]\ngpu = "H100"\ncount = 24\n[[worker]]\ngpu = "RTX4090"\ncount = 8\n')
    return (*EIGHT, LONG, "--learner.prompts_per_step=128", "--fleet", str(path))


def test_the_answer_names_pool_others_and_price(fleet: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*fleet, "--what-if", "uplink=1gbit,S=4", "--learner.steps=100")
    found = told(capsys, *asked)
    assert found["is_feasible"] and found["staleness_bound"] == 4
    formulas = {term["limit_kind"]: term["formula"] for term in found["terms"]}
    assert formulas["staleness"] == "T_bcast + L_roll + R/mu_pool <= (S-kappa+1)*T_train" and all(formulas.values())
    assert sum(found["pool_by_kind"].values()) == len(found["pool"]) > 0
    others = found["alternatives"]
    assert {"cheapest", "fastest", "fewest workers"} <= set(others)
    assert others["cheapest"]["usd_per_hour"] <= others["fastest"]["usd_per_hour"] + 1e-9
    assert others["fewest workers"]["workers"] <= others["cheapest"]["workers"]
    learner, hours = found["learner"], found["run"]["hours"]
    total = found["usd_per_hour"] + learner["price_usd_per_hour"]
    assert learner["price_usd_per_hour"] > 0 and found["run"]["usd"] == pytest.approx(hours * total)
    busy_s = 100 * (learner["train_s"] - learner["idle_s"])
    assert hours == pytest.approx(busy_s / found["predicted_utilisation"] / 3600)
    rows = [(row["machine"].split()[0], row["GPUs a worker"]) for row in found["machines"]]
    assert [gpus for name, gpus in rows if name == "RTX4090"] == ["1", "2"], "one card beside what is recommended"
    assert [gpus for name, gpus in rows if name == "H100"] == ["1"]
    assert run("plan", *asked) == 0
    printed = capsys.readouterr().out
    assert f"= ${total:.2f}/h" in printed and f"and ${found['run']['usd']:,.2f}" in printed
    assert "100 steps: about" in printed
    assert run("plan", *fleet, "--learner.steps=1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 step: about" in printed and re.search(r"\(\$\d+\.\d\d to \$\d+\.\d\d at such prices\)", printed), printed


def test_the_plan_counts_what_is_tried_and_saved(fleet: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """In the utilisation that it tells, in what workers have to make, and in the hours."""
    seldom = ("--staleness.bound=8", "--task.eval_prompts=0", "--learner.checkpoint_every_steps=100000")
    often = ("--task.eval_prompts=512", "--task.eval_every_steps=4", "--learner.checkpoint_every_steps=1")
    plain, full = told(capsys, *fleet, *seldom), told(capsys, *fleet, seldom[0], *often)
    assert plain["predicted_utilisation"] > 0.99
    share = full["learner"]["idle_s"] / full["learner"]["train_s"]
    assert 0.01 < share < 0.5 and full["predicted_utilisation"] <= 1 - share + 1e-9
    assert full["learner"]["rollouts_per_step"] == plain["learner"]["rollouts_per_step"] + 128
    assert full["run"]["hours"] > plain["run"]["hours"] * (1 + 0.9 * share)


def test_the_budget_is_judged_by_the_runs_cost(fleet: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    def budget_of(*more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        found = told(capsys, *fleet, *more)
        return found, next(term for term in found["terms"] if term["limit_kind"] == "usd_budget")

    found, term = budget_of("--coordinator.usd_budget=1000000")
    assert found["is_feasible"]
    assert term["value"] == pytest.approx(found["run"]["hours"] * found["usd_per_hour"], rel=0.01)
    short = f"--coordinator.usd_budget={term['value'] / 3:.2f}"
    found, term = budget_of(short)
    assert not found["is_feasible"] and term["value"] > term["limit"]
    assert any(one["what_if"].startswith("budget=") for one in found["advice"])
    sets = ("--task.eval_sets.sums.task=sums", "--task.eval_sets.few.task=sums", "--task.eval_sets.few.prompts=8")
    assert run("plan", *fleet, short, *sets) == 0
    printed = capsys.readouterr().out
    assert "not in the plan: the evaluation sets sums, of" in printed, "nobody here knows how many they are"
    assert "not feasible with this budget" in printed and "the run  " in printed, "what it costs is said, too"


def test_a_period_that_more_rate_does_not_help_is_given_up_for_one_that_it_does() -> None:
    """Every two steps the learner waits whatever pool it has; the search paid ever more for one, up to ten times too much."""
    asked = question_of(RunConfig(), {}, load_catalogue(None), 4.0)[0].what_if("train", "13.11s")
    solver = Solver(fleet := FleetModel.of(asked.snapshot(), asked.wishes), fleet.is_must)
    found, rejected = solver.cheapest(0.975)
    assert found is not None and found.kappa == 1 and len(rejected) < 8
    assert max(one.usd_per_hour for one in rejected) < 2 * found.usd_per_hour


def test_of_long_periods_only_some_are_tried_and_any_may_be_kept() -> None:
    long, short = PlanConfig(64), PlanConfig(12)
    assert short.kappas == tuple(range(1, 13)) and len(long.kappas) < 30
    assert (long.kappas[0], long.kappas[-1]) == (1, 64)
    assert all(later <= 1.13 * kappa + 1 for kappa, later in pairwise(long.kappas))
    assert [long.allows(kappa) for kappa in (0, 1, 13, 64, 65)] == [False, True, True, True, False]


FLEETS = {
    "few machines": '[[worker]]\ngpu = "RTX4090"\ncount = 2\n',
    "slow uplink": '[learner]\nuplink = "3mbit"\n[[worker]]\ngpu = "H200"\ncount = 8\n',
    "short step": '[learner]\ntrain = "40s"\n[[worker]]\ngpu = "H100"\ncount = 8\n',
}


@pytest.mark.parametrize(
    "fleet",
    [pytest.param(text, marks=[] if name == "slow uplink" else pytest.mark.soak) for name, text in FLEETS.items()],
    ids=FLEETS,
)
def test_advice_holds_when_it_is_followed(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line of advice is taken as it is printed, in at most 100 columns, and given back to the same command."""
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "fleet.toml"
    path.write_text(fleet)
    asked = ("plan", "--billions=4", "--fleet", str(path), LONG, "--learner.prompts_per_step=64", "--staleness.bound=2")
    assert run(*asked, "--explain") == 0
    printed = capsys.readouterr().out
    for said in ("what limits the run", "(3)", "not feasible with these machines", "would do "):
        assert said in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert "alternatives" not in printed, "there is none to choose from"
    found = re.findall(r"workers\s+(\$[\d.]+/h)\s+--what-if (\S+)", printed)
    assert found
    for price, what_if in found:
        assert run(*asked, "--what-if", what_if) == 0
        printed = capsys.readouterr().out
        assert "not feasible with" not in printed and f"workers {price}" in printed, what_if


@pytest.mark.soak
def test_among_hundreds_of_machines_a_larger_bound_alone_is_found_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the whole market under many periods the relations promise what a rehearsal denies: the search must not end before the pool
    that does."""
    assert run("plan", *EIGHT, "--json", "--staleness.bound=4") == 0
    found = json.loads(capsys.readouterr().out)
    alone = [one["what_if"] for one in found["advice"] if re.fullmatch(r"S=\d+", one["what_if"])]
    assert not found["is_feasible"] and len(alone) == 1, found["advice"]
    assert run("plan", *EIGHT, "--json", "--staleness.bound=4", "--what-if", alone[0]) == 0
    assert json.loads(capsys.readouterr().out)["reason"].startswith(CHEAPEST)


def test_the_audit_costs_what_it_reads_and_nothing_where_it_is_off() -> None:
    def audit_s(**learner: object) -> float | None:
        config = RunConfig.model_validate({"learner": learner, "model": {"lora_rank": learner.pop("rank", 0)}})
        return audit_s_per_step(config, 1000.0, 2000.0, 60.0)

    default = audit_s()
    assert default and audit_s(audit_share=RunConfig().learner.audit_share / 2) == pytest.approx(default / 2)
    assert audit_s(audit_share=0) is None and audit_s(rank=8) is None


def test_the_models_size_is_never_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    shape = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 1000, "head_dim": 16, "tie_word_embeddings": True, "max_position_embeddings": 4096,
    }  # fmt: skip
    local, cached = tmp_path / "my-12B-model", tmp_path / "hub" / "models--me--my-12B" / "snapshots" / "abc"
    for folder in (local, cached):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(shape))
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[[worker]]\ngpu = "RTX4090"\ncount = 2\n')
    assert run("plan", f"--model.path={local}", "--fleet", str(fleet), "--learner.prompts_per_step=4") == 0
    printed = capsys.readouterr().out
    assert f"({local / 'config.json'})" in printed and "model    0.000" in printed
    assert "0.0 s" not in printed and not re.search(r"-\d+(\.\d+)?%", printed)
    assert model_of("me/my-12B")[1] == str(cached / "config.json")
    for path in ("me/other-12B", str(tmp_path / "other-12B")):
        with pytest.raises(ConfigError, match=r"expected (its )?config\.json.*--billions"):
            run("plan", f"--model.path={path}")
    with pytest.raises(ConfigError, match=r"expected a model, got none.*--model\.path"):
        run("plan")


def test_recomputed_caches_enlarge_the_pool_unless_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[[worker]]\ngpu = "RTX3090"\ngpus = 2\ncount = 60\n')
    asked = ("--learner.drop_equal_groups=false", "--staleness.kappa=1", "--coordinator.usd_per_hour_cap=inf")
    plan = (str(EXAMPLE_8B), "--fleet", str(path), *asked)
    recomputed, kept = (told(capsys, *plan, *more) for more in ((), ("--worker.swap_mode=keep_kv",)))
    assert recomputed["is_feasible"] and kept["is_feasible"]
    assert len(kept["pool"]) < len(recomputed["pool"]) < 1.4 * len(kept["pool"])
    (cost,) = recomputed["prefill"].values()
    assert cost["recompute_s"] == pytest.approx(31.7, rel=0.05) and not cost["is_measured"]
    (cost,) = kept["prefill"].values()
    assert cost["recompute_s"] == 0.0
    assert run("plan", *plan, "--explain") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "prefill 2xRTX3090: 3506 tokens/s read" in printed and "again at each version, 31.7 s" in printed


def test_the_share_of_groups_thrown_away_by_sampling_is_said_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--task.eval_prompts=0", "--learner.drop_equal_groups=true")
    plain = told(capsys, asked[0])
    half = told(capsys, *asked, "--what-if", "dropped=0.5")
    batch = plain["learner"]["rollouts_per_step"]
    assert (half["learner"]["rollouts_per_step"], half["learner"]["dropped_rollouts"]) == (2 * batch, batch)
    assert half["learner"]["train_s"] == plain["learner"]["train_s"], "no step is made of what is thrown away"
    assert half["run"]["hours"] == pytest.approx(plain["run"]["hours"], rel=0.05)
    assert run("plan", *EIGHT, LONG, "--learner.prompts_per_step=128", *asked) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "25% of the groups are assumed to have equal rewards" in printed and "--what-if dropped=" in printed


SINGLE = '[learner]\ngpu = "H100"\ngpu_count = 8\n[[worker]]\ngpu = "RTX4090"\ncount = 30\nprice_usd_per_hour = 0.35\n'


def planned_for(fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    path = tmp_path / "fleet.toml"
    path.write_text(fleet)
    return told(capsys, str(EXAMPLE_8B), "--fleet", str(path), *more)


def test_thirty_single_cards_are_thirty_cards() -> None:
    """Each is a worker of its own, at its own price; pairs are asked for by `gpus = 2`."""
    config, rates = load_config([EXAMPLE_8B]), list[float]()
    for text, kind, count in ((SINGLE, "RTX4090", 30), (SINGLE.replace("= 30", "= 15\ngpus = 2"), "2xRTX4090", 15)):
        answer = planned(question_of(config, tomllib.loads(text), load_catalogue(None))[0])
        assert pool_by_kind(answer) == {kind: count} and answer.usd_per_hour == pytest.approx(30 * 0.35)
        rates.append(answer.throughput_rollouts_per_s)
    assert rates[1] > 1.5 * rates[0], "as many cards"


def test_single_cards_stand_beside_machines_of_two_and_assumed_prices_make_a_range() -> None:
    cards = PoolOffer("RTX4090", 24, 0.35, LinkEstimate(12.5e6, 5e7, 0.08))
    asked = replace(question(), offers=(cards,), learner=learner(rollouts_per_step=256, train_s=200.0))
    answer = planned(asked)
    single = alternatives(asked, answer)["single cards"]
    assert asked.prior(cards).gpu_count == 2 and single is not None and single.is_feasible
    assert single.usd_per_hour == pytest.approx(0.35 * len(single.pool)), "one card a worker"
    of_one = replace(asked, offers=(replace(cards, gpus=1),))
    assert "single cards" not in alternatives(of_one, planned(of_one)), "the answer takes them anyway"
    for is_assumed, low, high in ((True, 0.5, 2.0), (False, 1.0, 1.0)):
        costs = as_json(asked, answer, PlannedRun(10, "a test", prices_are_assumed=is_assumed))["run"]
        assert (costs["usd_low"], costs["usd_high"]) == (low * costs["usd"], high * costs["usd"])
    nobody = replace(asked, wishes=PlanConfig(4, usd_per_hour_cap=0.0))
    assert json.dumps(as_json(nobody, planned(nobody), PlannedRun(10, "a test")), allow_nan=False)


def test_machines_that_cannot_hold_the_model_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ("--model.path=Qwen/Qwen3-32B",)
    with pytest.raises(ResourceError, match=r"no machine on offer holds the model.* 1 x RTX4090: .*such GPUs"):
        planned_for(SINGLE, tmp_path, capsys, *large)
    found = planned_for(SINGLE + '[[worker]]\ngpu = "H200"\ncount = 4\n', tmp_path, capsys, *large)
    assert set(found["pool_by_kind"]) == {"H200"} and "such GPUs" in found["left_out"]["1 x RTX4090"]


def test_the_learners_gpus_of_the_file_reach_memory_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.toml"

    def printed(count: int) -> str:
        path.write_text(f'[learner]\ngpu = "H100"\ngpu_count = {count}\n[[worker]]\ngpu = "H200"\ncount = 8\n')
        assert run("plan", str(EXAMPLE_8B), "--fleet", str(path)) == 0
        return " ".join(capsys.readouterr().out.split())

    eight, two = printed(8), printed(2)
    assert "learner: 34.1 GB on each of 8 GPUs" in eight and "the learner scores 7.51 s a step" in eight
    assert "on each of 2 GPUs" in two and "the learner scores 30.4 s a step" in two
    assert "GPU memory is SHORT: 95.5 GB needed on each of 2 GPUs, 76.9 GB there" in two and "4 such GPUs" in two
    assert "SHORT" not in eight
    with pytest.raises(ConfigError, match="gpu_count: expected a number above 0"):
        printed(0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[worker]]\ngpu = "GTX"\n', "gpu: expected one of"),
        ("[[worker]]\nprice_usd_per_hour = -1\n", "price_usd_per_hour"),
        ("[[worker]]\ncolour = 1\n", "no such field: colour"),
        ("[[worker]]\ncount = inf\n", "worker 0: count: expected a whole number, got inf"),
        ("[[worker]]\ngpus = -1\n", "gpus: expected a finite number, 0 to 64"),
        ("[[worker]]\nhazard_per_hour = 1e308\n", "hazard_per_hour: expected a finite number, 0 to 1e\\+15"),
        ("[learner]\nrollouts_per_step = 9999999999999999999\n", "rollouts_per_step: expected .*, 1 to 1e"),
        ("[learner]\nuplink = 1e-308\n", "uplink_bytes_per_s: expected a finite number above 0, up to 1e"),
        ("[learner]\ntrain = 1e-308\n", "idle_s: expected"),
        ("[learner]\ntrain = true\n", "train: expected a number"),
        ('[[worker]]\nuplink = "fast"\n', "worker 0: uplink: .*expected"),
        ('[learner]\ntrain = "nan"\n', "learner: train: .*expected"),
        ("worker = 3\n", "worker: expected"),
        ("[[", "expected TOML"),
    ],
)
def test_bad_fleet_files_are_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        run("plan", *EIGHT, "--fleet", str(path), "--json")


def test_help_is_printed_without_loading_the_planner() -> None:
    heavy = {"numpy", "scipy", "torch", "rich"}
    code = f"import sys; from echo2.cli.main import make_parser; make_parser(); print({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.strip() == "set()"


def test_all_that_is_evaluated_is_planned_for() -> None:
    task = {"eval_prompts": 8, "eval_samples": 2, "eval_every_steps": 4}
    assert evaluation_rollouts(RunConfig.model_validate({"task": task})) == 4.0
    assert evaluation_rollouts(RunConfig.model_validate({"task": task, "agent": {"harness": "agent:play"}})) == 4.0
    one, two = {"task": "sums"}, {"task": "sort_digits", "eval_prompts": 4}
    sets = {"more": {"task": "sums", "prompts": 6, "samples": 2}}
    mixed = {**task, "mixture": {"one": one, "two": two}, "eval_sets": sets}
    assert evaluation_rollouts(RunConfig.model_validate({"task": mixed})) == (2 * (8 + 4) + 12) / 4

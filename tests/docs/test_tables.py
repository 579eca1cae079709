"""Tables of the documentation are those of what a program wrote last, or of what it answers now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import bench_audit
from benchmarks.bench_audit import table_of, write_page
from echo2.cli.plan import load_catalogue, question_of
from echo2.cli.plan_text import PlannedRun, hours_of, planned
from echo2.config.load import load_config, parse_overrides, read_toml
from tests.docs.test_docs import ROOT


def test_the_audits_table_is_what_the_benchmark_found(tmp_path: Path) -> None:
    kept = json.loads(bench_audit.RESULTS.read_text())
    assert table_of(kept) in bench_audit.PAGE.read_text(), "run `make bench-audit`"
    page = tmp_path / "security.md"
    page.write_text(bench_audit.PAGE.read_text())
    write_page(kept, page)
    assert page.read_text() == bench_audit.PAGE.read_text()


def test_the_benchmarks_figures_say_what_the_page_claims() -> None:
    kept = json.loads(bench_audit.RESULTS.read_text())
    values = {row["name"]: row["value"] for row in kept["rows"]}
    assert kept["honest_accused"] == 0 == values["honest workers accused"]
    assert sum(kept["honest"].values()) >= 5 and values["bound on false alarms"] == pytest.approx(1e-6)
    for found in kept["findings"]:
        if found["noise_nats"] > bench_audit.ALLOWED_NATS:
            assert len(found["rollouts"]) == found["watched"], found["worker"]


@pytest.mark.parametrize(
    ("changed", "what_if", "row"),
    [
        ((), (), "takes 5 of the workers: 200 steps in {:.1f} h for {:.0f} USD, .* busy {:.0%} of"),
        (("--sampling.max_new_tokens=8192",), (), r"`sampling.max_new_tokens` \| 2048 \| 8192: {:.1f}, {:.0f}, {:.0%}"),
        ((), ("mean", "1400"), "assumed 717 .* `mean=1400`: {:.1f}, {:.0f}, {:.0%}"),
        (
            ("--learner.prompts_per_step=64", "--learner.rollouts_per_prompt=16"), (),
            r"\| 32 x 8 \| 64 x 16: {:.1f}, {:.0f}, {:.0%}",
        ),
        ((), ("S", "8"), r"\| 12 \| 8: {:.1f}, {:.0f}, {:.0%};"),
        ((), ("S", "4"), "; 4: {:.1f}, {:.0f}, {:.0%}"),
        (("--coordinator.usd_per_hour_cap=1",), (), r"\| 5 \| 1: {:.1f}, {:.0f}, {:.0%}: two workers"),
    ],
)  # fmt: skip
def test_the_first_runs_numbers_are_the_plans(changed: tuple[str, ...], what_if: tuple[str, ...], row: str) -> None:
    config = load_config([ROOT / "examples" / "first-4b.toml"], None, parse_overrides(changed))
    question, _ = question_of(config, read_toml(ROOT / "examples" / "first-4b-fleet.toml"), load_catalogue(None))
    question = question.what_if(*what_if) if what_if else question
    plan = planned(question)
    hours = hours_of(question, plan, PlannedRun(config.learner.steps, ""))
    usd = hours * (plan.usd_per_hour + question.learner.price_usd_per_hour)
    expected = row.format(hours, usd, plan.predicted_utilisation)
    page = " ".join((ROOT / "docs" / "first-run.md").read_text().split())
    assert re.search(expected, page), expected
    assert changed or what_if or (plan.is_feasible and len(plan.pool) == 5)

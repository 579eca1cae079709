"""Tables of the documentation that are written by a program are those of what it wrote last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_audit
from benchmarks.bench_audit import table_of, write_page


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

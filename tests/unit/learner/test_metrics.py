from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from echo2.base.errors import ConfigError, PortBusy
from echo2.learner.metrics import (
    JsonLines,
    PrometheusEndpoint,
    RunFacts,
    StepTimes,
    gauge_name,
    open_sinks,
    peak_flops_of,
    time_fields,
)
from echo2.learner.training.loss import SUM_NAMES, loss_metrics
from echo2.learner.training.trainer import StepResult

ROW = {"step": 3, "reward/mean": 0.5, "lag/histogram": [7, 0, 2], "is_skipped": False, "note": "text"}

DOCS = Path(__file__).parents[3] / "docs" / "learner.md"


def documented_names() -> set[str]:
    table = DOCS.read_text().split("## metrics.jsonl", 1)[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_a_torn_last_row_is_cut_off_and_no_step_gets_a_second_row(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(3):
        sink.write({"step": step})
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    sink = JsonLines(tmp_path / "metrics.jsonl")
    assert sink.last_step == 2
    for step in (1, 2, 3):
        sink.write({"step": step})
    sink.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 0}', '{"step": 1}', '{"step": 2}', '{"step": 3}']


def served(endpoint: PrometheusEndpoint) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_prometheus_serves_the_last_row_under_the_documented_names() -> None:
    endpoint = PrometheusEndpoint(0, lambda: {"step": 4, "waiting_s": 1.5})
    try:
        assert served(endpoint) == {"echo2_learner_step": 4.0, "echo2_learner_waiting_s": 1.5}
        endpoint.write(ROW)
        found = served(endpoint)
        assert found["echo2_learner_reward_mean"] == 0.5 and found["echo2_learner_is_skipped"] == 0.0
        assert found['echo2_learner_lag_histogram{lag="2"}'] == 2.0 and found["echo2_learner_step"] == 4.0
        with pytest.raises(PortBusy, match="metrics_port"):
            PrometheusEndpoint(endpoint.port, dict)
    finally:
        endpoint.close()
    assert len({gauge_name(name) for name in documented_names()}) == len(documented_names()), "no two share a name"
    page = DOCS.read_text()
    for name in ("echo2_learner_reward_mean", "echo2_learner_step", "echo2_learner_waiting_s"):
        assert name in page


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensorboard, wandb or trackio"):
        open_sinks(tmp_path, "run", ("graphite",))
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(tmp_path, "run", ("tensorboard",))
    for step in (1, 2):
        for sink in sinks:
            sink.write({**ROW, "step": step, "reward/mean": step / 4})
    for sink in sinks:
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


WRITES = f"""
import pathlib, sys
from echo2.learner.metrics import open_sinks
for steps in ((1, 2), (3,)):  # a restart goes on with the same run
    sinks = open_sinks(pathlib.Path(sys.argv[1]), "trial", (sys.argv[2],))
    for step in steps:
        for sink in sinks:
            sink.write({{**{ROW!r}, "step": step, "reward/mean": step / 4}})
    for sink in sinks:
        sink.close()
"""


def written_by(sink: str, folder: Path, more: str = "", **environment: str) -> str:
    """In a process of its own: a library's service has written everything only once its process is gone."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", WRITES + more, str(folder), sink]
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": paths, **environment}
    return subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True, text=True).stdout


@pytest.mark.extras
def test_weights_and_biases_writes_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    written_by("wandb", tmp_path, WANDB_MODE="offline")
    written = [path.read_bytes() for path in (tmp_path / "wandb").glob("offline-run-*/run-trial.wandb")]
    assert written and all(b"reward/mean" in content for content in written)


@pytest.mark.extras
def test_trackio_keeps_a_run_under_the_rows_own_names(tmp_path: Path) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    read = (
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "print([(one['step'], one['reward/mean']) for one in SQLiteStorage.get_logs('echo2', 'trial')])\n"
    )
    said = written_by("trackio", tmp_path, read, TRACKIO_DIR=str(tmp_path / "t"))
    assert "[(1, 0.25), (2, 0.5), (3, 0.75)]" in said.splitlines()


def test_utilisation_of_the_device_counts_six_operations_a_parameter_and_position() -> None:
    metrics = loss_metrics(torch.zeros(len(SUM_NAMES)), 0.0)
    result = StepResult(1, {"forward": 1.0, "backward": 1.0}, metrics, 0.0, 0.0, False, 1000, 500)
    facts = RunFacts(flops_per_position=6e9, peak_flops=peak_flops_of("NVIDIA H200"))
    assert time_fields(result, StepTimes(), facts)["mfu"] == pytest.approx(6e9 * 1000 / 2.0 / 989e12)
    assert "mfu" not in time_fields(result, StepTimes(), RunFacts(flops_per_position=6e9))
    assert peak_flops_of("AMD Ryzen") == 0.0

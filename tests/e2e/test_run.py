"""The real daemons on loopback: a run in which each process is killed and a worker cheats, and the same run from its backup."""

import asyncio
import shutil
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import bench_coordinator
from benchmarks.bench_coordinator import RECOVERY_S_MAX, Outcome, measure
from echo2.cli import learner
from echo2.cli.demo.model import ModelRecipe, make_model
from tests.e2e.cluster import Cluster, error_line, trained_groups
from tests.patience import WAIT_S

STEPS, BOUND = 16, 4


def assert_run_ended_well(cluster: Cluster, steps: int, kills: int = 0) -> None:
    """A kill may cost the metrics row of the step in flight; it never costs the step."""
    rows = [row for row in cluster.metrics() if "reward/mean" in row]
    last = rows[-1]
    assert last["step"] == steps
    assert len({row["step"] for row in rows}) >= steps - kills
    lags = last["lag/histogram"]
    assert sum(lags) > 0 and sum(lags[BOUND + 1 :]) == 0, f"tokens over S were trained on: {lags}"
    assert last["tokens/over_stale"] == 0
    assert Counter(trained_groups(cluster).values()) == dict.fromkeys(range(steps), 12), "a step lost or doubled groups"
    assert (cluster.run_folder / "learner" / "model" / "config.json").exists()


def back_up(run: Path, into: Path) -> None:
    """What docs/runbook.md says of a run's folder, while coordinator and learner work in it."""
    shutil.copytree(run / "links", into / "links")
    shutil.copytree(run / "coordinator", into / "coordinator", ignore=shutil.ignore_patterns("state.sqlite*", "lock"))
    state, copy = run / "coordinator" / "state.sqlite", into / "coordinator" / "state.sqlite"
    if tool := shutil.which("sqlite3"):
        subprocess.run([tool, str(state), f".backup '{copy}'"], check=True, timeout=WAIT_S, capture_output=True)
    else:
        with sqlite3.connect(state) as source, sqlite3.connect(copy) as target:
            source.backup(target)
    for name in ("checkpoints", "journal", "node"):
        shutil.copytree(run / "learner" / name, into / "learner" / name)
    shutil.copy(run / "learner" / "run.json", into / "learner" / "run.json")


def refuses_another_model(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the run folder where it is the same, by the coordinator where the folder is new."""
    other = tmp_path / "other"
    make_model(other, ModelRecipe(hidden_size=32, warmup_steps=1))
    for folder in ([], ["--folder", str(tmp_path / "new")]):
        code = learner.main([*cluster.commands["learner"][1:], "--model.path", str(other), *folder])
        line = error_line(code, capsys.readouterr().err)
        assert "model" in line and "expected" in line, line


def logs_no_secret(cluster: Cluster) -> None:
    links = (cluster.run_folder / "links").iterdir()
    secrets = [
        path.read_text().strip() for path in links if path.name != "dashboard.url"
    ]  # an address, which is logged
    secrets += [link.partition("token=")[2] for link in secrets if "token=" in link]
    assert len(secrets) >= 5, "three links with their tokens, and the page's"
    for name in cluster.commands:
        text = cluster.log(name)
        assert text and not any(secret in text for secret in secrets), name


def test_a_run_outlives_a_cheat_and_the_kill_of_each_process_and_goes_on_from_its_backup(
    tmp_path: Path, run_config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config.replace("steps = 30", f"steps = {STEPS}")
    kept = tmp_path / "kept"
    with Cluster(tmp_path, config, workers=2) as cluster:
        cluster.commands["w1"] = ["tests.e2e.cheating_worker", *cluster.commands["w1"][1:]]
        cluster.start_all()
        assert cluster.wait("w1") == 4, cluster.log("w1")[-2000:]
        banned = "is banned: audit: its log-probabilities are not those of the version that it claims"
        assert banned in cluster.log("w1")
        del cluster.processes["w1"]
        cluster.wait_until(lambda: cluster.step() >= 6, "step 6")
        back_up(cluster.run_folder, kept)
        for more, name in ((1, "w0"), (2, "coordinator"), (2, "learner")):
            after = cluster.step() + more
            cluster.wait_until(lambda at=after: cluster.step() >= at, f"step {after}")  # type: ignore[misc]
            assert after < STEPS - 2, "it is to be killed at work"
            cluster.kill(name)
            if name == "learner":
                refuses_another_model(cluster, tmp_path, capsys)
            cluster.start(name)
        assert cluster.wait("learner") == 0, cluster.log("learner")[-3000:]
        assert_run_ended_well(cluster, STEPS, kills=1)
        last = cluster.metrics()[-1]
        assert last["rollouts/trained"] == STEPS * 12 * 8, "a rollout was trained on twice, or is missing"
        cluster.wait_until(lambda: f"version {STEPS} is live" in cluster.log("w0"), "the last version there")
        assert cluster.wait("w0") == 0, "the honest one worked until the run had finished"
        cluster.kill("coordinator", 15)
        assert cluster.wait("coordinator") == 0, cluster.log("coordinator")[-2000:]
        logs_no_secret(cluster)
    evaluations = cluster.evaluations()
    assert evaluations[-1]["eval/reward"] > evaluations[0]["eval/reward"] + 0.05, evaluations
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder = cluster.run_folder / "learner" / "model"
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(model_folder))
    shutil.rmtree(cluster.run_folder)

    newest = max((kept / "learner" / "checkpoints").glob("step-????????"))
    checkpoint = int(newest.name.removeprefix("step-"))
    text = config.replace(f"steps = {STEPS}", f"steps = {checkpoint + 3}")
    with Cluster(tmp_path / "new", text.replace(f"{tmp_path}/runs", f"{tmp_path}/new/runs"), workers=1) as new:
        shutil.copytree(kept, new.run_folder, dirs_exist_ok=True)
        new.start_all()
        assert new.wait("learner") == 0, new.log("learner")[-3000:]
        assert_run_ended_well(new, checkpoint + 3, kills=STEPS)  # metrics.jsonl begins anew
        assert f"checkpoint of step {checkpoint}" in new.log("learner")


@pytest.mark.soak  # tests/unit/learner has it in one process
def test_two_processes_as_torchruns_environment_describes_them_are_one_learner(tmp_path: Path, run_config: str) -> None:
    """Sharded parameters, real workers; SIGTERM in between leaves a checkpoint from which two go on."""
    config = run_config.replace("steps = 30", "steps = 8")
    with Cluster(tmp_path, config) as cluster:
        _, *arguments = cluster.commands["learner"]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "echo2.cli.learner"]
        cluster.commands["learner"] = [*torchrun, *arguments]
        cluster.start_all()
        cluster.wait_until(lambda: cluster.step() >= 3, "step 3")
        cluster.kill("learner", 15)
        cluster.wait("learner")
        checkpoints = list((cluster.run_folder / "learner" / "checkpoints").glob("step-????????"))
        assert len(list(max(checkpoints).glob("*.safetensors"))) == 2, "one file of shards a rank"
        cluster.start("learner")
        assert cluster.wait("learner") == 0, cluster.log("learner")[-2000:]
        assert_run_ended_well(cluster, 8)


# ---- kill -9 of the coordinator's process under a load of real streams, judged by the history checker


def test_kills_under_load_lose_no_join_no_lease_and_no_group_and_double_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_coordinator, "HEARTBEAT_S", 1.0)  # the load is settled after three
    monkeypatch.setattr(bench_coordinator, "STATES", 0)  # nobody asks for the page
    outcome = Outcome()
    asyncio.run(
        asyncio.wait_for(measure(outcome, workers=16, seconds=2, groups_per_s=10, kills=2, doing=print), WAIT_S)
    )
    assert outcome.violations == []
    assert max(outcome.recovery_s) < RECOVERY_S_MAX
    assert max(outcome.streams_back_s) < RECOVERY_S_MAX
    assert outcome.grants_after > 0

"""The real daemons, as processes, on loopback: a run from start to end, and the same with each process killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster


def trained_groups(cluster: Cluster) -> dict[str, int]:
    """The ledger of the last checkpoint: each group that the model's history trained on, with its step."""
    newest = max((cluster.run_folder / "learner" / "checkpoints").glob("step-*"))
    trained: dict[str, int] = json.loads((newest / "state.json").read_text())["groups"]["trained"]
    return trained


def assert_run_ended_well(cluster: Cluster, steps: int, staleness_bound: int, kills: int = 0) -> None:
    """A kill may cost the metrics row of the step in flight; it never costs the step."""
    rows = [row for row in cluster.metrics() if "reward/mean" in row]
    last = rows[-1]
    assert last["step"] == steps
    assert len({row["step"] for row in rows}) >= steps - kills
    lags = last["lag/histogram"]
    assert sum(lags) > 0
    assert sum(lags[staleness_bound + 1 :]) == 0, f"tokens over S were trained on: {lags}"
    assert last["tokens/over_stale"] == 0
    assert (cluster.run_folder / "learner" / "model" / "config.json").exists()


@pytest.mark.parametrize("staleness_bound", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_a_run_trains_to_its_end_within_the_bound(tmp_path: Path, run_config: str, staleness_bound: int) -> None:
    config = run_config + f"[staleness]\nbound = {staleness_bound}\n"
    with Cluster(tmp_path, config) as cluster:
        cluster.start_all()
        assert cluster.wait("learner") == 0
        assert_run_ended_well(cluster, 30, staleness_bound)
        for name in ("w0", "w1", "coordinator"):
            cluster.kill(name, 15)
            assert cluster.wait(name) == 0, cluster.log(name)[-2000:]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder = cluster.run_folder / "learner" / "model"
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert model.config.vocab_size == len(tokenizer)
    evaluations = cluster.evaluations()
    assert evaluations[-1]["eval/reward"] > evaluations[0]["eval/reward"] + 0.05, evaluations


@pytest.mark.soak  # tests/unit/learner has it in one process
def test_an_environment_of_two_turns_is_leased_turn_by_turn_and_trained(tmp_path: Path, run_config: str) -> None:
    """Real workers that know nothing of environments sample both turns; kill -9 of the learner in between."""
    config = run_config.replace('name = "sort_digits"', 'name = "tests.e2e.worlds:AskedTwice"')
    config = config.replace("args = { digit_count = 5 }\n", "").replace("steps = 30", "steps = 12")
    with Cluster(tmp_path, config) as cluster:
        cluster.start_all()
        cluster.wait_until(lambda: cluster.step() >= 5, "step 5")
        cluster.kill("learner")
        cluster.start("learner")
        assert cluster.wait("learner") == 0, cluster.log("learner")[-2000:]
        assert_run_ended_well(cluster, 12, 4, kills=1)
    rows = cluster.metrics()
    assert cluster.evaluations()[-1]["eval/turns"] == 2.0
    assert rows[-1]["completion_tokens/mean"] > 7, "two turns of sampled tokens, the world's not among them"
    assert all(count == 12 for count in Counter(trained_groups(cluster).values()).values())


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
        assert_run_ended_well(cluster, 8, 4)


@pytest.mark.soak  # tests/unit/learner/test_replay.py has it in one process
def test_a_learner_killed_on_a_device_that_does_not_give_the_same_bits_goes_on(tmp_path: Path, run_config: str) -> None:
    """kill -9; weight decay stands for sums in another order. Workers keep what they hold and follow by deltas."""
    config = run_config.replace("steps = 30", "steps = 16").replace("every_steps = 5", "every_steps = 100")
    with Cluster(tmp_path, config) as cluster:
        cluster.start_all()
        cluster.wait_until(lambda: cluster.step() >= 5, "five steps")
        cluster.kill("learner")
        cluster.commands["learner"] += ["--learner.weight_decay", "0.3"]
        cluster.start("learner")
        assert cluster.wait("learner") == 0
        assert_run_ended_well(cluster, 16, 4, kills=1)
        assert "published versions stay as they are" in cluster.log("learner")
        assert Counter(trained_groups(cluster).values()) == dict.fromkeys(range(16), 12), "each batch is whole"
        final = [line for line in cluster.log("learner").splitlines() if "published version 16 (delta" in line]
        assert final
        for name in ("w0", "w1"):
            cluster.wait_until(lambda name=name: "version 16 is live" in cluster.log(name), "the last version")  # type: ignore[misc]
            assert "a version was bad" not in cluster.log(name)


def test_each_process_may_be_killed_and_comes_back(tmp_path: Path, run_config: str) -> None:
    """kill -9 and the same command again, one process after the other, in one run."""
    config = run_config.replace("steps = 30", "steps = 16")
    with Cluster(tmp_path, config, workers=2) as cluster:
        cluster.start_all()
        for after_step, name in ((3, "w0"), (6, "coordinator"), (9, "learner")):
            cluster.wait_until(lambda at=after_step: cluster.step() >= at, f"step {after_step}")  # type: ignore[misc]
            cluster.kill(name)
            cluster.start(name)
        assert cluster.wait("learner") == 0, cluster.log("learner")[-3000:]
        assert_run_ended_well(cluster, 16, 4, kills=1)
        per_step = Counter(trained_groups(cluster).values())
        assert per_step == dict.fromkeys(range(16), 12), "a step trained on more or fewer groups than its own"
        rows = [row for row in cluster.metrics() if "reward/mean" in row]
        assert rows[-1]["rollouts/trained"] == 16 * 12 * 8, "a rollout was trained on twice, or is missing"
        cluster.wait_until(
            lambda: all(f"version {rows[-1]['step']} is live" in cluster.log(name) for name in ("w0", "w1")),
            "weights",
        )

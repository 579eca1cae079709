"""Two real processes over gloo, as torchrun starts them, against one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from echo2.base.errors import ConfigError, MalformedMessage
from echo2.base.ids import Step, Version
from echo2.learner.options import LearnerLimits
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.rollouts.groups import Batch
from echo2.learner.run_folder import RunFolder
from echo2.learner.startup import new_team, prepare
from echo2.learner.training.ranks import Ranks, check_replicas
from echo2.learner.training.team import batch_from_bytes, batch_to_bytes
from echo2.weights import fingerprint
from echo2.weights.fingerprint import key_of_run
from tests.patience import WAIT_S
from tests.ports import choose_ports
from tests.unit.learner import two_ranks
from tests.unit.learner.fleet import RUN
from tests.unit.learner.test_trainer import random_groups
from tests.unit.learner.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def torchrun(command: str, model: Path, folder: Path, weights_dtype: str, *, ends_well: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    count = "4" if weights_dtype.endswith("-copies") else "2"
    arguments = ["--standalone", "--nproc-per-node", count, "-m", "tests.unit.learner.two_ranks", command]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, str(model), str(folder), weights_dtype],
        env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == ends_well, done.stderr[-4000:]


def two_nodes(model: Path, folder: Path, weights_dtype: str, command: str = "steps") -> None:
    """The ranks as of two machines that share no disk: each has a model and a run folder of its own, for two ranks where
    there are two copies of the weights."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    (port,) = choose_ports((0,))
    started = []
    for node, (path, own) in enumerate(
        [(model, folder), (folder / "elsewhere" / "model", folder / "elsewhere" / "run")]
    ):
        own.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            shutil.copytree(model, path)
        where = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        arguments = [
            *where,
            "--nproc-per-node",
            "2" if weights_dtype.endswith("-copies") else "1",
            "-m",
            "tests.unit.learner.two_ranks",
            command,
        ]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *arguments, str(path), str(own), weights_dtype],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        for node in started:
            said, _ = node.communicate(timeout=WAIT_S)
            assert node.returncode == 0, said[-4000:]
    finally:
        for node in started:
            node.kill()
            node.wait()
            assert node.stdout is not None
            node.stdout.close()


@pytest.fixture(scope="module")
def trained(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Three steps of a dtype on two ranks, made when first asked for: folders that are only read from then on."""
    folder = tmp_path_factory.mktemp("two")

    def of(weights_dtype: str) -> Path:
        if not (folder / weights_dtype).exists():
            two_nodes(model_path, folder / weights_dtype, weights_dtype)
        return folder / weights_dtype

    return of


@pytest.mark.parametrize(
    "weights_dtype",
    [
        "float32",  # copies: test_rank_paths.py
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("float32-copies", "bfloat16", "float32-lora")),
    ],
)
def test_two_ranks_train_as_one_process_does(
    model_path: Path, trained: Callable[[str], Path], tmp_path: Path, weights_dtype: str
) -> None:
    two: dict[str, Any] = torch.load(trained(weights_dtype) / "result.pt", weights_only=False)
    one = new_team(two_ranks.options_of(model_path, tmp_path / "one", weights_dtype), Ranks())
    for step in range(two_ranks.STEPS):
        result = one.step(two_ranks.batch(step))
        ours = {**asdict(result.metrics), "grad_norm": result.grad_norm}
        for name, value in ours.items():
            assert two["steps"][step][name] == pytest.approx(value, rel=2e-3, abs=2e-5), (step, name)
    for name, tensor in one.snapshot().items():
        assert two["policy"][name].dtype == tensor.dtype
        assert torch.allclose(two["policy"][name].float(), tensor.float(), rtol=1e-2, atol=2e-4), name
    assert two["again"] == two["repeated"], "what was loaded is what was saved"
    if not weights_dtype.endswith("-lora"):
        store = CheckpointStore(trained(weights_dtype) / "checkpoints", LearnerLimits(free_bytes_min=0))
        loaded = one.load_newest(store)
        assert loaded is not None
        numbers, behind = two_ranks.scored(one, loaded.published)
        assert len(numbers) == 29 and two["scored"] == pytest.approx(numbers, abs=1e-3)
        assert two["behind"] == pytest.approx(behind, rel=2e-3, abs=2e-5), "training goes on as if nothing was scored"
    assert two["held"], "each rank takes its rows of whole weights, and they come together again"
    total = sum(p.numel() for p in one.model.parameters)
    assert two["moment_elements"] == pytest.approx(total / 2, rel=0.02)
    if not weights_dtype.endswith("-lora"):
        assert len(two["loaded_elements"]) == len(one.model.parameters)
        layer = sum(p.numel() for n, p in one.model.masters_by_name().items() if ".layers.1." in n)
        # Half of the first layer, and the second one whole: no rank ever holds the model.
        assert max(two["loaded_elements"]) <= 1.02 * (1.5 * layer) < 0.75 * total


@pytest.mark.parametrize("weights_dtype", ["float32", pytest.param("float32-copies", marks=pytest.mark.soak)])
def test_machines_without_a_shared_disk_go_on_from_the_checkpoint_that_is_on_the_first_one(
    model_path: Path, trained: Callable[[str], Path], weights_dtype: str
) -> None:
    folder = trained(weights_dtype)
    before: dict[str, Any] = torch.load(folder / "result.pt", weights_only=False)
    two_nodes(model_path, folder, weights_dtype, "resume")
    found = torch.load(folder / "resumed.pt", weights_only=False)
    assert found["step"] == two_ranks.STEPS and found["loss"] == before["again"]
    assert all(torch.equal(found["after"][name], tensor) for name, tensor in before["after"].items())
    left = [path for path in (folder / "elsewhere" / "run").rglob("*") if path.is_file()]
    assert not left, "what was sent to be read is removed again"


def test_one_process_reads_the_shards_that_two_wrote(model_path: Path, trained: Callable[[str], Path]) -> None:
    folder = trained("float32")
    two: dict[str, Any] = torch.load(folder / "result.pt", weights_only=False)
    store = CheckpointStore(folder / "checkpoints", LearnerLimits(free_bytes_min=0))
    files = list(store.folder_of(Step(two_ranks.STEPS)).glob("*.safetensors"))
    assert len(files) == 2, "each rank writes its own shards"
    left = [path for path in (folder / "elsewhere" / "run").rglob("*") if path.is_file()]
    assert not left, "what the second machine wrote went to the first"
    one = new_team(two_ranks.options_of(model_path, folder, "float32"), Ranks())
    loaded = one.load_newest(store)
    assert loaded is not None and loaded.published_version == Version(two_ranks.STEPS)
    for name, tensor in one.snapshot().items():
        assert torch.equal(tensor, two["policy"][name])
        assert torch.equal(tensor, loaded.published[name])
    one.step(two_ranks.batch(two_ranks.STEPS))
    for name, tensor in one.snapshot().items():
        assert torch.allclose(tensor, two["after"][name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("weights_dtype", ["bfloat16", pytest.param("bfloat16-copies", marks=pytest.mark.soak)])
def test_the_daemon_trains_to_its_end_on_ranks_and_its_versions_are_those_that_workers_hold(
    model_path: Path, tmp_path: Path, weights_dtype: str
) -> None:
    torchrun("daemon", model_path, tmp_path / "run", weights_dtype)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["fingerprint"] == summary["followed"] == summary["merged"]
    assert_each_rank_coded_its_rows(tmp_path / "run", summary)
    folder = RunFolder(tmp_path / "run")
    resumed = prepare(two_ranks.options_of(model_path, tmp_path / "run", "bfloat16"), folder)
    folder.release()
    assert resumed.trainer.step_count == 6 and resumed.checkpoint_step == 6
    ranks = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("rank?.json"))]
    assert 6 in ranks[0]["coded"] and not any(rank["coded"] for rank in ranks[1:]), "the first copy's ranks code"
    assert len(ranks) == (3 if weights_dtype.endswith("-copies") else 1)
    assert all(rank["newest"] == 6 for rank in ranks), "all forget what they are told to"


@pytest.mark.parametrize(("replicas", "count"), [(3, 4), (8, 4), (2, 1), (0, 4)])
def test_copies_that_cannot_be_spread_evenly_over_the_ranks_are_refused(replicas: int, count: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"learner.replicas: expected a divisor of the {count} ranks .* got {replicas}"
    ):
        check_replicas(replicas, count)


def assert_each_rank_coded_its_rows(folder: Path, summary: dict[str, Any]) -> None:
    """Whole tensors came together once, for the export: which is what the fleet holds."""
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).named_parameters())
    other = json.loads((folder / "rank1.json").read_text())
    shapes = sorted(str(tuple(tensor.shape)) for tensor in exported.values())
    assert sorted(summary["gathered"]) == sorted(other["gathered"]) == shapes
    assert f"{fingerprint(exported, key_of_run(RUN)):016x}" == summary["fingerprint"]
    elements = sum(tensor.numel() for tensor in exported.values())
    assert other["newest"] == 6 and 0.4 * elements < other["own_elements"] <= 0.5 * elements


@pytest.mark.soak
def test_a_rank_that_cannot_code_its_rows_ends_the_run_with_its_error_and_the_next_start_sends_them(
    model_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    torchrun("failing", model_path, folder, "bfloat16", ends_well=False)
    error = (folder / "error").read_text()
    assert error.startswith("StateError: rank 1: expected block") and error.endswith("OSError: a row cannot be read")
    torchrun("daemon", model_path, folder, "bfloat16")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["versions"][0] == [4, 2], "what was cut off comes first"
    assert [0, 4] in summary["merged_to"], "and goes to newcomers as a delta from the base"
    assert summary["steps"] == 6 and summary["fingerprint"] == summary["followed"]
    assert_each_rank_coded_its_rows(folder, summary)


def test_a_batch_reads_back_as_it_was_written() -> None:
    batch = Batch(Step(7), random_groups(3))
    read = batch_from_bytes(batch_to_bytes(batch))
    assert read.step == 7 and [g.rewards for g in read.groups] == [g.rewards for g in batch.groups]
    for one, other in zip(read.groups, batch.groups, strict=True):
        assert [r.token_ids for r in one.rollouts] == [r.token_ids for r in other.rollouts]
        assert one.spec == other.spec
    with pytest.raises(MalformedMessage, match="expected a frame"):
        batch_from_bytes(batch_to_bytes(batch)[:-3])

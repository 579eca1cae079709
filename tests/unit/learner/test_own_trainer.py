"""The hand-over between the learner's thread and a user's, with the two in any order."""

import runpy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import echo2
from echo2.base.errors import ConfigError, StateError
from echo2.base.ids import Step, Version
from echo2.learner.options import LearnerLimits, RunFolder
from echo2.learner.own_trainer import DeclaredModel, OwnTrainer, TrainerLeft, take_published
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.rollouts.groups import Batch
from echo2.learner.startup import export_run
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.ranks import Ranks
from echo2.weights.elements import published_tensors
from tests.contract.families import LATENT, save_tiny
from tests.fork_server import ROOT
from tests.patience import WAIT_S
from tests.unit.learner.own_two_ranks import STEPS
from tests.unit.learner.test_ranks import logs, run_ranks


def trainer_of(path: Path) -> tuple[OwnTrainer, dict[str, torch.Tensor]]:
    model = DeclaredModel(str(path), "bfloat16")
    weights = {name: torch.ones(shape) for name, shape in model.shapes.items()}
    own = OwnTrainer(model)
    own.begin(0, weights)
    return own, weights


def stepping(own: OwnTrainer, step: int, failures: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            own.step(Batch(Step(step), ()), is_published=True, is_kept=step == 0)
        except TrainerLeft as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_declared_model_is_told_as_the_learners_own_is(model_path: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        own = PolicyModel(str(model_path), dtype, torch.device("cpu"), 1.0)
        declared = DeclaredModel(str(model_path), dtype)
        assert declared.config_json() == own.config_json() and declared.digest() == own.digest()
        assert declared.stop_token_ids == own.stop_token_ids == (1,)


def test_buffers_of_the_models_files_are_published_in_their_own_dtype(tmp_path: Path) -> None:
    model = save_tiny("deepseek_v3", LATENT, tmp_path / "model").to(torch.bfloat16)
    declared = DeclaredModel(str(tmp_path / "model"), "bfloat16")
    for name in declared.kept:
        model.get_buffer(name).data = torch.full(declared.shapes[name], 1 / 3)
    with pytest.raises(ConfigError, match=r"bias is missing; a dict of them is echo2\.published_tensors\(model\)"):
        declared.gathered(dict(model.named_parameters()), Ranks())
    told = declared.gathered(echo2.published_tensors(model), Ranks())
    assert {name for name, tensor in told.items() if tensor.dtype == torch.float32} == declared.kept
    assert any(name.endswith("e_score_correction_bias") for name in declared.kept)
    declared.save(told, tmp_path / "out")
    written = PolicyModel(str(tmp_path / "out"), "bfloat16", torch.device("cpu"), 1.0).kept
    assert all(torch.equal(written[name], told[name]) for name in declared.kept)


def test_a_batch_that_is_there_before_it_is_asked_for_is_taken_and_weights_that_are_refused_are_handed_in_again(
    model_path: Path,
) -> None:
    own, weights = trainer_of(model_path)
    failures: list[BaseException] = []
    name = sorted(weights)[-1]
    weight = weights[name].detach()
    refused: tuple[tuple[Any, str], ...] = (
        (weight * float("nan"), "holds NaN or infinity"), (weight.int(), "a float dtype, got .* of torch.int"),
        (weight.to("meta"), "a float dtype, got a meta Tensor"), (weight.numpy(), "a float dtype, got a cpu ndarray"),
    )  # fmt: skip
    for step in range(3):
        thread = stepping(own, step, failures)
        batch = own.next_batch()
        assert batch is not None and batch.step == step
        with pytest.raises(StateError, match=f"expected a call after step {step + 1}, before more rollouts"):
            own.next_batch()
        with pytest.raises(StateError, match=f"publish: expected step {step + 1}, got {step + 2}"):
            own.hand_in(step + 2, weights)
        for given, told in refused:
            with pytest.raises(ConfigError, match=f"publish: expected .*{name}.* {told}"):
                own.hand_in(step + 1, weights | {name: given})
        assert own.hand_in(step + 1, weights)
        with pytest.raises(StateError, match=f"the batch after step {step + 1} to be taken first, got {step + 1}"):
            own.hand_in(step + 1, weights)
        thread.join(WAIT_S)
        assert not thread.is_alive() and not failures


def test_the_examples_step_takes_a_group_of_which_one_reward_is_left(model_path: Path) -> None:
    train = runpy.run_path(str(ROOT / "examples" / "own_trainer.py"))["train"]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    told = [
        echo2.Sample(group, (5, 6), (7, 8), (-1.0, -1.0), (0, 0), reward)
        for group, reward in ((0, 1.0), (1, 0.0), (1, 1.0))
    ]
    train(model, torch.optim.AdamW(model.parameters()), echo2.TrainingBatch(0, tuple(told)))
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


class OtherRank(Ranks):
    """Keeps what the rank beside is told."""

    count = 2

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, head: Mapping[str, object], payload: bytes = b"") -> None:
        self.told += head


def test_other_ranks_hear_of_what_their_first_takes_and_once_that_it_is_over(model_path: Path) -> None:
    """Who leaves all ranks at one step has not taken the batch that waits; whoever waits for it is woken."""
    own, weights = trainer_of(model_path)
    own.ranks = other = OtherRank()
    failures: list[BaseException] = []
    thread = stepping(own, 0, failures)
    assert own.next_batch() is not None and own.hand_in(1, weights)
    thread.join(WAIT_S)
    thread = stepping(own, 1, failures)
    own.end()
    thread.join(WAIT_S)
    assert isinstance(failures[0], TrainerLeft)
    assert own.is_kept, "of the step that was handed in, whatever is asked for already"
    for _ in range(2):
        own.stop()
    assert other.told == ["is_published", "is_kept", "is_over"]


def test_a_failure_is_raised_after_the_collective_in_which_other_ranks_wait_and_with_a_batch_that_is_told(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks may have heard that it is over, and train on nothing."""
    own, weights = trainer_of(model_path)
    thread = stepping(own, 0, [])
    assert own.next_batch() is not None
    own.end(StateError("the disk is full"))
    monkeypatch.setattr(own.model, "gathered", gathered := mock.Mock())
    with pytest.raises(StateError, match="the disk is full"):
        own.hand_in(1, weights)
    assert gathered.called
    thread.join(WAIT_S)
    own, _ = trainer_of(model_path)
    own.ranks = other = OtherRank()
    other.tell = lambda *_: own.end(StateError("the disk is full"))  # type: ignore[method-assign]
    thread = stepping(own, 0, [])
    with pytest.raises(StateError, match="the disk is full"):
        own.next_batch()
    thread.join(WAIT_S)


def test_the_runs_checkpoint_of_a_step_waits_for_the_users(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kill between the two leaves the older one of each. It says that it waits."""
    monkeypatch.setattr("echo2.learner.own_trainer.WAIT_TOLD_S", 0.01)
    caplog.set_level("INFO", "echo2")
    for way in ("next_batch", "saved", "end"):
        own, weights = trainer_of(model_path)
        store, leave = CheckpointStore(tmp_path / way, LearnerLimits(free_bytes_min=1)), getattr(own, way)
        training = stepping(own, 0, [])
        assert own.next_batch() is not None and own.hand_in(1, weights)
        training.join(WAIT_S)
        taking = threading.Thread(target=own.take, args=(store, weights, Version(1), {}), daemon=True)
        taking.start()
        taking.join(0.05)
        assert taking.is_alive(), "the user still writes its own"
        assert "the checkpoint of step 1 waits for your trainer" in caplog.text
        caplog.clear()
        threading.Thread(target=leave, daemon=True).start()
        taking.join(WAIT_S)
        assert not taking.is_alive()
        own.end()


def test_a_tensor_parallel_engine_publishes_bit_for_bit(model_path: Path, tmp_path: Path) -> None:
    assert run_ranks([], tmp_path, [model_path], program="own_two_ranks") == [0, 0], logs(tmp_path)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert found["steps"] == STEPS and {(2, 0), (4, 2)} <= set(found["versions"]), "deltas were applied"
    assert set(found["layouts"].values()) == {"DTensor", "Tensor"}, "some tensors are split, some are on both ranks"
    trained, followed, start = found["trained"], found["followed"], found["start"]
    assert trained.keys() == followed.keys()
    assert all(torch.equal(followed[name], tensor) for name, tensor in trained.items())
    assert any(not torch.equal(start[name], tensor) for name, tensor in trained.items())
    kept = CheckpointStore(tmp_path / "checkpoints", LearnerLimits(), is_owner=False).load_newest()
    assert kept is not None and kept.step == STEPS
    assert all(torch.equal(kept.published[name], tensor) for name, tensor in trained.items())
    went_on, refused = found["again"]
    assert went_on == str(STEPS)
    assert "expected the weights that were published as version 4, fingerprint" in refused and "got others" in refused


def test_what_was_published_last_is_exported(model_path: Path, tmp_path: Path) -> None:
    """The masters are in the user's own checkpoint, which ours lacks."""
    folder = RunFolder(tmp_path / "run")
    folder.check_identity({"lora": [0, 0], "weights_dtype": "bfloat16"}, {"model_path": str(model_path)})
    folder.release()
    store = CheckpointStore(tmp_path / "run" / "checkpoints", LearnerLimits(free_bytes_min=0))
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    weights = {name: tensor.detach() + 1 for name, tensor in published_tensors(base).items()}
    store.save(take_published(store, Step(5), weights, Version(4), {"journal_from": 0}))
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "chat_template.jinja").write_text("of another model, whose export was killed")
    assert export_run(tmp_path / "run", tmp_path / "out") == 4 and not (tmp_path / "out/chat_template.jinja").exists()
    exported = published_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16))
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())

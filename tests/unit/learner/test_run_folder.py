"""A run's folder: whose it is, its secret, and batches kept for a person to look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from echo2.base.errors import StateError
from echo2.base.ids import Step
from echo2.config.run import OptimizerState
from echo2.learner import startup
from echo2.learner.options import TrainerOptions
from echo2.learner.rollouts.groups import Batch
from echo2.learner.run_folder import KEPT_MAX, RunFolder, keep_for_inspection
from echo2.learner.startup import prepare
from echo2.learner.training import trainer as trainer_module
from tests.unit.learner.fleet import options_for, prompts_for
from tests.unit.learner.test_trainer import random_groups

WANTED = {"seed": 0, "task": "sums", "lora": [0, 0]}


def test_what_a_run_is_may_not_change(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_identity(WANTED, {"model_path": "here"})
    folder.check_identity(WANTED, {"model_path": "moved"})
    with pytest.raises(StateError, match='expected task "sums" as when the run began, got "products"'):
        folder.check_identity(WANTED | {"task": "products"})
    (tmp_path / "journal").mkdir()
    (tmp_path / "run.json").unlink()
    folder.check_identity({"seed": 0})
    (tmp_path / "run.json").unlink()
    (tmp_path / "journal" / "segment-00000000.records").touch()
    with pytest.raises(StateError, match=r"run\.json: expected it beside segment-00000000\.records, found none"):
        folder.check_identity({"seed": 1})


def test_a_run_goes_on_only_with_a_kind_of_optimiser_that_can_read_its_state(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "refuse_optimizer", lambda *_: None)  # the package for 8 bits may be missing
    monkeypatch.setattr(trainer_module, "adamw_of", lambda _, masters, *args, **how: torch.optim.AdamW(masters, **how))

    def begin(run: str, optimizer_state: OptimizerState) -> None:
        trainer, folder = (
            TrainerOptions(str(model_path), device="cpu", optimizer_state=optimizer_state),
            RunFolder(tmp_path / run),
        )
        try:
            prepare(options_for(tmp_path / run, model_path, trainer), folder).prompts.close()
        finally:
            folder.release()

    begin("one", "host")
    begin("one", "float32")
    with pytest.raises(StateError, match='expected optimizer_state "float32" as when the run began, got "8bit"'):
        begin("one", "8bit")
    begin("other", "8bit")
    with pytest.raises(StateError, match='expected optimizer_state "8bit" as when the run began, got "float32"'):
        begin("other", "host")


def test_every_flipped_bit_of_what_the_run_is_stops_the_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_identity(WANTED, {"model_path": "here"})
    path, refused = tmp_path / "run.json", 0
    whole = path.read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        path.write_bytes(data)
        try:
            folder.check_identity(WANTED)
        except StateError as error:
            assert "expected the run's identity" in str(error) and "restore it from a backup" in str(error)
            refused += 1
        else:
            assert json.loads(path.read_bytes())["model_path"] == "here", at
    assert refused > 0.7 * len(whole)  # the rest is white space and the name of the checksum


def test_seeds_follow_from_a_secret_of_the_run_that_is_made_once(model_path: Path, tmp_path: Path) -> None:
    prompts = prompts_for(options_for(tmp_path / "run", model_path))
    seeds = []
    for name in ("one", "one", "other"):
        folder = RunFolder(tmp_path / name)
        prompts.secret = folder.secret()
        folder.release()
        drawn = [prompts.draw(cursor) for cursor in range(3)]
        assert prompts.seeded(drawn[0].again()).sampling == drawn[0].sampling
        seeds.append([draw.sampling.seed for draw in drawn])
    assert seeds[0] == seeds[1] and len({*seeds[0], *seeds[2]}) == 6, (
        "the same after a restart, new ones for another run"
    )
    secret = tmp_path / "one" / "sampling.secret"
    assert secret.stat().st_mode & 0o077 == 0
    secret.write_bytes(b"short")
    with pytest.raises(StateError, match="expected 32 bytes, got 5"):
        RunFolder(tmp_path / "one").secret()
    prompts.close()


def test_a_kept_batch_reads_back_whole_and_few_are_kept(tmp_path: Path) -> None:
    for step in range(KEPT_MAX + 2):
        keep_for_inspection(Batch(Step(step), random_groups(step)), tmp_path)
    kept = sorted((tmp_path / "not_finite").iterdir())
    assert [path.name for path in kept] == [f"step-{step:08d}.json" for step in range(KEPT_MAX)]
    found = json.loads(kept[3].read_text())
    assert found["step"] == 3
    for said, group in zip(found["groups"], random_groups(3), strict=True):
        assert said["group_id"] == group.spec.group_id and said["rewards"] == list(group.rewards)
        assert said["prompt_token_ids"] == list(group.spec.prompt_token_ids)
        for one, rollout in zip(said["rollouts"], group.rollouts, strict=True):
            assert one["index"] == rollout.index and one["token_ids"] == list(rollout.token_ids)
            assert one["logprobs"] == list(rollout.logprobs) and one["raw_logprobs"] == list(rollout.raw_logprobs)

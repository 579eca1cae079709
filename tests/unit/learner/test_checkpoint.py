from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echo2.base.errors import DiskFull, StateError
from echo2.base.ids import Step, Version
from echo2.learner.batcher import Batch
from echo2.learner.runtime.checkpoint import Checkpoint, CheckpointStore, put_back, take
from echo2.learner.runtime.options import CheckpointOptions
from echo2.learner.runtime.trainer import Trainer
from tests.unit.learner.test_trainer import new_trainer, random_groups
from tests.unit.learner.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def checkpoint_of(trainer: Trainer, journal_from: int = 0) -> Checkpoint:
    return take(trainer, trainer.model.snapshot(), Version(trainer.step_count), {"journal_from": journal_from})


def saved(store: CheckpointStore, trainer: Trainer, journal_from: int = 0) -> Step:
    checkpoint = checkpoint_of(trainer, journal_from)
    store.begin(checkpoint)
    return store.save(checkpoint)


def train(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        trainer.step(Batch(Step(trainer.step_count), random_groups(trainer.step_count)))


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "float32"])
def test_training_on_from_a_checkpoint_gives_the_same_bits(
    model_path: Path, tmp_path: Path, weights_dtype: str
) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    straight = new_trainer(model_path, weights_dtype=weights_dtype)
    train(straight, 2)
    saved(store, straight)
    train(straight, 3)
    resumed = new_trainer(model_path, weights_dtype=weights_dtype)
    loaded = store.load_newest()
    assert loaded is not None and loaded.step == 2
    put_back(loaded, resumed)
    train(resumed, 3)
    for one, other in zip(straight.model.masters, resumed.model.masters, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(straight.model.parameters, resumed.model.parameters, strict=True):
        assert torch.equal(one, other)


def test_the_newest_are_kept_and_the_journal_before_them_is_not_needed(model_path: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(kept=2, free_bytes_min=0))
    trainer = new_trainer(model_path)
    needed = []
    for number in range(4):
        train(trainer, 1)
        needed.append(saved(store, trainer, journal_from=number))
    assert store.steps() == [3, 4] and needed == [0, 0, 1, 2]


def test_a_torn_checkpoint_is_not_seen_and_the_one_before_is_used(model_path: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    trainer = new_trainer(model_path)
    saved(store, trainer)
    (tmp_path / "step-00000009.partial").mkdir()
    (tmp_path / "step-00000009.partial" / "state.json").write_text("{")
    again = CheckpointStore(tmp_path, CheckpointOptions())
    loaded = again.load_newest()
    assert loaded is not None and loaded.step == 0
    assert not (tmp_path / "step-00000009.partial").exists()


def test_a_damaged_checkpoint_is_a_clear_error(model_path: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    saved(store, new_trainer(model_path))
    (path,) = (tmp_path / "step-00000000").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateError, match="cannot be read"):
        store.load_newest()


def test_a_checkpoint_without_room_is_refused_before_a_byte_is_written(model_path: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=1 << 62))
    with pytest.raises(DiskFull, match="bytes free"):
        saved(store, new_trainer(model_path))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    other = new_trainer(make_tiny_model(tmp_path / "other", hidden=16))
    with pytest.raises(StateError, match="of shape"):
        put_back(checkpoint_of(other), new_trainer(model_path))
    store = CheckpointStore(tmp_path / "kept", CheckpointOptions(free_bytes_min=0))
    saved(store, other)
    with pytest.raises(StateError, match="of shape"):
        store.load_newest(new_trainer(model_path))

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from echo2.base.errors import DiskFull, StateError, TrainingError
from echo2.base.ids import Step, Version
from echo2.learner.batch import Batch
from echo2.learner.runtime import sums
from echo2.learner.runtime.checkpoint import Checkpoint, CheckpointStore, put_back, take, write_shards
from echo2.learner.runtime.lending import LentTensors
from echo2.learner.runtime.options import CheckpointOptions
from echo2.learner.runtime.ranks import Ranks
from echo2.learner.runtime.sums import SUMS_FILE
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


def break_weights(trainer: Trainer) -> None:
    """From now on no step of it is finite."""
    with torch.no_grad():
        trainer.model.parameters[0].fill_(float("nan"))


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


def test_steps_in_a_row_that_were_not_finite_count_on_after_a_restart(model_path: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    trainer = new_trainer(model_path, nonfinite_steps_max=3)
    break_weights(trainer)
    train(trainer, 2)
    saved(store, trainer)
    resumed = new_trainer(model_path, nonfinite_steps_max=3)
    loaded = store.load_newest()
    assert loaded is not None and loaded.step == 2
    put_back(loaded, resumed)
    break_weights(resumed)
    train(resumed, 1)
    assert (resumed.nonfinite_steps, resumed.nonfinite_in_a_row) == (3, 3)
    with pytest.raises(TrainingError, match="for 4 steps in a row"):
        train(resumed, 1)


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "float32"])
def test_a_checkpoint_that_is_written_while_training_goes_on_holds_its_own_step(
    model_path: Path, tmp_path: Path, weights_dtype: str
) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    trainer = new_trainer(model_path, weights_dtype=weights_dtype)
    train(trainer, 1)
    checkpoint = checkpoint_of(trainer)
    assert (checkpoint.lent is not None) == (weights_dtype == "bfloat16"), (
        "masters that audits change are copied at once"
    )
    expected = {key: tensor.clone() for key, tensor in checkpoint.shards.items()}
    train(trainer, 2)
    store.begin(checkpoint)
    store.save(checkpoint)
    loaded = store.load_newest()
    assert loaded is not None and loaded.shards.keys() == expected.keys()
    assert all(torch.equal(loaded.shards[key], tensor) for key, tensor in expected.items())
    assert not all(
        torch.equal(tensor, expected[f"masters|{name}"]) for name, tensor in trainer.model.masters_by_name().items()
    )


def test_what_is_written_already_is_not_copied_when_it_changes() -> None:
    tensors = {name: torch.zeros(3) for name in ("a", "b")}
    lent = LentTensors(tensors)
    with lent.taken("a") as taken:
        assert taken is tensors["a"], "written from where it lies"
    lent.keep()
    tensors["a"] += 1
    tensors["b"] += 1
    with lent.taken("a") as again:
        assert again is None
    with lent.taken("b") as kept:
        assert kept is not None and not kept.any(), "as it was when it was lent"


def test_writing_a_checkpoint_takes_no_memory_beside_its_tensors(model_path: Path, tmp_path: Path) -> None:
    size = 64 << 20
    tensors = {f"masters|{number}": torch.ones(size // 32) for number in range(8)}
    before = peak_bytes(reset=True)
    write_shards(tensors, tmp_path, Ranks())
    assert peak_bytes() - before < size // 2, "torch's own writer takes twice the bytes"
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) >= size


def peak_bytes(*, reset: bool = False) -> int:
    """Of this process since the last reset; skips where the kernel does not reset it."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("no /proc/self/clear_refs")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


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


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found(model_path: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    saved(store, new_trainer(model_path))
    files = sorted((tmp_path / "step-00000000").iterdir())
    assert {path.suffix for path in files} == {".json", ".safetensors"} and len(files) == 3
    chance = random.Random(3)
    for path in files:
        whole = path.read_bytes()
        for position in {0, 7, 8, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(12))}:
            data = bytearray(whole)
            data[position] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            with pytest.raises(StateError, match="checkpoint .*step-00000000: expected .* found .* remove it to go on"):
                store.load_newest()
        path.write_bytes(whole)
    assert store.load_newest() is not None


def test_a_file_cut_short_missing_or_foreign_is_a_clear_error(model_path: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    saved(store, new_trainer(model_path))
    (path,) = (tmp_path / "step-00000000").glob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(StateError, match=f"of {len(whole)} bytes, found {len(whole) - 1} bytes"):
        store.load_newest()
    path.unlink()
    with pytest.raises(StateError, match="found none"):
        store.load_newest()
    path.write_bytes(whole)
    (path.parent / "shard-00002-model-00001-of-00001.safetensors").write_bytes(whole)
    with pytest.raises(StateError, match="only files of this checkpoint, found shard-00002"):
        store.load_newest()
    (path.parent / "shard-00002-model-00001-of-00001.safetensors").unlink()
    (path.parent / SUMS_FILE).unlink()
    with pytest.raises(StateError, match=f"expected {SUMS_FILE} in it, found none"):
        store.load_newest()


def test_a_checkpoint_of_a_release_without_checksums_is_loaded(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    saved(store, new_trainer(model_path))
    (tmp_path / "step-00000000" / SUMS_FILE).unlink()
    state = tmp_path / "step-00000000" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 2}))
    assert store.load_newest() is not None and "loaded unchecked" in caplog.text


def test_an_older_checkpoint_that_rots_neither_stops_the_next_nor_costs_journal(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
    trainer = new_trainer(model_path)
    saved(store, trainer, journal_from=0)
    train(trainer, 1)
    assert saved(store, trainer, journal_from=1) == 0
    state = tmp_path / "step-00000000" / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"journal_from": 0', b'"journal_from": 8'))
    assert saved(store, trainer, journal_from=1) == 0 and "The journal is kept whole" in caplog.text


def test_every_tensor_is_compared_before_it_is_given_out(model_path: Path, tmp_path: Path) -> None:
    """Also where tensors span blocks: the tiny model's file is summed in blocks of 1 kB here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sums, "BLOCK_BYTES", 1000)
        store = CheckpointStore(tmp_path, CheckpointOptions(free_bytes_min=0))
        saved(store, new_trainer(model_path))
        (path,) = (tmp_path / "step-00000000").glob("*.safetensors")
        said = json.loads((path.parent / SUMS_FILE).read_text())["files"][path.name]
        assert len(said["blocks"]) == -(-path.stat().st_size // 1000) > 20
        assert store.load_newest() is not None
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        last = len(said["blocks"]) - 1
        with pytest.raises(StateError, match=f"expected bytes {last * 1000} to "):
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

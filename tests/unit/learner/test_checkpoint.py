import errno
import random
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo2.base.errors import ConfigError, DiskFull, StateError, TrainingError
from echo2.base.ids import Step, Version
from echo2.base.rollout import AdamStep, ClientLoss, Example
from echo2.learner.options import LearnerLimits
from echo2.learner.publishing.checkpoint import Checkpoint, CheckpointStore, put_back, take
from echo2.learner.rollouts.groups import Batch
from echo2.learner.training import model as model_module, optimiser
from echo2.learner.training.trainer import Trainer
from echo2.outside import Machine, entered
from echo2.outside.files import MachineFiles
from tests.unit.learner.fleet import options_for
from tests.unit.learner.made import new_trainer, random_groups
from tests.unit.learner.tiny import make_tiny_model


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
    with torch.no_grad():
        trainer.model.parameters[0].fill_(float("nan"))


@pytest.mark.parametrize(
    "weights_dtype, optimizer_state",
    [
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("bfloat16", "host"),
        pytest.param("bfloat16", "8bit", marks=pytest.mark.extras),
    ],
)
def test_checkpoints_resume_equal(model_path: Path, tmp_path: Path, weights_dtype: str, optimizer_state: str) -> None:
    if optimizer_state == "8bit":
        pytest.importorskip("bitsandbytes")
    store = CheckpointStore(tmp_path, LearnerLimits(free_bytes_min=0))
    how = {"weights_dtype": weights_dtype, "optimizer_state": optimizer_state}
    straight = new_trainer(model_path, **how)
    train(straight, 2)
    checkpoint = checkpoint_of(straight)
    assert (checkpoint.lent is not None) == (weights_dtype == "bfloat16"), "what audits change is copied at once"
    expected = {key: tensor.clone() for key, tensor in checkpoint.shards.items()}
    train(straight, 3)
    store.begin(checkpoint)
    store.save(checkpoint)
    resumed = new_trainer(model_path, **how)
    loaded, to_export = store.load_newest(resumed), store.load_newest()
    assert loaded is not None and loaded.step == 2 and loaded.shards.keys() == expected.keys()
    assert all(torch.equal(loaded.shards[key], tensor) for key, tensor in expected.items())
    assert to_export is not None and to_export.shards.keys() == {k for k in expected if k.startswith("masters|")}
    put_back(loaded, resumed)
    train(resumed, 3)
    assert all(torch.equal(*pair) for pair in zip(straight.model.masters, resumed.model.masters, strict=True))
    assert all(torch.equal(*pair) for pair in zip(straight.model.parameters, resumed.model.parameters, strict=True))


def test_masters_in_host_memory_step_bit_equal(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimiser, "PIECE_ELEMENTS", 1000)  # several of a tensor
    monkeypatch.setattr(model_module, "_computes_in_bf16", lambda *_: True)
    one, other = (new_trainer(model_path, optimizer_state=how, weight_decay=0.1) for how in ("float32", "host"))
    for trainer in (one, other):
        train(trainer, 3)
    assert all(torch.equal(*pair) for pair in zip(one.model.masters, other.model.masters, strict=True))
    assert all(torch.equal(*pair) for pair in zip(one.model.parameters, other.model.parameters, strict=True))
    assert other.model.parameters[0].dtype == torch.bfloat16


def test_steps_not_finite_change_nothing_and_count_on_after_a_restart(model_path: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, LearnerLimits(free_bytes_min=0))
    trainer = new_trainer(model_path, nonfinite_steps_max=3)
    break_weights(trainer)
    before = [master.clone() for master in trainer.model.masters]
    train(trainer, 2)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.masters, strict=True))
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


def test_the_newest_are_kept_and_the_journal_before_them_is_not_needed_unless_one_rots(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, LearnerLimits(2, free_bytes_min=0))
    trainer = new_trainer(model_path)
    needed = []
    for number in range(4):
        train(trainer, 1)
        needed.append(saved(store, trainer, journal_from=number))
    assert store.steps() == [3, 4] and needed == [0, 0, 1, 2]
    state = tmp_path / "step-00000004" / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"journal_from": 3', b'"journal_from": 8'))
    train(trainer, 1)
    assert saved(store, trainer, journal_from=4) == 0 and "The journal is kept whole" in caplog.text


@pytest.fixture(scope="module")
def two(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 0 and 1, to be copied and then harmed."""
    folder = tmp_path_factory.mktemp("two")
    store = CheckpointStore(folder, LearnerLimits(free_bytes_min=0))
    trainer = new_trainer(model_path)
    saved(store, trainer)
    train(trainer, 1)
    saved(store, trainer)
    return folder


def harmed(file: Path, chance: random.Random) -> str:
    """Cuts a file off at any byte, changes any bit, lets it grow, or takes it away; says what it did."""
    whole, kind = file.read_bytes(), chance.choice(["cut", "flip", "grow", "gone"])
    place = chance.choice([0, 7, 8, len(whole) - 1, chance.randrange(len(whole))])
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(whole[:place])
    elif kind == "grow":
        file.write_bytes(whole + whole[:1])
    else:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
    return f"{file.name}: {kind} at {place}"


def test_a_harmed_checkpoint_is_refused_and_the_one_before_is_used(two: Path, tmp_path: Path) -> None:
    chance, told = random.Random(3), set()
    expected = CheckpointStore(two, LearnerLimits(), is_owner=False).load(Step(0), None)
    for number in range(40):
        folder = tmp_path / str(number)
        shutil.copytree(two, folder)
        told.add(what := harmed(chance.choice(sorted((folder / "step-00000001").iterdir())), chance))
        with pytest.raises(StateError, match="step-00000001: expected"):
            CheckpointStore(folder, LearnerLimits()).load(Step(1), None)
        loaded = CheckpointStore(folder, LearnerLimits()).load_newest()
        assert loaded is not None and loaded.step == 0, what
        assert all(torch.equal(tensor, expected.shards[key]) for key, tensor in loaded.shards.items())
        assert {path.name for path in folder.iterdir()} == {"step-00000000", "damaged-00000001"}, what
        if number % 3 == 0:  # and where none before it is whole
            what = harmed(chance.choice(sorted((folder / "step-00000000").iterdir())), chance)
            with pytest.raises(StateError, match="step-00000000: expected .* found .*restore this folder from"):
                CheckpointStore(folder, LearnerLimits()).load_newest()
        shutil.rmtree(folder)
    assert len({what.split(":")[1].split()[0] for what in told}) == 4 and len({w.split(":")[0] for w in told}) == 2


def test_one_that_the_disk_does_not_give_is_as_good_as_harmed(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = shutil.copytree(two, tmp_path / "two"), Path.open

    def refuse(path: Path, *how: Any, **named: Any) -> Any:
        if path == folder / "step-00000001" / "rank-00000.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, *how, **named)

    monkeypatch.setattr(Path, "open", refuse)
    assert CheckpointStore(folder, LearnerLimits()).newest() == 0


def test_a_file_of_another_is_refused_a_torn_one_not_seen_and_the_last_damaged_one_kept(
    two: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(two, tmp_path / "more")
    newest = folder / "step-00000001"
    shutil.copytree(newest, folder / "step-00000002.partial")
    assert CheckpointStore(folder, LearnerLimits()).newest() == 1
    assert not (folder / "step-00000002.partial").exists()
    shutil.copy(newest / "rank-00000.safetensors", newest / "rank-00001.safetensors")
    assert CheckpointStore(folder, LearnerLimits()).newest() == 0
    shutil.copytree(two / "step-00000001", newest)
    (newest / "state.json").write_text("{}")
    assert CheckpointStore(folder, LearnerLimits()).newest() == 0
    assert {path.name for path in folder.iterdir()} == {"step-00000000", "damaged-00000001"}
    assert (folder / "damaged-00000001" / "state.json").read_text() == "{}"


def test_a_kill_at_any_byte_leaves_the_checkpoint_before(model_path: Path, two: Path, tmp_path: Path) -> None:
    class Killed(Exception):
        """Instead of the end of the process: nothing after it runs."""

    class Dies(MachineFiles):
        left = 0

        def write(self, descriptor: int, data: memoryview | bytes) -> int:
            if self.left <= 0:
                raise Killed
            done = super().write(descriptor, memoryview(data)[: self.left])
            self.left -= done
            return done

    trainer = new_trainer(model_path)
    train(trainer, 2)
    size = sum(path.stat().st_size for path in (two / "step-00000001").iterdir())
    chance = random.Random(5)
    for left in (0, 1, 8, size - 1, *(chance.randrange(size) for _ in range(8))):
        folder = shutil.copytree(two, tmp_path / str(left), dirs_exist_ok=True)
        machine = Machine()
        machine.files = files = Dies()
        files.left = left
        with entered(machine), pytest.raises(Killed):
            saved(CheckpointStore(folder, LearnerLimits(free_bytes_min=0)), trainer)
        again = CheckpointStore(folder, LearnerLimits())
        assert again.newest() == 1 and again.steps() == [0, 1]


def test_what_a_new_one_of_the_same_step_replaces_is_there_until_it_has_its_name(two: Path, tmp_path: Path) -> None:
    class Fails(MachineFiles):
        def rename(self, old: Path, new: Path) -> None:
            if old.suffix == ".partial":
                raise OSError(errno.EIO, "Input/output error")
            super().rename(old, new)

    folder, machine = shutil.copytree(two, tmp_path / "two"), Machine()
    machine.files = Fails()
    kept = CheckpointStore(folder, LearnerLimits(1, free_bytes_min=0))
    newest = kept.load(Step(1), None)
    for is_done in (False, True):
        kept.begin(newest)
        with entered(machine if not is_done else Machine()), nullcontext() if is_done else pytest.raises(OSError):
            kept.save(newest)
        kept = CheckpointStore(folder, LearnerLimits(1, free_bytes_min=0))
        assert kept.newest() == 1 and {path.name for path in folder.iterdir()} >= {"step-00000001"}
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


@pytest.mark.extras
def test_a_named_version_is_scored_while_another_one_is_written(model_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("tinker", reason="needs Tinker's SDK: pip install '.[tinker]'")
    from echo2.learner.driven import DrivenTeam

    team = DrivenTeam(new_trainer(model_path), options_for(tmp_path, model_path))
    for version in range(1, 8):
        team.put(Version(version), team.snapshot())
        if version == 1:
            store, checkpoint = team.take_named(Version(1))
            store.save(checkpoint)
    store, checkpoint = team.take_named(Version(7))
    assert len(team.scored(Version(1), (3, 4, 5))) == 2, "from its file: the fleet has newer ones"
    store.save(checkpoint)
    assert store.steps() == [1, 7]


IDS = np.array([3, 4, 5, 6, 7], np.int64)
EXAMPLE = Example(IDS[:-1], IDS[1:, None], {"weights": np.ones((4, 1), np.float32)})
SAVED = "0123456789:train:0/x"


@pytest.mark.extras
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_client_goes_on_from_what_it_saved_and_versions_only_grow(
    model_path: Path, tmp_path: Path, lora_rank: int
) -> None:
    pytest.importorskip("tinker", reason="needs Tinker's SDK: pip install '.[tinker]'")
    from echo2.learner.driven import DrivenTeam

    def team_of() -> DrivenTeam:
        return DrivenTeam(new_trainer(model_path, lora_rank=lora_rank), options_for(tmp_path, model_path))

    def learnt(team: DrivenTeam, steps: int) -> list[torch.Tensor]:
        for _ in range(steps):
            team.trainer.forward_backward([EXAMPLE], ClientLoss("cross_entropy"))
            assert team.optim_step(AdamStep(1e-2, 0.9, 0.99, 1e-8))["update_made"]
        return [master.detach().clone() for master in team.model.masters]

    def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    team = team_of()
    published = CheckpointStore(tmp_path / "checkpoints", LearnerLimits(free_bytes_min=0))
    first = learnt(team, 1)
    store, state = team.take_to_save(SAVED, overwrites=False)
    further = learnt(team, 2)  # while the state is written
    store.save(state)
    with pytest.raises(ConfigError, match="which is there"):
        team.take_to_save(SAVED, overwrites=False)
    assert team.is_changed
    team.put(Version(3), team.snapshot())
    published.save(team.take(published, team.snapshot(), Version(3), {"journal_from": 0}))
    team.is_changed = False  # as when it is on its way
    before = team.scored(Version(3), (3, 4, 5))
    infinite = replace(EXAMPLE, columns={"weights": np.full((4, 1), np.inf, np.float32)})
    team.trainer.forward_backward([infinite], ClientLoss("cross_entropy"))
    assert not team.optim_step(AdamStep(1e-2, 0.9, 0.99, 1e-8))["update_made"] and not team.is_changed
    learnt(team, 1)
    assert team.is_changed and np.allclose(team.scored(Version(3), (3, 4, 5)), before, atol=1e-3)
    for saved, with_optimiser, expected in ((SAVED, True, further), ("", False, first), (SAVED, False, None)):
        team.trainer.forward_backward([EXAMPLE], ClientLoss("cross_entropy"))  # of which no step was made
        store, other = team.take_to_save("0123456789:train:0/y", overwrites=True)
        was = [master.detach().clone() for master in team.model.masters]
        team.begin(saved, with_optimiser=with_optimiser)
        store.save(other)
        kept = store.load_newest(None)
        assert kept is not None and are_equal([kept.masters[name] for name in team.model.names], was)
        assert team.trainer.step_count == 3 and team.is_changed, "versions only grow"
        found = learnt(team, 1 if saved == "" else 2)
        assert are_equal(found, further if expected is None else expected) == (expected is not None)
    again = team_of()
    kept = again.load_newest(published)
    assert kept is not None and again.trainer.step_count == 3 and again.is_changed, "the fleet has a later version"
    again.begin(SAVED, with_optimiser=True)
    assert are_equal(learnt(again, 2), further)
    again.is_changed = False
    again.begin("", with_optimiser=False)
    assert again.is_changed, "what trains is not the newest version any more"
    assert again.to_publish().keys() == again.snapshot().keys()
    with torch.no_grad():
        again.model.parameters[0].fill_(torch.nan)
    with pytest.raises(ConfigError, match="publish: expected finite weights"):
        again.to_publish()


def test_one_without_room_is_refused_before_a_byte_is_written_and_so_is_one_of_another_model(
    model_path: Path, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, LearnerLimits(free_bytes_min=1 << 62))
    with pytest.raises(DiskFull, match="bytes free"):
        saved(store, new_trainer(model_path))
    assert list(tmp_path.iterdir()) == []
    other = new_trainer(make_tiny_model(tmp_path / "other", hidden=16))
    with pytest.raises(StateError, match="of shape"):
        put_back(checkpoint_of(other), new_trainer(model_path))
    store = CheckpointStore(tmp_path / "kept", LearnerLimits(free_bytes_min=0))
    saved(store, other)
    with pytest.raises(StateError, match="of shape"):
        store.load_newest(new_trainer(model_path))

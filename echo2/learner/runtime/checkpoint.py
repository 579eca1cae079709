"""Checkpoints on disk: masters, optimiser, published weights, ledger; whole or not there at all.

Guarantees: every rank writes its own shards beside the next steps, through torch.distributed.checkpoint; a checkpoint's
folder gets its name by one rename after every byte of every rank is on the disk, so a kill at any instant leaves the
earlier ones usable; one that needs more room than the disk has is refused with `DiskFull` before a byte is written; the
newest `kept` remain; any number of ranks can read what any number wrote; a file that changed on the disk is a
`StateError`, never weights. Nothing is pickled: tensors are safetensors, the rest is JSON. Leaves to others: checksums
(sums), files of torch.distributed.checkpoint (tensor_files), taking the snapshot between two steps (loop), what happened
since (journal).
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from echo2.base.errors import DiskFull, StateError
from echo2.base.ids import GroupId, Step, Version
from echo2.learner.batcher import Held
from echo2.learner.runtime.carrying import for_reading, sees_leader, to_leader
from echo2.learner.runtime.lending import LentTensors
from echo2.learner.runtime.options import CheckpointOptions
from echo2.learner.runtime.ranks import Ranks, as_sharded, on_host, own_part
from echo2.learner.runtime.sums import SUMS_FILE, CheckedFile, damaged, gather_sums, read_sums, written_with_sums
from echo2.learner.runtime.tensor_files import CheckedReader, SummingWriter
from echo2.learner.runtime.trainer import Trainer
from echo2.learner.shelf import Counts, Shelf
from echo2.outside import here

FORMAT = 3
FORMAT_WITHOUT_SUMS = 2
STATE_FILE = "state.json"
# One process is what was asked for (`no_dist`); torch warns of it at every checkpoint all the same.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
_log = logging.getLogger("echo2.learner")
_MASTERS, _OPTIMISER, _PUBLISHED = "masters|", "optimiser|", "published|"


class LaidOutModel(Protocol):
    """Whose rows lie where: a rank's model as a checkpoint is read into."""

    @property
    def path(self) -> str: ...

    def layout_of(self, published_name: str, /) -> Tensor | None: ...

    def masters_by_name(self) -> dict[str, Tensor]: ...


class LaidOut(Protocol):
    """A rank of a trainer."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def model(self) -> LaidOutModel: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that step `step` needs to go on, apart from the journal. Tensors are copies on the host, but for `lent`.

    `shards`: this rank's masters and optimiser state by `masters|NAME` and `optimiser|NAME|FIELD`. `published`: its
    rows of the published weights. `lent`: those of `shards` that are the trainer's own, to be written from there.
    """

    step: Step
    shards: Mapping[str, Tensor]
    published: Mapping[str, Tensor]
    published_version: Version
    state: Mapping[str, Any]
    ranks: Ranks = field(default_factory=Ranks)
    lent: LentTensors | None = None

    @property
    def tensor_bytes(self) -> int:
        """Of all ranks."""
        tensors = (*self.shards.values(), *self.published.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def masters(self) -> dict[str, Tensor]:
        return {key.removeprefix(_MASTERS): t for key, t in self.shards.items() if key.startswith(_MASTERS)}


def take(trainer: Trainer, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]) -> Checkpoint:
    """The tensors between two steps: borrowed from a trainer that lends them, else copied. `published`: the weights of
    `version`; they are never changed in place.

    `state`: what else must be kept, taken at the same step boundary on the event loop's thread.
    """
    counts = (trainer.nonfinite_steps, trainer.nonfinite_in_a_row)
    step = Step(trainer.step_count)
    whole = state_of(state, step, version, *counts)
    if not trainer.lends_state:
        return Checkpoint(step, shards_of(trainer), published, version, whole, trainer.ranks)
    shards = {key: tensor.detach() for key, tensor in _state_tensors(trainer)}
    trainer.lent = LentTensors(shards)
    return Checkpoint(step, shards, published, version, whole, trainer.ranks, trainer.lent)


def state_of(
    state: Mapping[str, Any], step: Step, version: Version, nonfinite_steps: int = 0, nonfinite_in_a_row: int = 0
) -> dict[str, Any]:
    """The JSON of a checkpoint: `state` and where the trainer stood."""
    return {
        **state,
        "format": FORMAT,
        "step": step,
        "published_version": version,
        "nonfinite_steps": nonfinite_steps,
        "nonfinite_in_a_row": nonfinite_in_a_row,
    }


def shards_of(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's part of masters and optimiser, copied to the host."""
    return {key: on_host(tensor, trainer.ranks) for key, tensor in _state_tensors(trainer)}


def _state_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for name, master in trainer.model.masters_by_name().items():
        yield f"{_MASTERS}{name}", master
        for key, value in trainer.optimiser.state.get(master, {}).items():
            yield f"{_OPTIMISER}{name}|{key}", torch.as_tensor(value)


def published_shards(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows of the published weights, by their names in a checkpoint."""
    return {f"{_PUBLISHED}{name}": tensor for name, tensor in published.items()}


def put_back(checkpoint: Checkpoint, trainer: Trainer, *, is_given_away: bool = False) -> None:
    """The trainer as it was. `is_given_away`: nobody else uses the checkpoint's tensors, so that the trainer may take them."""
    masters = trainer.model.masters_by_name()
    trainer.model.load_masters(checkpoint.masters)
    trainer.step_count = int(checkpoint.step)
    trainer.nonfinite_steps = int(checkpoint.state["nonfinite_steps"])
    trainer.nonfinite_in_a_row = int(checkpoint.state["nonfinite_in_a_row"])
    for key, value in checkpoint.shards.items():
        if not key.startswith(_OPTIMISER):
            continue
        name, _, kept = key.removeprefix(_OPTIMISER).rpartition("|")
        state = trainer.optimiser.state[masters[name]]
        if kept == "step":
            state[kept] = value.clone()
        elif is_given_away and trainer.model.device.type == "cpu":
            state[kept] = value
        else:
            state[kept] = torch.zeros_like(masters[name])
            own_part(state[kept]).copy_(own_part(value))


def shelf_state(shelf: Held) -> dict[str, Any]:
    return {
        "trained": dict(shelf.ledger.trained),
        "tokens_by_lag": {str(lag): count for lag, count in shelf.ledger.tokens_by_lag.items()},
        "counts": asdict(shelf.counts),
        "published": list(shelf.published),
    }


def put_back_shelf(state: Mapping[str, Any], step: Step, shelf: Shelf) -> None:
    """Ledger, counts and published versions as they were at `step`."""
    shelf.next_step = step
    shelf.ledger.trained = {GroupId(name): Step(int(at)) for name, at in state["trained"].items()}
    shelf.ledger.tokens_by_lag = Counter({int(lag): int(n) for lag, n in state["tokens_by_lag"].items()})
    shelf.counts = Counts(**state["counts"])
    shelf.published = [Version(int(version)) for version in state["published"]]


def write_shards(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks, lent: LentTensors | None = None) -> None:
    """Writes this rank's tensors; returns on rank 0 once all ranks have written theirs, and its `folder` holds them. A
    collective."""
    is_shared = sees_leader(folder, ranks)
    if not is_shared:
        folder.mkdir(parents=True, exist_ok=True)
    writer = SummingWriter(folder, lent)
    save(dict(tensors), storage_writer=writer, process_group=ranks.writers, no_dist=ranks.count == 1)
    to_leader(folder, writer.written, ranks, is_shared=is_shared)


class CheckpointStore:
    """The checkpoints of one run folder. Only the learner that holds the folder's lock may own it."""

    def __init__(self, folder: Path, options: CheckpointOptions, is_owner: bool = True) -> None:
        self.folder = folder
        self.options = options
        if not is_owner:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("*.partial"):
            shutil.rmtree(torn)

    def steps(self) -> list[Step]:
        """Steps of the whole checkpoints, oldest first."""
        return sorted(Step(int(path.name.removeprefix("step-"))) for path in self.folder.glob("step-????????"))

    def folder_of(self, step: Step) -> Path:
        return self.folder / f"step-{step:08d}"

    def begin(self, checkpoint: Checkpoint) -> Path:
        """Makes the folder that all ranks then write to, if there is room."""
        self.check_room(checkpoint.tensor_bytes)
        partial = self.folder_of(checkpoint.step).with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def save(self, checkpoint: Checkpoint) -> Step:
        """Writes what was begun, lets old ones go, and returns the oldest journal segment still needed. In a thread."""
        target = self.folder_of(checkpoint.step)
        partial = target.with_suffix(".partial")
        try:
            tensors = {**checkpoint.shards, **published_shards(checkpoint.published)}
            write_shards(tensors, partial, checkpoint.ranks, checkpoint.lent)
            with written_with_sums(partial / STATE_FILE) as file:
                file.write(json.dumps(checkpoint.state).encode())
            gather_sums(partial)
            for path in (*partial.iterdir(), partial):
                here().files.sync_path(path)
            if target.exists():
                shutil.rmtree(target)
            here().files.rename(partial, target)
            here().files.sync_path(self.folder)
        except (OSError, SafetensorError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            if _is_disk_full(error):
                raise DiskFull(f"checkpoint of step {checkpoint.step}: no space left in {self.folder}") from error
            raise
        kept = self.steps()[-self.options.kept :]
        for step in self.steps():
            if step not in kept:
                shutil.rmtree(self.folder_of(step))
        try:
            return Step(int(_read_state(self.folder_of(kept[0]))["journal_from"]))
        except StateError as error:  # the one before was damaged meanwhile; the one just written is good
            _log.error("%s. The journal is kept whole", error)
            return Step(0)

    def load(self, step: Step, trainer: LaidOut | None) -> Checkpoint:
        """The checkpoint of `step`: the shards of `trainer`'s rank, everything whole where there is none."""
        return self.load_shards(self.folder_of(step), trainer, step)

    def load_newest(self, trainer: LaidOut | None = None) -> Checkpoint | None:
        """The newest whole checkpoint, or None when there is none."""
        steps = self.steps()
        return self.load(steps[-1], trainer) if steps else None

    @staticmethod
    def load_shards(folder: Path, trainer: LaidOut | None, step: Step) -> Checkpoint:
        with for_reading(folder, trainer.ranks if trainer is not None else Ranks()) as found:
            return CheckpointStore._load_shards(found, trainer, step)

    @staticmethod
    def _load_shards(folder: Path, trainer: LaidOut | None, step: Step) -> Checkpoint:
        ranks = trainer.ranks if trainer is not None else Ranks()
        try:
            sums = read_sums(folder)
            state = _read_state(folder)
            _check_format(folder, state, has_sums=sums is not None)
            reader = CheckedReader(folder, sums)
            found = {
                key: said
                for key, said in reader.read_metadata().state_dict_metadata.items()
                if isinstance(said, TensorStorageMetadata)
            }
            tensors = {key: _room_for(key, said, trainer, folder) for key, said in found.items()}
            load(tensors, storage_reader=reader, process_group=ranks.writers, no_dist=ranks.count == 1)
        except (OSError, ValueError, KeyError, IndexError, SafetensorError, CheckpointException) as error:
            raise _told_by_reader(error) or StateError(f"checkpoint {folder}: cannot be read: {error}") from error
        published = {key.removeprefix(_PUBLISHED): t for key, t in tensors.items() if key.startswith(_PUBLISHED)}
        shards = {key: t for key, t in tensors.items() if not key.startswith(_PUBLISHED)}
        return Checkpoint(step, shards, published, Version(state["published_version"]), state, ranks)

    def check_room(self, tensor_bytes: int) -> None:
        """A checkpoint of this size, with the reserve, must fit on the disk."""
        needed = tensor_bytes + self.options.free_bytes_min
        free = here().files.free_bytes(self.folder)
        if free < needed:
            raise DiskFull(
                f"checkpoint: expected {needed} bytes free in {self.folder} ({tensor_bytes} for it, the rest "
                f"as reserve), got {free}"
            )


def _room_for(key: str, said: TensorStorageMetadata, trainer: LaidOut | None, folder: Path) -> Tensor:
    """An empty tensor to read into: sharded as the trainer's own is, else whole."""
    whole = torch.empty(said.size, dtype=said.properties.dtype)
    if trainer is None or not said.size:
        return whole
    name = key.split("|")[1]
    model = trainer.model
    master = model.layout_of(name) if key.startswith(_PUBLISHED) else model.masters_by_name().get(name)
    if master is None:
        raise StateError(f"checkpoint {folder}: expected the tensors of {trainer.model.path}, got another: {name}")
    if tuple(master.shape) != tuple(said.size):
        raise StateError(
            f"checkpoint: expected {name} of shape {tuple(master.shape)}, got {tuple(said.size)} in {folder}"
        )
    part = torch.empty(own_part(master).shape, dtype=said.properties.dtype)
    return as_sharded(part, master, trainer.ranks)


def _read_state(folder: Path) -> dict[str, Any]:
    """The JSON of a checkpoint, compared with its sum where one was kept."""
    sums = read_sums(folder)
    if sums is not None:
        if STATE_FILE not in sums:
            raise damaged(folder, f"{STATE_FILE} among its files, found it without a sum")
        CheckedFile(folder / STATE_FILE, sums[STATE_FILE]).check_all()
    state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    return state


def _check_format(folder: Path, state: Mapping[str, Any], *, has_sums: bool) -> None:
    if state["format"] == FORMAT and not has_sums:
        raise damaged(folder, f"{SUMS_FILE} in it, found none")
    if state["format"] not in (FORMAT, FORMAT_WITHOUT_SUMS):
        raise StateError(f"checkpoint {folder}: expected format {FORMAT}, got {state['format']}")
    if not has_sums:
        _log.warning("checkpoint %s: an older release wrote it without checksums; it is loaded unchecked", folder)


def _told_by_reader(error: BaseException) -> StateError | None:
    """What a rank found wrong with a file, in whatever the layers above made of that."""
    return next((one for one in _causes(error) if isinstance(one, StateError)), None)


def _causes(error: BaseException) -> list[BaseException]:
    reasons = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return [
        cause for cause in (r[0] if isinstance(r, tuple) else r for r in reasons) if isinstance(cause, BaseException)
    ]


def _is_disk_full(error: BaseException) -> bool:
    """Whether the disk was full, in whatever the writer's layers made of that."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error).lower()
    is_said = isinstance(error, SafetensorError) and ("os error 28" in text or "no space" in text)
    return is_said or any(map(_is_disk_full, _causes(error)))

"""Checkpoints on disk: masters, optimiser, published weights, ledger; each is either complete or absent.

Guarantees: every rank writes its own shards while training continues, through torch.distributed.checkpoint; one rename gives a
checkpoint's folder its name after all bytes of all ranks are synced, so a kill at any instant leaves the earlier checkpoints
usable; a checkpoint that does not fit on the disk is refused with `DiskFull` before a byte is written; the newest `kept`
remain; any number of ranks can read a checkpoint written by any number; a file that changed on disk raises `StateError` and
never becomes weights. Nothing is pickled: tensors are safetensors, the rest is JSON. Leaves to others: checksums (sums), the
files of torch.distributed.checkpoint (tensor_files), taking the snapshot between two steps (loop), later events (journal).
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
# A single process is intended (`no_dist`), yet torch would warn about it at every checkpoint.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
_log = logging.getLogger("echo2.learner")
_MASTERS, _OPTIMISER, _PUBLISHED = "masters|", "optimiser|", "published|"


class LaidOutModel(Protocol):
    """What the checkpoint reader needs from a rank's model: its tensors and how they are sharded."""

    @property
    def path(self) -> str: ...

    def layout_of(self, published_name: str, /) -> Tensor | None: ...

    def masters_by_name(self) -> dict[str, Tensor]: ...


class LaidOut(Protocol):
    """What the checkpoint reader needs from one rank of a trainer."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def model(self) -> LaidOutModel: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything needed to resume after `step`, apart from the journal. Tensors are copies in host memory unless `lent` is set.

    `shards`: this rank's masters and optimiser state under `masters|NAME` and `optimiser|NAME|FIELD`. `published`: this rank's
    rows of the published weights. `lent`: tracks those `shards` that still belong to the trainer and are written in place.
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
        """Bytes of the checkpoint's tensors over all ranks."""
        tensors = (*self.shards.values(), *self.published.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def masters(self) -> dict[str, Tensor]:
        return {key.removeprefix(_MASTERS): t for key, t in self.shards.items() if key.startswith(_MASTERS)}


def take(trainer: Trainer, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]) -> Checkpoint:
    """Takes a checkpoint between two steps: borrows the tensors if the trainer lends them, else copies them. `published`: the
    weights of `version`, never changed in place.

    `state`: other JSON state to save, taken at the same step boundary on the event loop's thread.
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
    """Returns the JSON of a checkpoint: `state` plus the trainer's counters."""
    return {
        **state,
        "format": FORMAT,
        "step": step,
        "published_version": version,
        "nonfinite_steps": nonfinite_steps,
        "nonfinite_in_a_row": nonfinite_in_a_row,
    }


def shards_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies this rank's shards of masters and optimiser state to host memory."""
    return {key: on_host(tensor, trainer.ranks) for key, tensor in _state_tensors(trainer)}


def _state_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for name, master in trainer.model.masters_by_name().items():
        yield f"{_MASTERS}{name}", master
        for key, value in trainer.optimiser.state.get(master, {}).items():
            yield f"{_OPTIMISER}{name}|{key}", torch.as_tensor(value)


def published_shards(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows of the published weights, keyed by their names in a checkpoint."""
    return {f"{_PUBLISHED}{name}": tensor for name, tensor in published.items()}


def put_back(checkpoint: Checkpoint, trainer: Trainer, *, is_given_away: bool = False) -> None:
    """Restores the trainer from `checkpoint`. `is_given_away`: the caller no longer uses the checkpoint's tensors, so the trainer
    may keep them instead of copying."""
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
    """Restores ledger, counts and published versions as of `step`."""
    shelf.next_step = step
    shelf.ledger.trained = {GroupId(name): Step(int(at)) for name, at in state["trained"].items()}
    shelf.ledger.tokens_by_lag = Counter({int(lag): int(n) for lag, n in state["tokens_by_lag"].items()})
    shelf.counts = Counts(**state["counts"])
    shelf.published = [Version(int(version)) for version in state["published"]]


def write_shards(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks, lent: LentTensors | None = None) -> None:
    """Writes this rank's tensors. A collective: on rank 0 it returns once the tensors of all ranks are in its `folder`."""
    is_shared = sees_leader(folder, ranks)
    if not is_shared:
        folder.mkdir(parents=True, exist_ok=True)
    writer = SummingWriter(folder, lent)
    save(dict(tensors), storage_writer=writer, process_group=ranks.writers, no_dist=ranks.count == 1)
    to_leader(folder, writer.written, ranks, is_shared=is_shared)


class CheckpointStore:
    """The checkpoints of one run folder. Only the learner that holds the folder's lock may pass `is_owner`: it deletes
    half-written checkpoints."""

    def __init__(self, folder: Path, options: CheckpointOptions, is_owner: bool = True) -> None:
        self.folder = folder
        self.options = options
        if not is_owner:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("*.partial"):
            shutil.rmtree(torn)

    def steps(self) -> list[Step]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(Step(int(path.name.removeprefix("step-"))) for path in self.folder.glob("step-????????"))

    def folder_of(self, step: Step) -> Path:
        return self.folder / f"step-{step:08d}"

    def begin(self, checkpoint: Checkpoint) -> Path:
        """Creates and returns the folder that all ranks then write to; raises `DiskFull` if the checkpoint does not fit."""
        self.check_room(checkpoint.tensor_bytes)
        partial = self.folder_of(checkpoint.step).with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def save(self, checkpoint: Checkpoint) -> Step:
        """Writes the checkpoint that `begin` prepared, deletes old ones and returns the oldest journal segment still needed.
        Blocks, so call it in a thread; raises `DiskFull` if space runs out."""
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
        except StateError as error:  # an older checkpoint was damaged; the one just written is good
            _log.error("%s. The journal is kept whole", error)
            return Step(0)

    def load(self, step: Step, trainer: LaidOut | None) -> Checkpoint:
        """Loads the checkpoint of `step`: the shards of `trainer`'s rank, or whole tensors if `trainer` is None."""
        return self.load_shards(self.folder_of(step), trainer, step)

    def load_newest(self, trainer: LaidOut | None = None) -> Checkpoint | None:
        """Loads the newest complete checkpoint; None if there is none."""
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
        """Raises `DiskFull` unless a checkpoint of this size, plus the reserve, fits on the disk."""
        needed = tensor_bytes + self.options.free_bytes_min
        free = here().files.free_bytes(self.folder)
        if free < needed:
            raise DiskFull(
                f"checkpoint: expected {needed} bytes free in {self.folder} ({tensor_bytes} for it, the rest "
                f"as reserve), got {free}"
            )


def _room_for(key: str, said: TensorStorageMetadata, trainer: LaidOut | None, folder: Path) -> Tensor:
    """Allocates a tensor to read into: sharded like the trainer's own, or whole without a trainer."""
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
    """Reads the JSON of a checkpoint and verifies its checksum if the checkpoint has checksums."""
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
    """Finds the `StateError` of a rank's reader among the causes of an exception from torch."""
    return next((one for one in _causes(error) if isinstance(one, StateError)), None)


def _causes(error: BaseException) -> list[BaseException]:
    reasons = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return [
        cause for cause in (r[0] if isinstance(r, tuple) else r for r in reasons) if isinstance(cause, BaseException)
    ]


def _is_disk_full(error: BaseException) -> bool:
    """Whether the disk was full; the writer's layers wrap that error in several ways."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error).lower()
    is_said = isinstance(error, SafetensorError) and ("os error 28" in text or "no space" in text)
    return is_said or any(map(_is_disk_full, _causes(error)))

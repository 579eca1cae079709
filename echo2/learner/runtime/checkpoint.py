"""Checkpoints on disk: masters, optimiser, published weights, ledger; whole or not there at all.

Guarantees: a checkpoint's folder gets its name by one rename after every byte of it is on the disk, so a kill at any
instant leaves the earlier ones usable; one that needs more room than the disk has is refused with `DiskFull` before a
byte is written; the newest `kept` remain. Nothing is pickled: tensors are safetensors, the rest is JSON. Leaves to
others: taking the snapshot between two steps (daemon), what happened since (journal).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo2.base.errors import DiskFull, StateError
from echo2.base.ids import GroupId, Step, Version
from echo2.learner.batcher import Batcher, BatcherCounts
from echo2.learner.runtime.options import CheckpointOptions
from echo2.learner.runtime.trainer import Trainer

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that step `step` needs to go on, apart from the journal. Tensors are copies on the host."""

    step: Step
    masters: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]
    published: Mapping[str, Tensor]
    published_version: Version
    state: Mapping[str, Any]

    @property
    def tensor_bytes(self) -> int:
        groups = (self.masters, self.optimiser, self.published)
        return sum(t.numel() * t.element_size() for group in groups for t in group.values())


def take(trainer: Trainer, published: Mapping[str, Tensor], version: Version, state: Mapping[str, Any]) -> Checkpoint:
    """Copies the tensors between two steps. `published`: the weights of `version`; they are never changed in place.

    `state`: what else must be kept, taken at the same step boundary on the event loop's thread.
    """
    masters = {name: master.detach().cpu().clone() for name, master in trainer.model.masters_by_name().items()}
    whole = {
        **state,
        "format": FORMAT,
        "step": trainer.step_count,
        "published_version": version,
        "nonfinite_steps": trainer.nonfinite_steps,
        "nonfinite_in_a_row": trainer.nonfinite_in_a_row,
    }
    return Checkpoint(Step(trainer.step_count), masters, _optimiser_tensors(trainer), published, version, whole)


def put_back(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """The trainer as it was."""
    trainer.model.load_masters(checkpoint.masters)
    trainer.step_count = int(checkpoint.step)
    trainer.nonfinite_steps = int(checkpoint.state["nonfinite_steps"])
    trainer.nonfinite_in_a_row = int(checkpoint.state["nonfinite_in_a_row"])
    for name, master in trainer.model.masters_by_name().items():
        fields = {key.rpartition("|")[2]: value for key, value in checkpoint.optimiser.items() if _is_of(key, name)}
        if fields:
            trainer.optimiser.state[master] = {
                field: value.clone() if field == "step" else value.to(master.device, copy=True)
                for field, value in fields.items()
            }


def _is_of(key: str, name: str) -> bool:
    return key.rpartition("|")[0] == name


def _optimiser_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """`name|field` -> tensor: first and second moments and step counts of AdamW."""
    tensors: dict[str, Tensor] = {}
    for name, master in trainer.model.masters_by_name().items():
        for field, value in trainer.optimiser.state.get(master, {}).items():
            tensors[f"{name}|{field}"] = torch.as_tensor(value).detach().cpu().clone()
    return tensors


def batcher_state(batcher: Batcher) -> dict[str, Any]:
    return {
        "trained": dict(batcher.ledger.trained),
        "tokens_by_lag": {str(lag): count for lag, count in batcher.ledger.tokens_by_lag.items()},
        "counts": asdict(batcher.counts),
        "published": list(batcher.published),
    }


def put_back_batcher(state: Mapping[str, Any], step: Step, batcher: Batcher) -> None:
    """Ledger, counts and published versions as they were at `step`."""
    batcher.next_step = step
    batcher.ledger.trained = {GroupId(name): Step(int(at)) for name, at in state["trained"].items()}
    batcher.ledger.tokens_by_lag = Counter({int(lag): int(n) for lag, n in state["tokens_by_lag"].items()})
    batcher.counts = BatcherCounts(**state["counts"])
    batcher.published = [Version(int(version)) for version in state["published"]]


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

    def save(self, checkpoint: Checkpoint) -> Step:
        """Writes it, lets old ones go, and returns the oldest journal segment still needed. Runs in a thread."""
        self._check_room(checkpoint.tensor_bytes)
        target = self.folder / f"step-{checkpoint.step:08d}"
        partial = target.with_suffix(".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _save_tensors(checkpoint.masters, partial / "masters.safetensors")
            _save_tensors(checkpoint.optimiser, partial / "optimiser.safetensors")
            _save_tensors(checkpoint.published, partial / "published.safetensors")
            (partial / "state.json").write_text(json.dumps(checkpoint.state))
            for path in (*partial.iterdir(), partial):
                _sync(path)
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            _sync(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"checkpoint of step {checkpoint.step}: no space left in {self.folder}") from error
            raise
        kept = self.steps()[-self.options.kept :]
        for step in self.steps():
            if step not in kept:
                shutil.rmtree(self.folder / f"step-{step:08d}")
        oldest = json.loads((self.folder / f"step-{kept[0]:08d}" / "state.json").read_text())
        return Step(int(oldest["journal_from"]))

    def load_newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None when there is none."""
        steps = self.steps()
        if not steps:
            return None
        folder = self.folder / f"step-{steps[-1]:08d}"
        try:
            state = json.loads((folder / "state.json").read_text())
            if state["format"] != FORMAT:
                raise StateError(f"checkpoint {folder}: expected format {FORMAT}, got {state['format']}")
            masters, optimiser, published = (
                load_file(folder / f"{name}.safetensors") for name in ("masters", "optimiser", "published")
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise StateError(f"checkpoint {folder}: cannot be read: {error}") from error
        return Checkpoint(steps[-1], masters, optimiser, published, Version(state["published_version"]), state)

    def _check_room(self, tensor_bytes: int) -> None:
        needed = tensor_bytes + self.options.free_bytes_min
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise DiskFull(
                f"checkpoint: expected {needed} bytes free in {self.folder} ({tensor_bytes} for it, the rest "
                f"as reserve), got {free}"
            )


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        if "os error 28" in str(error).lower() or "no space" in str(error).lower():
            raise OSError(errno.ENOSPC, str(error)) from error
        raise


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

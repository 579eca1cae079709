"""The base checkpoint from this machine or a model hub, so that the first weights need not come from peers: as version 0 itself, or
with one merged delta on top as any later version.

Looked for in this order: a local folder in Hugging Face layout, the hub's cache on this machine, the hub itself
(unless `HF_HUB_OFFLINE` is set). Guarantees: what is found is only a candidate, its bits become a version when they have
the fingerprint that the learner signed for it (`BaseCheckpointLoader.proven`) or for the parent of a delta; whatever goes
wrong here is told and the weights come from peers as usual; the weights lie in memory only until they are given or another way to
a version is taken, and nothing is downloaded from then on. Waits for: a download as long as it is worth it (hub_pace), the disk
as long as it reads LOAD_BYTES_PER_S_MIN. Leaves to others: the download (hub), peers, the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from echo2.base.ids import RunId, Version
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.weights import HostWeights
from echo2.weights.fingerprint import key_of_run
from echo2.weights.policy import BaseCheckpoint
from echo2.worker.runtime.hub import download

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PART = re.compile(r".*-\d+-of-(?P<count>\d+)\.safetensors")
_HUB_ID = re.compile(rf"{_NAME.pattern}/{_NAME.pattern}")
LOAD_S, LOAD_BYTES_PER_S_MIN = 60.0, 50e6
"""A disk that reads slower is given up for peers."""
_log = logging.getLogger("echo2.worker")


def find_base(model_path: str, model_name: str) -> Path | None:
    """A folder of this machine with safetensors files."""
    local = Path(model_path).expanduser()
    if model_path and _is_checkpoint(local):
        return local
    return _cached(model_path, model_name)


def is_at_hub(model_path: str) -> bool:
    """Whether it may be asked for there."""
    return _HUB_ID.fullmatch(model_path) is not None and os.environ.get("HF_HUB_OFFLINE") != "1"


def load_base(folder: Path, is_wanted: Callable[[], bool] = lambda: True) -> HostWeights | None:
    """All tensors as bf16 under their names, tied ones once. None where `is_wanted` ends between two files."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not is_wanted():
            return None
        tensors.update({name: tensor.bfloat16() for name, tensor in load_file(file).items()})
    return HostWeights.from_tensors(tensors, Version(0), copy=False)


class BaseCheckpointLoader:
    """Looks in the background, and loads ahead where `loads_ahead`; else a delta from the base has it loaded. `keyframe_s`: the hub
    is asked too, as long as it is not much slower than this for a keyframe from peers."""

    def __init__(
        self,
        run_id: RunId,
        model_path: str,
        model_name: str,
        *,
        keyframe_s: Callable[[], float] | None = None,
        loads_ahead: bool = True,
    ) -> None:
        self._key = key_of_run(run_id)
        self._names = model_path, model_name
        self._keyframe_s, self._loads_ahead = keyframe_s, loads_ahead
        self._folder: Path | None = None
        self._weights: HostWeights | None = None
        self._fingerprint = ""
        self._is_wanted = True
        self._looking = asyncio.create_task(self._look())

    async def offer_to(self, node: BroadcastNode) -> None:
        """The node fetches nothing until it is known whether there is one."""
        node.set_base(None, is_sought=True)
        await asyncio.wait([self._looking])
        is_there = not self._looking.cancelled() and self._looking.result()
        if not is_there:
            self.end()
        node.set_base(BaseCheckpoint(Version(0), 0.0) if is_there else None)

    async def candidate(self) -> HostWeights | None:
        """The weights, said to be version 0, for a delta that names the fingerprint of its parent; given once."""
        if self._weights is None:
            await self._load()
        return self._given()

    def proven(self, version: Version, fingerprint: str) -> HostWeights | None:
        """The weights, as `version`, if they are loaded and have the fingerprint (hex) that was signed for it. Else they are no
        longer kept: another way is taken."""
        if self._weights is None:
            return None
        if self._fingerprint != fingerprint:
            self._weights = None
            return None
        self._weights.version = version
        return self._given()

    def end(self) -> None:
        """They are not needed any more: what was loaded goes, and nothing more is looked for."""
        self._is_wanted = False
        self._weights = self._folder = None
        self._looking.cancel()

    def _given(self) -> HostWeights | None:
        """Once: from now on the weights change."""
        weights, self._weights = self._weights, None
        return weights

    async def _look(self) -> bool:
        """Whether there is one."""
        self._folder = await asyncio.to_thread(find_base, *self._names)
        if self._folder is None and self._keyframe_s is not None and is_at_hub(self._names[0]):
            self._folder = await download(self._names[0], self._keyframe_s)
        if self._folder is not None and self._loads_ahead:
            size = sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))
            try:
                await asyncio.wait_for(self._load(), LOAD_S + size / LOAD_BYTES_PER_S_MIN)
            except TimeoutError:
                _log.warning("base checkpoint in %s is given up: the disk is too slow; peers have it", self._folder)
                return False
        return self._folder is not None

    async def _load(self) -> None:
        folder = self._folder
        if folder is None:
            return
        try:
            weights, self._fingerprint = await asyncio.to_thread(self._read, folder)
        except Exception as error:  # noqa: BLE001  a checkpoint that cannot be read is one that is not here
            _log.warning("base checkpoint in %s cannot be used (%s); peers have it", folder, error)
            self._folder = None
            return
        if weights is not None and self._is_wanted:
            self._weights = weights
            _log.info(
                "base checkpoint in %s: %d tensors, fingerprint %s", folder, len(weights.table.specs), self._fingerprint
            )

    def _read(self, folder: Path) -> tuple[HostWeights | None, str]:
        """In a thread."""
        weights = load_base(folder, lambda: self._is_wanted)
        if weights is None:
            return None, ""
        weights.key = self._key
        return weights, f"{weights.fingerprint():016x}"


def _is_checkpoint(folder: Path) -> bool:
    """Whole: a download that was given up leaves some of its parts."""
    names = [file.name for file in folder.glob("*.safetensors")] if folder.is_dir() else []
    parts = [found for found in map(_PART.fullmatch, names) if found is not None]
    return bool(names) and all(len(parts) == int(found["count"]) for found in parts)


def _cached(model_path: str, model_name: str) -> Path | None:
    """The newest snapshot of the hub id, or of any whose name is the learner's, in the hub's cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    is_hub_id = _HUB_ID.fullmatch(model_path) is not None
    name = model_path.replace("/", "--") if is_hub_id else f"*--{model_name}"
    if not _NAME.fullmatch(model_name) and not is_hub_id:
        return None
    snapshots = [folder for folder in cache.glob(f"models--{name}/snapshots/*") if _is_checkpoint(folder)]
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)

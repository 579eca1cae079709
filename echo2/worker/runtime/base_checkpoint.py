"""Finds the base checkpoint on this machine or at a model hub, so that the first weights need not come from peers: as version 0, or
with one merged delta on top as any later version.

Looks in this order: a local folder in Hugging Face layout, the hub's cache on this machine, the hub itself (unless
`HF_HUB_OFFLINE` is set). Guarantees: a checkpoint found is only a candidate; its bits become a version if they have the fingerprint
that the learner signed for it (`BaseCheckpointLoader.proven`) or for the parent of a delta; any failure here is logged and the
weights come from peers as usual; the weights stay in memory only until they are handed over or another way to a version is taken,
and from then on nothing is downloaded. Waits for: a download while it is worth waiting for (hub_pace), the disk while it reads at
least LOAD_BYTES_PER_S_MIN. Leaves to others: the download (hub), peers, the engine.
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
"""Loading may take LOAD_S plus the size at this rate; on a slower disk the weights come from peers."""
_log = logging.getLogger("echo2.worker")


def find_base(model_path: str, model_name: str) -> Path | None:
    """A local folder with a complete safetensors checkpoint: `model_path` or one in the hub's cache; None if there is none."""
    local = Path(model_path).expanduser()
    if model_path and _is_checkpoint(local):
        return local
    return _cached(model_path, model_name)


def is_at_hub(model_path: str) -> bool:
    """Whether `model_path` is a hub id and the hub may be asked."""
    return _HUB_ID.fullmatch(model_path) is not None and os.environ.get("HF_HUB_OFFLINE") != "1"


def load_base(folder: Path, is_wanted: Callable[[], bool] = lambda: True) -> HostWeights | None:
    """Loads all tensors as bf16 under their names, tied ones once. None if `is_wanted` becomes false between two files."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not is_wanted():
            return None
        tensors.update({name: tensor.bfloat16() for name, tensor in load_file(file).items()})
    return HostWeights.from_tensors(tensors, Version(0), copy=False)


class BaseCheckpointLoader:
    """Looks for the checkpoint in the background. With `loads_ahead` it also loads it at once, else only when a delta needs it.

    `keyframe_s`: seconds that a keyframe from peers would take; if given, the hub is asked too, unless it would be much slower.
    """

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
        """Tells the node whether there is a base checkpoint; until then the node fetches nothing."""
        node.set_base(None, is_sought=True)
        await asyncio.wait([self._looking])
        is_there = not self._looking.cancelled() and self._looking.result()
        if not is_there:
            self.end()
        node.set_base(BaseCheckpoint(Version(0), 0.0) if is_there else None)

    async def candidate(self) -> HostWeights | None:
        """The weights, labelled version 0, for a delta whose parent's fingerprint will check them; handed over once."""
        if self._weights is None:
            await self._load()
        return self._given()

    def proven(self, version: Version, fingerprint: str) -> HostWeights | None:
        """The weights as `version`, if they are loaded and have its signed fingerprint (hex). Otherwise drops them and returns
        None: the version then comes from peers."""
        if self._weights is None:
            return None
        if self._fingerprint != fingerprint:
            self._weights = None
            return None
        self._weights.version = version
        return self._given()

    def end(self) -> None:
        """Drops what was loaded and stops looking: the weights are no longer needed."""
        self._is_wanted = False
        self._weights = self._folder = None
        self._looking.cancel()

    def _given(self) -> HostWeights | None:
        """Hands the weights over, once: the receiver will change them."""
        weights, self._weights = self._weights, None
        return weights

    async def _look(self) -> bool:
        """Looks for a checkpoint, and loads it if so configured; returns whether there is one."""
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
        except Exception as error:  # noqa: BLE001  an unreadable checkpoint counts as absent
            _log.warning("base checkpoint in %s cannot be used (%s); peers have it", folder, error)
            self._folder = None
            return
        if weights is not None and self._is_wanted:
            self._weights = weights
            _log.info(
                "base checkpoint in %s: %d tensors, fingerprint %s", folder, len(weights.table.specs), self._fingerprint
            )

    def _read(self, folder: Path) -> tuple[HostWeights | None, str]:
        """Weights and their fingerprint in hex. Runs in a thread."""
        weights = load_base(folder, lambda: self._is_wanted)
        if weights is None:
            return None, ""
        weights.key = self._key
        return weights, f"{weights.fingerprint():016x}"


def _is_checkpoint(folder: Path) -> bool:
    """Whether all parts are there: a download that was given up may leave only some."""
    names = [file.name for file in folder.glob("*.safetensors")] if folder.is_dir() else []
    parts = [found for found in map(_PART.fullmatch, names) if found is not None]
    return bool(names) and all(len(parts) == int(found["count"]) for found in parts)


def _cached(model_path: str, model_name: str) -> Path | None:
    """The newest snapshot in the hub's cache: of the hub id `model_path`, else of any id with the learner's model name."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()
    is_hub_id = _HUB_ID.fullmatch(model_path) is not None
    name = model_path.replace("/", "--") if is_hub_id else f"*--{model_name}"
    if not _NAME.fullmatch(model_name) and not is_hub_id:
        return None
    snapshots = [folder for folder in cache.glob(f"models--{name}/snapshots/*") if _is_checkpoint(folder)]
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)

"""The base checkpoint from this machine or a model hub, so that the first weights need not come from peers: as version 0 itself, or
with one merged delta on top as any later version.

`find_base` looks in this order: a local folder in Hugging Face layout, the hub's cache on this machine, the hub itself
(unless `HF_HUB_OFFLINE` is set). Guarantees: what is found is only a candidate, its bits become a version when they have
the fingerprint that the learner signed for it (`BaseCheckpointLoader.proven`) or for the parent of a delta; whatever goes
wrong here is told and the weights come from peers as usual. Leaves to others: peers, the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from pathlib import Path

import torch

from echo2.base.ids import RunId, Version
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.weights import HostWeights
from echo2.weights.fingerprint import key_of_run
from echo2.weights.policy import BaseCheckpoint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_ID = re.compile(rf"{_NAME.pattern}/{_NAME.pattern}")
_FILES = ["*.safetensors", "*.json"]
WAIT_S = 600.0
"""A hub that has not given the base by then is given up for peers."""
_log = logging.getLogger("echo2.worker")


def find_base(model_path: str, model_name: str) -> Path | None:
    """A folder with safetensors files; None where none is on this machine and none can be got."""
    local = Path(model_path).expanduser()
    if model_path and _is_checkpoint(local):
        return local
    cached = _cached(model_path, model_name)
    if cached is not None or not _HUB_ID.fullmatch(model_path) or os.environ.get("HF_HUB_OFFLINE") == "1":
        return cached
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_path, allow_patterns=_FILES))
    except Exception as error:  # noqa: BLE001  the hub's client raises whatever its transport does
        _log.info("base checkpoint: %s cannot be had from the hub (%s); peers have it", model_path, error)
        return None


def load_base(folder: Path) -> HostWeights:
    """All tensors as bf16 under their names, tied ones once."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update({name: tensor.bfloat16() for name, tensor in load_file(file).items()})
    return HostWeights.from_tensors(tensors, Version(0), copy=False)


class BaseCheckpointLoader:
    """Loads in the background; `proven` gives the weights of a version that they are."""

    def __init__(self, run_id: RunId, model_path: str, model_name: str) -> None:
        self._key = key_of_run(run_id)
        self._fingerprint = ""
        self._loading = asyncio.create_task(asyncio.to_thread(self._load, model_path, model_name))

    async def loaded(self, timeout_s: float) -> bool:
        """Whether there is one; False as well where it takes longer than that."""
        done, _ = await asyncio.wait([self._loading], timeout=timeout_s)
        return bool(done) and self._loading.result() is not None

    async def offer_to(self, node: BroadcastNode) -> None:
        """The node fetches nothing until it is known whether there is one, for `WAIT_S` at most."""
        node.set_base(None, is_sought=True)
        node.set_base(BaseCheckpoint(Version(0), 0.0) if await self.loaded(WAIT_S) else None)

    def candidate(self) -> HostWeights | None:
        """The weights, said to be version 0, for a delta that names the fingerprint of its parent; given once."""
        if not self._fingerprint or not self._loading.done() or self._loading.cancelled():
            return None
        self._fingerprint = ""
        return self._loading.result()

    def proven(self, version: Version, fingerprint: str) -> HostWeights | None:
        """The weights, as `version`, if they are loaded and have the fingerprint (hex) that was signed for it."""
        if not self._loading.done() or self._loading.cancelled():
            return None
        weights = self._loading.result()
        if weights is None or self._fingerprint != fingerprint:
            return None
        self._fingerprint = ""  # from now on they change: they are given once
        weights.version = version
        return weights

    def _load(self, model_path: str, model_name: str) -> HostWeights | None:
        folder = find_base(model_path, model_name)
        if folder is None:
            return None
        try:
            weights = load_base(folder)
        except Exception as error:  # noqa: BLE001  a checkpoint that cannot be read is one that is not here
            _log.warning("base checkpoint in %s cannot be used (%s); peers have it", folder, error)
            return None
        weights.key = self._key
        self._fingerprint = f"{weights.fingerprint():016x}"
        _log.info(
            "base checkpoint in %s: %d tensors, fingerprint %s", folder, len(weights.table.specs), self._fingerprint
        )
        return weights


def _is_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.safetensors"))


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

"""Finds the base checkpoint on this machine or at a model hub, so that the first weights need not come from peers: as version 0, or
with one merged delta on top as any later version.

Looks at a local folder in Hugging Face layout, the hub's cache on this machine, then the hub (unless `HF_HUB_OFFLINE` is set).
Guarantees: a checkpoint is only a candidate; its bits become a version if they have the fingerprint that the learner signed for it
or for the parent of a delta; any failure here is logged and the weights come from peers; a download is given up only if no byte
arrived for `STALLED_S`, or if the rest of it would take more than `KEYFRAME_TIMES` times as long as a keyframe from peers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echo2.base.errors import EchoError
from echo2.base.ids import RunId, Version
from echo2.broadcast.node import BroadcastNode
from echo2.broadcast.route import BaseCheckpoint
from echo2.outside import monotonic
from echo2.outside.guard import ShowsProgress, shown
from echo2.weights import HostWeights
from echo2.weights.elements import CHECKPOINT
from echo2.weights.fingerprint import key_of_run

LOOK_S = 5.0  # a rate needs several looks in WINDOW_S
STALLED_S = 60.0  # longer than a server's hiccup or a change of route
WINDOW_S = 60.0  # long enough to even out the bursts of parallel downloads
JUDGED_FROM_S = 30.0  # the rate is not judged before this: a connection needs its first seconds to ramp up
KEYFRAME_TIMES = 2.0
"""The hub may take this many times longer than peers: its download loads no peer, and estimates of link rates are inexact."""
_log = logging.getLogger("echo2.worker")


class HubDownload:
    """One attempt at the hub, shared by the client's threads, which count, and the event loop, which may end it. `whole_bytes`: the
    checkpoint's size; 0: not known."""

    def __init__(self, model_id: str, began_s: float) -> None:
        self.model_id, self.whole_bytes = model_id, 0
        self.arrived_bytes = 0
        self.is_ended = threading.Event()
        self._began_s = self._moved_s = began_s
        self._looks: deque[tuple[float, int]] = deque([(began_s, 0)], maxlen=1024)

    def why_given_up(self, keyframe_s: float, now: float) -> str:
        """Why to give up the download; empty: continue. `keyframe_s`: seconds that a keyframe from peers would take."""
        if self.arrived_bytes > self._looks[-1][1]:
            self._moved_s = now
        self._looks.append((now, self.arrived_bytes))
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        if now - self._moved_s >= STALLED_S:
            return f"nothing came for {now - self._moved_s:.0f} s"
        if not self.whole_bytes or now - self._began_s < JUDGED_FROM_S:
            return ""
        then, before = self._looks[0]
        rate = max(1.0, (self.arrived_bytes - before) / (now - then))
        left_s = (self.whole_bytes - self.arrived_bytes) / rate
        if left_s > KEYFRAME_TIMES * keyframe_s:
            return f"it would take {left_s:.0f} s more, a keyframe from peers about {keyframe_s:.0f} s"
        return ""


def _fetch(attempt: HubDownload) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    constants.HF_HUB_DISABLE_XET = True  # xet's downloads cannot be ended half-way

    class Counter(tqdm):
        """Takes the place of the client's progress bars, which it tells of every piece that arrives."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            self._counts = named.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*arguments, **(named | {"disable": True}))  # type: ignore[no-untyped-call]

        def update(self, count: float | None = 1) -> None:
            if attempt.is_ended.is_set():
                raise EchoError("the download has been given up")
            if self._counts:
                attempt.arrived_bytes += int(count or 0)

    how: dict[str, Any] = {**CHECKPOINT, "tqdm_class": Counter}
    files = snapshot_download(attempt.model_id, **how, dry_run=True)
    attempt.whole_bytes = sum(file.file_size or 0 for file in files if file.will_download)
    return Path(snapshot_download(attempt.model_id, **how))


async def download(model_id: str, keyframe_s: Callable[[], float], progress: ShowsProgress) -> Path | None:
    """The checkpoint's folder; None if the hub does not have it or would take too long. `keyframe_s`: seconds that a keyframe
    from peers would take."""
    attempt = HubDownload(model_id, monotonic())
    running = asyncio.get_running_loop().run_in_executor(None, _fetch, attempt)

    async def followed() -> Path:
        while not running.done():
            await asyncio.wait([running], timeout=LOOK_S)
            if not running.done() and (why := attempt.why_given_up(keyframe_s(), monotonic())):
                raise EchoError(f"the download is given up: {why}")
        return running.result()

    try:
        what = f"base checkpoint: {model_id} from the hub"
        return await shown(progress, what, followed(), lambda: (attempt.arrived_bytes, attempt.whole_bytes))
    except Exception as error:  # noqa: BLE001  the hub's client raises whatever its transport does
        _log.info("base checkpoint: %s cannot be had from the hub (%s); peers have it", model_id, error)
        return None
    finally:
        attempt.is_ended.set()
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else asks for its error


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PART = re.compile(r".*-\d+-of-(?P<count>\d+)\.safetensors")
_HUB_ID = re.compile(rf"{_NAME.pattern}/{_NAME.pattern}")
LOAD_S, LOAD_BYTES_PER_S_MIN = 60.0, 50e6
"""Loading may take LOAD_S plus the size at this rate; on a slower disk the weights come from peers."""


def find_base(model_path: str, model_name: str) -> Path | None:
    """A local folder with a complete safetensors checkpoint: `model_path` or one in the hub's cache; None if there is none."""
    local = Path(model_path).expanduser()
    if model_path and _is_checkpoint(local):
        return local
    return _cached(model_path, model_name)


def load_base(folder: Path, is_wanted: Callable[[], bool] = lambda: True) -> HostWeights | None:
    """Loads all tensors as bf16 under their names, tied ones once. None if `is_wanted` becomes false between two files."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        if not is_wanted():
            return None
        tensors.update({name: tensor.bfloat16() for name, tensor in load_file(file).items()})
    return HostWeights.from_tensors(tensors, Version(0), copy=False)


class BaseCheckpointLoader:
    """Looks for the checkpoint in the background. With `loads_ahead` it also loads it at once, else only when a delta needs it.
    `keyframe_s`: seconds that a keyframe from peers would take; if given, the hub is asked too, unless it would be much slower."""

    def __init__(
        self,
        run_id: RunId,
        model_path: str,
        model_name: str,
        progress: ShowsProgress,
        *,
        keyframe_s: Callable[[], float] | None = None,
        loads_ahead: bool = True,
    ) -> None:
        self._key = key_of_run(run_id)
        self._names, self._progress = (model_path, model_name), progress
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
        if self._weights is None and self._folder is not None:
            await self._load(self._folder)
        weights, self._weights = self._weights, None  # the receiver will change them
        return weights

    def proven(self, version: Version, fingerprint: str) -> HostWeights | None:
        """The weights as `version`, if they are loaded and have its signed fingerprint (hex). Otherwise drops them and returns
        None: the version then comes from peers."""
        weights, self._weights = self._weights, None
        if weights is None or self._fingerprint != fingerprint:
            return None
        weights.version = version
        return weights

    def end(self) -> None:
        """Drops what was loaded and stops looking: the weights are no longer needed."""
        self._is_wanted = False
        self._weights = self._folder = None
        self._looking.cancel()

    async def _look(self) -> bool:
        """Whether there is a checkpoint; it is loaded, too, if so configured."""
        try:
            folder = await asyncio.to_thread(find_base, *self._names)
        except (OSError, RuntimeError) as error:  # such as a folder that may not be read, or no home
            folder = None
            _log.warning("base checkpoint: this machine cannot be searched for it (%s); peers have it", error)
        is_at_hub = _HUB_ID.fullmatch(self._names[0]) and os.environ.get("HF_HUB_OFFLINE") != "1"
        if folder is None and self._keyframe_s is not None and is_at_hub:
            folder = await download(self._names[0], self._keyframe_s, self._progress)
        self._folder = folder
        if folder is not None and self._loads_ahead:
            await self._load(folder)
        return self._folder is not None

    async def _load(self, folder: Path) -> None:
        try:
            size = sum(file.stat().st_size for file in _weight_files(folder))
            reading = asyncio.to_thread(self._read, folder)
            async with asyncio.timeout(LOAD_S + size / LOAD_BYTES_PER_S_MIN):
                weights, fingerprint = await reading
        except Exception as error:  # noqa: BLE001  an unreadable checkpoint counts as absent, as does one on too slow a disk
            _log.warning("base checkpoint in %s cannot be used (%s); peers have it", folder, str(error) or "slow disk")
            self._folder = None
            return
        if weights is not None and self._is_wanted:
            self._weights, self._fingerprint = weights, fingerprint
            count = len(weights.table.specs)
            _log.info("base checkpoint in %s: %d tensors, fingerprint %s", folder, count, fingerprint)

    def _read(self, folder: Path) -> tuple[HostWeights | None, str]:
        """Weights and their fingerprint in hex. Runs in a thread."""
        weights = load_base(folder, lambda: self._is_wanted)
        if weights is None:
            return None, ""
        weights.key = self._key
        return weights, f"{weights.fingerprint():016x}"


def _weight_files(folder: Path) -> list[Path]:
    """Those that the learner reads: one file, where there is one, whatever parts lie beside it."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))


def _is_checkpoint(folder: Path) -> bool:
    """Whether all parts are there: a download that was given up may leave only some."""
    names = [file.name for file in _weight_files(folder)]
    parts = [match for match in map(_PART.fullmatch, names) if match is not None]
    return bool(names) and all(len(parts) == int(match["count"]) for match in parts)


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

"""Downloads a checkpoint from a model hub in a separate process that can be ended at any moment.

Guarantees: once the caller is cancelled or the download is given up, no more bytes arrive; the process ends with its worker,
however that ends; what has arrived stays in the hub's cache, where the next attempt finds it. Waits for: the process's reports, one
every `REPORT_S`. Leaves to others: when to give up (hub_pace), whether to ask the hub at all (base_checkpoint).
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from echo2.outside import monotonic
from echo2.outside.under_way import far_text, under_way
from echo2.worker.hub_pace import STALLED_S, HubPace

FILES = ["*.safetensors", "*.json"]
REPORT_S = 5.0
ENDING_S = 5.0
REPORT_BYTES_MAX = 1 << 16
_BLOCK_BYTES = 512  # the unit of st_blocks
_log = logging.getLogger("echo2.worker")


async def download(model_id: str, keyframe_s: Callable[[], float], command: tuple[str, ...] = ()) -> Path | None:
    """The checkpoint's folder; None if the hub does not have it or would take too long.

    `keyframe_s`: seconds that a keyframe from peers would take.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    process = await asyncio.create_subprocess_exec(
        *(command or (sys.executable, "-m", "echo2.worker.runtime.hub")), model_id,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=REPORT_BYTES_MAX,
    )  # fmt: skip
    began = monotonic()
    pace = HubPace(began)

    def far() -> str:
        return far_text(pace.came_bytes, pace.whole_bytes, monotonic() - began)

    try:
        following = _followed(process, model_id, pace, keyframe_s)
        return await under_way(_log, f"base checkpoint: {model_id} from the hub", following, far)
    finally:
        await asyncio.shield(_ended(process))


async def _followed(
    process: asyncio.subprocess.Process, model_id: str, pace: HubPace, keyframe_s: Callable[[], float]
) -> Path | None:
    assert process.stdout is not None, "it is a pipe"
    while True:
        line = b""
        with contextlib.suppress(TimeoutError):
            line = await asyncio.wait_for(process.stdout.readline(), STALLED_S)
            if not line:
                _log.info("base checkpoint: %s cannot be had from the hub; peers have it", model_id)
                return None
        report = json.loads(line) if line else {}
        if "folder" in report:
            return Path(report["folder"])
        pace.whole_bytes = int(report.get("whole_bytes", pace.whole_bytes))
        if "came_bytes" in report:
            pace.seen(int(report["came_bytes"]), monotonic())
        if why := pace.why_given_up(keyframe_s(), monotonic()):
            _log.info("base checkpoint: the download of %s from the hub is given up: %s; peers have it", model_id, why)
            return None


async def _ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), ENDING_S)
    except TimeoutError:
        process.kill()
        await process.wait()


# ---- in the separate process


def main() -> int:
    """Prints reports, one JSON object a line: `whole_bytes` first, `came_bytes` every `REPORT_S`, `folder` at the end."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the worker shows the progress
    from huggingface_hub import HfApi, constants, snapshot_download

    model_id = sys.argv[1]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(Exception):  # a mirror may not report sizes
        files = HfApi().model_info(model_id, files_metadata=True).siblings or []
        sizes = (file.size or 0 for file in files if any(fnmatch.fnmatch(file.rfilename, one) for one in FILES))
        _report(whole_bytes=sum(sizes))
    blobs = Path(constants.HF_HUB_CACHE, "models--" + model_id.replace("/", "--"), "blobs")
    threading.Thread(target=_report_bytes, args=(blobs, threading.Event()), daemon=True).start()
    try:
        folder = snapshot_download(model_id, allow_patterns=FILES)
    except Exception as error:  # noqa: BLE001  the hub's client raises whatever its transport does
        print(f"base checkpoint: {model_id}: {error}", file=sys.stderr)
        return 1
    _report(folder=str(folder))
    return 0


def _report(**said: object) -> None:
    print(json.dumps(said), flush=True)


def _report_bytes(blobs: Path, never: threading.Event) -> None:
    while True:
        _report(came_bytes=bytes_in(blobs))
        never.wait(REPORT_S)


def bytes_in(folder: Path) -> int:
    """Bytes allocated on disk in `folder`; not file sizes, since a file may get its full size before its bytes arrive."""
    found = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # the file was just renamed to its final name
                found += path.stat().st_blocks * _BLOCK_BYTES
    return found


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # ends when the worker does
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

"""A worker in a process of its own: `python -m benchmarks.worker_process LINK FOLDER SLOWDOWN SLOTS`."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from echo2.config.run import RunConfig, WorkerSection
from echo2.worker.options import WorkerOptions
from echo2.worker.worker import WorkerDaemon

if __name__ == "__main__":
    link, folder, slowdown, slots = sys.argv[1:]
    options = WorkerOptions(
        join_link=link,
        folder=Path(folder),
        name="doomed",
        config=RunConfig(worker=WorkerSection(engine="embedded", slots=int(slots), slowdown=float(slowdown))),
        listen_host="127.0.0.1",
    )

    async def run() -> None:
        daemon = WorkerDaemon(options)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stop, "SIGTERM")
        await daemon.run()

    asyncio.run(run())

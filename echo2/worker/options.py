"""Options of one worker process: the run file's sections as they are, and what only this process or its machine knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from echo2.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`config`: a worker reads its sections worker, model and run. `folder` keeps its identity, its chunks and its control
    socket between runs."""

    join_link: str
    folder: Path
    config: RunConfig = field(default_factory=RunConfig)
    name: str = ""
    listen_host: str = ""  # empty: every address, or loopback if the coordinator is on loopback
    advertised_addresses: tuple[str, ...] = ()
    link_file: Path | None = None  # read again if the coordinator is not found: the operator may have moved it
    preemption_notice: str = ""  # where to watch for preemption: aws, azure, gcp or an http address

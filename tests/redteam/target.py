"""The daemon under attack: a real coordinator process with few descriptors, and what it costs it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echo2.base.errors import Unreachable
from echo2.trust import tls
from echo2.trust.enrolment import enrol
from echo2.trust.identity import Identity, JoinLink, Role
from tests.e2e.cluster import Cluster, small_run
from tests.redteam.hostile import cpu_seconds, descriptors, resident_bytes

DESCRIPTORS = 1024
JOIN_S = 120.0
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
"""Honest callers come from one address, hostile ones from another, unless a test is about them sharing it."""


class Target:
    """A coordinator of a run on one machine; `more` are options at the end of its configuration."""

    def __init__(self, folder: Path, more: str = "") -> None:
        text = small_run(folder, folder / "no-model").replace("[coordinator]", "[coordinator]\n" + more)
        self.config: dict[str, Any] = tomllib.loads(text)
        self.cluster = Cluster(folder, text, workers=0)
        self.cluster.placed = lambda name, argv: [
            "/bin/sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', name, *argv
        ]  # fmt: skip
        self.links = self.cluster.run_folder / "links"

    def start(self) -> None:
        self.cluster.start("coordinator")
        self.cluster.wait_until(lambda: "dashboard at" in self.log(), "the coordinator")

    @property
    def pid(self) -> int:
        return self.cluster.processes["coordinator"].pid

    def port(self, name: str) -> int:
        return int(self.config["coordinator"][name])

    def log(self) -> str:
        return self.cluster.log("coordinator")

    def is_alive(self) -> bool:
        return self.cluster.processes["coordinator"].poll() is None

    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def descriptors(self) -> int:
        return descriptors(self.pid)

    def link(self, role: Role = Role.WORKER) -> JoinLink:
        return JoinLink.parse((self.links / f"{role.value}.link").read_text().strip())

    def join(self, role: Role = Role.WORKER) -> tls.Credentials:
        """An honest newcomer's certificate, from here; it tries again as workers do."""
        until = time.monotonic() + JOIN_S
        while True:
            try:
                return asyncio.run(enrol(self.link(role), Identity.generate(), role, timeout_s=5))
            except Unreachable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.25)  # a real process has no virtual clock


@contextlib.contextmanager
def coordinator(folder: Path, more: str = "") -> Iterator[Target]:
    target = Target(folder, more)
    with target.cluster:
        target.start()
        yield target

"""Kills, freezes, cuts and full disks for a cluster of real processes, from a seed.

`Chaos.run` strikes until the learner ends; a process that is down is started again with the same command. Counts say
what was done. Guarantees: same seed, same order of strikes (their effect depends on the machine's timing).
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.cuttable import Forwarder
from tests.e2e.history import Archive

DISK_FULL_CODE = 6


class SmallDisk:
    """A tmpfs that can be filled. `is_mounted` is False where mounting is not allowed."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        self.is_mounted = (
            os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
        )

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.folder / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(1 << 16))

    def free(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def unmount(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


class Chaos:
    """`mean_gap_s`: between two strikes. `kinds`: what may happen."""

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        archive: Archive,
        link: Forwarder,
        disks: dict[str, SmallDisk],
        mean_gap_s: float,
    ) -> None:
        self.cluster, self.archive, self.link, self.disks = cluster, archive, link, disks
        self.rng = random.Random(seed)
        self.mean_gap_s = mean_gap_s
        self.counts: Counter[str] = Counter()
        self._due: list[tuple[float, Callable[[], None]]] = []

    def run(self, last_step: int, strike_s: float, within_s: float) -> None:
        """Strikes for `strike_s` or until the learner has made its last step, puts everything right again, and waits for
        that step, for `within_s` in all."""
        deadline = time.monotonic() + within_s
        strikes_end = time.monotonic() + strike_s
        next_strike = time.monotonic() + self.mean_gap_s
        while self.cluster.step() < last_step:
            now = time.monotonic()
            if now >= strikes_end:
                self._undo_all()
                next_strike = strikes_end = math.inf
            assert now < deadline, f"not at step {last_step} within {within_s:.0f} s, at step {self.cluster.step()}"
            self.archive.look()
            for at, act in [one for one in self._due if one[0] <= now]:
                self._due.remove((at, act))
                act()
            self._tend()
            if now >= next_strike:
                self._strike()
                next_strike = now + self.rng.expovariate(1.0 / self.mean_gap_s)
            time.sleep(0.05)  # real processes have no virtual clock
        self._undo_all()
        for _ in range(40):  # what a full disk is about to end is started again as well
            self._tend()
            time.sleep(0.05)

    def _tend(self) -> None:
        """Starts again what a full disk ended; any other end is a failure."""
        for name, process in list(self.cluster.processes.items()):
            code = process.poll()
            if code is None or code == -signal.SIGKILL:
                continue
            is_excused = code == DISK_FULL_CODE and self.counts["disk full"] > 0
            assert is_excused, f"{name} ended with code {code}:\n{self.cluster.log(name)[-3000:]}"
            self.counts["ended by a full disk"] += 1
            for disk in self.disks.values():
                disk.free()
            self.cluster.start(name)

    def _undo_all(self) -> None:
        due, self._due = self._due, []
        for _, act in due:
            act()
        self.archive.look()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    # ---- strikes

    def _strike(self) -> None:
        strike = self.rng.choice((self._kill, self._kill, self._freeze, self._cut, self._fill))
        strike(self.rng.choice(list(self.cluster.commands)))

    def _is_down(self, name: str) -> bool:
        process = self.cluster.processes.get(name)
        return process is None or process.poll() is not None

    def _kill(self, name: str) -> None:
        if self._is_down(name):
            return
        self.cluster.kill(name)
        self.counts[f"kill -9 {name.rstrip('0123456789')}"] += 1
        self._later(self.rng.uniform(0.1, 1.5), lambda: self._start(name))

    def _start(self, name: str) -> None:
        if self._is_down(name):
            self.cluster.start(name)
            self.counts["restarts"] += 1

    def _freeze(self, name: str) -> None:
        if self._is_down(name):
            return
        process = self.cluster.processes[name]
        self.cluster.kill(name, signal.SIGSTOP)
        self.counts[f"freeze {name.rstrip('0123456789')}"] += 1

        def thaw() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)

        self._later(self.rng.uniform(0.3, 4.0), thaw)

    def _cut(self, name: str) -> None:
        """All connections to the learner break; for a while none can be made."""
        if self.link.cut():
            self.counts["links to the learner cut"] += 1
        self.link.refuse(True)
        self._later(self.rng.uniform(0.0, 2.0), lambda: self.link.refuse(False))

    def _fill(self, name: str) -> None:
        disk = self.disks.get(name)
        if disk is None or not disk.is_mounted:
            return
        disk.fill()
        self.counts["disk full"] += 1
        self._later(self.rng.uniform(0.5, 3.0), disk.free)

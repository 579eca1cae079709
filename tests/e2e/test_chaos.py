"""Real processes under kill -9, SIGSTOP, cut links and full disks: what the run's history must say afterwards.

`Chaos.run` strikes until the learner ends; a process that is down is started again with the same command. Counts say
what was done. Guarantees: same seed, same order of strikes (their effect depends on the machine's timing).
"""

import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from echo2.base.errors import Unreachable
from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import Rollout
from echo2.learner.rollouts.journal import read_journal
from echo2.wire.gen.echo2.v1.journal_pb2 import JournalRecord
from echo2.wire.rollout import rollout_from_message
from echo2.worker.control import ask
from tests.e2e.cluster import Cluster

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


# ---- A TCP forwarder between real processes whose links a test may cut, stall or refuse


class Forwarder(socketserver.ThreadingTCPServer):
    """Listens on `port` and forwards each connection to `target_port`, in threads of its own, until `close`."""

    daemon_threads = True

    def __init__(self, target_port: int) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.port: int = self.server_address[1]
        self._target = ("127.0.0.1", target_port)
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._is_refusing = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """One connection to its end. While refusing, new ones are ended at once."""
        with contextlib.suppress(OSError):
            if self._is_refusing:
                return
            pair = request, socket.create_connection(self._target, timeout=2)
            pair[1].settimeout(None)
            self._pairs.add(pair)
            back = threading.Thread(target=_pump, args=pair[::-1], daemon=True)
            back.start()
            _pump(*pair)
            back.join()
            self._pairs.discard(pair)
            pair[1].close()

    def cut(self) -> int:
        pairs = list(self._pairs)
        for pair in pairs:
            _end(pair)
        return len(pairs)

    def refuse(self, is_refusing: bool) -> None:
        self._is_refusing = is_refusing

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.cut()


def _pump(near: socket.socket, far: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := near.recv(1 << 16):
            far.sendall(data)
    _end((near, far))


def _end(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with contextlib.suppress(OSError):  # it has ended already
            end.shutdown(socket.SHUT_RDWR)


class Archive:
    """Hard links to the journal's segments, made as they appear."""

    def __init__(self, journal: Path, folder: Path) -> None:
        self.journal, self.folder = journal, folder
        folder.mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        """Call it now and then while the run lasts."""
        for path in self.journal.glob("segment-*"):
            with contextlib.suppress(OSError):
                os.link(path, self.folder / path.name)

    def records(self) -> list[JournalRecord]:
        return [record for _, record in read_journal(self.folder, Step(0))[0]]


class Chaos:
    """`mean_gap_s`: between two strikes. `kinds`: what may happen."""

    def __init__(
        self, cluster: Cluster, seed: int, archive: Archive, link: Forwarder, disks: dict[str, SmallDisk],
        mean_gap_s: float,
    ) -> None:  # fmt: skip
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


# ---- what a run of real processes leaves behind, and what must be true of it


@dataclass(slots=True)
class Judged:
    """The history of a run, as its journal has it."""

    trained: dict[GroupId, Step] = field(default_factory=dict)
    groups_of: dict[Step, tuple[GroupId, ...]] = field(default_factory=dict)
    finished: dict[tuple[GroupId, int], Rollout] = field(default_factory=dict)
    dropped: set[GroupId] = field(default_factory=set)
    sizes: dict[GroupId, int] = field(default_factory=dict)
    fingerprints: dict[Version, str] = field(default_factory=dict)


def judge(records: list[JournalRecord], staleness_bound: int) -> Judged:
    """Puts the records together; fails where one contradicts another."""
    found = Judged()
    for record in records:
        match record.WhichOneof("kind"):
            case "opened":
                found.sizes[GroupId(record.opened.group.group_id)] = record.opened.group.rollout_count
            case "rollout":
                rollout = rollout_from_message(record.rollout.rollout)
                name = (rollout.group_id, rollout.index)
                known = found.finished.setdefault(name, rollout)
                assert known == rollout, f"rollout {name} was admitted twice, with other tokens"
            case "batch":
                step, names = Step(record.batch.step), tuple(GroupId(each.group_id) for each in record.batch.groups)
                assert found.groups_of.setdefault(step, names) == names, f"step {step} was drawn twice, otherwise"
                for group_id in names:
                    at = found.trained.setdefault(group_id, step)
                    assert at == step, f"group {group_id} was trained at steps {at} and {step}"
            case "closed":
                found.dropped.add(GroupId(record.closed.group_id))
            case "published" if fingerprint := record.published.fingerprint:
                version = Version(record.published.version)
                known_print = found.fingerprints.setdefault(version, fingerprint)
                assert known_print == fingerprint, f"version {version} was published with two fingerprints"
            case _:
                pass
    _judge_tokens(found, staleness_bound)
    return found


def _judge_tokens(found: Judged, staleness_bound: int) -> None:
    for group_id, step in found.trained.items():
        assert group_id not in found.dropped, f"group {group_id} was dropped and trained"
        for index in range(found.sizes[group_id]):
            rollout = found.finished.get((group_id, index))
            assert rollout is not None, f"step {step} trained rollout {index} of {group_id}, which was never admitted"
            for span in rollout.version_spans:
                assert 0 <= step - span.version <= staleness_bound, (
                    f"step {step} trained a token of version {span.version}"
                )


def nothing_is_lost(found: Judged, still_open: set[GroupId], last_step: int) -> None:
    """Every admitted rollout was trained, dropped for a stated reason, or was still waiting at the end."""
    assert sorted(found.groups_of) == list(range(last_step)), "a step is missing from the journal"
    for group_id, index in found.finished:
        is_known = group_id in found.trained or group_id in found.dropped or group_id in still_open
        assert is_known, f"rollout {index} of {group_id} was admitted and is neither trained, dropped nor waiting"


# ---- a run

STALENESS_BOUND = 4
GROUPS_PER_STEP = 12


def chaotic_run(
    tmp_path: Path, run_config: str, seed: int, steps: int, mean_gap_s: float, within_s: float
) -> Counter[str]:
    """One run under chaos, judged; returns what was done to it."""
    port = int(re.findall(r"\[learner\]\nport = (\d+)", run_config)[0])
    link = Forwarder(port)
    config = run_config.replace("steps = 30", f'steps = {steps}\nadvertise = "127.0.0.1:{link.port}"')
    config += f"[staleness]\nbound = {STALENESS_BOUND}\n"
    cluster = Cluster(tmp_path, config, workers=2)
    disks = {
        "w0": SmallDisk(cluster.run_folder / "workers" / "w0", "160m"),
        "learner": SmallDisk(cluster.run_folder / "learner", "256m"),
    }
    archive_folder = cluster.run_folder / "learner" / "archive"
    chaos: Chaos | None = None
    try:
        with cluster:
            cluster.start_all()
            archive = Archive(cluster.run_folder / "learner" / "journal", archive_folder)
            chaos = Chaos(cluster, seed, archive, link, disks, mean_gap_s)
            cluster.wait_until(lambda: cluster.step() >= 2, "the first steps", within_s)
            chaos.run(steps, within_s / 2, within_s)
            held = held_bits(cluster, steps)
            assert cluster.wait("learner") == 0, cluster.log("learner")[-3000:]
            archive.look()
            found = judge_run(cluster, archive, steps)
            for version, fingerprint in held:
                assert fingerprint == found.fingerprints[Version(version)], f"version {version} is not the learner's"
            return chaos.counts
    finally:
        if chaos is not None:
            print(json.dumps({**chaos.counts, "optimiser steps": cluster.step()}))
        link.close()
        for disk in disks.values():
            disk.unmount()


def held_bits(cluster: Cluster, steps: int) -> set[tuple[int, str]]:
    """While the finished learner serves its last version: versions and the fingerprints that the workers' engines prove.

    A finished learner waits for the workers that are connected. One that was being started again at that moment keeps what
    it has, if anything; at least one has the last version.
    """
    homes = [cluster.run_folder / "workers" / name for name in cluster.commands if name[0] == "w"]
    held: dict[Path, tuple[int, str] | None] = {}

    def all_there() -> bool:
        is_over = cluster.processes["learner"].poll() is not None
        for home in set(homes) - set(held):
            with contextlib.suppress(Unreachable):  # it has just been started
                answer = asyncio.run(ask(home, "status"))
                version, fingerprint = answer.get("version"), answer.get("fingerprint")
                if version is None and is_over:
                    held[home] = None
                elif fingerprint and (version == steps or is_over):
                    held[home] = (int(version), str(fingerprint))
        return len(held) == len(homes)

    cluster.wait_until(all_there, f"version {steps} on every worker that was there at the end")
    found = {one for one in held.values() if one is not None}
    assert steps in {version for version, _ in found}, f"no worker holds the last version: {found}"
    return found


def judge_run(cluster: Cluster, archive: Archive, steps: int) -> Judged:
    found = judge(archive.records(), STALENESS_BOUND)
    newest = max((cluster.run_folder / "learner" / "checkpoints").glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    assert state["step"] == steps
    ledger = {GroupId(name): step for name, step in state["groups"]["trained"].items()}
    assert ledger == found.trained, "the ledger and the journal tell different histories"
    open_groups = set(found.sizes) - set(found.trained) - found.dropped
    nothing_is_lost(found, open_groups, steps)
    assert Counter(ledger.values()) == dict.fromkeys(range(steps), GROUPS_PER_STEP)
    assert len(open_groups) <= (STALENESS_BOUND + 1) * GROUPS_PER_STEP, "admitted groups pile up untrained"
    evaluations = {row["step"]: row["eval/reward"] for row in cluster.evaluations()}
    first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
    assert max(evaluations) == steps and last > first + 0.03, f"the reward does not rise: {evaluations}"
    return found


@pytest.mark.soak
def test_long_chaos(tmp_path: Path, run_config: str) -> None:
    """`CHAOS_SEED` and `CHAOS_STEPS` choose, `CHAOS_WITHIN_S` bounds; what was done is printed, also when it fails."""
    seed, steps = int(os.environ.get("CHAOS_SEED", "7")), int(os.environ.get("CHAOS_STEPS", "150"))
    within_s = float(os.environ.get("CHAOS_WITHIN_S", "600"))
    chaotic_run(tmp_path, run_config, seed, steps=steps, mean_gap_s=2.0, within_s=within_s)

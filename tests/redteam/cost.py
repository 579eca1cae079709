"""What an attack costs the daemons of a real run, read from the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, coordinator_pb2_grpc
from tests.e2e.cluster import ROOT, Cluster, environment_of, small_run
from tests.redteam.scene import Scene, last_step
from tests.unit.learner.tiny import make_tiny_model

DAEMONS = ("coordinator", "learner", "w0")
PROBE_PAUSE_S = 0.1
ANSWER_S = 20.0
INSIDE = Path(__file__).parent / "inside"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def held_bytes(cluster: Cluster) -> dict[str, int]:
    alive = {name: cluster.processes[name].pid for name in DAEMONS if cluster.processes[name].poll() is None}
    return {name: resident_bytes(pid) for name, pid in alive.items()}


def idle_run(folder: Path) -> str:
    """The configuration of a run that does not end and has little work: what it costs meanwhile is the attack."""
    model = make_tiny_model(folder / "model")
    config = small_run(folder, model, steps=100_000, prompts=2, rollouts=2, eval_prompts=2, eval_every_steps=100_000)
    return config + "emulated_step = 3.0\n"


def count_live_bytes(cluster: Cluster) -> None:
    """Before its daemons start: `live_bytes` can be asked of them. All that Python allocates is glibc's then."""
    folder = cluster.folder / "live"
    folder.mkdir()
    with_it = ["env", f"PYTHONPATH={INSIDE}:{ROOT}", "PYTHONMALLOC=malloc", f"LIVE_BYTES_IN={folder}"]
    cluster.placed = lambda name, argv: [*with_it, *argv]


def live_bytes(cluster: Cluster) -> dict[str, int]:
    """Allocated and not freed, by daemon."""
    files = {name: cluster.folder / "live" / str(cluster.processes[name].pid) for name in DAEMONS}
    for name, path in files.items():
        path.unlink(missing_ok=True)
        os.kill(cluster.processes[name].pid, signal.SIGUSR2)
    until = time.monotonic() + ANSWER_S
    while not all(path.exists() for path in files.values()):
        assert time.monotonic() < until, "a daemon does not say what it holds"
        time.sleep(0.05)  # a real process has no virtual clock
    return {name: int(path.read_text()) for name, path in files.items()}


def loop_cpu_s(pid: int) -> float:
    """Of the thread that runs the loop, to the nanosecond."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


@dataclass
class Cost:
    """Of one window, by daemon. `kept_bytes`: in RAM; `live_bytes`: allocated, where it was asked; `held_ms`: the most that the
    loop's thread worked between a call and its answer."""

    messages: int = 0
    kept_bytes: dict[str, int] = field(default_factory=dict)
    live_bytes: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    held_ms: dict[str, float] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    steps: int = 0
    passed_s: float = 0.0

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.passed_s

    @property
    def steps_per_cpu_s(self) -> float:
        return self.steps / max(1e-9, sum(self.cpu_s.values()))

    def spent_cores(self, daemon: str, *quiet: Cost) -> float:
        """Of a daemon, on the attack: all that its steps do not explain, or, of the coordinator, the time that has passed."""
        quiet_s = sum(cost.cpu_s[daemon] for cost in quiet)
        if daemon == "coordinator":
            honest_s = quiet_s / sum(cost.passed_s for cost in quiet) * self.passed_s
        else:
            honest_s = quiet_s / max(1, sum(cost.steps for cost in quiet)) * self.steps
        return max(0.0, self.cpu_s[daemon] - honest_s) / self.passed_s


class Attacking:
    """An attacker's process; `for_s` makes it attack."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, seconds: float) -> None:
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    async def count(self) -> int:
        return int(await asyncio.to_thread(self.line) or "0")

    def line(self) -> str:
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def attacking(cluster: Cluster, name: str, core: int | None = None) -> Iterator[Attacking]:
    """An attacker by name, ready to begin, on a core of its own where one is named."""

    where = ["taskset", "-c", str(core)] if core is not None else []
    command = [*where, sys.executable, "-m", "tests.redteam.attacking", str(cluster.run_folder), name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment_of(cluster.folder),
    ) as process:  # fmt: skip
        try:
            attack = Attacking(process)
            assert attack.line() == "ready", name
            yield attack
        finally:
            process.kill()


async def _probe(scene: Scene, pid: int, cost: Cost) -> None:
    """An honest operator that asks again and again."""
    async with scene.channel(scene.coordinator, scene.identity(Role.OPERATOR)) as channel:
        stub = coordinator_pb2_grpc.OperatorStub(channel)
        held: list[float] = []
        while True:
            before = loop_cpu_s(pid)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.GetStatus(pb.GetStatusRequest(), timeout=10)
                held.append(loop_cpu_s(pid) - before)
            cost.held_ms["coordinator"] = 1e3 * sorted(held)[max(0, int(0.99 * len(held)) - 1)] if held else 0.0
            await asyncio.sleep(PROBE_PAUSE_S)


async def cost_of(cluster: Cluster, scene: Scene, attack: Attacking | None, seconds: float) -> Cost:
    """The run for so long, with an attacker or without; memory is looked at once it has settled."""
    cost, pids = Cost(), {name: cluster.processes[name].pid for name in DAEMONS}
    probing = asyncio.create_task(_probe(scene, pids["coordinator"], cost))
    kept = {name: resident_bytes(pid) for name, pid in pids.items()}
    spent = {name: cpu_seconds(pid) for name, pid in pids.items()}
    loop = asyncio.get_running_loop()
    begun, step = loop.time(), last_step(scene.folder)
    try:
        if attack is None:
            await asyncio.sleep(seconds)
        else:
            attack.start(seconds)
            cost.messages = await attack.count()
    finally:
        cost.passed_s, cost.steps = loop.time() - begun, last_step(scene.folder) - step
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    cost.ended = [name for name in DAEMONS if cluster.processes[name].poll() is not None]
    for name, pid in pids.items():
        if name not in cost.ended:
            cost.kept_bytes[name] = resident_bytes(pid) - kept[name]
            cost.cpu_s[name] = cpu_seconds(pid) - spent[name]
    return cost

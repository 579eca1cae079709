"""A real run under attack: its daemons are processes of their own, and what an attack costs them is read from the kernel.

Registered attackers (`@attacker("name")`) get a `Scene` and a time at which to stop; they say how many messages they sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from echo2.base.ids import GroupId, PeerId, RunId
from echo2.coordinator.lease_events import lease_id_of
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.runtime import tls
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import coordinator_pb2_grpc, rollout_pb2
from echo2.wire.ticket import Ticket, sign_ticket
from tests.e2e.cluster import Cluster
from tests.redteam.grammar import Grammar

DAEMONS = ("coordinator", "learner", "w0")
PROBE_PAUSE_S = 0.1


@dataclass
class Target:
    """A port and who listens there."""

    address: str
    peer_id: PeerId


@dataclass
class Scene:
    """What a worker with a join link may know of the run. Certificates are issued here, as enrolment would."""

    cluster: Cluster
    authority: RunAuthority
    coordinator: Target
    enrolment: str
    learner: Target
    worker: Target
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def run_id(self) -> RunId:
        return self.authority.run_id

    def identity(self, role: Role = Role.WORKER) -> tls.Credentials:
        identity, key = Identity.generate(), TlsKey.generate()
        certificate = self.authority.issue(certificate_request(identity, key), role, time.time())
        return tls.Credentials(
            identity, key.to_pem(), certificate, self.authority.certificate_pem, self.run_id,
            self.authority.identity.peer_id, self.coordinator.address,
        )  # fmt: skip

    def channel(self, target: Target, credentials: tls.Credentials) -> grpc.aio.Channel:
        return tls.open_channel(target.address, target.peer_id, credentials, [("grpc.use_local_subchannel_pool", 1)])

    def grammar(self, worker: PeerId) -> Grammar:
        """It knows the ids of the run, and holds tickets of groups that are open about now."""
        step = self.cluster.step()
        groups = [GroupId(f"g{number:08d}") for number in range(max(0, 12 * step - 12), 12 * step + 24)]
        return Grammar(
            self.rng, [self.run_id, worker, *groups[:8], lease_id_of(groups[0], 1)],
            tickets=[self.ticket(worker, group) for group in groups[:12]],
        )  # fmt: skip

    def ticket(self, worker: PeerId, group: GroupId, attempt: int = 1) -> rollout_pb2.LeaseTicket:
        one = Ticket(lease_id_of(group, attempt), group, worker, attempt, time.time() + 60, self.run_id)
        return sign_ticket(one, self.authority.identity)


Attacker = Callable[[Scene, float], Awaitable[int]]
ATTACKERS: dict[str, Attacker] = {}


def attacker(name: str) -> Callable[[Attacker], Attacker]:
    """Registers one: `await attack(scene, until)` stops at loop time `until` and says how many messages it sent."""

    def register(attack: Attacker) -> Attacker:
        ATTACKERS[name] = attack
        return attack

    return register


async def scene_of(cluster: Cluster, config: str) -> Scene:
    """Once the fleet works: the worker has joined and a step was made."""
    keys = cluster.run_folder / "coordinator"
    identity = tls.load_or_create_identity(keys)
    authority = RunAuthority(
        identity, TlsKey.from_pem(tls.read_secret(keys / "authority.key")), (keys / "authority.pem").read_bytes()
    )
    ports = {name: int(port) for name, port in re.findall(r"^(enrol_port|port) = (\d+)", config, re.M)}
    services, learner = (int(port) for port in re.findall(r"^port = (\d+)", config, re.M))
    coordinator = Target(f"127.0.0.1:{services}", identity.peer_id)
    scene = Scene(
        cluster, authority, coordinator, f"127.0.0.1:{ports['enrol_port']}", Target(f"127.0.0.1:{learner}", PeerId("")),
        Target("", PeerId("")),
    )  # fmt: skip
    operator = scene.identity(Role.OPERATOR)
    async with scene.channel(coordinator, operator) as channel:
        stub = coordinator_pb2_grpc.OperatorStub(channel)
        status = await stub.GetStatus(pb.GetStatusRequest())
    (worker,) = status.workers
    scene.worker = Target(worker.hello.addresses[0], PeerId(worker.peer_id))
    folder = cluster.run_folder / "learner" / "node"
    scene.learner.peer_id = tls.load_or_create_identity(folder).peer_id
    return scene


# ---- what it costs


def _kernel(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def rss_bytes(pid: int) -> int:
    return int(_kernel(pid, "statm").split()[1]) * 4096


def cpu_s(pid: int) -> float:
    """Of all threads."""
    user, system = _kernel(pid, "stat").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / 100


def loop_cpu_s(pid: int) -> float:
    """Of the thread that runs the loop, to the nanosecond."""
    return int(_kernel(pid, f"task/{pid}/schedstat").split()[0]) / 1e9


@dataclass
class Cost:
    """Of one attack, by daemon. `held_ms`: the most that the loop's thread worked between a call and its answer."""

    messages: int = 0
    kept_bytes: dict[str, int] = field(default_factory=dict)
    cpu_share: dict[str, float] = field(default_factory=dict)
    held_ms: dict[str, float] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    steps_per_s: float = 0.0


async def _probe(scene: Scene, cost: Cost) -> None:
    """An honest operator that asks again and again."""
    pid = scene.cluster.processes["coordinator"].pid
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


async def cost_of(scene: Scene, attack: Attacker | None, seconds: float) -> Cost:
    """The run for so long, with an attacker or without; memory is looked at once it has settled."""
    cost, pids = Cost(), {name: scene.cluster.processes[name].pid for name in DAEMONS}
    kept = {name: rss_bytes(pid) for name, pid in pids.items()}
    spent = {name: cpu_s(pid) for name, pid in pids.items()}
    loop = asyncio.get_running_loop()
    begun, step = loop.time(), scene.cluster.step()
    probing = asyncio.create_task(_probe(scene, cost))
    try:
        if attack is None:
            await asyncio.sleep(seconds)
        else:
            cost.messages = await attack(scene, begun + seconds)
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    passed_s = loop.time() - begun
    cost.steps_per_s = (scene.cluster.step() - step) / passed_s
    cost.ended = [name for name in DAEMONS if scene.cluster.processes[name].poll() is not None]
    for name, pid in pids.items():
        if name not in cost.ended:
            cost.kept_bytes[name] = rss_bytes(pid) - kept[name]
            cost.cpu_share[name] = (cpu_s(pid) - spent[name]) / passed_s
    return cost


async def closed(call: Any, timeout_s: float = 5.0) -> None:
    """Waits for the other side's end of a stream, then gives it up."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            while await call.read() is not grpc.aio.EOF:
                pass
    call.cancel()

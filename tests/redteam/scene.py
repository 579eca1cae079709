"""What an attacker knows of a real run, whose daemons are processes of their own.

Registered attackers (`@attacker("name")`) get a `Scene` and a time at which to stop; they say how many messages they sent.
"""

import asyncio
import contextlib
import json
import random
import time
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from echo2.base.ids import GroupId, PeerId, RunId
from echo2.broadcast.node import port_beside
from echo2.coordinator.leases.lease import lease_id_of
from echo2.trust import tls
from echo2.trust.identity import Role, RunAuthority, TlsKey
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, coordinator_pb2_grpc, rollout_pb2
from echo2.wire.rollout import Ticket, sign_ticket
from tests.certificates import issued
from tests.redteam.grammar import Grammar


@dataclass
class Target:
    """A port and who listens there."""

    address: str
    peer_id: PeerId


@dataclass
class Scene:
    """What a worker with a join link may know of the run. Certificates are issued here, as enrolment would."""

    folder: Path
    authority: RunAuthority
    coordinator: Target
    enrolment: str
    learner: Target
    learner_node: Target
    worker: Target
    page_port: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def run_id(self) -> RunId:
        return self.authority.run_id

    def identity(self, role: Role = Role.WORKER) -> tls.Credentials:
        return issued(self.authority, role, self.coordinator.address)

    def channel(self, target: Target, credentials: tls.Credentials) -> grpc.aio.Channel:
        return tls.open_channel(target.address, target.peer_id, credentials, [("grpc.use_local_subchannel_pool", 1)])

    def grammar(self, worker: PeerId) -> Grammar:
        """It knows the ids of the run, and holds tickets of groups that are open about now."""
        step = last_step(self.folder)
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


async def scene_of(folder: Path) -> Scene:
    """Of the run in this folder, once the fleet works: the worker has joined and a step was made."""
    keys = folder / "coordinator"
    identity = tls.load_or_create_identity(keys)
    key = TlsKey.from_pem(tls.read_secret(keys / "authority.key"))
    authority = RunAuthority(identity, key, (keys / "authority.pem").read_bytes())
    config = tomllib.loads((folder / "run.toml").read_text())
    ports = config["coordinator"]
    coordinator = Target(f"127.0.0.1:{ports['port']}", identity.peer_id)
    learner, port = tls.load_or_create_identity(folder / "learner" / "node").peer_id, config["learner"]["port"]
    scene = Scene(
        folder, authority, coordinator, f"127.0.0.1:{ports['enrol_port']}", Target(f"127.0.0.1:{port}", learner),
        Target(f"127.0.0.1:{port_beside(port)}", learner), Target("", PeerId("")), ports["dashboard_port"],
    )  # fmt: skip
    operator = scene.identity(Role.OPERATOR)
    async with scene.channel(coordinator, operator) as channel:
        stub = coordinator_pb2_grpc.OperatorStub(channel)
        status = await stub.GetStatus(pb.GetStatusRequest())
    (worker,) = [one for one in status.workers if one.hello.name == "w0"]  # attackers leave some
    scene.worker = Target(worker.hello.addresses[0], PeerId(worker.peer_id))
    return scene


def last_step(folder: Path) -> int:
    """That the learner of this run has finished."""
    path = folder / "learner" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return int(json.loads(whole[-1])["step"]) if whole else 0


async def closed(call: Any, timeout_s: float = 5.0) -> None:
    """Waits for the other side's end of a stream, then gives it up."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            while await call.read() is not grpc.aio.EOF:
                pass
    call.cancel()

"""A fleet that is all talk: real gRPC streams of simulated workers and a simulated learner against a real coordinator.

Certificates are issued straight from the run's authority in the coordinator's folder, so that thousands of workers are
there in seconds. Workers ask for leases, report progress, finish, and send heartbeats with telemetry; the learner offers
groups, closes what was made and reports steps. The time from a lease request to its grant is noted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.coordinator_history import History
from echo2.base.clock import Backoff
from echo2.base.ids import PeerId, RunId
from echo2.trust import tls
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, coordinator_pb2_grpc, rollout_pb2

GROUP_SIZE = 8
OPENING_MAX = 48
"""Handshakes at a time: the fleet's half of them would be made on its own machines, here it shares the coordinator's."""
FOREIGN = "the lease has gone to another worker or its group is closed"
GPUS = (("RTX 4090", 0.34, 1.0), ("A100 80GB", 1.19, 2.2), ("H100", 2.49, 4.1), ("RTX 3090", 0.19, 0.6))


class Issuer:
    """Hands out certificates of the run; one TLS key serves all, each identity vouches for it."""

    def __init__(self, folder: Path, run_id: RunId, address: str) -> None:
        keys = folder / "coordinator"
        identity = tls.load_or_create_identity(keys)
        self._authority: RunAuthority = tls.load_or_create_authority(keys, identity, run_id)
        self._key, self._address = TlsKey.generate(), address

    def credentials(self, role: Role, identity: Identity | None = None) -> tls.Credentials:
        identity = identity or Identity.generate()
        certificate = self._authority.issue(certificate_request(identity, self._key), role, time.time())
        return tls.Credentials(
            identity, self._key.to_pem(), certificate, self._authority.certificate_pem, self._authority.run_id,
            self._authority.identity.peer_id, self._address,
        )  # fmt: skip


@dataclass
class Ledger:
    """What the simulated parts know together. `grant_s`: from each lease request to its grant."""

    grant_s: list[float] = field(default_factory=list)
    history: History = field(default_factory=History)
    connected: set[PeerId] = field(default_factory=set)
    version: int = 0
    step: int = 0
    heartbeats: int = 0
    refused: list[str] = field(default_factory=list)
    """The workers that the coordinator would not have any more, with its words; they end."""
    closable: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while groups are made and offered; without it only heartbeats are sent, and what was made is closed."""
    opening: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(OPENING_MAX))


class SimWorker:
    """Takes leases one at a time and finishes each after about `work_s`; goes on working while it has no stream."""

    def __init__(self, index: int, credentials: tls.Credentials, ledger: Ledger, work_s: float, beat_s: float) -> None:
        self.index, self.credentials, self.ledger, self.work_s, self.beat_s = index, credentials, ledger, work_s, beat_s
        self.rng = random.Random(index)
        self.gpu, self.price, self.speed = GPUS[index % len(GPUS)]
        self.name = f"{self.gpu.split()[-1].lower()}-{index:04d}"
        self.peer_id = credentials.peer_id
        self.held: dict[str, rollout_pb2.LeaseTicket] = {}
        self.asked_at: float | None = None
        self.is_active, self.is_first, self.is_refused = True, True, False
        self.tokens = self.finished = 0
        self.born = time.time()
        self._call: Any = None
        self._said: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._work_tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Keeps a stream until cancelled, or refused."""
        backoff = Backoff(self.rng)
        try:
            while True:
                channel = tls.open_channel(
                    self.credentials.coordinator_address, self.credentials.coordinator_peer_id, self.credentials
                )
                try:
                    async with channel:
                        async with self.ledger.opening:
                            self._call = coordinator_pb2_grpc.CoordinatorStub(channel).WorkerSession()
                            await self._call.write(pb.WorkerMessage(hello=self._hello()))
                            welcome = await self._call.read()
                        await self._talk(welcome, backoff)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass
                finally:
                    self._call, self.asked_at = None, None
                    self.ledger.connected.discard(self.peer_id)
                if self.is_refused:
                    return
                await asyncio.sleep(backoff.next_pause_s())
        finally:
            for task in self._work_tasks.values():
                task.cancel()

    def _write(self, message: pb.WorkerMessage) -> None:
        """Says it if there is a stream; what is lost with one, the coordinator must find out."""
        if self._call is not None:
            self._said.put_nowait(message)

    async def _writes(self) -> None:
        """One task writes: a write that is cancelled would end the stream."""
        while True:
            await self._call.write(await self._said.get())

    async def _talk(self, order: Any, backoff: Backoff) -> None:
        """From the first answer to the end of the stream."""
        self._said = asyncio.Queue()
        tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._writes())]
        try:
            while order is not grpc.aio.EOF:  # type: ignore[attr-defined]
                match order.WhichOneof("kind"):
                    case "welcome":
                        backoff.succeeded()
                        self.ledger.history.is_welcomed(self.peer_id)
                        self.ledger.connected.add(self.peer_id)
                    case "activation":
                        self.is_active = order.activation.is_active
                        self._ask()
                    case "lease_grant":
                        self._granted(order.lease_grant)
                    case "lease_revoke":
                        self._revoked(order.lease_revoke)
                    case "refusal":
                        self.is_refused = True
                        self.ledger.refused.append(f"{self.name}: {order.refusal.code}: {order.refusal.message}")
                        return
                order = await self._call.read()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _hello(self) -> pb.WorkerHello:
        rng = random.Random(self.index)
        up = 12.5e6 * rng.uniform(0.4, 4)
        return pb.WorkerHello(
            protocol_version=2, name=self.name, run_id=self.credentials.run_id, slot_count=GROUP_SIZE, gpu=self.gpu,
            engine="simulated", provider=("vast", "runpod", "own")[self.index % 3], price_usd_per_hour=self.price,
            is_spot=self.index % 3 == 0, addresses=[f"10.0.{self.index // 250}.{self.index % 250}:7000"],
            link=pb.Link(uplink_bytes_per_s=up, downlink_bytes_per_s=4 * up, rtt_s=rng.uniform(0.01, 0.12)),
            region=("eu-nl", "us-tx", "")[self.index % 3], held_tickets=list(self.held.values()),
        )  # fmt: skip

    def _granted(self, grant: pb.LeaseGrant) -> None:
        ticket = grant.ticket
        is_news = self.ledger.history.is_granted(
            ticket.lease_id, ticket.group_id, self.peer_id, ticket.attempt, ticket.deadline_unix_s
        )
        if not is_news:
            return
        if self.asked_at is not None:
            self.ledger.grant_s.append(time.monotonic() - self.asked_at)
            self.asked_at = None
        self.held[ticket.lease_id] = ticket
        self._work_tasks[ticket.lease_id] = asyncio.create_task(self._work(ticket))

    def _revoked(self, revoke: pb.LeaseRevoke) -> None:
        """Hands it back with all its tokens, as a worker does whatever the reason."""
        self.ledger.history.is_revoked(revoke.lease_id, is_foreign=revoke.reason.startswith(FOREIGN))
        if self.held.pop(revoke.lease_id, None) is not None:
            self._work_tasks.pop(revoke.lease_id).cancel()
            ended = pb.LeaseEnded(lease_id=revoke.lease_id, reason=pb.LeaseEnded.REASON_HANDED_BACK)
            self._write(pb.WorkerMessage(lease_ended=ended))
        self._ask()

    async def _work(self, ticket: rollout_pb2.LeaseTicket) -> None:
        parts = 3
        share = self.rng.random() if self.is_first else self.rng.uniform(0.7, 1.3)  # not all at the same time
        self.is_first = False
        for part in range(parts):
            await asyncio.sleep(share * self.work_s / parts / self.speed)
            await self.ledger.goes_on.wait()
            self.tokens += 1200 // parts
            progress = pb.LeaseProgress(lease_id=ticket.lease_id, finished_rollouts=part, tokens=400 * (part + 1))
            self._write(pb.WorkerMessage(lease_progress=progress))
        if self.held.pop(ticket.lease_id, None) is None:
            return
        self._work_tasks.pop(ticket.lease_id, None)
        self.finished += GROUP_SIZE
        self.ledger.history.has_ended(ticket.lease_id)
        if self.ledger.history.is_admitted(ticket.group_id, ticket.attempt):  # straight to the learner
            self.ledger.closable.put_nowait(ticket.group_id)
        ended = pb.LeaseEnded(lease_id=ticket.lease_id, reason=pb.LeaseEnded.REASON_FINISHED)
        self._write(pb.WorkerMessage(lease_ended=ended))
        self._ask()

    def _ask(self, again: bool = False) -> None:
        """A request, and `again` at each heartbeat with the version of then while nothing has come."""
        if not self.is_active or self.held or self._call is None or (self.asked_at is not None and not again):
            return
        if not self.ledger.goes_on.is_set():
            return
        self.asked_at = self.asked_at or time.monotonic()
        self._write(
            pb.WorkerMessage(lease_request=pb.LeaseRequest(free_rollouts=GROUP_SIZE, version=self.ledger.version))
        )

    def _log(self) -> pb.LogTail:
        text = "<b>learner</b>: no answer for 12 s; trying again in 4 s"
        return pb.LogTail(
            lines=[pb.LogLine(unix_s=self.born, text=text), pb.LogLine(unix_s=self.born, is_error=True, text=text)]
        )

    async def _beat(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, self.beat_s))
        while True:
            rate = GROUP_SIZE * self.speed / self.work_s
            held = self.rng.randint(0, 40)
            beat = pb.Heartbeat(
                version=max(0, self.ledger.version - 2 * (self.index % 7 == 6)), has_version=True,
                running_sequences=len(self.held) * GROUP_SIZE,
                sampled_tokens=self.tokens, finished_rollouts=self.finished, rollouts_per_s=rate,
                tokens_per_s=150 * rate,
                rollout_s_mean=self.work_s / self.speed, rollout_s_p95=1.3 * self.work_s / self.speed, swap_s=0.02,
                apply_s=0.05, newest_chunk_count=40, newest_chunks_held=40 if self.index % 4 else held,
                newest_version_in_flight=self.ledger.version, log=self._log() if self.index % 5 == 4 else None,
            )  # fmt: skip
            self._write(pb.WorkerMessage(heartbeat=beat))
            self.ledger.heartbeats += self._call is not None
            self._ask(again=True)
            await asyncio.sleep(self.beat_s * self.rng.uniform(0.95, 1.05))


class SimLearner:
    """Keeps `open_groups` groups open at a rate of at most `groups_per_s`, and pretends a rising reward."""

    def __init__(self, credentials: tls.Credentials, ledger: Ledger, open_groups: int, groups_per_s: float) -> None:
        self.credentials, self.ledger = credentials, ledger
        self.step_s = 24 / groups_per_s  # a step takes 24 groups
        self.open_groups, self.groups_per_s = open_groups, groups_per_s
        self.open: dict[str, rollout_pb2.GroupSpec] = {}
        self.made = 0
        self._call: Any = None
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        while True:
            channel = tls.open_channel(
                self.credentials.coordinator_address, self.credentials.coordinator_peer_id, self.credentials
            )
            try:
                async with channel:
                    await self._talk(channel)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            await asyncio.sleep(0.3)

    async def _write(self, message: pb.LearnerMessage) -> None:
        async with self._writing:
            await self._call.write(message)

    async def _talk(self, channel: grpc.aio.Channel) -> None:
        self._call, self._writing = coordinator_pb2_grpc.CoordinatorStub(channel).LearnerSession(), asyncio.Lock()
        hello = pb.LearnerHello(
            protocol_version=2, run_id=self.credentials.run_id, address="10.1.0.1:7000",
            model_name="Qwen3-8B (simulated)",
            model_digest="5" * 64, staleness_bound=4, rollouts_per_step=24 * GROUP_SIZE, rollouts_per_group=GROUP_SIZE,
            step=self.ledger.step, newest_version=self.ledger.version,
            open_groups=[group for name, group in self.open.items() if name not in self.ledger.history.admitted],
            full_snapshot_bytes=16_400_000_000, step_limit=400,
            link=pb.Link(uplink_bytes_per_s=125e6, downlink_bytes_per_s=125e6, rtt_s=0.02),
        )  # fmt: skip
        await self._write(pb.LearnerMessage(hello=hello))
        tasks = [asyncio.create_task(self._offer()), asyncio.create_task(self._step())]
        try:
            while (order := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if order.WhichOneof("kind") == "wanted":
                    await self._write(pb.LearnerMessage(shown=self._shown(order.wanted)))
                if order.WhichOneof("kind") == "refusal":
                    raise SystemExit(f"the learner was refused: {order.refusal.code}: {order.refusal.message}")
        finally:
            for task in tasks:
                task.cancel()

    def _shown(self, wanted: pb.RolloutsWanted) -> pb.RolloutsShown:
        """Rollouts as hostile models might write them."""
        step, hostile = self.ledger.step, "<img src=x onerror=alert(1)> 1 + 2 =\n3 "
        rollouts = [
            pb.RolloutSummary(
                rollout_id=f"g{index}/0", step=step, reward=index / 8, token_count=600, oldest_version=max(0, step - 2),
                newest_version=step, finish_reason="stop", completion=hostile * 4, turn_count=3, peer_ids=["a" * 20, "b" * 20],
            )
            for index in range(8)
        ]  # fmt: skip
        if not wanted.rollout_id:
            return pb.RolloutsShown(request=wanted.request, rollouts=rollouts)
        tokens = [
            pb.TokenShown(
                token_id=place, text=hostile[place % len(hostile)], logprob=-(place % 5), version=step - (place < 300),
                peer=place // 200,
            )
            for place in range(wanted.offset, min(600, wanted.offset + 512))
        ]  # fmt: skip
        turns = [pb.TurnShown(turn=2, position=200, text=hostile * 3), pb.TurnShown(turn=3, position=400)]
        turns = [turn for turn in turns if wanted.offset <= turn.position]
        return pb.RolloutsShown(
            request=wanted.request, rollouts=rollouts[:1], tokens=tokens, prompt=hostile, turns=turns
        )

    async def _offer(self) -> None:
        pause_s = 0.1
        while True:
            closed = []
            while not self.ledger.closable.empty():
                closed.append(self.ledger.closable.get_nowait())
            for group_id in closed:
                self.open.pop(group_id, None)
            if closed:
                self.ledger.history.is_closed(closed)
                await self._write(pb.LearnerMessage(close=pb.CloseGroups(group_ids=closed, reason="complete")))
            await self.ledger.goes_on.wait()
            room = min(self.open_groups - len(self.open), max(1, int(2 * self.groups_per_s * pause_s)))
            fresh = [self._group() for _ in range(max(0, room))]
            if fresh:
                self.ledger.history.is_offered(group.group_id for group in fresh)
                await self._write(pb.LearnerMessage(offer=pb.OfferGroups(groups=fresh)))
            await asyncio.sleep(pause_s)

    def _group(self) -> rollout_pb2.GroupSpec:
        self.made += 1
        sampling = rollout_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=512)
        group = rollout_pb2.GroupSpec(
            group_id=f"g{self.made}", prompt_token_ids=range(64), rollout_count=GROUP_SIZE, sampling=sampling,
            consume_step=self.ledger.step + 1,
        )  # fmt: skip
        self.open[group.group_id] = group
        return group

    async def _step(self) -> None:
        lags, rng = [0] * 5, random.Random(7)
        while True:
            await asyncio.sleep(self.step_s)
            ledger = self.ledger
            ledger.step += 1
            for lag, share in enumerate((0.18, 0.41, 0.28, 0.11, 0.02)):
                lags[lag] += int(190_000 * share)
            if ledger.step % 2 == 0:
                ledger.version = ledger.step
                published = pb.VersionPublished(
                    version=ledger.step, parent=ledger.step - 2, has_parent=ledger.step > 2, encode_s=0.1,
                    artifact_bytes=int(rng.uniform(9e6, 1.3e7)), full_snapshot_bytes=16_400_000_000,
                )  # fmt: skip
                await self._write(pb.LearnerMessage(published=published))
            report = pb.LearnerReport(
                step=ledger.step, newest_version=ledger.version, train_s=0.9 * self.step_s, wait_s=0.03,
                reward_mean=0.85 * (1 - 0.985**ledger.step) + rng.uniform(-0.03, 0.03), buffered_rollouts=96,
                open_rollouts=len(self.open) * GROUP_SIZE, trained_rollouts=192 * ledger.step, trained_tokens=sum(lags),
                lag_histogram=lags, utilisation=min(1.0, 0.93 + rng.uniform(-0.02, 0.02)),
                eval_reward=0.85 * (1 - 0.985 ** (ledger.step // 10 * 10)),
                waits_for="rollouts of its batch" if ledger.step % 5 == 0 else "", waits_since_s=0.2,
            )  # fmt: skip
            await self._write(pb.LearnerMessage(report=report))


@dataclass(frozen=True)
class Shape:
    """How large a load, and how fast."""

    workers: int
    groups_per_s: float
    work_s: float
    beat_s: float
    open_groups: int
    joins_per_s: float = 200.0


async def run_load(folder: Path, run_id: RunId, address: str, shape: Shape, seconds: float, ledger: Ledger) -> None:
    """The whole fleet for `seconds` after the last worker has been started."""
    issuer = Issuer(folder, run_id, address)
    ledger.goes_on.set()
    learner = SimLearner(issuer.credentials(Role.LEARNER), ledger, shape.open_groups, shape.groups_per_s)
    tasks = [asyncio.create_task(learner.run())]
    for index in range(shape.workers):
        worker = SimWorker(index, issuer.credentials(Role.WORKER), ledger, shape.work_s, shape.beat_s)
        tasks.append(asyncio.create_task(worker.run()))
        if index % 20 == 19:
            await asyncio.sleep(20 / shape.joins_per_s)
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run_id")
    parser.add_argument("address")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--work-s", type=float, default=2.0)
    parser.add_argument("--groups-per-s", type=float, default=50)
    parser.add_argument("--beat-s", type=float, default=1.0)
    own = parser.parse_args()
    shape = Shape(own.workers, own.groups_per_s, own.work_s, own.beat_s, open_groups=3 * own.workers)
    asyncio.run(run_load(own.folder, RunId(own.run_id), own.address, shape, own.seconds, Ledger()))


if __name__ == "__main__":
    main()

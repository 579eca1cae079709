"""A small fleet in the test's own process: a coordinator that hands every group out, workers that sample at random.

All of it talks real gRPC over mutual TLS with the learner under test; only the policy of the workers is made up.
"""

import asyncio
import json
import math
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import torch

from echo2.base.ids import GroupId, LeaseId, PeerId, RunId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SegmentVerdict
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.node import NodeCalls
from echo2.config.run import RunConfig
from echo2.learner.learner import Learner, LearnerDaemon
from echo2.learner.options import LearnerLimits, LearnerOptions, RunFolder
from echo2.learner.rollouts.prompts import Prompts
from echo2.learner.startup import Prepared, prepare
from echo2.trust.calls import GatedServer
from echo2.trust.identity import Identity, Role, RunAuthority
from echo2.trust.ports import LEARNER
from echo2.trust.tls import (
    bind_server,
    coordinator_credentials,
    load_or_create_identity,
    new_server,
    open_channel,
    save_credentials,
    server_credentials,
)
from echo2.weights import ContainerDecoder, DeltaHeader, FrameReader, HostWeights, parse_frame
from echo2.weights.container import HeaderFrame
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, coordinator_pb2_grpc, ingest_pb2, ingest_pb2_grpc
from echo2.wire.rollout import Ticket, group_from_message, rollout_to_message, sign_ticket, verdicts_from_message
from tests.certificates import issued
from tests.patience import WAIT_S
from tests.unit.learner.made import RESOLVED, rollout_of

RUN = RunId("test-run")


def new_authority() -> RunAuthority:
    return RunAuthority.create(Identity.generate(), RUN, time.time())


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Welcomes the learner, sends one plan, keeps what it is told."""

    def __init__(self, authority: RunAuthority, plan: coordinator_pb2.PlanUpdate | None = None) -> None:
        self.authority = authority
        self.plan = plan
        self.groups: dict[GroupId, GroupSpec] = {}
        self.waiting: asyncio.Queue[GroupSpec] = asyncio.Queue()
        self.offered: set[GroupId] = set()
        self.hellos: list[coordinator_pb2.LearnerHello] = []
        self.reports: list[coordinator_pb2.LearnerReport] = []
        self.accused: list[coordinator_pb2.WorkerAccused] = []
        self.left_for: list[str] = []
        self.published: list[coordinator_pb2.VersionPublished] = []
        self.closed: list[tuple[GroupId, str]] = []
        self.newest = Version(0)
        self.offers = self.reminders = 0
        self.orders: list[coordinator_pb2.LearnerOrder] = []  # said after the learner's next message
        self.server: GatedServer | None = None
        self.address = ""

    async def start(self, port: int = 0) -> None:
        self.server = new_server(LEARNER)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self.server)
        credentials = server_credentials(coordinator_credentials(self.authority, "127.0.0.1:0"))
        self.address = f"127.0.0.1:{bind_server(self.server, f'127.0.0.1:{port}', credentials)}"
        await self.server.start()

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop(0)

    async def LearnerSession(
        self, request_iterator: AsyncIterator[coordinator_pb2.LearnerMessage], context: Any
    ) -> AsyncIterator[coordinator_pb2.LearnerOrder]:
        yield coordinator_pb2.LearnerOrder(welcome=coordinator_pb2.LearnerWelcome(run_id=RUN, heartbeat_interval_s=0.2))
        if self.plan is not None:
            yield coordinator_pb2.LearnerOrder(plan=self.plan)
        async for message in request_iterator:
            self._take(message)
            while self.orders:
                yield self.orders.pop(0)

    def _take(self, message: coordinator_pb2.LearnerMessage) -> None:
        match message.WhichOneof("kind"):
            case "hello":
                self.hellos.append(message.hello)
                self.newest = max(self.newest, Version(message.hello.newest_version))
                self._offer(message.hello.open_groups)
            case "offer":
                self.offers += 1
                self.reminders += len(message.offer.held_tokens) > 0
                self._offer(message.offer.groups)
            case "close":
                self.closed += [(GroupId(name), message.close.reason) for name in message.close.group_ids]
            case "published":
                self.published.append(message.published)
                self.newest = max(self.newest, Version(message.published.version))
            case "report":
                self.reports.append(message.report)
            case "accused":
                self.accused.append(message.accused)
            case "leaving":
                self.left_for.append(message.leaving.reason)

    def _offer(self, groups: Any) -> None:
        for group in groups:
            spec = group_from_message(group)
            if spec.group_id not in self.offered:
                self.offered.add(spec.group_id)
                self.groups[spec.group_id] = spec
                self.waiting.put_nowait(spec)


@dataclass
class FollowerBroadcaster:
    """Applies every artifact to a copy of the weights, as a worker would, and checks the fingerprint."""

    host: HostWeights = field(default_factory=HostWeights.empty)
    versions: list[tuple[int, int | None]] = field(default_factory=list)
    sent_bytes: int = 0
    spread_bytes_per_s: float = 0.0
    kept: dict[tuple[int, int], bytes] = field(default_factory=dict)  # by parent (-1: a keyframe) and version
    merged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    calls: NodeCalls = field(default_factory=NodeCalls)
    needed_looks: int = 0  # for so many looks somebody still fetches
    asked: int = 0

    def made(self, credentials: object, options: object, calls: NodeCalls) -> Self:
        """By the learner, in the place of its node."""
        self.calls = calls
        return self

    async def publish(
        self, artifact: ArtifactId, frames: Iterable[bytes], fingerprint: object, full_snapshot_bytes: int, *,
        is_pushed: bool,
    ) -> int:  # fmt: skip
        version, parent = artifact.version, artifact.parent
        data = await asyncio.to_thread(lambda: b"".join(frames))
        if parent is not None and not is_pushed:
            self.kept[parent, version] = self.merged[parent, version] = data
            return len(data)
        self.sent_bytes += len(data)
        self.versions.append((version, parent))
        self.kept[-1 if parent is None else parent, version] = data
        if self.host.version is None:
            self.host = HostWeights.empty()
        if self.host.version is None or parent is not None or version > self.host.version:
            self.apply(self.host, -1 if parent is None else parent, version)
        return len(data)

    def apply(self, host: HostWeights, parent: int, version: int) -> DeltaHeader:
        """What was published so, to a copy of one's own; returns its header."""
        decoder = ContainerDecoder(host)
        frames = list(FrameReader().feed(self.kept[parent, version]))
        for frame in frames:
            decoder.feed(frame)
        host.commit(decoder.finish())
        head = parse_frame(frames[0])
        assert isinstance(head, HeaderFrame)
        return head.header

    def frames(self, version: Version, parent: Version) -> Iterator[bytes] | None:
        data = self.kept.get((parent, version))
        return FrameReader().feed(data) if data is not None else None

    def listen(self) -> int:
        return 1

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def serve_relay(self, listen_host: str, port: int) -> int:
        return port

    def hold_pipe_place(self, relay: PeerId, relay_address: str, own: tuple[str, int]) -> None: ...

    def apply_plan(self, plan: broadcast_pb2.BroadcastPlan) -> None: ...

    def bar(self, peer_id: PeerId, *, is_lifted: bool) -> None: ...

    def is_needed(self) -> bool:
        self.asked += 1
        return self.asked < self.needed_looks


class RandomWorker:
    """Takes groups off the coordinator's queue and reports uniformly random digits, in two pieces a rollout."""

    def __init__(
        self, coordinator: Coordinator, learner_address: str, learner: Identity, vocabulary: int, lag: int = 0
    ) -> None:
        self.coordinator = coordinator
        self.identity = Identity.generate()
        self.credentials = issued(coordinator.authority, Role.WORKER, coordinator.address, identity=self.identity)
        self.learner_address = learner_address
        self.learner = learner
        self.vocabulary = vocabulary
        self.rng = random.Random(7)
        self.verdicts: list[SegmentVerdict] = []
        self.lag = lag

    def ticket(self, group_id: GroupId, attempt: int = 1, run_id: RunId = RUN) -> Any:
        ticket = Ticket(LeaseId(f"l-{group_id}-{attempt}"), group_id, self.identity.peer_id, attempt, 2e9, run_id)
        return sign_ticket(ticket, self.coordinator.authority.identity)

    def segments(self, spec: GroupSpec, version: Version) -> list[Rollout]:
        logprob = -math.log(self.vocabulary)
        pieces = []
        for index in range(spec.rollout_count):
            tokens = [self.rng.randrange(3, self.vocabulary) for _ in range(self.rng.randrange(1, 5))] + [1]
            cut = len(tokens) // 2
            for offset, part in ((0, tokens[:cut]), (cut, tokens[cut:])):
                if part:
                    reason = FinishReason.STOP if part[-1] == 1 else FinishReason.UNFINISHED
                    how = {"spans": [(version, len(part))], "logprobs": [logprob] * len(part), "reason": reason}
                    pieces.append(replace(rollout_of(part, index, name=spec.group_id, **how), offset=offset))
        return pieces

    async def run(self) -> None:
        options = [("grpc.max_receive_message_length", 8 << 20)]
        async with open_channel(self.learner_address, self.learner.peer_id, self.credentials, options) as channel:
            stub = ingest_pb2_grpc.IngestStub(channel)
            stream = stub.Report()
            sequence = 0
            while True:
                spec = await self.coordinator.waiting.get()
                # The staleness rule paces a worker: it does not begin what would be too old when its turn comes.
                version = max(v for v in self._known() if v <= max(0, self.coordinator.newest - self.lag))
                version = version if spec.exact_version is None else spec.exact_version
                bound = self.coordinator.hellos[-1].staleness_bound
                if spec.exact_version is None and version < spec.consume_step - bound:
                    await asyncio.sleep(0.01)
                    self.coordinator.waiting.put_nowait(spec)
                    continue
                report = ingest_pb2.RolloutReport(
                    draws_by_seed=True,
                    sequence=sequence,
                    ticket=self.ticket(spec.group_id),
                    segments=[rollout_to_message(segment) for segment in self.segments(spec, version)],
                )
                await stream.write(report)
                answer = await stream.read()
                assert answer.sequence == sequence
                self.verdicts += verdicts_from_message(answer)
                sequence += 1

    def _known(self) -> list[int]:
        told = (hello.newest_version for hello in self.coordinator.hellos)  # what left before it came
        return [0, *told, *(published.version for published in self.coordinator.published)]


def options_for(
    folder: Path, path: Path, metrics_port: int = 0, turns_max: int = 1,
    limits: LearnerLimits | None = None, **sections: dict[str, Any],
) -> LearnerOptions:  # fmt: skip
    """`sections`: options of the run file by section, beside and before those below."""
    given: dict[str, dict[str, Any]] = {
        "run": {"name": RUN},
        "model": {"path": str(path)},
        "learner": {
            "steps": 6, "prompts_per_step": 2, "rollouts_per_prompt": 4, "checkpoint_every_steps": 2, "audit_share": 0,
            "lr": 1e-3, "device": "cpu", **RESOLVED,
        },
        "staleness": {"bound": 2},
        # Trusted: scored in this process. The first contained reward of a run waits 1.5 s for its process.
        "task": {"name": "tests.unit.learner.worlds:DigitShare", "eval_prompts": 4, "eval_every_steps": 3, "trusted_rewards": True},
        "sampling": {"max_new_tokens": 6},
    }  # fmt: skip
    both = {name: given.get(name, {}) | sections.get(name, {}) for name in given | sections}
    return LearnerOptions(
        folder, RunConfig.model_validate(both), turns_max=turns_max, metrics_port=metrics_port,
        limits=limits or LearnerLimits(free_bytes_min=1 << 20, linger_s=0.0),
    )  # fmt: skip


def prompts_for(
    options: LearnerOptions, vocabulary_size: int = 100, stop_token_ids: tuple[int, ...] = (1,), **given: Any
) -> Prompts:
    """The run's prompts, for a model of which nothing else matters."""
    model: Any = SimpleNamespace(vocabulary_size=vocabulary_size, stop_token_ids=stop_token_ids, context_tokens=256)
    return Prompts(options, model, **given)


# ---- whole runs


class RunSummary(NamedTuple):
    """State of a run at its end. `evaluations`: held-out reward by step."""

    steps: int
    is_finished: bool
    version: Version
    fingerprint: str
    evaluations: dict[int, float]
    trained_rollouts: int
    over_stale_tokens: int


class Run:
    """One learner with its coordinator and workers."""

    def __init__(self, options: LearnerOptions, plan: coordinator_pb2.PlanUpdate | None = None, **made: Any) -> None:
        """`made`: parts of the daemon's own, in the place of a follower that applies what is published."""
        self.options = options
        self.authority = new_authority()
        self.coordinator = Coordinator(self.authority, plan)
        self.follower = FollowerBroadcaster()
        self.daemon = LearnerDaemon(options, **{"make_broadcaster": self.follower.made, **made})
        self.workers: list[RandomWorker] = []
        self.at_step: dict[int, Any] = {}

    async def finish(self, worker_count: int = 2, lag: int = 0) -> RunSummary:
        await self.coordinator.start()
        node = self.options.folder / "node"
        learner = load_or_create_identity(node)  # and its credentials, as enrolment would leave them
        save_credentials(node, issued(self.authority, Role.LEARNER, self.coordinator.address, identity=learner))
        running = asyncio.get_running_loop().create_task(self.daemon.run())
        while self.daemon.learner is None and not running.done():
            await asyncio.sleep(0.01)
        address = ""
        if self.daemon.learner is not None:
            loop, address = self.daemon.learner.loop, self.daemon.learner.address
            original = loop.on_step
            loop.on_step = lambda: (original(), self._stepped())[0]
        self.workers = [RandomWorker(self.coordinator, address, learner, 60, lag) for _ in range(worker_count)]
        tasks = [asyncio.get_running_loop().create_task(worker.run()) for worker in self.workers]
        try:
            await asyncio.wait_for(running, WAIT_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.coordinator.stop()
        loop, publisher, pool = self.learner.loop, self.learner.publisher, self.learner.pool
        return RunSummary(
            loop.step, loop.is_finished, publisher.newest_version, f"{publisher.newest_fingerprint:016x}",
            pool.evaluations.rewards, pool.groups.counts.trained, pool.groups.ledger.over_stale_tokens(),
        )  # fmt: skip

    @property
    def learner(self) -> Learner:
        assert self.daemon.learner is not None, "it has begun"
        return self.daemon.learner

    def _stepped(self) -> None:
        action = self.at_step.get(self.learner.loop.step)
        if action is not None:
            action()


def rows_of(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def crash_image(run: Run, target: Path) -> list[torch.Tensor]:
    """What a kill would leave on the disk at this very instant, and the weights that are lost with the process."""
    shutil.copytree(run.options.folder, target, ignore=shutil.ignore_patterns("learner.lock", "*.partial"))
    return [master.clone() for master in run.learner.loop.p.model.masters]  # type: ignore[attr-defined]


def prepared_from(options: LearnerOptions, make: Callable[..., Prepared] = prepare) -> Prepared:
    folder = RunFolder(options.folder)
    try:
        return make(options, folder)
    finally:
        folder.release()

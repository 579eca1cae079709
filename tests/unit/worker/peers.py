"""A small real run on loopback: an authority, a coordinator and a learner over mutual TLS, to test the worker against.

The coordinator grants the groups it is given, by the level asked for; the learner keeps tokens as the protocol says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import torch

from echo2.base.ids import LeaseId, PeerId, RunId, Version
from echo2.base.rollout import GroupSpec, Rollout, SegmentVerdict, Verdict, spans_of
from echo2.broadcast.artifact import ArtifactId
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.trust import tls
from echo2.trust.calls import GatedServer
from echo2.trust.identity import Identity, JoinLink, Role, RunAuthority
from echo2.trust.ports import LEARNER, SERVICES
from echo2.weights import DeltaHeader, HostWeights, encode_delta, encode_keyframe
from echo2.weights.fingerprint import key_of_run
from echo2.wire import rollout as wire
from echo2.wire.gen.echo2.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    enrolment_pb2,
    enrolment_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
)  # fmt: skip
from echo2.wire.rollout import Ticket, sign_ticket, verify_ticket
from tests.certificates import issued

RUN = RunId("small-run")
KEY = key_of_run(RUN)


async def until(is_so: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.005)


def weights_of(model: torch.nn.Module, version: int) -> HostWeights:
    tensors = {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}
    return HostWeights.from_tensors(tensors, Version(version), KEY)


@dataclass
class _Told:
    changed: asyncio.Condition = field(default_factory=asyncio.Condition, kw_only=True)

    async def until(self, is_so: Any, within_s: float = 60.0) -> None:
        """Waits until `is_so(self)`, woken by what the worker says."""
        async with asyncio.timeout(within_s), self.changed:
            await self.changed.wait_for(lambda: is_so(self))


@dataclass
class SmallLearner(_Told, ingest_pb2_grpc.IngestServicer):
    """Holds tokens by (group, index); refuses what no ticket of the run covers."""

    authority: RunAuthority
    held: dict[tuple[str, int], list[Rollout]] = field(default_factory=dict)
    finished: dict[tuple[str, int], Rollout] = field(default_factory=dict)
    reports: list[ingest_pb2.RolloutReport] = field(default_factory=list)
    is_silent: bool = False
    streams: int = 0
    refuses: set[str] = field(default_factory=set)

    async def Report(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        caller = tls.peer_of(context)
        self.streams += 1
        tickets: dict[str, Ticket] = {}
        async for report in requests:
            if report.HasField("ticket"):
                ticket = verify_ticket(report.ticket, RUN, self.authority.identity.peer_id, caller.peer_id)
                tickets[ticket.lease_id] = ticket
            group_id = tickets[report.lease_id].group_id
            if self.is_silent:
                continue
            if group_id in self.refuses:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"MalformedMessage: report of group {group_id}")
            verdicts = [self.judge(segment, group_id) for segment in wire.segments_from_report(report)]
            async with self.changed:
                self.reports.append(report)
                self.changed.notify_all()
            segments = map(wire.verdict_to_message, verdicts)
            yield ingest_pb2.RolloutVerdict(sequence=report.sequence, segments=segments)

    async def GetPartials(self, request: Any, context: Any) -> Any:
        caller = tls.peer_of(context)
        ticket = verify_ticket(request.ticket, RUN, self.authority.identity.peer_id, caller.peer_id)
        partials = [self.rollout_of(key) for key in self.held if key[0] == ticket.group_id]
        return ingest_pb2.GetPartialsReply(rollouts=[wire.rollout_to_message(rollout) for rollout in partials])

    def rollout_of(self, key: tuple[str, int]) -> Rollout:
        """What is held of one rollout, whole."""
        segments = self.held[key]
        names = ("token_ids", "logprobs", "raw_logprobs")
        columns: dict[str, Any] = {name: tuple(x for s in segments for x in getattr(s, name)) for name in names}
        spans = spans_of(version for s in segments for version in s.versions)
        return replace(segments[-1], offset=0, version_spans=spans, **columns)

    def judge(self, segment: Rollout, group_id: str) -> SegmentVerdict:
        key = (segment.group_id, segment.index)
        count, verdict = sum(len(s.token_ids) for s in self.held.get(key, [])), Verdict.HELD
        assert segment.group_id == group_id, "of the lease's group"
        if key in self.finished:
            verdict = Verdict.DUPLICATE
        elif segment.offset != count:
            verdict = Verdict.RESEND
        else:
            self.held.setdefault(key, []).append(segment)
            count = segment.end
            if segment.is_finished:
                self.finished[key], verdict = self.rollout_of(key), Verdict.ADMITTED
        return SegmentVerdict(segment.group_id, segment.index, verdict, count)


@dataclass
class SmallCoordinator(_Told, coordinator_pb2_grpc.CoordinatorServicer):
    """Grants `groups` in order while the worker asks for more; keeps what it is told."""

    authority: RunAuthority
    run_id: str = RUN
    learner: coordinator_pb2.LearnerWhereabouts | None = None
    groups: list[GroupSpec] = field(default_factory=list)
    continues: set[str] = field(default_factory=set)
    refusal: coordinator_pb2.Refusal | None = None
    report_interval_s: float = 0.1
    heartbeat_interval_s: float = 0.2
    lease_s: float = 600.0  # a slow machine's sequences end by themselves
    clock_ahead_s: float = 0.0
    hellos: list[coordinator_pb2.WorkerHello] = field(default_factory=list)
    heartbeats: list[coordinator_pb2.Heartbeat] = field(default_factory=list)
    requests: list[coordinator_pb2.LeaseRequest] = field(default_factory=list)
    ended: list[coordinator_pb2.LeaseEnded] = field(default_factory=list)
    leavings: list[str] = field(default_factory=list)
    outbox: asyncio.Queue[coordinator_pb2.WorkerOrder | None] = field(default_factory=asyncio.Queue)  # None: its end
    leases: int = 0
    _level: int = 0

    async def WorkerSession(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        caller = tls.peer_of(context)
        hello = (await anext(requests)).hello
        self.hellos.append(hello)
        if self.refusal is not None:
            yield coordinator_pb2.WorkerOrder(refusal=self.refusal)
            return
        self._level = 0
        self.outbox = asyncio.Queue()
        welcome = coordinator_pb2.WorkerWelcome(
            run_id=self.run_id, staleness_bound=4, heartbeat_interval_s=self.heartbeat_interval_s,
            report_interval_s=self.report_interval_s, learner=self.learner, unix_s=time.time() + self.clock_ahead_s,
        )  # fmt: skip
        yield coordinator_pb2.WorkerOrder(welcome=welcome)
        reading, outbox = asyncio.create_task(self._read(requests, caller.peer_id)), self.outbox
        reading.add_done_callback(lambda _: outbox.put_nowait(None))
        try:
            while (order := await outbox.get()) is not None:
                yield order
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[Any], peer_id: PeerId) -> None:
        async for message in requests:
            match message.WhichOneof("kind"):
                case "heartbeat":
                    self.heartbeats.append(message.heartbeat)
                case "lease_request":
                    self.requests.append(message.lease_request)
                    self._level = message.lease_request.free_rollouts
                    self.grant(peer_id)
                case "lease_ended":
                    self.ended.append(message.lease_ended)
                case "leaving":
                    self.leavings.append(message.leaving.reason)
            async with self.changed:
                self.changed.notify_all()

    def grant(self, peer_id: PeerId) -> None:
        while self.groups and self._level >= self.groups[0].rollout_count:
            group = self.groups.pop(0)
            self._level -= group.rollout_count
            self.leases += 1
            lease_id = LeaseId(f"lease-{self.leases}")
            ticket = Ticket(lease_id, group.group_id, peer_id, 1, time.time() + self.lease_s, RUN)
            grant = coordinator_pb2.LeaseGrant(
                ticket=sign_ticket(ticket, self.authority.identity),
                group=wire.group_to_message(group),
                is_continuation=group.group_id in self.continues,
            )
            self.outbox.put_nowait(coordinator_pb2.WorkerOrder(lease_grant=grant))


class _Enrolment(enrolment_pb2_grpc.EnrolmentServicer):
    def __init__(self, run: SmallRun) -> None:
        self._run = run

    async def Enrol(self, request: Any, context: Any) -> Any:
        if request.token != "good":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "token: expected one that is known, got another")
        certificate = self._run.authority.issue(request.certificate_request_der, Role(request.role), time.time())
        return enrolment_pb2.EnrolReply(
            certificate_pem=certificate.pem,
            authority_pem=self._run.authority.certificate_pem,
            run_id=RUN,
            coordinator_peer_id=self._run.authority.identity.peer_id,
            coordinator_address=self._run.coordinator_address,
        )


class SmallRun:
    """`async with SmallRun() as run`. Each service can be stopped and started again at its port.

    With a `folder` the learner also broadcasts (`publish`).
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.node: BroadcastNode | None = None
        self.published: HostWeights | None = None
        self.authority = RunAuthority.create(Identity.generate(), RUN, time.time())
        self.coordinator = SmallCoordinator(self.authority)
        self.learner = SmallLearner(self.authority)
        self.coordinator_address = "127.0.0.1:0"
        self.learner_address = "127.0.0.1:0"
        self.chunk_address = ""
        self.enrol_port = 0
        self.model_config_json = b""
        self.model_digest = ""
        self._servers: dict[str, GatedServer] = {}

    async def __aenter__(self) -> SmallRun:
        await self.start_coordinator()
        self.learner_credentials = issued(self.authority, Role.LEARNER, self.coordinator_address)
        await self.start_learner()
        server = tls.new_enrolment_server()
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(_Enrolment(self), server)
        self.enrol_port = tls.bind_server(server, "127.0.0.1:0", tls.enrolment_server_credentials(self.authority))
        await server.start()
        self._servers["enrolment"] = server
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._servers):
            await self.stop(name)

    def link(self, token: str = "good") -> str:
        return str(JoinLink("127.0.0.1", self.enrol_port, self.authority.identity.peer_id, token))

    async def start_coordinator(self) -> None:
        server = tls.new_server(SERVICES)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self.coordinator, server)
        credentials = tls.coordinator_credentials(self.authority, self.coordinator_address)
        port = tls.bind_server(server, self.coordinator_address, tls.server_credentials(credentials))
        self.coordinator_address = f"127.0.0.1:{port}"
        await server.start()
        self._servers["coordinator"] = server

    async def start_learner(self) -> None:
        server = tls.new_server(LEARNER)
        ingest_pb2_grpc.add_IngestServicer_to_server(self.learner, server)
        if self.folder is not None:
            self.node = BroadcastNode(self.learner_credentials, NodeOptions(self.folder / "learner"))
            self.chunk_address = f"127.0.0.1:{self.node.listen()}"
            await self.node.start()
        credentials = tls.server_credentials(self.learner_credentials)
        port = tls.bind_server(server, self.learner_address, credentials)
        self.learner_address = f"127.0.0.1:{port}"
        await server.start()
        self._servers["learner"] = server

    async def stop(self, name: str) -> None:
        if name == "learner" and self.node is not None:
            await self.node.stop()
        await self._servers.pop(name).stop(0)

    async def publish(self, version: int, model: torch.nn.Module, *, base: torch.nn.Module | None = None) -> str:
        """A keyframe first, then deltas, as the learner makes them; with a `base`, a delta from that version 0, for those who ask.

        Returns the fingerprint in hex.
        """
        assert self.node is not None, "give the run a folder"
        target = weights_of(model, version)
        parent = self.published if base is None else weights_of(base, 0)
        header = DeltaHeader(
            target_version=Version(version),
            parent_version=parent.version if parent else None,
            parent_fingerprint=parent.fingerprint() if parent else None,
            fingerprint_key=KEY,
            block_elements=4096,  # tensors span several blocks, as large ones do
        )
        after = target.tensors()
        frames = encode_delta(parent.tensors(), after, header) if parent else encode_keyframe(after, header)
        artifact, fingerprint = ArtifactId(Version(version), header.parent_version), f"{target.fingerprint():016x}"
        is_pushed, size_bytes = parent is not None and base is None, sum(tensor.nbytes for tensor in after.values())
        await self.node.publish(artifact, frames, lambda: fingerprint, size_bytes, is_pushed=is_pushed)
        self.published = target
        return fingerprint

    @property
    def whereabouts(self) -> coordinator_pb2.LearnerWhereabouts:
        return coordinator_pb2.LearnerWhereabouts(
            peer_id=self.learner_credentials.peer_id,
            address=self.learner_address,
            chunk_address=self.chunk_address,
            model_name="tiny",
            model_config_json=self.model_config_json,
            model_digest=self.model_digest,
            newest_version=Version(0),
        )

"""The attackers of the wire: grammar clients for every service, and floods of the dearest messages."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from echo2.base.errors import Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.artifact import CHUNKS_MAX, ArtifactKey
from echo2.broadcast.events import Have, RelayAck
from echo2.broadcast.transport import Transport
from echo2.trust import tls
from echo2.trust.enrolment import checked_certificate
from echo2.trust.identity import JoinLink
from echo2.wire import broadcast as wire
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, enrolment_pb2, ingest_pb2, probe_pb2
from tests.redteam.grammar import Grammar
from tests.redteam.scene import Scene, Target, attacker, closed

STREAM_MESSAGES = 120
PEER = PeerId("")  # whom a frame is for, only its connection says
PATIENCE_S = 4.0
HEAR_S = 0.3
LATE_S = 20.0
"""On a busy machine an attack ends so much later, if nothing of it was sent yet."""


async def _members(scene: Scene, target: Target, until: float) -> AsyncIterator[tuple[Grammar, grpc.aio.Channel]]:
    """New members one after another, each with a channel to the target."""
    while asyncio.get_running_loop().time() < until:
        credentials = scene.identity()
        async with scene.channel(target, credentials) as channel:
            yield scene.grammar(credentials.peer_id), channel


def _made(grammar: Grammar, kind: type[Message], is_wild: bool) -> bytes:
    return grammar.message(kind.DESCRIPTOR, is_wild).SerializeToString()


async def _stream(call: Any, messages: list[bytes], *, is_unary: bool = False) -> int:
    """Writes until the other side has enough; how many were taken."""
    sent = 0
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            for message in messages:
                await call.write(message)
                sent += 1
            await call.done_writing()
    if is_unary:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(call, 1.0)
    else:
        await closed(call, 1.0)
    return sent


@attacker("control streams by grammar")
async def control_streams(scene: Scene, until: float) -> int:
    sent, kind = 0, coordinator_pb2.WorkerMessage
    async for grammar, channel in _members(scene, scene.coordinator, until):
        worker = channel.stream_stream("/echo2.v1.Coordinator/WorkerSession")
        learner = channel.stream_stream("/echo2.v1.Coordinator/LearnerSession")
        for _ in range(4):
            hello = grammar.message(coordinator_pb2.WorkerHello.DESCRIPTOR, is_wild=False)
            hello.protocol_version, hello.run_id = tls.PROTOCOL_VERSION, scene.run_id
            for field in ("held_tickets", "quantisation", "model_digest"):
                hello.ClearField(field)
            messages = [_made(grammar, kind, number % 40 == 39) for number in range(STREAM_MESSAGES)]
            sent += await _stream(worker(), [kind(hello=hello).SerializeToString(), *messages])
            sent += await _stream(worker(), [_made(grammar, kind, True)])
            sent += await _stream(learner(), [_made(grammar, coordinator_pb2.LearnerMessage, True)])
    return sent


@attacker("reports by grammar")
async def reports(scene: Scene, until: float) -> int:
    sent = 0
    async for grammar, channel in _members(scene, scene.learner, until):
        for _ in range(12):
            messages = [_made(grammar, ingest_pb2.RolloutReport, number % 10 == 9) for number in range(20)]
            sent += await _stream(channel.stream_stream("/echo2.v1.Ingest/Report")(), messages)
            request = _made(grammar, ingest_pb2.GetPartialsRequest, False)
            sent += await _unary(channel, "/echo2.v1.Ingest/GetPartials", request)
    return sent


async def _unary(channel: grpc.aio.Channel, path: str, data: bytes) -> int:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await channel.unary_unary(path)(data, timeout=PATIENCE_S)
    return 1


UNARY = {
    "Operator/GetStatus": coordinator_pb2.GetStatusRequest,
    "Operator/Act": coordinator_pb2.ActRequest,
    "Renewal/Renew": enrolment_pb2.RenewRequest,
}
OF_STRANGERS = {
    "Enrolment/Enrol": enrolment_pb2.EnrolRequest,
    "Probe/Reach": probe_pb2.ReachRequest,
    "Probe/Download": probe_pb2.DownloadRequest,
    "Probe/Upload": probe_pb2.UploadBlock,
}


@attacker("calls by grammar")
async def calls(scene: Scene, until: float) -> int:
    sent = 0
    async for grammar, channel in _members(scene, scene.coordinator, until):
        for _ in range(20):
            name, kind = scene.rng.choice(list(UNARY.items()))
            data = _made(grammar, kind, scene.rng.random() < 0.5)
            if scene.rng.random() < 0.2:
                data = scene.rng.randbytes(len(data) + 3)
            sent += await _unary(channel, f"/echo2.v1.{name}", data)
    return sent


@attacker("enrolment and probes by grammar, by a stranger with a join link")
async def enrolment(scene: Scene, until: float) -> int:
    """Its token is among what the grammar knows; a probe's first block may be followed by many."""
    sent, loop = 0, asyncio.get_running_loop()
    link = JoinLink.parse((scene.folder / "links" / "worker.link").read_text().strip())
    shown = await asyncio.to_thread(checked_certificate, link, 5.0)
    grammar = Grammar(scene.rng, [link.token, "worker", "operator", scene.run_id])
    while loop.time() < until:
        async with tls.open_enrolment_channel(link, shown.pem) as channel:
            for _ in range(40):
                name, kind = scene.rng.choice(list(OF_STRANGERS.items()))
                message: Any = grammar.message(kind.DESCRIPTOR, scene.rng.random() < 0.4)
                if scene.rng.random() < 0.5 and "protocol_version" in kind.DESCRIPTOR.fields_by_name:
                    message.protocol_version = tls.PROTOCOL_VERSION
                data = message.SerializeToString()
                if scene.rng.random() < 0.1:
                    data = scene.rng.randbytes(len(data) + 3)
                if name == "Probe/Upload":
                    sent += await _stream(channel.stream_unary(f"/echo2.v1.{name}")(), [data] * 6, is_unary=True)
                elif name == "Probe/Download":
                    call = channel.unary_stream(f"/echo2.v1.{name}")(data)
                    await closed(call, 1.0)
                    sent += 1
                else:
                    sent += await _unary(channel, f"/echo2.v1.{name}", data)
    return sent


async def _peer(scene: Scene, target: Target, until: float, is_flood: bool) -> int:
    sent, loop = 0, asyncio.get_running_loop()
    while loop.time() < until + (0 if sent else LATE_S):
        credentials = scene.identity()
        grammar = scene.grammar(credentials.peer_id)
        with contextlib.suppress(Unreachable, TimeoutError):
            connection = await Transport(credentials).dial(target.address, target.peer_id)
            async with asyncio.timeout(PATIENCE_S):
                await connection.send(wire.hello(tls.PROTOCOL_VERSION, scene.run_id))
                hearing = asyncio.create_task(_hear(connection, grammar))  # a read that is given up would end the call
                await asyncio.wait({hearing}, timeout=HEAR_S)
                dear = wire.control_frame(Have(PEER, ArtifactKey(grammar.keys[-1]), (1 << CHUNKS_MAX) - 1, False))
                for number in range(STREAM_MESSAGES):
                    await connection.send(dear if is_flood else _peer_message(grammar, number))
                    sent += 1
            await connection.close()
    return sent


async def _hear(connection: Any, grammar: Grammar) -> None:
    while (frame := await connection.receive()) is not None:
        message = broadcast_pb2.PeerMessage.FromString(frame)
        kind = message.WhichOneof("kind")
        if key := getattr(getattr(message, kind), "key", b"") if kind else b"":
            grammar.keys.append(key)


def _peer_message(grammar: Any, number: int) -> bytes:
    is_last = number == STREAM_MESSAGES - 1
    message = grammar.message(broadcast_pb2.PeerMessage.DESCRIPTOR, is_wild=is_last)
    kind = message.WhichOneof("kind")
    if kind in ("have", "request", "cancel", "relay_ack"):
        getattr(message, kind).key = grammar.rng.choice(grammar.keys)
    elif not is_last and kind in ("hello", "chunk", "seal", "header"):
        return wire.control_frame(RelayAck(PEER, ArtifactKey(grammar.keys[-1]), grammar.rng.randrange(CHUNKS_MAX), 3))
    return bytes(message.SerializeToString())


attacker("peer messages by grammar, to a worker")(lambda scene, until: _peer(scene, scene.worker, until, False))
attacker("peer messages by grammar, to the learner")(
    lambda scene, until: _peer(scene, scene.learner_node, until, False)
)
attacker("flood of whole have-maps")(lambda scene, until: _peer(scene, scene.learner_node, until, True))


@attacker("flood of the largest reports")
async def largest_reports(scene: Scene, until: float) -> int:
    sent, loop = 0, asyncio.get_running_loop()
    credentials = scene.identity()
    grammar = scene.grammar(credentials.peer_id)
    tokens = (1 << 16) // 16
    segment = ingest_pb2.RolloutReport().segments.add()
    segment.token_ids.extend([1] * tokens)
    segment.logprobs.extend([-0.5] * tokens)
    segment.raw_logprobs.extend([-0.5] * tokens)
    segment.version_spans.add(count=tokens)
    async with scene.channel(scene.learner, credentials) as channel:
        while loop.time() < until:
            ticket = grammar.tickets[0]
            segment.group_id = ticket.group_id
            report = ingest_pb2.RolloutReport(sequence=1, ticket=ticket, segments=[segment] * 16).SerializeToString()
            sent += await _stream(channel.stream_stream("/echo2.v1.Ingest/Report")(), [report] * 8)
    return sent

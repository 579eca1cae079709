"""Whatever bytes come over a stream, the coordinator lives, nothing it holds changes, and it says what was wrong."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.trust import tls
from echo2.trust.enrolment import checked_certificate
from echo2.trust.identity import Identity, JoinLink, Role, TlsKey, certificate_request
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, enrolment_pb2
from tests.unit.coordinator.test_daemon import Node, group, options, running

METHODS = ("WorkerSession", "LearnerSession")
TRIES = 60


def fingerprint(daemon: CoordinatorDaemon) -> str:
    """All that must not change."""
    hub = daemon.hub
    groups = sorted((g.spec.group_id, g.phase.value, g.attempts) for g in hub.book.groups.values())
    members = sorted((m.peer_id, m.setting.value, m.hello.name) for m in hub.membership.members.values())
    tokens = sorted((t.token_id, t.is_revoked, len(t.peers)) for t in hub.tokens.tokens.values())
    return repr((groups, sorted(hub.book.leases), members, tokens, hub.board.report, hub.board.totals))


async def raw_stream(node: Node, method: str, messages: list[bytes]) -> str:
    """Sends bytes as they are; returns how the stream ended."""
    call = node.channel.stream_stream(f"/echo2.v1.Coordinator/{method}")()
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
        answers = [answer async for answer in call]
        return f"ended after {len(answers)} answers"
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        return type(error).__name__


def mutated(good: bytes, rng: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(rng.randint(1, 6)):
        match rng.randrange(4):
            case 0 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1 if data:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += rng.randbytes(rng.randint(1, 40))
            case _:
                data = bytearray(rng.randbytes(rng.randint(0, 200)))
    return bytes(data)


async def test_malformed_oversized_and_unordered_messages_change_nothing(tmp_path: Path) -> None:
    rng = random.Random(20)
    async with running(options(tmp_path)) as daemon:
        learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        operator = await Node.join(daemon, Role.OPERATOR)
        await learner.hello(open_groups=[group("g1"), group("g2")])
        await asyncio.sleep(0)
        before = fingerprint(daemon)
        # A valid first message would be a join, which is a change: so each stream begins with something else.
        seeds = [
            pb.WorkerMessage(lease_request=pb.LeaseRequest(free_rollouts=8)).SerializeToString(),
            pb.WorkerMessage(hello=pb.WorkerHello(protocol_version=9, name="x" * 900)).SerializeToString(),
            pb.WorkerMessage(heartbeat=pb.Heartbeat(rollouts_per_s=float("nan"))).SerializeToString(),
            pb.LearnerMessage(offer=pb.OfferGroups(groups=[group("bad")])).SerializeToString(),
            pb.LearnerMessage(close=pb.CloseGroups(group_ids=["g1"])).SerializeToString(),
            pb.LearnerMessage(hello=pb.LearnerHello(rollouts_per_group=5)).SerializeToString(),
        ]
        for index in range(TRIES):
            node = (worker, operator)[index % 2]
            messages = [mutated(rng.choice(seeds), rng) for _ in range(rng.randint(1, 4))]
            await asyncio.wait_for(raw_stream(node, rng.choice(METHODS), messages), 10)
        for seed in seeds:
            for method in METHODS:
                await asyncio.wait_for(raw_stream(worker, method, [seed, seed]), 10)
        huge = pb.WorkerMessage(leaving=pb.WorkerLeaving(reason="x" * (17 << 20))).SerializeToString()
        await asyncio.wait_for(raw_stream(worker, "WorkerSession", [huge]), 20)
        assert fingerprint(daemon) == before
        await _joined_worker_that_goes_astray(daemon, worker)


async def _joined_worker_that_goes_astray(daemon: CoordinatorDaemon, worker: Node) -> None:
    """After a good hello, each bad message ends the stream with a refusal that names the trouble."""
    bad: list[tuple[dict[str, Any], str]] = [
        ({"hello": pb.WorkerHello(protocol_version=2, run_id="a-run")}, "after its hello"),
        ({"heartbeat": pb.Heartbeat(tokens_per_s=float("inf"))}, "tokens_per_s"),
        ({"lease_request": pb.LeaseRequest(free_rollouts=1 << 30)}, "free_rollouts"),
        ({"lease_ended": pb.LeaseEnded(lease_id="l-1")}, "reason of the end"),
        ({"lease_progress": pb.LeaseProgress(lease_id="")}, "lease_id"),
    ]
    await worker.hello()
    await worker.close()
    worker = Node(worker.credentials)
    before = fingerprint(daemon)
    for message, expected in bad:
        await worker.hello()
        await worker.say(**message)
        refusal = await worker.until("refusal")
        assert (refusal.code, expected in refusal.message) == ("MalformedMessage", True), refusal.message
    # Replayed ends of leases that are not his change nothing either.
    await worker.hello()
    for _ in range(3):
        ended = pb.LeaseEnded(lease_id="l-of-another", reason=pb.LeaseEnded.REASON_FINISHED)
        await worker.say(lease_ended=ended)
    await worker.say(lease_progress=pb.LeaseProgress(lease_id="l-of-another", tokens=5))
    assert (await worker.until("lease_revoke")).lease_id == "l-of-another"
    assert fingerprint(daemon) == before


def act(name: str, **body: object) -> bytes:
    return pb.ActRequest(name=name, body_json=json.dumps(body).encode()).SerializeToString()


UNARY = ("GetStatus", "Act")


async def raw_call(channel: grpc.aio.Channel, path: str, data: bytes) -> str:
    """Sends bytes as one request; returns the status."""
    try:
        await channel.unary_unary(path)(data, timeout=10)
        return "OK"
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)


async def test_operator_calls_of_others_and_malformed_ones_change_nothing(tmp_path: Path) -> None:
    rng = random.Random(21)
    async with running(options(tmp_path)) as daemon:
        worker, operator = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.OPERATOR)
        before = fingerprint(daemon)
        good = act("tokens", role="worker", lifetime_s=60, label="x")
        for _ in range(TRIES):  # a worker's certificate, whatever it says: replayed, mutated, on any method
            path = f"/echo2.v1.Operator/{rng.choice(UNARY)}"
            data = good if rng.random() < 0.3 else mutated(good, rng)
            refused = ("PERMISSION_DENIED", "INVALID_ARGUMENT")  # the last: it is no message
            assert await raw_call(worker.channel, path, data) in refused
        assert await raw_call(worker.channel, "/echo2.v1.Operator/Act", good) == "PERMISSION_DENIED"
        huge = b"\x0a" + b"\xff\xff\xff\x07" + b"x" * (5 << 20)
        assert await raw_call(operator.channel, "/echo2.v1.Operator/Act", huge) != "OK"
        assert await raw_call(operator.channel, "/echo2.v1.Operator/Reboot", b"") == "UNIMPLEMENTED"
        assert fingerprint(daemon) == before
        assert await raw_call(operator.channel, "/echo2.v1.Operator/GetStatus", b"") == "OK"


async def enrolment_channel(link: JoinLink) -> grpc.aio.Channel:
    """As a newcomer opens it."""
    shown = await asyncio.to_thread(checked_certificate, link, 10)
    return tls.open_enrolment_channel(link, shown.pem)


async def test_enrolment_of_whatever_comes_admits_nobody(tmp_path: Path) -> None:
    rng = random.Random(22)
    async with running(options(tmp_path)) as daemon:
        link = JoinLink.parse(daemon.links["worker"])
        request = enrolment_pb2.EnrolRequest(
            protocol_version=2, token=link.token, role="worker",
            certificate_request_der=certificate_request(Identity.generate(), TlsKey.generate()),
        )  # fmt: skip
        before, der = fingerprint(daemon), request.certificate_request_der
        bad: list[tuple[str, object]] = [
            ("token", "x" * 43), ("token", "x" * 9000), ("role", "king"), ("role", "learner"), ("protocol_version", 9),
            ("certificate_request_der", b""), ("certificate_request_der", b"x" * 20_000),
        ]  # fmt: skip
        for at in rng.sample(range(len(der)), 20):  # with a flipped bit none is vouched for by its identity
            flipped = der[:at] + bytes([der[at] ^ 1 << rng.randrange(8)]) + der[at + 1 :]
            bad.append(("certificate_request_der", flipped))
        async with await enrolment_channel(link) as channel:
            statuses = []
            for name, value in bad:
                spoilt = enrolment_pb2.EnrolRequest()
                spoilt.CopyFrom(request)
                setattr(spoilt, name, value)
                statuses.append(await raw_call(channel, "/echo2.v1.Enrolment/Enrol", spoilt.SerializeToString()))
            assert "OK" not in statuses, statuses
            assert fingerprint(daemon) == before
            for _ in range(40):
                statuses.append(await raw_call(channel, "/echo2.v1.Enrolment/Enrol", spoilt.SerializeToString()))
            assert "RESOURCE_EXHAUSTED" in statuses, "who tries too often is slowed down"
        assert fingerprint(daemon) == before

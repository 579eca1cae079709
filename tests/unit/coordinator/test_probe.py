"""A machine looks at its own link through a real coordinator: nothing is joined, nothing used up, nothing without a token."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from echo2.base.errors import BadToken, PortBusy, TrustError
from echo2.base.ids import PeerId
from echo2.broadcast import reachability
from echo2.broadcast.nat import reach
from echo2.broadcast.nat.reach import HostOptions, look_at_own_link
from echo2.coordinator import learner as learner_door
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet import enrolment
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.trust.identity import Identity, JoinLink, Role
from echo2.trust.ports import remote_of
from echo2.wire.broadcast import plan_from_message
from echo2.wire.gen.echo2.v1 import probe_pb2 as pb, probe_pb2_grpc
from tests.patience import WAIT_S
from tests.ports import choose_ports
from tests.unit.coordinator.test_daemon import Node, options, running
from tests.unit.coordinator.test_rpc_fuzz import enrolment_channel, fingerprint


async def test_reach_clock_and_rates_are_found_and_nothing_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "TRANSFER_BYTES", 4 << 20)
    async with running(options(tmp_path)) as daemon:
        link, hub, before = JoinLink.parse(daemon.links["worker"]), daemon.hub, fingerprint(daemon)
        found = await look_at_own_link(link, {}, 5)
        assert found.seen.local == found.seen.observed, "on loopback both ends see the same"
        assert found.seen.dialled_port == found.tried_port > 0 and not found.failure
        assert (found.role, found.token_problem, found.rate_problem) == ("worker", "", "")
        assert abs(found.skew_s) < 1
        assert found.uplink_bytes_per_s > 1e6 and found.downlink_bytes_per_s > 1e6
        learners = JoinLink.parse(daemon.links["learner"])
        with socket.create_server(("0.0.0.0", 0)) as busy:
            port = busy.getsockname()[1]
            with pytest.raises(PortBusy, match=f"port {port}"):
                await look_at_own_link(learners, {"learner": port}, 5)
        reach = await look_at_own_link(learners, {"learner": port, "worker": 1}, 5)
        assert reach.seen.dialled_port == port, "of the role"
        with pytest.raises(BadToken, match="does not know"):
            await look_at_own_link(replace(link, token="x" * 43), {}, 5)
        with pytest.raises(TrustError, match="expected the peer"):
            await look_at_own_link(replace(link, peer_id=Identity.generate().peer_id), {}, 5)
        assert fingerprint(daemon) == before
        token = hub.tokens.redeem(link.token, "worker", Identity.generate().peer_id, hub.clock.now())
        token.use_limit = 1
        hub.clock = SimpleNamespace(now=lambda: time.time() + 3600.0)  # later: it has called often
        token.expires_at += 7200.0
        assert "used 1 of 1 times" in (await look_at_own_link(link, {}, 5)).token_problem
        token.is_revoked = True
        with pytest.raises(BadToken, match="revoked"):
            await look_at_own_link(link, {}, 5)


async def test_only_the_callers_own_address_is_dialled_and_the_nonce_is_read(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        link = JoinLink.parse(daemon.links["worker"])
        async with await enrolment_channel(link) as channel:
            stub = probe_pb2_grpc.ProbeStub(channel)

            async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 400 No")
                writer.close()

            async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                request = pb.ReachRequest(protocol_version=2, token=link.token, port=port, nonce=b"n" * 16)
                reply = await stub.Reach(request)
            assert (reply.is_dialled, reply.host) == (False, "127.0.0.1")
            assert "something else answers" in reply.failure
            reply = await stub.Reach(request)
            assert "refused" in reply.failure
            for spoilt in ({"port": 99_999}, {"nonce": b"short"}, {"protocol_version": 9}, {"token": "x" * 9000}):
                request = pb.ReachRequest(protocol_version=2, token=link.token, port=port, nonce=b"n" * 16)
                for name, value in spoilt.items():
                    setattr(request, name, value)
                with pytest.raises(grpc.aio.AioRpcError, match="expected"):
                    await stub.Reach(request)


async def test_transfers_take_turns_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "TRANSFER_S", 0.2)
    monkeypatch.setattr(enrolment, "TURN_S", 0.1)
    monkeypatch.setattr(enrolment, "CALLS_BURST", 8)
    monkeypatch.setattr(enrolment, "WAITING_MAX", 1)

    async def stalling(token: str) -> AsyncIterator[pb.UploadBlock]:
        yield pb.UploadBlock(token=token, data=b"x")
        yield pb.UploadBlock(data=b"x" * 1000)
        await asyncio.Event().wait()

    async with running(options(tmp_path)) as daemon:
        link = JoinLink.parse(daemon.links["worker"])
        async with await enrolment_channel(link) as channel:
            stub = probe_pb2_grpc.ProbeStub(channel)
            first = asyncio.ensure_future(_reply(stub.Upload(stalling(link.token))))
            await asyncio.sleep(0.05)
            second = await _reply(stub.Upload(stalling(link.token)))
            assert "other machines were measured" in str(second)
            reply = await asyncio.wait_for(first, WAIT_S)
            assert isinstance(reply, pb.UploadReply) and reply.received_bytes == 1000
            gone = stub.Upload(stalling(link.token))
            await asyncio.sleep(0.05)
            gone.cancel()  # in its turn, which the next one has
            sent = sum([len(b.data) async for b in stub.Download(pb.DownloadRequest(token=link.token))])
            assert 0 < sent <= reachability.TRANSFER_BYTES
            with pytest.raises(grpc.aio.AioRpcError, match="does not know"):
                async for _ in stub.Download(pb.DownloadRequest(token="x" * 43)):
                    pass
            assert isinstance(await _reply(stub.Upload(stalling("x" * 43))), grpc.aio.AioRpcError)
            answers = [await _reply(stub.Reach(pb.ReachRequest(protocol_version=2))) for _ in range(4)]
            assert "too many" in str(answers[-1]), "who asks too often is refused"


async def _reply(call: grpc.aio.UnaryUnaryCall) -> object:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error


@pytest.mark.parametrize(
    ("peer", "seen"),
    [
        ("ipv4:203.0.113.7:4711", ("203.0.113.7", 4711)),
        ("ipv6:%5B2001:db8::7%5D:4711", ("2001:db8::7", 4711)),
        ("ipv6:%5B::ffff:203.0.113.7%5D:4711", ("203.0.113.7", 4711)),
        ("ipv6:%5Bfe80::7%25eth0%5D:4711", ("fe80::7%eth0", 4711)),
        ("unix:", ("", 0)),
    ],
)
def test_where_a_call_comes_from(peer: str, seen: tuple[str, int]) -> None:
    assert remote_of(peer) == seen


# ---- a learner that does not answer where it says is reached through byte pipes, and directly again once it does

AT, CHUNKS, PIPES = "198.51.100.7:8421", "198.51.100.7:8422", "203.0.113.9:8424"


class Answers:
    """In place of the network: whether the learner answers. `asked` holds what was dialled."""

    def __init__(self) -> None:
        self.is_there = False
        self.asked: list[tuple[str, int, PeerId]] = []

    def __call__(self, host: str, port: int, peer_id: PeerId, authority_pem: bytes) -> bool:
        assert b"CERTIFICATE" in authority_pem
        self.asked.append((host, port, peer_id))
        return self.is_there


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    made = Answers()
    monkeypatch.setattr(learner_door, "shows_certificate", made)
    for name, seconds in (("MISSED_S", 0.01), ("LOOK_HIDDEN_S", 0.1), ("LOOK_S", 0.1), ("PLACE_S", 0.2)):
        monkeypatch.setattr(learner_door, name, seconds)
    return made


@asynccontextmanager
async def relaying(folder: Path, *, has_place: bool = True) -> AsyncIterator[CoordinatorDaemon]:
    """As if it listened elsewhere than on the loopback."""
    async with running(options(folder)) as daemon:
        daemon.hub.relay_address = "203.0.113.9:8423"
        daemon.hub.relay = SimpleNamespace(is_piped=lambda peer: has_place, close=lambda: asyncio.sleep(0))  # type: ignore[assignment]
        yield daemon


def complaints(daemon: CoordinatorDaemon) -> list[str]:
    return [event.text for event in daemon.hub.state.events if "does not answer" in event.text]


async def learner_told(worker: Node, wanted: str) -> None:
    while (await worker.until("learner")).address != wanted:
        pass


async def dialled(worker: Node, wanted: tuple[str, ...]) -> None:
    """Waits until the plan says that the learner is dialled there."""
    while plan_from_message(await worker.until("broadcast_plan")).nodes[0].addresses != wanted:
        pass


async def test_a_learner_that_does_not_answer_is_reached_by_pipes(tmp_path: Path, answers: Answers) -> None:
    async with relaying(tmp_path) as daemon:
        learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        welcome = (await learner.hello(address=AT, chunk_address=CHUNKS)).welcome
        assert welcome.relay_address == "203.0.113.9:8423"
        came = await worker.hello()
        if came.welcome.learner.address != PIPES:
            await learner_told(worker, PIPES)
        assert answers.asked[0] == ("198.51.100.7", 8421, learner.credentials.peer_id)
        await dialled(worker, (PIPES,))  # all workers are hidden
        await worker.hello(addresses=["127.0.0.1:7777"])
        await dialled(worker, ())  # the learner dials it
        assert any("byte pipes" in text and AT in text for text in complaints(daemon))
        answers.is_there = True
        await learner_told(worker, AT)
        await dialled(worker, (CHUNKS,))


async def test_a_learner_without_a_place_is_left_and_told_of_once(tmp_path: Path, answers: Answers) -> None:
    async with relaying(tmp_path, has_place=False) as daemon:
        await Node.joined(daemon, Role.LEARNER, address=AT, chunk_address=CHUNKS)
        while len(answers.asked) < 3:
            await asyncio.sleep(0.02)
        (text,) = complaints(daemon)
        assert "learner.advertise" in text and daemon.hub is not None and daemon.hub.board.address == AT


async def test_one_dial_that_fails_moves_nobody(tmp_path: Path, answers: Answers) -> None:
    async with relaying(tmp_path) as daemon:
        learner, answers.is_there = await Node.join(daemon, Role.LEARNER), True
        await learner.hello(address=AT, chunk_address=CHUNKS)
        for fails in (False, True, False):
            asked, answers.is_there = len(answers.asked), not fails
            while len(answers.asked) == asked:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        assert daemon.hub is not None and not daemon.hub.board.pipe_address and not complaints(daemon)


async def test_the_relay_serves_who_is_not_banned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[HostOptions] = []

    class Relaying:
        def __init__(self, own: Any) -> None: ...

        async def serve(self, options: HostOptions) -> int:
            served.append(options)
            if options.port:
                raise PortBusy("expected to listen there: another run does")
            return 7

        async def close(self) -> None: ...

    monkeypatch.setattr(reach, "Nat", Relaying)

    async with running(options(tmp_path, advertise="192.0.2.9")) as daemon:
        hub = daemon.hub
        assert hub is not None and hub.relay_address == "192.0.2.9:7"
        link = daemon.links["worker"].replace("192.0.2.9", "127.0.0.1")
        daemon.links["worker"] = link
        worker = await Node.join(daemon, Role.WORKER)
        worker.credentials.coordinator_address = daemon.services_address.replace("192.0.2.9", "127.0.0.1")
        worker = Node(worker.credentials)
        await worker.hello()
        peer_id, (settings,) = worker.credentials.peer_id, served
        assert not settings.is_barred(peer_id) and not settings.is_barred(PeerId("another"))
        hub.set_worker(peer_id, OperatorSetting.BANNED, "it lies")
        assert settings.is_barred(peer_id)
        settings.proven(peer_id, "198.51.100.7:1")
        while not hub.proven.of(peer_id, hub.clock.now()):
            await worker.read()
    (port,) = choose_ports([0])
    async with running(options(tmp_path / "b", advertise="192.0.2.9", port=port, takes_free_ports=True)) as daemon:
        assert daemon.hub is not None and daemon.hub.relay_address == "192.0.2.9:7"
    with pytest.raises(PortBusy, match=r"^coordinator.port \+ 4: .* another run does; stop what"):
        await CoordinatorDaemon(options(tmp_path / "c", advertise="192.0.2.9", port=port)).run()


@pytest.mark.parametrize("address", [f"{'a' * 64}.example:9", "host..example:9", "127.0.0.1:99999"])
async def test_an_address_that_there_cannot_be_ends_no_process(tmp_path: Path, address: str) -> None:
    async with relaying(tmp_path) as daemon:
        await Node.joined(daemon, Role.LEARNER, address=address, chunk_address=address)
        while not complaints(daemon):
            await asyncio.sleep(0.02)

"""The coordinator as a process sees it, over real gRPC on loopback: joining, leasing, refusing, and coming back."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import ssl
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from echo2.base.errors import DiskFull, NotAllowed, PortBusy, StateError, TrustError
from echo2.base.ids import LeaseId, PeerId, RunId
from echo2.base.units import address_of
from echo2.broadcast.plan import can_connect
from echo2.config.run import RunConfig
from echo2.coordinator.coordinator import SWITCH_S, CoordinatorDaemon, collected_garbage
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.coordinator.hub import CoordinatorOptions, timed_section
from echo2.coordinator.operator import Commands
from echo2.coordinator.store import SqlStore, StateChanges
from echo2.trust import tls
from echo2.trust.enrolment import enrol, renew
from echo2.trust.identity import Identity, JoinLink, Role, RunAuthority, TlsKey, certificate_request
from echo2.wire.broadcast import plan_from_message
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2 as pb, coordinator_pb2_grpc, rollout_pb2
from echo2.wire.rollout import verify_ticket
from echo2.worker.heartbeat import listen_host
from echo2.worker.options import WorkerOptions

RUN = RunId("a-run")
WAIT_S = 10.0


def options(
    folder: Path,
    *,
    run_id: str = RUN,
    steps: int = 1,
    staleness_bound: int = 4,
    model_path: str = "",
    quantisation: str = "none",
    exit_when_finished: bool = False,
    takes_free_ports: bool = False,
    **section: Any,
) -> CoordinatorOptions:
    """A coordinator that soon misses who is silent, on any free ports; `section`: options and timing of [coordinator]."""
    timing = {
        "heartbeat_interval": 0.2,
        "suspect_after": 1.0,
        "gone_after": 2.0,
        "lease_timeout": 20.0,
        "report_interval": 2.0,
    }
    ports = {"enrol_port": 0, "port": 0, "dashboard_port": 0}
    config = RunConfig.model_validate({
        "run": {"name": run_id}, "learner": {"steps": steps}, "staleness": {"bound": staleness_bound},
        "model": {"path": model_path}, "worker": {"quantisation": quantisation},
        "coordinator": timed_section(**{**timing, **ports, **section}),
    })  # fmt: skip
    return CoordinatorOptions(folder, config, exit_when_finished, takes_free_ports)


@asynccontextmanager
async def running(chosen: CoordinatorOptions, **more: Any) -> AsyncIterator[CoordinatorDaemon]:
    daemon = CoordinatorDaemon(chosen, **more)
    task = asyncio.create_task(daemon.run())
    started = asyncio.create_task(daemon.started.wait())
    await asyncio.wait((task, started), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        started.cancel()
        task.result()
    try:
        yield daemon
    finally:
        while Node.open:
            await Node.open.pop().close()
        daemon.stop()
        await asyncio.wait_for(task, WAIT_S)


class Node:
    """A worker or learner that says what the test wants said. `running` closes those that are `open`."""

    open: ClassVar[list[Node]] = []

    def __init__(self, credentials: tls.Credentials) -> None:
        Node.open.append(self)
        self.credentials = credentials
        self.channel = tls.open_channel(credentials.coordinator_address, credentials.coordinator_peer_id, credentials)
        self.call: Any = None
        self._writing = asyncio.Lock()

    @classmethod
    async def join(cls, daemon: CoordinatorDaemon, role: Role, identity: Identity | None = None) -> Node:
        link = JoinLink.parse(daemon.links[role.value])
        return cls(await enrol(link, identity or Identity.generate(), role))

    @classmethod
    async def joined(cls, daemon: CoordinatorDaemon, role: Role, **hello: Any) -> Node:
        node = await cls.join(daemon, role)
        answer = await node.hello(**hello)
        if answer.WhichOneof("kind") == "refusal":
            raise NotAllowed(answer.refusal.message)
        return node

    async def hello(self, **fields: Any) -> Any:
        stub = coordinator_pb2_grpc.CoordinatorStub(self.channel)
        if self.credentials.role is Role.WORKER:
            base = {"protocol_version": 2, "run_id": RUN, "name": "w", "slot_count": 16, "price_usd_per_hour": 1.0}
            async with self._writing:  # what else it says waits for the hello of the new stream
                self.call = stub.WorkerSession()
                await self.call.write(pb.WorkerMessage(hello=pb.WorkerHello(**{**base, **fields})))
        else:
            self.call = stub.LearnerSession()
            base = {
                "protocol_version": 2, "run_id": RUN, "address": "127.0.0.1:9", "model_name": "tiny",
                "model_digest": "d" * 64, "staleness_bound": 4, "rollouts_per_step": 16, "rollouts_per_group": 8,
            }  # fmt: skip
            await self.call.write(pb.LearnerMessage(hello=pb.LearnerHello(**{**base, **fields})))
        return await self.read()

    async def read(self) -> Any:
        return await asyncio.wait_for(self.call.read(), WAIT_S)

    async def until(self, kind: str) -> Any:
        """Reads orders up to the first of `kind`."""
        for _ in range(100):
            order = await self.read()
            assert order is not grpc.aio.EOF, f"the stream ended before a {kind}"
            if order.WhichOneof("kind") == kind:
                return getattr(order, kind)
        raise AssertionError(f"no {kind} among 100 orders")

    async def say(self, **kind: Any) -> None:
        message = pb.WorkerMessage if self.credentials.role is Role.WORKER else pb.LearnerMessage
        async with self._writing:  # gRPC takes one write at a time
            await self.call.write(message(**kind))

    async def close(self) -> None:
        if self.call is not None:
            self.call.cancel()
        await self.channel.close()


def group(name: str, consume_step: int = 0) -> rollout_pb2.GroupSpec:
    sampling = rollout_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=8)
    return rollout_pb2.GroupSpec(
        group_id=name, prompt_token_ids=[1, 2, 3], rollout_count=8, sampling=sampling, consume_step=consume_step
    )


async def test_a_group_travels_with_a_ticket_that_the_learner_can_check_and_goes_on_elsewhere(tmp_path: Path) -> None:
    async def beat(node: Node) -> None:
        while True:
            await node.say(heartbeat=pb.Heartbeat())
            await asyncio.sleep(0.2)

    async with running(options(tmp_path, quantisation="fp8")) as daemon:
        learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        assert (await learner.hello()).WhichOneof("kind") == "welcome"
        welcome = (await worker.hello(engine="vllm", quantisation="fp8")).welcome
        assert (welcome.learner.address, welcome.relay_address) == ("127.0.0.1:9", ""), "no relay on loopback"
        other = await Node.join(daemon, Role.WORKER)
        assert "it generates by bf16" in (await other.hello(quantisation="bf16")).refusal.message, "the run allows fp8"
        activation = await worker.until("activation")
        assert activation.is_active and activation.reason
        nodes = [learner.credentials.peer_id, worker.credentials.peer_id]
        for member in (worker, learner):
            while [node.peer_id for node in (await member.until("broadcast_plan")).nodes] != nodes:
                pass  # the plan from before the worker's hello
        learner = Node(learner.credentials)
        await learner.hello()
        assert (await learner.read()).broadcast_plan.nodes, "one that comes back is told at once: it is not made anew"
        await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        await learner.say(offer=pb.OfferGroups(groups=[group("g1"), group("g2")]))
        grant = await worker.until("lease_grant")
        assert grant.group == group("g1") and not grant.is_continuation
        ticket = verify_ticket(grant.ticket, RUN, learner.credentials.coordinator_peer_id, worker.credentials.peer_id)
        assert (ticket.group_id, ticket.attempt) == ("g1", 1)
        await learner.say(close=pb.CloseGroups(group_ids=["g1"], reason="stale"))
        assert (await worker.until("lease_revoke")).lease_id == ticket.lease_id
        await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        assert (await worker.until("lease_grant")).group.group_id == "g2"
        await worker.close()
        other = await Node.joined(daemon, Role.WORKER)
        beats = asyncio.create_task(beat(other))
        await other.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        grant = await other.until("lease_grant")
        assert (grant.group.group_id, grant.ticket.attempt, grant.is_continuation) == ("g2", 2, True)
        beats.cancel()


async def test_a_restarted_coordinator_knows_leases_members_and_tokens_and_listens_where_it_did(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        learner = await Node.joined(daemon, Role.LEARNER, open_groups=[group("g1"), group("g2")])
        worker = await Node.joined(daemon, Role.WORKER)
        await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        ticket = (await worker.until("lease_grant")).ticket
        lease_id = LeaseId(ticket.lease_id)
        await worker.close()
        await learner.close()
        daemon.hub.handle(daemon.hub.book.recall, lease_id, "a word that it never hears")
        links, address = daemon.links, daemon.services_address
    async with running(options(tmp_path)) as daemon:
        assert (daemon.links, daemon.services_address) == (links, address)
        worker = Node(worker.credentials)
        await worker.hello(held_tickets=[ticket])
        renewed = await worker.until("lease_grant")
        assert (renewed.ticket.lease_id, renewed.ticket.attempt) == (ticket.lease_id, 1)
        assert renewed.ticket.deadline_unix_s > ticket.deadline_unix_s
        assert not daemon.hub.book.leases[lease_id].is_recalled, "it works on"


async def test_a_coordinator_that_runs_for_months_shows_a_certificate_and_links_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.coordinator.coordinator.LOOK_S_MAX", 0.01)
    async with running(options(tmp_path, dashboard_host="0.0.0.0")) as daemon:
        at, links, first = ("127.0.0.1", daemon._page.port), dict(daemon.links), daemon._own.certificate
        before = await asyncio.to_thread(ssl.get_server_certificate, at)
        (tmp_path / "links" / "worker.link").chmod(0o644)  # so that another account reads it
        (link,) = [token for token in daemon.hub.tokens.tokens.values() if token.label == "worker.link"]
        link.expires_at = daemon.hub.clock.now() + 0.01
        monkeypatch.setattr(
            "echo2.coordinator.coordinator.renewal_due_unix_s", lambda known: 0.0 if known is first else 2.0**40
        )
        while daemon.links == links or daemon._own.certificate is first:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(ssl.get_server_certificate, at) != before
        assert [role for role, link in daemon.links.items() if link != links[role]] == ["worker"], "the others hold"
        assert (tmp_path / "links" / "worker.link").read_text().strip() == daemon.links["worker"]
        monkeypatch.setattr("echo2.coordinator.coordinator.LOOK_S_MAX", 100.0)
        for left_s, holds in ((300.0, True), (150.0, False)):
            before = daemon.links["learner"]
            (link,) = [token for token in daemon.hub.tokens.tokens.values() if token.label == "learner.link"]
            link.expires_at = daemon.hub.clock.now() + left_s
            daemon._write_links()
            assert (daemon.links["learner"] == before) is holds, "renewed before it expires, two looks before"


async def test_a_certificate_is_renewed_for_the_key_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issue = RunAuthority.issue
    async with running(options(tmp_path)) as daemon:
        worker = await Node.joined(daemon, Role.WORKER)
        before = worker.credentials.certificate
        await renew(worker.credentials)
        after = worker.credentials.certificate
        assert after.pem != before.pem and after.spki_der != before.spki_der
        assert (after.peer_id, after.role) == (before.peer_id, Role.WORKER)
        await worker.close()
        worker = Node(worker.credentials)
        assert (await worker.hello()).WhichOneof("kind") == "welcome"
        others = certificate_request(worker.credentials.identity, TlsKey.generate())
        with monkeypatch.context() as patched:
            patched.setattr(RunAuthority, "issue", lambda self, der, *more, **by: issue(self, others, *more, **by))
            with pytest.raises(TrustError, match="expected one for the key that we sent"):
                await renew(worker.credentials)
        daemon.hub.membership.set(after.peer_id, OperatorSetting.BANNED, "the test says so")
        with pytest.raises(NotAllowed, match="banned: the test says so"):
            await renew(worker.credentials)
        assert worker.credentials.certificate.pem == after.pem


async def test_a_barred_worker_is_told_why_it_gets_no_lease_in_the_operators_words(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        barred, other = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.WORKER)
        for worker in (barred, other):
            await worker.hello()
        await barred.until("activation")
        peer_id = barred.credentials.peer_id
        daemon.hub.book.records.bar(peer_id, "it claims too much", 30.0, daemon.hub.clock.now())
        for _ in range(2):
            await barred.say(heartbeat=pb.Heartbeat())
        text = (await barred.until("activation")).reason
        row = Commands(daemon.hub, "127.0.0.1", 1, [], {}).view.worker(daemon.hub.membership.members[peer_id])
        assert text == row["no_lease"] == "given no leases for 30 s: it claims too much"


async def test_the_plan_says_how_hidden_workers_are_met_and_the_page_shows_their_links(tmp_path: Path) -> None:
    """As told in heartbeats: first places at a relay, then a hole between the two."""
    relay = Identity.generate().peer_id

    def told(worker: Node, host: str, other: Node, kind: str) -> pb.Heartbeat:
        access = broadcast_pb2.PeerAccess(public_host=host, relays=[relay], lan_addresses=["192.168.1.2:7"])
        link = pb.PeerLink(peer_id=other.credentials.peer_id, kind=kind, reason="said by the test")
        return pb.Heartbeat(reach=pb.Reach(access=access), links=pb.LinkTable(links=[link]))

    async with running(options(tmp_path)) as daemon:
        learner = await Node.join(daemon, Role.LEARNER)
        await learner.hello(relay_address="198.51.100.1:8423", longest_sequence_tokens=2560, full_snapshot_bytes=99)
        left, right = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.WORKER)
        for worker in (left, right):
            welcome = (await worker.hello(addresses=["192.168.1.2:7"])).welcome
            assert welcome.learner.relay_address == "198.51.100.1:8423"
            assert (welcome.learner.longest_sequence_tokens, welcome.learner.full_snapshot_bytes) == (2560, 99)
        for kind in ("relayed", "hole-punched"):
            await left.say(heartbeat=told(left, "203.0.113.1", right, kind))
            await right.say(heartbeat=told(right, "203.0.113.2", left, kind))
            is_met = kind == "hole-punched"
            while True:
                plan = plan_from_message(await left.until("broadcast_plan"))
                nodes = {node.peer_id: node for node in plan.nodes}
                mine, theirs = nodes.get(left.credentials.peer_id), nodes.get(right.credentials.peer_id)
                are_hidden = mine and theirs and not mine.addresses and not theirs.addresses
                if are_hidden and theirs.access.relays == (relay,) and bool(theirs.access.met) == is_met:
                    break
            assert right.credentials.peer_id in plan.neighbours(left.credentials.peer_id)
            assert can_connect(mine, theirs) == is_met
        member = daemon.hub.membership.members[left.credentials.peer_id]
        row = Commands(daemon.hub, "127.0.0.1", 1, [], {}).view.worker(member)
        assert row["links"] == [{"peer": "w", "kind": "hole-punched", "reason": "said by the test"}]
        assert (row["can_be_dialled"], row["relays"]) == (False, 1)


async def refused(node: Node, opened: Callable[[], Any], said: Message) -> str:
    """Why a stream was refused; opened anew where gRPC's own write fails because the other end has left already."""
    for _ in range(8):
        node.call = opened()
        try:
            await node.call.write(said)
            return str((await node.until("refusal")).message)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.INTERNAL:
                raise
    raise AssertionError("no refusal came in eight streams")


async def test_refusals_name_what_was_expected_what_came_and_whose_and_change_nothing(tmp_path: Path) -> None:
    """A stream is open to its own role alone: a worker that could speak as the learner would close groups and end the run."""

    async def refusal_of(node: Node, code: str, **fields: object) -> str:
        refusal = (await node.hello(**fields)).refusal
        assert refusal.code == code
        return str(refusal.message)

    async with running(options(tmp_path)) as daemon:
        hub, link = daemon.hub, JoinLink.parse(daemon.links["worker"])
        worker, learner = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.LEARNER)
        stub, hello = coordinator_pb2_grpc.CoordinatorStub, {"protocol_version": 2, "run_id": RUN}
        said = pb.LearnerMessage(hello=pb.LearnerHello(**hello))
        found = await refused(worker, stub(worker.channel).LearnerSession, said)
        assert "expected the role learner, its certificate says worker" in found
        said = pb.WorkerMessage(hello=pb.WorkerHello(**hello))
        found = await refused(learner, stub(learner.channel).WorkerSession, said)
        assert "expected the role worker, its certificate says learner" in found
        assert not hub.workers and hub.learner.session is None
        text = await refusal_of(worker, "VersionMismatch", protocol_version=7)
        assert f"expected protocol version {tls.PROTOCOL_VERSION}, got 7" in text
        assert "got 'other'" in await refusal_of(worker, "VersionMismatch", run_id="other")
        text = await refusal_of(worker, "ConfigError", quantisation="fp8")
        assert "it generates by fp8" in text and "worker.quantisation in its own file" in text
        await learner.hello()
        await learner.close()
        learner = Node(learner.credentials)
        text = await refusal_of(learner, "VersionMismatch", model_digest="e" * 64)
        assert "dddd" in text and "eeee" in text
        assert "S = 4" in await refusal_of(learner, "VersionMismatch", staleness_bound=6)
        await refusal_of(worker, "VersionMismatch", model_digest="e" * 64)
        assert not hub.membership.members
        for node in (worker, learner):
            await node.hello()
            await (copy := Node(node.credentials)).hello()
            refusal = await node.until("refusal")
            assert refusal.code == "NotAllowed" and "a copy of its folder is in use" in refusal.message
            elsewhere = Node(node.credentials)
            if node is learner:  # it goes on as long as it is heard
                hub.board.heard_at = hub.clock.now() + WAIT_S
                assert "at work at 127.0.0.1:9" in await refusal_of(elsewhere, "LimitExceeded", address="127.0.0.1:8")
                other = await Node.join(daemon, Role.LEARNER)
                assert "has a learner already" in await refusal_of(other, "NotAllowed", address="127.0.0.1:8")
                hub.board.heard_at -= 2 * WAIT_S
                assert (await elsewhere.hello(address="127.0.0.1:8")).WhichOneof("kind") == "welcome"
                assert (await copy.until("refusal")).code == "NotAllowed"
                await elsewhere.close()
                while hub.learner.session is not None:
                    await asyncio.sleep(0.01)
                hub.board.heard_at, elsewhere = hub.clock.now() + WAIT_S, Node(node.credentials)
                assert (await elsewhere.hello()).WhichOneof("kind") == "welcome", "whose stream has ended is gone"
            await elsewhere.close()
            await copy.close()
        await worker.hello()
        hub.set_worker(worker.credentials.peer_id, OperatorSetting.BANNED, "sent garbage")
        assert (await worker.until("refusal")).code == "NotAllowed"
        assert "sent garbage" in await refusal_of(worker, "NotAllowed")
        with pytest.raises(NotAllowed, match="banned"):
            await enrol(link, worker.credentials.identity, Role.WORKER)


async def test_a_start_that_cannot_go_on_names_port_or_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(options(tmp_path / "a")) as daemon:
        port = int(daemon.services_address.rpartition(":")[2])
        for name in ("port", "enrol_port", "dashboard_port"):
            folder = tmp_path / name
            with pytest.raises(
                PortBusy, match=f"^coordinator.{name}: .*{port}.*; stop what listens there, or"
            ) as raised:
                await CoordinatorDaemon(options(folder, **{name: port})).run()
            await asyncio.sleep(0)  # what the start left for the loop to do
            assert "\n" not in str(raised.value)
            store = SqlStore(f"sqlite:///{folder / 'coordinator' / 'state.sqlite'}", RUN)
            assert not store.load().meta and not store.load().events
            store.close()
        with pytest.raises(StateError, match="runs a coordinator in it"):
            await CoordinatorDaemon(options(tmp_path / "a")).run()
        chosen = ({"port": port}, {"port": port}, {"enrol_port": port})
        first, again, other = (options(tmp_path / "b", takes_free_ports=True, **more) for more in chosen)
        async with running(first) as beside:
            free, enrolment = beside.services_address, beside.enrol_address
    async with running(again) as daemon:
        assert (daemon.services_address, daemon.enrol_address) == (free, enrolment), "where who joined looks for it"
    async with running(other) as daemon:
        assert daemon.enrol_address.endswith(f":{port}"), "the configuration has changed"
    with pytest.raises(StateError, match="'a-run'"):
        await CoordinatorDaemon(options(tmp_path / "a", run_id="b-run")).run()
    assert not [line for line in caplog.records if line.levelname == "ERROR"]


async def test_when_a_loop_fails_its_error_ends_the_daemon_and_nothing_goes_on(tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("a bug")

    daemon = CoordinatorDaemon(options(tmp_path), garbage=lambda: nullcontext(fails))
    with pytest.raises(RuntimeError, match="a bug"):
        await daemon.run()
    assert daemon.started.is_set()
    assert not [task for task in asyncio.all_tasks() if "_Acceptor" in repr(task.get_coro())]


@dataclass(eq=False)
class Knot:
    """Garbage that only the collector finds."""

    other: list[Knot] = field(default_factory=list)


def knot() -> Knot:
    made = Knot()
    made.other.append(made)
    return made


def test_young_garbage_goes_at_the_next_tick_older_when_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    before, peak = sys.getswitchinterval(), SimpleNamespace(ru_maxrss=1000)
    monkeypatch.setattr(resource, "getrusage", lambda _: peak)
    with collected_garbage() as tick:
        young, old = weakref.ref(knot()), knot()
        assert not gc.isenabled() and sys.getswitchinterval() == SWITCH_S and young() is not None
        tick()
        assert young() is None and gc.get_freeze_count() > 0
        seen = weakref.ref(old)
        del old
        tick()
        assert seen() is not None, "it was set aside, and the process has not grown"
        peak.ru_maxrss = 1251
        tick()
        assert seen() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0 and sys.getswitchinterval() == before


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", ["[::1]", "::"])
async def test_a_worker_joins_a_coordinator_on_an_ipv6_address(tmp_path: Path, host: str) -> None:
    async with running(options(tmp_path / "first", host=host)) as daemon:
        link = JoinLink.parse(daemon.links[Role.WORKER.value])
        host_told = "127.0.0.1" if host == "::" else "::1"  # `::` takes both, and every machine has the former
        assert link.host == host_told and f"echo2://{address_of(host_told, link.port)}/" in str(link)
        node = await Node.joined(daemon, Role.WORKER)
        await node.close()
        with pytest.raises(PortBusy, match=r"\[::1?\]:"):
            async with running(options(tmp_path / "second", host=host, enrol_port=link.port)):
                pass


def test_hosts_have_brackets_once_and_a_worker_listens_where_its_coordinator_does(tmp_path: Path) -> None:
    assert address_of("::1", 7) == address_of("[::1]", 7) == "[::1]:7"
    assert address_of("10.0.0.1", 7) == "10.0.0.1:7" and address_of("host.example", 7) == "host.example:7"
    hosts = {"::1": "::1", "127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "2001:db8::1": "::"}
    for host, own in hosts.items():
        assert listen_host(WorkerOptions("", tmp_path), JoinLink(host, 8418, PeerId("p"), "t")) == own


# ---- nothing is told before it is on disk: leases, bans, the learner's plan


class Disk(SqlStore):
    """The real store; `is_full`: it writes nothing any more."""

    is_full = False

    def write(self, changes: StateChanges) -> None:
        if self.is_full and (changes.rows or changes.log):
            raise DiskFull("expected room for the coordinator's state, got: a test")
        super().write(changes)


async def test_when_the_state_cannot_be_saved_nothing_is_told_and_the_process_ends(tmp_path: Path) -> None:
    refused: list[str] = []
    is_granted = True
    patient = options(tmp_path, suspect_after=30.0, gone_after=60.0)
    with pytest.raises(DiskFull):  # of the process, whatever is raised inside: so all is looked at behind it
        async with running(patient, open_store=Disk) as daemon:
            learner, worker = await Node.joined(daemon, Role.LEARNER), await Node.joined(daemon, Role.WORKER)
            await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
            store, commands = daemon.hub.state.store, Commands(daemon.hub, "h", 1, [], {})
            while not daemon.hub.book.wanting:
                await asyncio.sleep(0.01)
            store.is_full = True
            await learner.say(offer=pb.OfferGroups(groups=[group("g1")]))
            while not daemon.hub.book.groups:
                await asyncio.sleep(0.01)
            for label in ("first", "second"):
                try:
                    commands.create_token(Role.WORKER.value, label, 60.0, 1)
                except DiskFull:
                    refused.append(label)
                store.is_full = False
            try:
                await worker.until("lease_grant")
            except (AssertionError, grpc.aio.AioRpcError):  # the stream has ended
                is_granted = False
            saved = store.load()
    assert refused == ["first", "second"] and not is_granted
    assert not saved.leases and not {"first", "second"} & {token.label for token in saved.tokens}

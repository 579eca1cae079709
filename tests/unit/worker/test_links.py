"""The control stream against a real gRPC coordinator on loopback, over mutual TLS."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from echo2.base.errors import NotAllowed, ProtocolError, StateError, VersionMismatch
from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.control.session import ControlSession
from echo2.control.waits import Backoff, Waits
from echo2.outside import SteadyClock
from echo2.trust.identity import Identity, Role, RunAuthority
from echo2.wire import rollout as wire
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import Ticket, sign_ticket
from echo2.worker.leases import LeaseRefused, Leases
from echo2.worker.leases_service import LeaseService
from echo2.worker.links import CoordinatorCommands, CoordinatorLink
from echo2.worker.options import WorkerLimits
from echo2.worker.reports import Reports
from tests.unit.worker.peers import RUN, SmallRun, issued
from tests.unit.worker.test_reports import NullEngine


class Bench:
    """A worker's session; itself the part that says hello and takes orders."""

    def __init__(self, run: SmallRun, at_hello: Callable[[], None] = lambda: None) -> None:
        self.orders: asyncio.Queue[coordinator_pb2.WorkerOrder] = asyncio.Queue()
        self.welcomes: asyncio.Queue[coordinator_pb2.WorkerWelcome] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.waits = Waits(SteadyClock())
        self.at_hello = at_hello
        self.on_welcome, self.on_order, self.on_lost = self.welcomes.put_nowait, self.orders.put_nowait, self.lost.set
        credentials = issued(run.authority, Role.WORKER, run.coordinator_address)
        backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.session = CoordinatorLink(ControlSession(credentials, self.waits, backoff, connect_s=5.0))
        self.task = asyncio.create_task(self.session.run(self, self))

    def hello(self) -> coordinator_pb2.WorkerHello:
        self.at_hello()
        return coordinator_pb2.WorkerHello(name="w")

    def heartbeat(self) -> coordinator_pb2.Heartbeat:
        return coordinator_pb2.Heartbeat(version=7, has_version=True)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_hello_heartbeats_requests_and_orders_pass() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            bench = Bench(run)
            welcome = await asyncio.wait_for(bench.welcomes.get(), 10)
            assert welcome.staleness_bound == 4
            await run.coordinator.until(lambda it: len(it.heartbeats) >= 2)
            assert run.coordinator.heartbeats[0].version == 7
            bench.session.request_leases(4, Version(7))
            bench.session.end_lease(LeaseId("l"), EndReason.HANDED_BACK, "why")
            await run.coordinator.until(lambda it: it.ended)
            assert run.coordinator.requests[0].free_rollouts == 4
            assert run.coordinator.ended[0].reason == coordinator_pb2.LeaseEnded.REASON_HANDED_BACK
            run.coordinator.outbox.put_nowait(
                coordinator_pb2.WorkerOrder(activation=coordinator_pb2.Activation(is_active=False, reason="dear"))
            )
            order = await asyncio.wait_for(bench.orders.get(), 10)
            assert order.activation.reason == "dear"
            await bench.close()

    asyncio.run(scene())


def test_a_coordinator_that_comes_back_is_greeted_again() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            bench = Bench(run)
            await asyncio.wait_for(bench.welcomes.get(), 10)
            await run.stop("coordinator")
            await asyncio.wait_for(bench.lost.wait(), 10)
            bench.session.request_leases(4, Version(7))  # nobody hears it, nothing keeps it
            await run.start_coordinator()
            await asyncio.wait_for(bench.welcomes.get(), 20)
            assert len(run.coordinator.hellos) == 2
            await run.coordinator.until(lambda it: len(it.heartbeats) >= 2)
            assert not run.coordinator.requests
            await bench.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("code", "error"),
    [("VersionMismatch", VersionMismatch), ("NotAllowed", NotAllowed), ("Nonsense", ProtocolError)],
)
def test_a_refusal_ends_the_session_with_the_error_that_it_names(code: str, error: type[Exception]) -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            run.coordinator.refusal = coordinator_pb2.Refusal(code=code, message="protocol 2, not 1")
            bench = Bench(run)
            with pytest.raises(error, match="protocol 2, not 1"):
                await asyncio.wait_for(bench.task, 10)

    asyncio.run(scene())


def test_a_coordinator_that_names_another_run_is_refused() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            run.coordinator.run_id = "another-run"
            bench = Bench(run)
            with pytest.raises(StateError, match="expected run small-run, got another-run"):
                await asyncio.wait_for(bench.task, 10)

    asyncio.run(scene())


def test_a_lease_that_ends_before_the_welcome_is_told_behind_the_hello_that_still_named_it() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            loop = asyncio.get_running_loop()

            def end_soon() -> None:
                loop.call_soon(lambda: bench.session.end_lease(LeaseId("l"), EndReason.HANDED_BACK, "why"))

            bench = Bench(run, at_hello=end_soon)
            await run.coordinator.until(lambda it: it.ended)
            assert run.coordinator.ended[0].lease_id == "l"
            await bench.close()

    asyncio.run(scene())


LEASE = LeaseId("l1")


@dataclass(frozen=True)
class Stage:
    """A worker's orders without a stream. `refused`: the leases that it hands back at once."""

    orders: CoordinatorCommands
    leases: LeaseService
    reports: Reports
    me: PeerId
    authority: RunAuthority
    refused: list[tuple[LeaseId, EndReason]]

    def granted(self, *, is_renewal: bool = False, worker: PeerId | None = None, ticket_of: str = "g1") -> None:
        group = GroupSpec(GroupId("g1"), (1, 2), 1, SamplingParams(max_new_tokens=5), 0)
        ticket = Ticket(LEASE, GroupId(ticket_of), worker or self.me, 1, time.time() + 60, RUN)
        signed = sign_ticket(ticket, self.authority.identity)
        grant = pb.LeaseGrant(ticket=signed, group=wire.group_to_message(group), is_renewal=is_renewal)
        self.orders.on_order(pb.WorkerOrder(lease_grant=grant))


class Link(CoordinatorLink):
    """Notes the leases that the worker ends."""

    def __init__(self, control: ControlSession[pb.WorkerMessage]) -> None:
        super().__init__(control)
        self.ended: list[tuple[LeaseId, EndReason]] = []

    def end_lease(self, lease_id: LeaseId, reason: EndReason, message: str) -> None:
        self.ended.append((lease_id, reason))


class NoPort:
    """The rest of a worker, which these orders do not concern."""

    def on_learner(self, learner: pb.LearnerWhereabouts) -> None: ...

    def on_skew(self, skew_s: float) -> None: ...

    def use_relay(self, peer_id: PeerId, address: str) -> None: ...


def stage(folder: Path) -> Stage:
    authority, clock = RunAuthority.create(Identity.generate(), RUN, time.time()), SteadyClock()
    credentials = issued(authority, Role.WORKER, "nowhere:1")
    backoff = Backoff(random.Random(0))
    reports = Reports(credentials, Waits(clock), backoff, 1.0)
    link = Link(ControlSession(credentials, Waits(clock), backoff))
    lease_service = LeaseService(Leases(WorkerLimits()), clock, reports, link)
    lease_service.engine = NullEngine()  # type: ignore[assignment]
    node = BroadcastNode(credentials, NodeOptions(folder))
    orders = CoordinatorCommands(credentials, link, lease_service, reports, node, NoPort(), clock)
    return Stage(orders, lease_service, reports, credentials.peer_id, authority, link.ended)


def test_of_a_lease_that_has_ended_no_renewal_leaves_a_ticket_behind(tmp_path: Path) -> None:
    """The coordinator renewed it before it had heard of the end."""

    async def scene() -> None:
        on = stage(tmp_path)
        on.granted()
        on.granted(is_renewal=True)
        assert on.leases.machine.lease_ids == (LEASE,) and on.reports.ticket_of(LEASE) is not None
        on.leases.send(LeaseRefused(LEASE, "the group is closed"))
        assert on.leases.machine.lease_ids == () and on.reports.ticket_of(LEASE) is None
        on.granted(is_renewal=True)
        assert on.leases.machine.lease_ids == () and on.reports.ticket_of(LEASE) is None
        on.leases.close()

    asyncio.run(scene())


@pytest.mark.parametrize("of_another", [{"worker": PeerId("another")}, {"ticket_of": "g2"}], ids=["worker", "group"])
def test_a_lease_whose_ticket_is_of_another_is_refused_and_not_worked_on(
    tmp_path: Path, of_another: dict[str, Any]
) -> None:
    async def scene() -> None:
        on = stage(tmp_path)
        on.granted(**of_another)
        assert on.leases.machine.lease_ids == () and on.reports.ticket_of(LEASE) is None
        assert on.refused == [(LEASE, EndReason.REFUSED)]
        on.leases.close()

    asyncio.run(scene())

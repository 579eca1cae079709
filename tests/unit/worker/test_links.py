"""The control stream against a real gRPC coordinator on loopback, over mutual TLS; and what orders do to a worker."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo2.base.errors import EchoError, NotAllowed, ProtocolError, StateError, VersionMismatch
from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams
from echo2.broadcast.node import BroadcastNode, NodeOptions
from echo2.control.session import ControlSession
from echo2.control.waits import Backoff, Waits
from echo2.outside import SteadyClock
from echo2.trust.identity import Identity, Role, RunAuthority
from echo2.wire import rollout as wire
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import Ticket, sign_ticket
from echo2.worker.generation import Generation
from echo2.worker.links import CoordinatorCommands, CoordinatorLink
from echo2.worker.options import WorkerLimits
from echo2.worker.reports import Reports
from tests.unit.worker.peers import RUN, SmallRun, issued
from tests.unit.worker.test_reports import NullEngine

LEASE = LeaseId("l1")


class Bench:
    """A worker's session; itself the part that says hello and takes orders."""

    def __init__(self, run: SmallRun, at_hello: Callable[[], None] = lambda: None) -> None:
        self.orders: asyncio.Queue[pb.WorkerOrder] = asyncio.Queue()
        self.welcomes: asyncio.Queue[pb.WorkerWelcome] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.at_hello = at_hello
        self.on_welcome, self.on_order, self.on_lost = self.welcomes.put_nowait, self.orders.put_nowait, self.lost.set
        credentials = issued(run.authority, Role.WORKER, run.coordinator_address)
        backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.session = CoordinatorLink(ControlSession(credentials, Waits(SteadyClock()), backoff, connect_s=5.0))
        self.task = asyncio.create_task(self.session.run(self, self))  # type: ignore[arg-type]

    def hello(self) -> pb.WorkerHello:
        self.at_hello()
        return pb.WorkerHello(name="w")

    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(version=7, has_version=True)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_messages_and_orders_pass_and_a_coordinator_that_comes_back_is_greeted_again() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            bench = Bench(run)
            assert (await asyncio.wait_for(bench.welcomes.get(), 10)).staleness_bound == 4
            await run.coordinator.until(lambda it: len(it.heartbeats) >= 2)
            assert run.coordinator.heartbeats[0].version == 7
            bench.session.request_leases(4, Version(7))
            bench.session.end_lease(LEASE, EndReason.HANDED_BACK, "why")
            await run.coordinator.until(lambda it: it.ended)
            assert [request.free_rollouts for request in run.coordinator.requests] == [4]
            assert run.coordinator.ended[0].reason == pb.LeaseEnded.REASON_HANDED_BACK
            run.coordinator.outbox.put_nowait(pb.WorkerOrder(activation=pb.Activation(is_active=False, reason="dear")))
            assert (await asyncio.wait_for(bench.orders.get(), 10)).activation.reason == "dear"
            await run.stop("coordinator")
            await asyncio.wait_for(bench.lost.wait(), 10)
            bench.session.request_leases(5, Version(7))  # nobody hears it, nothing keeps it
            await run.start_coordinator()
            await asyncio.wait_for(bench.welcomes.get(), 20)
            count = len(run.coordinator.heartbeats)
            await run.coordinator.until(lambda it: len(it.heartbeats) >= count + 2)
            assert len(run.coordinator.hellos) == 2 and len(run.coordinator.requests) == 1
            await bench.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        ("VersionMismatch", VersionMismatch, "protocol 2, not 1"),
        ("Nonsense", ProtocolError, "protocol 2, not 1"),
        ("NotAllowed", NotAllowed, "protocol 2, not 1"),
        ("", StateError, "expected run small-run, got another-run"),
    ],
)
def test_a_refusal_and_another_run_end_the_session_with_their_error(
    code: str, error: type[EchoError], text: str
) -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            run.coordinator.run_id = "another-run"
            run.coordinator.refusal = pb.Refusal(code=code, message="protocol 2, not 1") if code else None
            with pytest.raises(error, match=text):
                await asyncio.wait_for(Bench(run).task, 10)

    asyncio.run(scene())


def test_a_lease_that_ends_before_the_welcome_is_told_behind_the_hello_that_still_named_it() -> None:
    async def scene() -> None:
        async with SmallRun() as run:
            loop = asyncio.get_running_loop()

            def end_soon() -> None:
                loop.call_soon(lambda: bench.session.end_lease(LEASE, EndReason.HANDED_BACK, "why"))

            bench = Bench(run, at_hello=end_soon)
            await run.coordinator.until(lambda it: it.ended)
            assert run.coordinator.ended[0].lease_id == LEASE
            await bench.close()

    asyncio.run(scene())


class Stage:
    """A worker's orders without a stream. `refused`: the leases that it hands back at once."""

    def __init__(self, folder: Path) -> None:
        self.authority, clock = RunAuthority.create(Identity.generate(), RUN, time.time()), SteadyClock()
        credentials = issued(self.authority, Role.WORKER, "nowhere:1")
        self.me, backoff = credentials.peer_id, Backoff(random.Random(0))
        self.reports = Reports(credentials, Waits(clock), backoff, 1.0)
        link = CoordinatorLink(ControlSession(credentials, Waits(clock), backoff))
        self.refused: list[tuple[LeaseId, EndReason]] = []
        link.end_lease = lambda lease_id, reason, message: self.refused.append((lease_id, reason))  # type: ignore[method-assign]
        self.generation = Generation(WorkerLimits(), clock, self.reports, link)
        self.generation.engine = NullEngine()  # type: ignore[assignment]
        self.leases = self.generation.leases
        node = BroadcastNode(credentials, NodeOptions(folder))
        self.orders = CoordinatorCommands(link, self.leases, self.reports, node, clock, lambda finding: None)

    def grant(self, *, is_renewal: bool = False, worker: PeerId | None = None, ticket_of: str = "g1") -> None:
        group = GroupSpec(GroupId("g1"), (1, 2), 1, SamplingParams(max_new_tokens=5), 0)
        ticket = Ticket(LEASE, GroupId(ticket_of), worker or self.me, 1, time.time() + 60, RUN)
        signed = sign_ticket(ticket, self.authority.identity)
        grant = pb.LeaseGrant(ticket=signed, group=wire.group_to_message(group), is_renewal=is_renewal)
        self.orders.on_order(pb.WorkerOrder(lease_grant=grant))

    @property
    def holds(self) -> bool:
        assert (self.reports.ticket_of(LEASE) is not None) == (LEASE in self.leases.lease_ids)
        return LEASE in self.leases.lease_ids


def test_of_a_lease_that_has_ended_no_renewal_leaves_a_ticket_behind(tmp_path: Path) -> None:
    """The coordinator renewed it before it had heard of the end."""

    async def scene() -> None:
        on = Stage(tmp_path)
        on.grant()
        on.grant(is_renewal=True)
        assert on.holds
        on.leases.refuse(LEASE, "the group is closed")
        assert not on.holds
        on.grant(is_renewal=True)
        assert not on.holds
        on.generation.close()

    asyncio.run(scene())


@pytest.mark.parametrize("of_another", [{"worker": PeerId("another")}, {"ticket_of": "g2"}], ids=["worker", "group"])
def test_a_lease_whose_ticket_is_of_another_is_refused_and_not_worked_on(
    tmp_path: Path, of_another: dict[str, Any]
) -> None:
    async def scene() -> None:
        on = Stage(tmp_path)
        on.grant(**of_another)
        assert not on.holds and on.refused == [(LEASE, EndReason.REFUSED)]

    asyncio.run(scene())


def test_a_worker_ends_when_the_learner_comes_back_with_another_model_or_longer_sequences(tmp_path: Path) -> None:
    async def scene() -> None:
        on = Stage(tmp_path)

        def tell(digest: str, tokens: int) -> None:
            learner = pb.LearnerWhereabouts(
                peer_id=on.me, address="h:1", chunk_address="h:2", model_digest=digest, longest_sequence_tokens=tokens
            )
            on.orders.on_order(pb.WorkerOrder(learner=learner))

        tell("a" * 64, 0)
        tell("a" * 64, 40)  # 0: it had not said, and memory is laid out for the model's whole context
        with pytest.raises(VersionMismatch, match="expected 40 tokens, .* it is now 41; start this worker anew"):
            tell("a" * 64, 41)
        with pytest.raises(VersionMismatch, match="the learner's model: expected .* it now trains .*ffff"):
            tell("f" * 64, 40)

    asyncio.run(scene())

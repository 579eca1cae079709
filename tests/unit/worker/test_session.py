"""The control stream against a real gRPC coordinator on loopback, over mutual TLS."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from echo2.base.errors import NotAllowed, ProtocolError, StateError, VersionMismatch
from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import EndReason
from echo2.control.backoff import Backoff
from echo2.control.runtime.session import ControlSession
from echo2.control.waits import Waits
from echo2.outside import SteadyClock
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.worker.runtime.session import SessionHooks, WorkerSession
from tests.unit.worker.peers import SmallRun, issued


class Bench:
    def __init__(self, run: SmallRun, at_hello: Callable[[], None] = lambda: None) -> None:
        self.orders: asyncio.Queue[coordinator_pb2.WorkerOrder] = asyncio.Queue()
        self.welcomes: asyncio.Queue[coordinator_pb2.WorkerWelcome] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.waits = Waits(SteadyClock())

        def hello() -> coordinator_pb2.WorkerHello:
            at_hello()
            return coordinator_pb2.WorkerHello(name="w")

        hooks = SessionHooks(
            hello=hello,
            heartbeat=lambda: coordinator_pb2.Heartbeat(version=7, has_version=True),
            welcomed=self.welcomes.put_nowait,
            lost=self.lost.set,
            ordered=self.orders.put_nowait,
        )
        credentials = issued(run.authority, Role.WORKER, run.coordinator_address)
        backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.session = WorkerSession(ControlSession(credentials, self.waits, backoff, connect_s=5.0))
        self.task = asyncio.create_task(self.session.run(hooks))

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

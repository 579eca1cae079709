"""The learner's stream to the coordinator, over real gRPC and mutual TLS on loopback."""

from __future__ import annotations

import asyncio
import random

from echo2.base.ids import GroupId, PeerId
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.control.backoff import Backoff
from echo2.control.runtime.session import ControlSession
from echo2.control.waits import Waits
from echo2.learner.runtime.session import LearnerSession
from echo2.outside import SteadyClock
from echo2.trust.identity import Identity, Role
from echo2.trust.runtime.tls import Credentials
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from tests.unit.learner.fleet import RUN, Coordinator, issue, new_authority


def group_of(name: str) -> GroupSpec:
    return GroupSpec(GroupId(name), (1, 2), 2, SamplingParams(max_new_tokens=4, seed=1), 0)


def session_of(credentials: Credentials) -> LearnerSession:
    backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
    return LearnerSession(ControlSession(credentials, Waits(SteadyClock()), backoff))


def test_what_is_offered_while_the_stream_still_opens_reaches_the_coordinator_behind_the_hello() -> None:
    """The hello cannot say it any more, and no other hello follows."""

    async def scene() -> None:
        authority = new_authority()
        coordinator = Coordinator(authority)
        await coordinator.start()
        loop = asyncio.get_running_loop()

        def hello() -> coordinator_pb2.LearnerHello:
            loop.call_soon(lambda: session.offer([group_of("g-offered-while-it-opens")]))
            return coordinator_pb2.LearnerHello(run_id=RUN, protocol_version=1)

        credentials = issue(authority, Identity.generate(), Role.LEARNER, coordinator.address)
        session = session_of(credentials)
        task = asyncio.create_task(session.run(hello, coordinator_pb2.LearnerReport, lambda order: None))
        try:
            offered = await asyncio.wait_for(coordinator.waiting.get(), 20)
            assert offered.group_id == "g-offered-while-it-opens"
            assert len(coordinator.hellos) == 1, "the hello came first, and once"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await coordinator.stop()

    asyncio.run(scene())


def test_a_coordinator_that_moved_is_looked_for() -> None:
    async def scene() -> None:
        authority = new_authority()
        coordinator = Coordinator(authority)
        await coordinator.start()
        credentials = issue(authority, Identity.generate(), Role.LEARNER, "127.0.0.1:1")

        searches = 0

        async def find() -> None:
            nonlocal searches
            searches += 1
            credentials.coordinator_address = coordinator.address

        def hello() -> coordinator_pb2.LearnerHello:
            return coordinator_pb2.LearnerHello(run_id=RUN, protocol_version=1)

        session = session_of(credentials)
        task = asyncio.create_task(session.run(hello, coordinator_pb2.LearnerReport, lambda order: None, find))
        try:
            async with asyncio.timeout(30):
                while not session.is_connected:
                    await asyncio.sleep(0.02)
            assert searches == 1 and len(coordinator.hellos) == 1
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await coordinator.stop()

    asyncio.run(scene())


def test_a_step_and_an_accusation_are_told_at_once_and_whole() -> None:
    async def scene() -> None:
        authority = new_authority()
        coordinator = Coordinator(authority)
        await coordinator.start()

        def hello() -> coordinator_pb2.LearnerHello:
            return coordinator_pb2.LearnerHello(run_id=RUN, protocol_version=1)

        session = session_of(issue(authority, Identity.generate(), Role.LEARNER, coordinator.address))
        task = asyncio.create_task(session.run(hello, coordinator_pb2.LearnerReport, lambda order: None))
        try:
            async with asyncio.timeout(30):
                while not session.is_connected:
                    await asyncio.sleep(0.02)
                session.accuse(PeerId("w"), "it lies", is_certain=True)
                session.report(coordinator_pb2.LearnerReport(step=7))
                while 7 not in [report.step for report in coordinator.reports]:
                    await asyncio.sleep(0.02)
            told = coordinator_pb2.WorkerAccused(peer_id="w", reason="it lies", is_certain=True)
            assert coordinator.accused == [told]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await coordinator.stop()

    asyncio.run(scene())

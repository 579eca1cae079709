"""The learner's stream to the coordinator, over real gRPC and mutual TLS on loopback."""

from __future__ import annotations

import asyncio

from echo2.base.ids import GroupId
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.learner.runtime.session import CoordinatorSession
from echo2.trust.identity import Identity, Role
from echo2.trust.runtime.enrolling import FAILURES_BEFORE_SEARCH
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.wire.rollout import group_to_message
from tests.unit.learner.fleet import RUN, Coordinator, issue, new_authority


def offer_of(name: str) -> coordinator_pb2.LearnerMessage:
    group = GroupSpec(GroupId(name), (1, 2), 2, SamplingParams(max_new_tokens=4, seed=1), 0)
    return coordinator_pb2.LearnerMessage(offer=coordinator_pb2.OfferGroups(groups=[group_to_message(group)]))


def test_what_is_offered_while_the_stream_still_opens_reaches_the_coordinator_behind_the_hello() -> None:
    """The hello cannot say it any more, and no other hello follows."""

    async def scene() -> None:
        authority = new_authority()
        coordinator = Coordinator(authority)
        await coordinator.start()
        loop = asyncio.get_running_loop()

        def hello() -> coordinator_pb2.LearnerHello:
            loop.call_soon(lambda: session.send(offer_of("g-offered-while-it-opens")))
            return coordinator_pb2.LearnerHello(run_id=RUN, protocol_version=1)

        credentials = issue(authority, Identity.generate(), Role.LEARNER, coordinator.address)
        session = CoordinatorSession(credentials, hello, coordinator_pb2.LearnerReport, lambda order: None)
        task = asyncio.create_task(session.run())
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

        async def find() -> None:
            credentials.coordinator_address = coordinator.address

        def hello() -> coordinator_pb2.LearnerHello:
            return coordinator_pb2.LearnerHello(run_id=RUN, protocol_version=1)

        session = CoordinatorSession(credentials, hello, coordinator_pb2.LearnerReport, lambda order: None, find)
        task = asyncio.create_task(session.run())
        try:
            async with asyncio.timeout(30):
                while not session.is_connected:
                    await asyncio.sleep(0.02)
            assert session.reconnects == FAILURES_BEFORE_SEARCH and len(coordinator.hellos) == 1
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await coordinator.stop()

    asyncio.run(scene())

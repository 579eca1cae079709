"""The learner's stream to the coordinator, over real gRPC and mutual TLS on loopback."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from echo2.base.ids import PeerId
from echo2.control.session import ControlSession
from echo2.control.waits import Backoff, Waits
from echo2.learner.session import LearnerSession
from echo2.outside import SteadyClock
from echo2.trust.identity import Identity, Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.learner.fleet import RUN, Coordinator, issue, new_authority


class Bench:
    """A session, its coordinator, and what the session needs of a learner. It dials `address` at first, if that is given."""

    def __init__(self, address: str = "") -> None:
        self.address, self.searches = address, 0

    async def __aenter__(self) -> Bench:
        self.coordinator = Coordinator(new_authority())
        await self.coordinator.start()
        at = self.address or self.coordinator.address
        self.credentials = issue(self.coordinator.authority, Identity.generate(), Role.LEARNER, at)
        backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.session = LearnerSession(ControlSession(self.credentials, Waits(SteadyClock()), backoff))
        self.task = asyncio.create_task(self.session.run(self))
        await self.until(lambda: self.session.is_connected)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.coordinator.stop()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.02)

    def hello(self) -> pb.LearnerHello:
        return pb.LearnerHello(run_id=RUN, protocol_version=1)

    def report(self) -> pb.LearnerReport:
        return pb.LearnerReport()

    def on_welcome(self, welcome: pb.LearnerWelcome) -> None: ...

    def on_order(self, order: pb.LearnerOrder) -> None: ...

    async def find_coordinator(self) -> None:
        self.searches += 1
        self.credentials.coordinator_address = self.coordinator.address


def test_a_coordinator_that_moved_is_looked_for() -> None:
    async def scene() -> None:
        async with Bench("127.0.0.1:1") as bench:
            assert bench.searches == 1 and len(bench.coordinator.hellos) == 1

    asyncio.run(scene())


def test_a_step_and_an_accusation_are_told_at_once_and_whole() -> None:
    async def scene() -> None:
        async with Bench() as bench:
            bench.session.accuse(PeerId("w"), "it lies", is_certain=True)
            bench.session.report(pb.LearnerReport(step=7))
            await bench.until(lambda: 7 in [report.step for report in bench.coordinator.reports])
            told = pb.WorkerAccused(peer_id="w", reason="it lies", is_certain=True)
            assert bench.coordinator.accused == [told]

    asyncio.run(scene())

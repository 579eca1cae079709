"""The learner's stream to the coordinator, over real gRPC and mutual TLS on loopback."""

from __future__ import annotations

import asyncio
import random

from echo2.base.ids import PeerId
from echo2.control.session import ControlSession
from echo2.control.waits import Backoff, Waits
from echo2.learner.learner import Learner
from echo2.outside import SteadyClock
from echo2.trust.identity import Identity, Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.patience import WAIT_S
from tests.unit.learner.fleet import RUN, Coordinator, issue, new_authority


class Moved(Learner):
    """One with nothing but its stream. Its coordinator has moved."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.credentials = issue(coordinator.authority, Identity.generate(), Role.LEARNER, "127.0.0.1:1")
        backoff = Backoff(random.Random(1), first_s=0.02, longest_s=0.1)
        self.session = ControlSession(self.credentials, Waits(SteadyClock()), backoff)

    def hello(self) -> pb.LearnerHello:
        return pb.LearnerHello(run_id=RUN, protocol_version=2)

    def report(self) -> pb.LearnerReport:
        return pb.LearnerReport()

    def on_welcome(self, welcome: pb.LearnerWelcome) -> None: ...

    def on_order(self, order: pb.LearnerOrder) -> None: ...

    async def find_coordinator(self) -> None:
        self.credentials.coordinator_address = self.coordinator.address


def test_a_coordinator_that_moved_is_looked_for_and_told_of_a_step_and_an_accusation_at_once_and_whole() -> None:
    async def scene() -> None:
        coordinator = Coordinator(new_authority())
        await coordinator.start()
        learner = Moved(coordinator)
        task = asyncio.create_task(learner.talk())
        async with asyncio.timeout(WAIT_S):
            while not learner.session.is_connected:
                await asyncio.sleep(0.02)
            learner.accuse(PeerId("w"), "it lies", is_certain=True)
            learner.tell(report=pb.LearnerReport(step=7))
            while 7 not in [report.step for report in coordinator.reports]:
                await asyncio.sleep(0.02)
        assert len(coordinator.hellos) == 1
        assert coordinator.accused == [pb.WorkerAccused(peer_id="w", reason="it lies", is_certain=True)]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await coordinator.stop()

    asyncio.run(scene())

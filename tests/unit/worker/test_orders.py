"""What a worker makes of the coordinator's orders, without a stream."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from echo2.base.ids import GroupId, LeaseId
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.broadcast.runtime.node_options import NodeOptions
from echo2.control.backoff import Backoff
from echo2.control.runtime.session import ControlSession
from echo2.control.waits import Waits
from echo2.outside import SteadyClock
from echo2.trust.identity import Identity, Role, RunAuthority
from echo2.wire import rollout as wire
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.ticket import Ticket, sign_ticket
from echo2.worker import duties
from echo2.worker.assignments import Assignments
from echo2.worker.options import WorkerLimits
from echo2.worker.runtime.desk import Desk
from echo2.worker.runtime.orders import OrderCalls, Orders
from echo2.worker.runtime.reporting import Reporting
from echo2.worker.runtime.session import WorkerSession
from echo2.worker.telemetry import RateWindow
from tests.unit.worker.peers import RUN, issued
from tests.unit.worker.test_reporting import NullEngine

LEASE = LeaseId("l1")


def test_of_a_lease_that_has_ended_no_renewal_leaves_a_ticket_behind(tmp_path: Path) -> None:
    """The coordinator renewed it before it had heard of the end."""

    async def scene() -> None:
        authority, clock = RunAuthority.create(Identity.generate(), RUN, time.time()), SteadyClock()
        credentials = issued(authority, Role.WORKER, "nowhere:1")
        backoff = Backoff(random.Random(0))
        reporting = Reporting(credentials, lambda event: None, Waits(clock), backoff, 1.0)
        session = WorkerSession(ControlSession(credentials, Waits(clock), backoff))
        desk = Desk(Assignments(WorkerLimits()), clock, RateWindow(), reporting, session)
        desk.take(NullEngine())  # type: ignore[arg-type]
        calls = OrderCalls(
            learner_is_at=lambda whereabouts: None, skew_is=lambda skew_s: None, refuse=session.end_lease,
            use_relay=lambda peer, address: None,
        )  # fmt: skip
        orders = Orders(desk, reporting, BroadcastNode(credentials, NodeOptions(tmp_path)), credentials, calls, clock)
        group = GroupSpec(GroupId("g1"), (1, 2), 1, SamplingParams(max_new_tokens=5), 0)
        ticket = sign_ticket(
            Ticket(LEASE, group.group_id, credentials.peer_id, 1, time.time() + 60, RUN), authority.identity
        )

        def granted(is_renewal: bool) -> None:
            grant = pb.LeaseGrant(ticket=ticket, group=wire.group_to_message(group), is_renewal=is_renewal)
            orders.ordered(pb.WorkerOrder(lease_grant=grant))

        granted(False)
        granted(True)
        assert desk.machine.lease_ids == (LEASE,) and reporting.ticket_of(LEASE) is not None
        desk.send(duties.ReportRefused(LEASE, "the group is closed"))
        assert desk.machine.lease_ids == () and reporting.ticket_of(LEASE) is None
        granted(True)
        assert desk.machine.lease_ids == () and reporting.ticket_of(LEASE) is None
        desk.close()

    asyncio.run(scene())

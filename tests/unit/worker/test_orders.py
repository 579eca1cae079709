"""What a worker makes of the coordinator's orders, without a stream."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from echo2.base.ids import GroupId, LeaseId, PeerId
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams
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


@dataclass(frozen=True)
class Stage:
    """A worker's orders without a stream. `refused`: the leases that it hands back at once."""

    orders: Orders
    desk: Desk
    reporting: Reporting
    me: PeerId
    authority: RunAuthority
    refused: list[tuple[LeaseId, EndReason]]

    def granted(self, *, is_renewal: bool = False, worker: PeerId | None = None, ticket_of: str = "g1") -> None:
        group = GroupSpec(GroupId("g1"), (1, 2), 1, SamplingParams(max_new_tokens=5), 0)
        ticket = Ticket(LEASE, GroupId(ticket_of), worker or self.me, 1, time.time() + 60, RUN)
        signed = sign_ticket(ticket, self.authority.identity)
        grant = pb.LeaseGrant(ticket=signed, group=wire.group_to_message(group), is_renewal=is_renewal)
        self.orders.ordered(pb.WorkerOrder(lease_grant=grant))


def stage(folder: Path) -> Stage:
    authority, clock = RunAuthority.create(Identity.generate(), RUN, time.time()), SteadyClock()
    credentials = issued(authority, Role.WORKER, "nowhere:1")
    backoff = Backoff(random.Random(0))
    reporting = Reporting(credentials, lambda event: None, Waits(clock), backoff, 1.0)
    session = WorkerSession(ControlSession(credentials, Waits(clock), backoff))
    desk = Desk(Assignments(WorkerLimits()), clock, RateWindow(), reporting, session)
    desk.take(NullEngine())  # type: ignore[arg-type]
    refused: list[tuple[LeaseId, EndReason]] = []
    calls = OrderCalls(
        learner_is_at=lambda whereabouts: None, skew_is=lambda skew_s: None,
        refuse=lambda lease_id, reason, text: refused.append((lease_id, reason)), use_relay=lambda peer, address: None,
    )  # fmt: skip
    orders = Orders(desk, reporting, BroadcastNode(credentials, NodeOptions(folder)), credentials, calls, clock)
    return Stage(orders, desk, reporting, credentials.peer_id, authority, refused)


def test_of_a_lease_that_has_ended_no_renewal_leaves_a_ticket_behind(tmp_path: Path) -> None:
    """The coordinator renewed it before it had heard of the end."""

    async def scene() -> None:
        on = stage(tmp_path)
        on.granted()
        on.granted(is_renewal=True)
        assert on.desk.machine.lease_ids == (LEASE,) and on.reporting.ticket_of(LEASE) is not None
        on.desk.send(duties.ReportRefused(LEASE, "the group is closed"))
        assert on.desk.machine.lease_ids == () and on.reporting.ticket_of(LEASE) is None
        on.granted(is_renewal=True)
        assert on.desk.machine.lease_ids == () and on.reporting.ticket_of(LEASE) is None
        on.desk.close()

    asyncio.run(scene())


@pytest.mark.parametrize("of_another", [{"worker": PeerId("another")}, {"ticket_of": "g2"}], ids=["worker", "group"])
def test_a_lease_whose_ticket_is_of_another_is_refused_and_not_worked_on(
    tmp_path: Path, of_another: dict[str, Any]
) -> None:
    async def scene() -> None:
        on = stage(tmp_path)
        on.granted(**of_another)
        assert on.desk.machine.lease_ids == () and on.reporting.ticket_of(LEASE) is None
        assert on.refused == [(LEASE, EndReason.REFUSED)]
        on.desk.close()

    asyncio.run(scene())

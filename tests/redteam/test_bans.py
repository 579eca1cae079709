"""A worker that is banned: everybody who might serve it chunks is told, and told when that is lifted."""

import asyncio
import random
from pathlib import Path

from echo2.base.clock import Backoff, Waits
from echo2.control.session import ControlSession
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.outside import SteadyClock
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.worker.generation import Generation
from echo2.worker.links import CoordinatorCommands, CoordinatorLink, Reports
from tests.contract.fleet import Member, fleet, until
from tests.unit.coordinator.test_daemon import Node, options, running


async def test_all_workers_and_the_learner_hear_of_a_ban_and_of_its_end_and_newcomers_at_once(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        learner, bad = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        worker, late = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.WORKER)
        await learner.hello()
        await bad.hello()
        assert not (await worker.hello()).welcome.banned_peer_ids
        hub, name = daemon.hub, bad.credentials.peer_id
        hub.set_worker(name, OperatorSetting.BANNED, "it lies")
        assert (await worker.until("banned")) == pb.BannedPeer(peer_id=name)
        told = await learner.until("banned")
        assert (told.peer_id, told.is_banned, told.is_lifted) == (name, True, False)
        assert list((await late.hello()).welcome.banned_peer_ids) == [name]
        hub.set_worker(name, OperatorSetting.QUARANTINED, "it may have lied")
        assert (await worker.until("banned")) == pb.BannedPeer(peer_id=name, is_lifted=True)
        told = await learner.until("banned")
        assert (told.peer_id, told.is_banned, told.is_lifted) == (name, False, False)


def orders_of(member: Member) -> CoordinatorCommands:
    clock = SteadyClock()
    backoff = Backoff(random.Random(0))
    reports = Reports(member.credentials, Waits(clock), backoff, 1.0)
    link = CoordinatorLink(ControlSession(member.credentials, Waits(clock), backoff))
    leases = Generation(clock, reports, link).leases
    return CoordinatorCommands(link, leases, reports, member.node, clock, lambda finding: None)


async def test_a_worker_that_is_told_of_a_ban_cuts_the_peer_off_and_takes_it_back_when_told_so(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2) as f:
        _, one, other = f.members
        orders, banned = orders_of(one), other.node.peer_id
        orders.on_order(pb.WorkerOrder(banned=pb.BannedPeer(peer_id=banned)))
        assert banned not in one.node.session.peers
        await asyncio.sleep(1.5)  # either side would have dialled again by now
        assert banned not in one.node.session.peers
        orders.on_order(pb.WorkerOrder(banned=pb.BannedPeer(peer_id=banned, is_lifted=True)))
        await until(lambda: banned in one.node.session.peers, "they have met again")
        orders.on_welcome(pb.WorkerWelcome(banned_peer_ids=[banned], report_interval_s=1.0))
        assert banned not in one.node.session.peers
        orders.on_welcome(pb.WorkerWelcome(report_interval_s=1.0))
        await until(lambda: banned in one.node.session.peers, "a welcome names all that are banned")

"""A worker that goes: by its own good-bye, or because its machine will be taken away."""

from __future__ import annotations

import asyncio
from pathlib import Path

from echo2.coordinator.ending import preempted
from echo2.coordinator.fleet.members import Liveness
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import Node, group, options, play, running


def test_a_good_bye_is_heard_and_its_group_goes_to_another_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path, suspect_after=40.0, gone_after=50.0, lease_timeout=60.0)) as daemon:
            assert daemon.hub is not None
            learner = await Node.join(daemon, Role.LEARNER)
            first, second = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.WORKER)
            await learner.hello(open_groups=[group("g1")])
            await first.hello()
            await first.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
            await first.until("lease_grant")
            await first.say(leaving=pb.WorkerLeaving(reason="preemption notice"))
            await second.hello()
            await second.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
            assert (await second.until("lease_grant")).is_continuation, "though nobody has missed the first one yet"
            member = daemon.hub.membership.members[first.credentials.peer_id]
            assert member.last_liveness is Liveness.GONE
            assert any("leaves: preemption notice" in event.text for event in daemon.hub.state.events)
            assert [paid.action for paid in daemon.hub.state.paid].count("preempted") == 1
            for node in (learner, first, second):
                await node.close()

    play(scene)


def test_of_a_machine_that_will_be_taken_away_the_leases_are_called_back_and_go_to_another(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path, lease_timeout=60.0)) as daemon:
            assert daemon.hub is not None
            learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
            await learner.hello(open_groups=[group("g1")])
            await worker.hello()
            await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
            lease_id = (await worker.until("lease_grant")).ticket.lease_id
            preempted(daemon.hub, worker.credentials.peer_id, "the cloud says so")
            revoked = await worker.until("lease_revoke")
            assert (revoked.lease_id, revoked.reason) == (lease_id, "preemption: the cloud says so")
            assert daemon.hub.book.leases[lease_id].is_recalled
            await asyncio.gather(learner.close(), worker.close())

    play(scene)

"""What becomes of a worker that the learner accuses: a ban, or a quarantine that the operator may end."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.coordinator.fleet.members import OperatorSetting
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import Node, group, options, play, running

TEXT = "audit: its log-probabilities are 0.08 nats off, 0.05 are allowed"


def test_a_finding_that_is_not_certain_sets_the_worker_aside_until_the_operator_releases_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path, suspect_after=30.0, gone_after=60.0)) as daemon:
            learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
            peer_id = worker.credentials.peer_id
            await learner.hello(open_groups=[group("g1")])
            await worker.hello()
            await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
            assert (await worker.until("lease_grant")).ticket.attempt == 1
            await learner.say(accused=pb.WorkerAccused(peer_id=peer_id, reason=TEXT))
            told = await worker.until("activation")
            assert not told.is_active and told.reason == TEXT, "it may stay, and is told why it gets nothing"
            barred = await learner.until("banned")
            assert (barred.peer_id, barred.reason, barred.is_lifted) == (peer_id, TEXT, False)
            hub = daemon.hub
            assert hub is not None and not hub.book.leases, "its lease is free for another"
            assert any(event.kind == "audit" and TEXT in event.text for event in hub.state.events), "with the evidence"

            await learner.close()
            again = await Node.join(daemon, Role.LEARNER, learner.credentials.identity)
            await again.hello(open_groups=[group("g1"), group("g2")])
            assert (await again.until("banned")).peer_id == peer_id, "a learner that comes back is told again"

            hub.set_worker(peer_id, OperatorSetting.AUTOMATIC, "its card is that way")
            lifted = await again.until("banned")
            assert lifted.peer_id == peer_id and lifted.is_lifted
            await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
            grant = await worker.until("lease_grant")
            assert grant.group.group_id == "g2", (
                "it works again; the group that was taken from it waits for others first"
            )
            for node in (again, worker):
                await node.close()

    play(scene)


def test_a_certain_finding_bans_and_a_lesser_one_does_not_soften_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path, suspect_after=30.0, gone_after=60.0)) as daemon:
            learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
            await learner.hello()
            await worker.hello()
            peer_id = worker.credentials.peer_id
            for is_certain in (True, False):
                await learner.say(accused=pb.WorkerAccused(peer_id=peer_id, reason=TEXT, is_certain=is_certain))
            refusal = await worker.until("refusal")
            assert refusal.code == "NotAllowed" and TEXT in refusal.message
            assert (await learner.until("banned")).peer_id == peer_id
            await learner.say(report=pb.LearnerReport())
            assert daemon.hub is not None and daemon.hub.membership.members[peer_id].setting is OperatorSetting.BANNED
            for node in (learner, worker):
                await node.close()

    play(scene)


@pytest.mark.parametrize("setting", [OperatorSetting.BANNED, OperatorSetting.QUARANTINED])
def test_a_notice_that_the_machine_goes_does_not_free_a_barred_worker(tmp_path: Path, setting: OperatorSetting) -> None:
    from echo2.coordinator.ending import preempted

    async def scene() -> None:
        async with running(options(tmp_path, suspect_after=30.0, gone_after=60.0)) as daemon:
            worker = await Node.join(daemon, Role.WORKER)
            await worker.hello()
            hub, peer_id = daemon.hub, worker.credentials.peer_id
            assert hub is not None
            hub.set_worker(peer_id, setting, "audit")
            preempted(hub, peer_id, "in two minutes")
            assert hub.membership.members[peer_id].setting is setting
            await worker.close()

    play(scene)

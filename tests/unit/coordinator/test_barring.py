"""What becomes of a worker that the learner accuses, that leaves, or whose machine will be taken away."""

from __future__ import annotations

import asyncio
from pathlib import Path

from echo2.coordinator.fleet.members import Liveness, OperatorSetting
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.contract.fleet import until
from tests.unit.coordinator.test_daemon import Node, group, options, running
from tests.unit.coordinator.test_planner_input import beat

TEXT = "audit: its log-probabilities are 0.08 nats off, 0.05 are allowed"
PATIENT = {"suspect_after": 30.0, "gone_after": 60.0, "lease_timeout": 60.0}


async def test_an_accused_worker_is_set_aside_until_the_operator_releases_it_and_one_surely_guilty_is_banned(
    tmp_path: Path,
) -> None:
    async with running(options(tmp_path, **PATIENT)) as daemon:
        hub, learner = daemon.hub, await Node.join(daemon, Role.LEARNER)
        worker = await Node.join(daemon, Role.WORKER)
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
        assert not hub.book.leases, "its lease is free for another"
        assert any(event.kind == "audit" and TEXT in event.text for event in hub.state.events), "with the evidence"
        hub.preempt(peer_id, "in two minutes")
        assert hub.membership.members[peer_id].setting is OperatorSetting.QUARANTINED, "a notice does not free it"

        await learner.close()
        learner = await Node.join(daemon, Role.LEARNER, learner.credentials.identity)
        await learner.hello(open_groups=[group("g1"), group("g2")])
        assert (await learner.until("banned")).peer_id == peer_id, "a learner that comes back is told again"

        hub.set_worker(peer_id, OperatorSetting.AUTOMATIC, "its card is that way")
        lifted = await learner.until("banned")
        assert lifted.peer_id == peer_id and lifted.is_lifted
        await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        grant = await worker.until("lease_grant")
        assert grant.group.group_id in ("g1", "g2"), "there is nobody else"

        for is_certain in (True, False):
            await learner.say(accused=pb.WorkerAccused(peer_id=peer_id, reason=TEXT, is_certain=is_certain))
        refusal = await worker.until("refusal")
        assert refusal.code == "NotAllowed" and TEXT in refusal.message
        assert (await learner.until("banned")).is_banned
        await learner.say(report=pb.LearnerReport(step=1))
        while hub.board.report.step < 1:  # what it says after the accusations
            await asyncio.sleep(0.02)
        assert hub.membership.members[peer_id].setting is OperatorSetting.BANNED, "a lesser finding softens no ban"


async def test_groups_of_a_worker_that_says_good_bye_or_will_lose_its_machine_go_to_another_at_once(
    tmp_path: Path,
) -> None:
    async with running(options(tmp_path, **PATIENT)) as daemon:
        hub, learner = daemon.hub, await Node.join(daemon, Role.LEARNER)
        first, second = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.WORKER)
        await learner.hello(open_groups=[group("g1")])
        await first.hello()
        await first.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        await first.until("lease_grant")
        await first.say(leaving=pb.WorkerLeaving(reason="preemption notice"))
        await second.hello()
        await second.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        grant = await second.until("lease_grant")
        assert grant.is_continuation, "though nobody has missed the first one yet"
        assert hub.membership.members[first.credentials.peer_id].last_liveness is Liveness.GONE
        assert any("leaves: preemption notice" in event.text for event in hub.state.events)
        assert [paid.action for paid in hub.state.paid].count("preempted") == 1

        hub.preempt(second.credentials.peer_id, "the cloud says so")
        revoked = await second.until("lease_revoke")
        assert (revoked.lease_id, revoked.reason) == (grant.ticket.lease_id, "preemption: the cloud says so")
        assert hub.book.leases[revoked.lease_id].is_recalled


async def test_a_worker_that_its_record_bars_is_not_planned_for_while_there_is_another(tmp_path: Path) -> None:
    async with running(options(tmp_path, plan_interval=0.1, **PATIENT)) as daemon:
        hub, learner = daemon.hub, await Node.join(daemon, Role.LEARNER)
        await learner.hello()
        barred, other = [await Node.join(daemon, Role.WORKER) for _ in range(2)]
        for worker in (barred, other):
            await worker.hello()
            await worker.say(heartbeat=beat())
        await learner.say(report=pb.LearnerReport(step=1, train_s=1.0, eval_reward=-1.0))
        names = {worker.credentials.peer_id for worker in (barred, other)}
        await until(lambda: hub.plan.now is not None and set(hub.plan.now.pool) == names, "both are worth having")
        hub.book.records.bar(barred.credentials.peer_id, "it gives up prompts", 60.0, hub.clock.now())
        alone = {other.credentials.peer_id}
        await until(
            lambda: hub.plan.now is not None and set(hub.plan.now.pool) == alone, "the other alone is planned for", 30.0
        )

"""What workers say of their speed, room and price, against the real coordinator: only what they deliver counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.members import Activation, Member
from echo2.coordinator.fleet.record import PICKS_MAX
from echo2.coordinator.planning.advice import lease_waits
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import rollout_pb2
from tests.patience import WAIT_S
from tests.unit.coordinator.test_daemon import Node, group, options, running

ROOM = 1 << 20
GROUP = 8


def prompt(number: int) -> rollout_pb2.GroupSpec:
    """Every other one is hard."""
    made = group(f"g{number:04d}")
    made.prompt_token_ids[:] = [1 + number]
    made.sampling.seed = 1000 + number
    return made


class Fleet:
    """A learner that tells what came, and workers of which the honest deliver what they are given."""

    def __init__(self, daemon: CoordinatorDaemon, learner: Node) -> None:
        self.daemon, self.hub, self.learner = daemon, daemon.hub, learner
        self.admitted: dict[str, float] = {}
        self.done = self.offered = 0
        self.seeds: dict[str, list[int]] = defaultdict(list)  # by group: what each lease of it was to be drawn by
        self.made_by: dict[str, Node] = {}
        self.handed_back: set[str] = set()
        self.tasks: list[asyncio.Task[None]] = []
        self.nodes: list[Node] = [learner]

    async def worker(self, heartbeat: pb.Heartbeat | None = None, **hello: Any) -> Node:
        node = await Node.join(self.daemon, Role.WORKER)
        await node.hello(**hello)
        self.nodes.append(node)
        self.tasks.append(asyncio.create_task(self._beat(node, heartbeat or pb.Heartbeat(has_version=True))))
        return node

    async def _beat(self, node: Node, heartbeat: pb.Heartbeat) -> None:
        while True:
            await node.say(heartbeat=heartbeat)
            await asyncio.sleep(0.1)

    def works(self, node: Node, free_rollouts: int = GROUP, *, is_picky: bool = False) -> None:
        self.tasks.append(asyncio.create_task(self._ask(node, free_rollouts)))
        self.tasks.append(asyncio.create_task(self._work(node, is_picky)))

    async def _work(self, node: Node, is_picky: bool) -> None:
        """Takes what it is given and delivers it at once; who is picky hands every other prompt back."""
        while True:
            grant = await node.until("lease_grant")
            if grant.is_renewal:
                continue
            name, lease_id = grant.group.group_id, grant.ticket.lease_id
            self.seeds[name].append(grant.group.sampling.seed)
            if is_picky and grant.group.prompt_token_ids[0] % 2:
                self.handed_back.add(name)
                ended = pb.LeaseEnded(lease_id=lease_id, reason=pb.LeaseEnded.REASON_HANDED_BACK, message="preemption")
                await node.say(lease_ended=ended)
                continue
            await node.say(lease_ended=pb.LeaseEnded(lease_id=lease_id, reason=pb.LeaseEnded.REASON_FINISHED))
            await self.learner.say(close=pb.CloseGroups(group_ids=[name], reason="complete"))
            self.delivered(node, GROUP)
            self.made_by[name] = node
            self.done += 1

    async def _ask(self, node: Node, free_rollouts: int) -> None:
        while True:
            await node.say(lease_request=pb.LeaseRequest(free_rollouts=free_rollouts, version=0))
            await asyncio.sleep(0.05)

    def hogs(self, node: Node) -> None:
        self.tasks.append(asyncio.create_task(self._ask(node, ROOM)))

    def delivered(self, node: Node, rollouts: float) -> None:
        peer = node.credentials.peer_id
        self.admitted[peer] = self.admitted.get(peer, 0.0) + rollouts

    async def tell(self) -> None:
        """Twice a second, and one step of the learner each time."""
        step = 1
        while True:
            told = [
                pb.WorkerDelivered(peer_id=peer, heard_rollouts=int(rollouts), admitted_rollouts=rollouts)
                for peer, rollouts in self.admitted.items()
            ]
            self.admitted.clear()
            await self.learner.say(delivered=pb.WorkersDelivered(workers=told))
            await self.learner.say(report=pb.LearnerReport(step=step, train_s=1.0, eval_reward=-1.0))
            step += 1
            await asyncio.sleep(0.5)

    async def keep_offered(self, groups: int) -> None:
        """So many groups are open at any time, as the plan's cap has it."""
        while True:
            missing = groups - (self.offered - self.done)
            if missing > 0:
                offered = [prompt(self.offered + number) for number in range(missing)]
                await self.learner.say(offer=pb.OfferGroups(groups=offered))
                self.offered += missing
            await asyncio.sleep(0.02)

    def member(self, node: Node) -> Member:
        return self.hub.membership.members[node.credentials.peer_id]

    def is_active(self, node: Node) -> bool:
        return self.member(node).last_activation is Activation.ACTIVE

    async def until(self, holds: Callable[[], bool]) -> None:
        """Looks until it holds."""
        limit = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < limit, [
                (one.name, one.activation, one.activation_reason) for one in self.hub.membership.members.values()
            ]
            await asyncio.sleep(0.05)

    async def stays(self, holds: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            assert holds(), [
                (one.name, one.activation, one.activation_reason) for one in self.hub.membership.members.values()
            ]
            await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet(folder: Path, **more: Any) -> AsyncIterator[Fleet]:
    async with running(options(folder, lease_timeout=4.0, plan_interval=0.3, **more)) as daemon:
        learner = await Node.join(daemon, Role.LEARNER)
        await learner.hello()
        made = Fleet(daemon, learner)
        made.tasks.append(asyncio.create_task(made.tell()))
        try:
            yield made
        finally:
            for task in made.tasks:
                task.cancel()
            with contextlib.suppress(Exception):
                await asyncio.gather(*made.tasks, return_exceptions=True)


def beat(rollouts_per_s: float) -> pb.Heartbeat:
    return pb.Heartbeat(
        has_version=True, rollouts_per_s=rollouts_per_s, tokens_per_s=100 * rollouts_per_s, rollout_s_mean=0.5,
        rollout_s_p95=0.6,
    )  # fmt: skip


async def test_workers_that_ask_for_everything_and_deliver_nothing_starve_nobody(tmp_path: Path) -> None:
    """Three of them, there from the start, and one that comes later; they get a group each now and then."""
    async with fleet(tmp_path) as run:
        run.tasks.append(asyncio.create_task(run.keep_offered(4)))
        for number in range(3):
            run.hogs(await run.worker(name=f"hog{number}", slot_count=ROOM))
        honest = await run.worker(name="honest")
        run.works(honest)
        await run.until(lambda: run.done >= 48)
        run.hogs(await run.worker(name="late", slot_count=ROOM))
        before = run.done
        await run.until(lambda: run.done >= before + 48)
        records, name = run.hub.book.records, honest.credentials.peer_id
        hogs = [record for peer, record in records.workers.items() if peer != name]
        assert any(record.bars for record in hogs) and all(sum(record.held.values()) <= GROUP for record in hogs)
        assert records.proven == {name}


def test_leases_that_are_only_said_to_be_finished_bring_no_more_of_them(tmp_path: Path) -> None:
    async def scene() -> None:
        async with fleet(tmp_path) as run:
            run.tasks.append(asyncio.create_task(run.keep_offered(4)))
            honest = await run.worker(name="honest")
            run.works(honest)
            await run.until(lambda: run.hub.book.records.proven != set())
            liar = await run.worker(name="liar", slot_count=ROOM)
            run.hogs(liar)
            grants = 0

            async def end_all() -> None:
                nonlocal grants
                while True:
                    grant = await liar.until("lease_grant")
                    grants += 1
                    ended = pb.LeaseEnded(lease_id=grant.ticket.lease_id, reason=pb.LeaseEnded.REASON_FINISHED)
                    await liar.say(lease_ended=ended)

            run.tasks.append(asyncio.create_task(end_all()))
            before = run.done
            await run.until(lambda: run.done >= before + 24)
            await run.until(lambda: grants >= 1)
            await run.stays(lambda: grants == 1, 2.0)

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))


async def test_a_speed_that_is_only_claimed_sends_nobody_to_standby(tmp_path: Path) -> None:
    """40 rollouts a second for nothing, and all else that would make it the only worker worth having."""
    async with fleet(tmp_path, heartbeat_interval=0.05) as run:
        honest = await run.worker(beat(20.0), name="honest", price_usd_per_hour=1.0)
        run.delivered(honest, 200.0)
        await run.until(lambda: run.hub.plan.now is not None and honest.credentials.peer_id in run.hub.plan.now.pool)
        liar = await run.worker(beat(40.0), name="liar", price_usd_per_hour=0.0)
        await run.until(lambda: run.member(liar).is_on_trial)
        await run.stays(lambda: run.is_active(honest), 3.0)
        assert run.hub.plan.now is not None and liar.credentials.peer_id not in run.hub.plan.now.pool
        run.delivered(liar, 1.0)  # a little buys a little
        await run.until(lambda: run.member(liar).record.is_proven)
        await run.stays(lambda: run.is_active(honest), 3.0)
        run.delivered(liar, 1000.0)  # as fast as it says, and for less: now it is worth it
        await run.until(lambda: not run.is_active(honest) and run.is_active(liar))


async def test_what_a_newcomer_claims_of_its_link_and_its_rollouts_spoils_no_plan(tmp_path: Path) -> None:
    async with fleet(tmp_path) as run:
        honest = await run.worker(beat(20.0), name="honest")
        run.delivered(honest, 200.0)
        await run.until(lambda: run.hub.plan.now is not None and run.member(honest).record.is_proven)
        plan = run.hub.plan.now
        assert plan is not None
        slow = pb.Heartbeat(
            has_version=True, rollouts_per_s=1e-3, tokens_per_s=1.0, rollout_s_mean=1e9, rollout_s_p95=1e9,
            apply_s=1e9, swap_s=1e9, link=pb.Link(uplink_bytes_per_s=1e-3, downlink_bytes_per_s=1e-3),
        )  # fmt: skip
        liar = await run.worker(slow, name="liar", price_usd_per_hour=0.0)
        await run.until(lambda: run.member(liar).is_on_trial)
        await run.until(lambda: run.hub.plan.now is not plan)
        now = run.hub.plan.now
        assert now is not None
        assert (now.kappa, now.pool) == (plan.kappa, plan.pool)
        assert now.predicted_utilisation >= plan.predicted_utilisation - 0.05


async def test_newcomers_are_paid_from_the_room_under_the_cap_and_as_many_as_have_delivered(tmp_path: Path) -> None:
    async with fleet(tmp_path, usd_per_hour_cap=5.0) as run:
        honest = await run.worker(beat(20.0), name="honest", price_usd_per_hour=1.0)
        run.delivered(honest, 200.0)
        await run.until(lambda: run.hub.plan.now is not None)
        crowd = [await run.worker(name=f"new{number}", price_usd_per_hour=3.0) for number in range(8)]
        await run.until(lambda: any(run.is_active(one) for one in crowd))
        await run.stays(lambda: sum(run.is_active(one) for one in crowd) <= 1 and run.is_active(honest), 2.0)
        assert run.hub.money.sums().usd_chosen_per_hour <= 5.0


async def test_a_worker_that_hands_back_hard_prompts_gets_none_for_a_while_and_others_draw_them_by_the_same_seeds(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as run:
        honest, picky = await run.worker(name="honest"), await run.worker(name="picky")
        for node in (honest, picky):
            run.delivered(node, 64)
        await run.until(lambda: len(run.hub.book.records.proven) == 2)
        run.works(picky, 4 * GROUP, is_picky=True)
        run.tasks.append(asyncio.create_task(run.keep_offered(16)))
        await run.until(lambda: len(run.handed_back) > 0)
        run.works(honest, 4 * GROUP)
        record = run.hub.book.records.of(picky.credentials.peer_id)
        await run.until(lambda: record.barred_until > run.hub.clock.now())
        assert "handed back" in record.why
        finished = sum(name in run.made_by for name in run.handed_back)
        assert finished <= 10 * PICKS_MAX, "what another finished counts; on a busy machine it is told late"
        held_back, before = sum(record.ways.values()), run.done
        await run.until(lambda: run.done >= before + 48)
        assert sum(record.ways.values()) == held_back, "it was given nothing since"
        told = [what for what, _ in lease_waits(run.hub.book, run.hub.clock.now())]
        assert any(f"{picky.credentials.peer_id} is given no leases for" in what for what in told), told
        assert run.hub.book.records.of(honest.credentials.peer_id).picks == 0
        assert all(run.made_by[name] is honest for name in run.handed_back)
        assert all(len(set(seeds)) == 1 for seeds in run.seeds.values())
        assert any(len(run.seeds[name]) > 1 for name in run.handed_back)

"""A worker that hands back the prompts it does not like, against the real coordinator: it gets fewer, and no new samples."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

from echo2.coordinator.fleet.record import PICKS_MAX
from echo2.coordinator.leases.waits import waits
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.gen.echo2.v1 import rollout_pb2
from tests.redteam.test_claims import GROUP, Fleet, fleet
from tests.unit.coordinator.test_daemon import Node, group, play

HELD_GROUPS = 4


class Prompts:
    """Groups of different prompts, every other one hard; `seeds`: by group, what each lease of it was to be drawn by."""

    def __init__(self, run: Fleet) -> None:
        self.run, self.count = run, 0
        self.seeds: dict[str, list[int]] = defaultdict(list)
        self.handed_back: set[str] = set()
        self.made_by: dict[str, Node] = {}

    def spec(self) -> rollout_pb2.GroupSpec:
        self.count += 1
        made = group(f"g{self.count:04d}")
        made.prompt_token_ids[:] = [self.count]
        made.sampling.seed = 1000 + self.count
        return made

    async def keep_offered(self, groups: int) -> None:
        while True:
            missing = groups - (self.count - len(self.made_by))
            if missing > 0:
                await self.run.learner.say(offer=pb.OfferGroups(groups=[self.spec() for _ in range(missing)]))
            await asyncio.sleep(0.02)

    async def works(self, node: Node, is_picky: bool) -> None:
        """Asks all the time, and delivers what it likes: the honest like everything."""
        asking = asyncio.create_task(self.run._ask(node, HELD_GROUPS * GROUP))
        try:
            while True:
                grant = await node.until("lease_grant")
                if grant.is_renewal:
                    continue
                name, lease_id = grant.group.group_id, grant.ticket.lease_id
                self.seeds[name].append(grant.group.sampling.seed)
                if is_picky and grant.group.prompt_token_ids[0] % 2:
                    self.handed_back.add(name)
                    reason = pb.LeaseEnded.REASON_HANDED_BACK
                    await node.say(lease_ended=pb.LeaseEnded(lease_id=lease_id, reason=reason, message="preemption"))
                    continue
                await node.say(lease_ended=pb.LeaseEnded(lease_id=lease_id, reason=pb.LeaseEnded.REASON_FINISHED))
                await self.run.learner.say(close=pb.CloseGroups(group_ids=[name], reason="complete"))
                self.made_by[name] = node
                self.run.delivered(node, GROUP)
        finally:
            asking.cancel()


def test_a_worker_that_hands_back_hard_prompts_gets_none_for_a_while_and_others_draw_them_by_the_same_seeds(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with fleet(tmp_path) as run:
            prompts = Prompts(run)
            honest, picky = await run.worker(name="honest"), await run.worker(name="picky")
            for node in (honest, picky):
                run.delivered(node, 64)
            await run.until(lambda: len(run.hub.book.records.proven) == 2)
            run.tasks.append(asyncio.create_task(prompts.works(picky, is_picky=True)))
            run.tasks.append(asyncio.create_task(prompts.keep_offered(16)))
            await run.until(lambda: len(prompts.handed_back) > 0)
            run.tasks.append(asyncio.create_task(prompts.works(honest, is_picky=False)))
            record = run.hub.book.records.of(picky.credentials.peer_id)
            await run.until(lambda: record.barred_until > run.hub.clock.now())
            assert "handed back" in record.why
            held_back = sum(record.ways.values())
            before = len(prompts.made_by)
            await run.until(lambda: len(prompts.made_by) >= before + 48)
            assert sum(record.ways.values()) == held_back <= 6 * PICKS_MAX, "it was given nothing since"
            told = [what for what, _ in waits(run.hub.book, run.hub.clock.now())]
            assert any(f"{picky.credentials.peer_id} is given no leases for another" in what for what in told), told
            assert run.hub.book.records.of(honest.credentials.peer_id).picks == 0
            assert prompts.handed_back and all(prompts.made_by[name] is honest for name in prompts.handed_back)
            assert all(len(set(seeds)) == 1 for seeds in prompts.seeds.values())
            assert any(len(prompts.seeds[name]) > 1 for name in prompts.handed_back)

    play(scene, 150.0)

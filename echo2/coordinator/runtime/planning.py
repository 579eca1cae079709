"""Runs the planners when something that they depend on has changed, the planner of the pool also at least every interval.

Waits for `hub.plan_needed` (at most `plan_interval_s`) and `hub.broadcast_needed`; a burst of changes is planned once. Guarantees:
streams are served while a plan is made, and each planner makes one plan at a time. Leaves to others: what a good plan is
(cost_model, broadcast), where it is made (aside), carrying it out (hub).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging

from echo2.base.errors import EchoError
from echo2.broadcast.weighting import is_fit, weighted_plan
from echo2.coordinator.membership import Liveness
from echo2.coordinator.options import PlannerMode
from echo2.coordinator.planner_input import (
    SnapshotMaker,
    broadcast_nodes,
    mark_shunned,
    needs_of,
    plan_config,
    pool_usd_per_s,
)
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.coordinator.runtime.experience_file import known
from echo2.coordinator.runtime.hub import Hub
from echo2.coordinator.runtime.pool_plan import make_plan
from echo2.coordinator.trials import Trials
from echo2.cost_model.snapshot import FleetSnapshot
from echo2.outside import unix_now
from echo2.outside.guard import noting

SETTLE_S = 0.2
SETTLE_S_PER_WORKER = 0.005  # so a burst of joins leads to a few plans, not to one per join
SENDS_AT_ONCE, SEND_PAUSE_S = 8, 0.02
ESTIMATES_AT_ONCE = 100
_log = logging.getLogger("echo2.coordinator")


async def snapshot_of(hub: Hub) -> FleetSnapshot | None:
    """The planner's snapshot of the fleet; None while too little is known. Yields to the loop, so leases are served meanwhile."""
    members = list(hub.membership.members.values())
    maker = SnapshotMaker(hub.board, members, hub.clock.now(), built_in_catalogue(), known(hub.options.machines_file))
    if not maker.is_possible:
        return None
    while not maker.is_whole:
        maker.go_on(ESTIMATES_AT_ONCE)
        await asyncio.sleep(0)
    return maker.snapshot()


class Planning:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._epoch = int(unix_now() * 1000)
        self._trials = Trials()

    async def run(self) -> None:
        """Runs both planners' loops until cancelled."""
        await asyncio.gather(self._run_pool(), self._run_broadcast())

    async def _settle(self) -> None:
        """Waits for a time that grows with the fleet: after a restart the whole fleet reconnects, and plans of its first few
        workers would be discarded."""
        fleet = sum(1 for _ in self._hub.membership.living())
        await asyncio.sleep(SETTLE_S + SETTLE_S_PER_WORKER * fleet)

    async def _run_pool(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hub.plan_needed.wait(), self._hub.options.plan_interval_s)
            await self._settle()
            self._hub.plan_needed.clear()
            with noting("planning the pool"):
                try:
                    await self._plan_pool()
                except EchoError as error:
                    self._hub.plan_waits_for = f"input that it can use: {error}"

    async def _plan_pool(self) -> None:
        hub = self._hub
        if hub.ending.finish is not None:
            hub.plan_waits_for = ""
            return
        members = list(hub.membership.members.values())
        choosable = [member.peer_id for member in members if member.last_liveness is Liveness.ALIVE]
        mark_shunned(members, hub.book.hearsay, hub.book.given_up, hub.clock.now())
        budget = hub.options.usd_budget
        is_spent = budget > 0 and hub.money.sums().usd_chosen >= budget
        self._trials.appraise(members, hub.book.worth, hub.options.usd_per_hour_cap, hub.clock.now(), is_spent)
        if hub.options.planner_mode is PlannerMode.AUTO:
            hub.try_out(members)
        snapshot = await snapshot_of(hub)
        if snapshot is None or not choosable:  # a plan without workers would put all on standby
            hub.plan_waits_for = _missing(hub) if hub.plan is None else ""
            return
        config = plan_config(hub.options, hub.board)
        plan = await hub.aside.run(len(members), make_plan, snapshot, config, hub.plan)
        hub.adopt_plan(plan, choosable, hub.options.planner_mode is PlannerMode.AUTO or is_spent)
        hub.broadcast_needed.set()  # the share of the pool that needs versions first may have changed

    async def _run_broadcast(self) -> None:
        while True:
            await self._hub.broadcast_needed.wait()
            await self._settle()
            self._hub.broadcast_needed.clear()
            with noting("planning the broadcast"):
                await self._plan_broadcast()

    async def _plan_broadcast(self) -> None:
        board, members = self._hub.board, self._hub.membership.members
        nodes = broadcast_nodes(board, list(members.values()))
        known = self._hub.broadcast_plan
        if len(nodes) < 2 or self._hub.ending.finish is not None:
            return
        needs = needs_of(nodes, members, self._hub.plan)
        if known is not None and await self._hub.aside.run(len(nodes), is_fit, known, nodes, needs):
            return
        size = board.delta_bytes or (board.hello.full_snapshot_bytes if board.hello else 0)
        self._epoch = max(self._epoch + 1, int(unix_now() * 1000))
        make = functools.partial(weighted_plan, usd_per_s=pool_usd_per_s(members.values()))
        plan = await self._hub.aside.run(len(nodes), make, nodes, needs, self._epoch, max(1, size))
        if known is not None and (known.nodes, known.trees) == (plan.nodes, plan.trees):
            return
        for index, session in enumerate(self._hub.adopt_broadcast_plan(plan)):
            self._hub.send_broadcast_plan(session)
            if index % SENDS_AT_ONCE == SENDS_AT_ONCE - 1:
                await asyncio.sleep(SEND_PAUSE_S)  # a large fleet's parts must not delay its leases


def _missing(hub: Hub) -> str:
    if hub.board.hello is None:
        return "the learner"
    return "the learner's first step" if hub.board.train_s <= 0 else "a first measured worker"

"""Runs the planners when something that they depend on has changed, the planner of the pool also at least every interval.

Waits for `hub.plan_needed` (at most `plan_interval_s`) and `hub.broadcast_needed`; a burst of changes is planned once.
Guarantees: streams are served while a plan is made, and each planner makes one plan at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging

from echo2.base.errors import EchoError
from echo2.broadcast.trees import PlanPace, is_worth_sending, serves, weighted_plan
from echo2.coordinator.fleet.members import ON_TRIAL, Liveness, try_newcomers
from echo2.coordinator.hub import Hub
from echo2.coordinator.money.market import built_in_catalogue
from echo2.coordinator.planning.pool_plan import make_plan
from echo2.coordinator.planning.telemetry import (
    broadcast_nodes,
    is_settled,
    learner_estimate,
    needs_of,
    plan_config,
    pool_usd_per_s,
    worker_estimates,
)
from echo2.cost_model.snapshot import FleetSnapshot, WorkerEstimate, is_spent
from echo2.outside import unix_now
from echo2.outside.guard import noting

SETTLE_S = 0.2  # more events of one burst
SETTLE_S_PER_WORKER = 0.005  # so a burst of joins leads to a few plans, not to one per join
SENDS_AT_ONCE, SEND_PAUSE_S = 8, 0.02  # leases are served in between within 20 ms
ESTIMATES_AT_ONCE = 100  # about 5 ms
_log = logging.getLogger("echo2.coordinator")


async def snapshot_of(hub: Hub) -> FleetSnapshot | None:
    """The planner's snapshot of the fleet; None while too little is known. Yields to the loop, so leases are served meanwhile."""
    board, now, estimates = hub.board, hub.clock.now(), list[WorkerEstimate]()
    members = list(hub.membership.members.values())
    workers = worker_estimates(board, members, now, built_in_catalogue(), hub.plan.rate_ratio)
    if workers is None or board.hello is None:
        return None
    for worker in workers:
        estimates.append(worker)
        if len(estimates) % ESTIMATES_AT_ONCE == 0:
            await asyncio.sleep(0)
    spent_usd = hub.money.sums().usd_chosen  # the same number by which cap and budget are checked
    steps_left = max(0, board.hello.step_limit - board.report.step)
    return FleetSnapshot(now, learner_estimate(board), tuple(estimates), spent_usd, steps_left)


class Planning:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._epoch = int(unix_now() * 1000)
        self._pace = PlanPace()
        self._later: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        await asyncio.gather(self._run_pool(), self._run_broadcast())

    async def _settle(self) -> None:
        """Waits for a time that grows with the fleet: after a restart the whole fleet reconnects, and plans of its first few
        workers would be discarded."""
        fleet = sum(1 for _ in self._hub.membership.living())
        await asyncio.sleep(SETTLE_S + SETTLE_S_PER_WORKER * fleet)

    async def _run_pool(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._hub.config.coordinator.plan_interval):
                    await self._hub.plan_needed.wait()
            await self._settle()
            self._hub.plan_needed.clear()
            with noting("planning the pool"):
                try:
                    await self._plan_pool()
                except EchoError as error:
                    self._hub.plan.wait_for(f"input that it can use: {error}", self._hub.clock.now())

    async def _plan_pool(self) -> None:
        hub = self._hub
        if hub.ending.finish is not None:
            hub.plan.wait_for("", hub.clock.now())
            return
        if hub.board.report.step < hub.config.sft.step_count:
            hub.plan.wait_for("the supervised warm start, which needs no worker", hub.clock.now())
            return
        members = list(hub.membership.members.values())
        choosable = [member.peer_id for member in members if member.last_liveness is Liveness.ALIVE]
        for member in members:
            member.is_barred_by_record = hub.book.records.is_barred(member.peer_id, choosable, hub.clock.now())
        section = hub.config.coordinator
        has_spent = is_spent(hub.money.sums().usd_chosen, section.usd_budget)
        try_newcomers(members, section.usd_per_hour_cap, hub.clock.now(), has_spent)
        if section.planner_mode == "auto":
            hub.want([member for member in members if member.is_on_trial and not member.is_wanted], (), ON_TRIAL)
        rate_ratio, has_settled = hub.plan.rate_ratio, is_settled(hub.board, [*hub.membership.pool()])
        snapshot = await snapshot_of(hub)
        if snapshot is None or not choosable:  # a plan without workers would put all on standby
            hub.plan.wait_for(_missing(hub) if hub.plan.now is None else "", hub.clock.now())
            if section.planner_mode == "auto" or hub.awaits_plan:
                hub.go_on_without_plan()
                is_at_work = any(member.is_wanted for member in hub.membership.living())
                hub.await_plan(has_spent or (hub.awaits_plan and not is_at_work))
            return
        config = plan_config(hub.config, hub.board)
        plan = await hub.plan_process.run(len(members), make_plan, snapshot, config, hub.plan.now)
        # In any mode a plan ends what a spent budget has begun: nobody else lets those work whom it put on standby.
        is_acted_on = section.planner_mode == "auto" or has_spent or hub.awaits_plan
        hub.adopt_plan(plan, choosable, is_acted_on, rate_ratio, has_settled)
        is_at_work = any(hub.membership.members[peer_id].is_wanted for peer_id in plan.pool)
        hub.await_plan(has_spent or (hub.awaits_plan and not is_at_work))
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
        needs = needs_of(nodes, members, self._hub.plan.now)
        if not self._may_plan(known is not None and serves(known, nodes, needs)):
            return
        size = board.delta_bytes or (board.hello.full_snapshot_bytes if board.hello else 0)
        self._epoch = max(self._epoch + 1, int(unix_now() * 1000))
        make = functools.partial(weighted_plan, usd_per_s=pool_usd_per_s(members.values()))
        plan = await self._hub.plan_process.run(len(nodes), make, nodes, needs, self._epoch, max(1, size))
        if known is not None and not await self._hub.plan_process.run(len(nodes), is_worth_sending, known, plan, needs):
            return
        for index, session in enumerate(self._hub.adopt_broadcast_plan(plan)):
            self._hub.send_broadcast_plan(session)
            if index % SENDS_AT_ONCE == SENDS_AT_ONCE - 1:
                await asyncio.sleep(SEND_PAUSE_S)  # a large fleet's parts must not delay its leases

    def _may_plan(self, are_rates_alone: bool) -> bool:
        """Whether a plan of the broadcast may be made now; if not, it is looked at again as soon as it may."""
        wait_s = self._pace.wait_s(are_rates_alone, self._hub.clock.now())
        if self._later is not None:
            self._later.cancel()
        self._later = None
        if wait_s > 0:
            self._later = asyncio.get_running_loop().call_later(wait_s, self._hub.broadcast_needed.set)
        return wait_s <= 0


def _missing(hub: Hub) -> str:
    if hub.board.hello is None:
        return "the learner"
    return "the learner's first step" if hub.board.train_s <= 0 else "a first measured worker"

"""Works out what to do next with this run, from the fleet as it is now, the run's own offers and the market's.

Guarantees: one computation at a time, off the event loop's thread; the page's answer is at most `PAGE_S` old and made only on
request. Leaves to others: what is best (cost_model/next_actions), doing it (commands, provisioner).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

from echo2.base.errors import ConfigError
from echo2.base.units import format_duration
from echo2.coordinator.membership import Activation, Liveness, Member
from echo2.coordinator.outlook import Candidates, RunWork, few_of, limits_text, own_offers, value_of
from echo2.coordinator.planner_input import is_measured, plan_config
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.coordinator.runtime.commands import IDLE_S, Commands
from echo2.coordinator.runtime.experience_file import known
from echo2.coordinator.runtime.market import Catalogue, kept_file, newest
from echo2.coordinator.runtime.planning import snapshot_of
from echo2.coordinator.sightings import work_of
from echo2.cost_model.next_actions import Candidate, Situation, next_actions
from echo2.cost_model.offers import MarketOffer
from echo2.cost_model.snapshot import FleetSnapshot, WorkerEstimate
from echo2.outside import unix_now

PAGE_S = 10.0
MARKET_MAX = 512
CURVE_SHOWN = 64
"""Most predictions of each quantity in a calibration curve."""
OWN_PRICES = "the coordinator's offers file"


class OutlookDesk:
    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._one_at_a_time = asyncio.Semaphore(1)
        self._kept: tuple[float, dict[str, Any]] | None = None
        self._market: tuple[float, list[MarketOffer], Catalogue] | None = None

    async def for_page(self) -> dict[str, Any]:
        now = self._commands.hub.clock.now()
        if self._kept is None or now - self._kept[0] > PAGE_S:
            market, prices = await asyncio.to_thread(self._at_hand)
            self._kept = now, await self.value(market, prices, 0.0)
        return self._kept[1]

    def _at_hand(self) -> tuple[list[MarketOffer], str]:
        """The offers cached on this machine, and their source in words. Fetches nothing; reads the file again only if it has
        changed."""
        path = kept_file()
        written_at = path.stat().st_mtime if path.exists() else 0.0
        if self._market is None or self._market[0] != written_at:
            try:
                found = newest(path, built_in_catalogue(), must_fetch=False, may_fetch=False, age_max_s=0.0)
                self._market = written_at, few_of(found.offers, MARKET_MAX), found
            except ConfigError as error:
                return [], str(error)
        _, offers, found = self._market
        age_s = found.age_s(unix_now())
        if age_s is None and any(one.usd_per_hour > 0 for one in self._commands.hub.money.offers):
            return [], ""  # typical prices are not real offers, so the run's own priced offers replace them
        return offers, found.source if age_s is None else f"{found.source}, fetched {format_duration(age_s)} ago"

    async def value(self, market: Sequence[MarketOffer], prices: str, learner_usd_per_hour: float) -> dict[str, Any]:
        """The next actions as JSON. `market`: offers besides the run's own; `prices`: their source, in words."""
        hub = self._commands.hub
        snapshot, plan = await snapshot_of(hub), hub.plan
        if hub.ending.finish is not None:
            return self._unknown(f"nothing: {hub.ending.text}")
        if snapshot is None or plan is None:
            return self._unknown(hub.plan_waits_for or "a first plan")
        members = hub.membership.members
        estimates = {one.worker_id: one for one in snapshot.workers}
        there = [members[one] for one in estimates if one in members and members[one].last_liveness is Liveness.ALIVE]
        pool = frozenset(one.peer_id for one in there if one.last_activation is Activation.ACTIVE)
        needed = set(plan.pool)
        spare = tuple(sorted(one.peer_id for one in there if one.peer_id not in needed and self._buys_nothing(one)))
        report = hub.board.report
        told = Situation(
            snapshot, plan_config(hub.options, hub.board), plan.kappa, pool, spare, hub.money.sums().usd_per_hour,
            learner_usd_per_hour, report.trained_tokens / report.trained_rollouts if report.trained_rollouts else 0.0,
            _rate_error(there, estimates.values()), hub.reckoning.track.bias, hub.reckoning.track.reach,
        )  # fmt: skip
        candidates = self._candidates(snapshot, there, market)
        async with self._one_at_a_time:
            found = await hub.aside.run(len(there), next_actions, told, candidates)
        limits = limits_text(plan)
        names = {peer_id: members[peer_id].name for peer_id in estimates if peer_id in members}
        told_prices = "; ".join(filter(None, (OWN_PRICES if hub.options.offers_file is not None else "", prices)))
        value = value_of(
            found, report.utilisation, limits, told_prices or "none: no offers file, no catalogue", names, pool
        )
        return value | {"history": hub.reckoning.track.value(CURVE_SHOWN)}

    def _buys_nothing(self, one: Member) -> bool:
        """For a worker that the plan leaves out: whether it does not help at all, rather than being new or on standby only since
        the last plan."""
        is_settled = self._commands.hub.clock.now() - one.activation_since >= IDLE_S
        return not one.is_newcomer and (one.last_activation is Activation.ACTIVE or is_settled)

    def _unknown(self, waits_for: str) -> dict[str, Any]:
        return {
            "is_known": False,
            "waits_for": waits_for,
            "history": self._commands.hub.reckoning.track.value(CURVE_SHOWN),
        }

    def _candidates(
        self, snapshot: FleetSnapshot, there: Sequence[Member], market: Sequence[MarketOffer]
    ) -> list[Candidate]:
        """The candidates from the run's offers and the market; empty until the model and the rollouts' length are known."""
        hub, catalogue = self._commands.hub, built_in_catalogue()
        size, lengths, held = work_of(hub.board)
        if size is None:
            return []
        report = hub.board.report
        work = RunWork(size, lengths, held, report.trained_tokens / report.trained_rollouts)
        estimates = {one.worker_id: one for one in snapshot.workers}
        measured = [(one.hello.gpu, estimates[one.peer_id]) for one in there if is_measured(one)]
        made = Candidates(snapshot, measured, work, catalogue, known(hub.options.machines_file))
        machines = hub.money.machines.values()
        rented = {
            offer.name: sum(one.is_open and one.offer == offer.name for one in machines) for offer in hub.money.offers
        }
        return [*made.of_run(own_offers(hub.money.offers, catalogue), rented), *made.of_market(market)]


def _rate_error(members: Sequence[Member], estimates: Iterable[WorkerEstimate]) -> float:
    """The relative error of the whole pool's rate, assuming that the workers' errors are independent."""
    total = sum(one.rollouts_per_s for one in estimates)
    found = [member.measures.estimate("rollouts_per_s") for member in members]
    return sqrt(sum(one.error**2 for one in found if one is not None)) / total if total > 0 else 0.0

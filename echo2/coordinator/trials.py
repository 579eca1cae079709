"""Chooses which newcomers are on trial: in the pool beside the plan until the learner has admitted something from them.

A plan uses only workers that have delivered; a newcomer's claims are not part of it. So newcomers join the pool beside the plan: at
most as many at once as there are proven workers (a fleet may double in one trial), within what the proven workers leave of the
price cap, first come first served. A trial that brings nothing within `trial_s` ends, and that worker waits for its next one for a
time that doubles each time. While no worker is proven (a run's start), all newcomers are on trial that the cap allows.

Guarantees: no proven worker leaves the pool because of what a newcomer says. Leaves to others: what a newcomer may hold
(worth), the pool (planner_input, cost_model).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.coordinator.membership import Liveness, Member, OperatorSetting
from echo2.coordinator.worth import Worth

TRIAL_S = 60.0
ON_TRIAL = "on trial, until the learner has had rollouts of it"
PAUSES_MAX = 6


@dataclass(slots=True)
class Past:
    """One worker's past trials. `failed`: trials that brought nothing; `not_before`: earliest time of the next one."""

    failed: int = 0
    not_before: float = -math.inf


@dataclass(slots=True)
class Trials:
    trial_s: float = TRIAL_S
    _began: dict[PeerId, float] = field(default_factory=dict)
    _past: dict[PeerId, Past] = field(default_factory=dict)

    def appraise(
        self, members: Iterable[Member], worth: Worth, usd_per_hour_cap: float, now: float, is_spent: bool = False
    ) -> None:
        """Sets each member's `delivered_per_s` and `is_on_trial` as of now. `is_spent`: the budget is spent, so there are no
        trials."""
        members = list(members)
        for member in members:
            member.delivered_per_s = worth.delivered_per_s(member.peer_id)
        proven = [m for m in members if m.last_liveness is Liveness.ALIVE and m.is_proven]
        newcomers = {m.peer_id: m for m in members if _may_be_tried(m) and not worth.is_paused(m.peer_id, now)}
        if not proven:
            newcomers.update({m.peer_id: m for m in members if m.last_liveness is Liveness.ALIVE and m.is_newcomer})
        self._end(newcomers, now)
        places = 0 if is_spent else len(proven) or len(newcomers)
        paid = sum(m.hello.price_usd_per_hour for m in proven if m.is_wanted)
        room = usd_per_hour_cap - paid if usd_per_hour_cap > 0 else math.inf
        self._begin(newcomers, places, room, now, is_start=not proven)
        for member in members:
            member.is_on_trial = member.peer_id in self._began

    def _end(self, newcomers: dict[PeerId, Member], now: float) -> None:
        for peer_id, began in list(self._began.items()):
            if peer_id not in newcomers:
                del self._began[peer_id]
            elif now - began >= self.trial_s:
                del self._began[peer_id]
                past = self._past.setdefault(peer_id, Past())
                past.failed += 1
                past.not_before = now + self.trial_s * 2.0 ** min(past.failed, PAUSES_MAX)

    def _begin(
        self, newcomers: dict[PeerId, Member], places: int, room_usd_per_hour: float, now: float, is_start: bool
    ) -> None:
        """Fills the trial places: running trials first, then waiting newcomers. `is_start`: no worker has delivered anything yet,
        so earlier failures do not make one wait."""
        nobody = Past()
        went_on = {peer_id: began for peer_id, began in self._began.items() if peer_id in newcomers}
        queue = [
            (self._past.get(peer_id, nobody).failed, member.joined_at, peer_id)
            for peer_id, member in newcomers.items()
            if peer_id not in went_on and (is_start or self._past.get(peer_id, nobody).not_before <= now)
        ]
        self._began = {}
        for peer_id in [*went_on, *(peer_id for _, _, peer_id in sorted(queue))]:
            price = newcomers[peer_id].hello.price_usd_per_hour
            if len(self._began) < places and price <= room_usd_per_hour:
                self._began[peer_id] = went_on.get(peer_id, now)
                room_usd_per_hour -= price


def _may_be_tried(member: Member) -> bool:
    """Whether a newcomer may be tried: it is alive, has weights, and neither the operator nor a price limit or shunning holds it
    back."""
    return (
        member.last_liveness is Liveness.ALIVE
        and member.setting is OperatorSetting.AUTOMATIC
        and member.is_newcomer
        and member.heartbeat.version is not None
        and not member.asks_too_much
        and not member.is_shunned
    )

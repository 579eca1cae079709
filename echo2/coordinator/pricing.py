"""What a worker may ask for its work without the operator's word.

A worker declares its own price, and the budget is spent by it, so a price is a claim: one on a machine that was rented here
may cost what was agreed for the machine; any other no more than the dearest offer of its GPU, than the cap of the whole
pool, and than what would spend the budget in `BUDGET_HOURS`. One that asks more stands by until the operator activates it,
which approves that price and none above it. Pure. Leaves to others: which of the approved are worth it (planner).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.coordinator.provisioning import MachineOffer, RentedMachine

BUDGET_HOURS = 1.0
ROUNDING = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class PriceLimit:
    """`what` it comes from, in words."""

    usd_per_hour: float = math.inf
    what: str = "any price"

    def is_exceeded_by(self, usd_per_hour: float) -> bool:
        return usd_per_hour > self.usd_per_hour * ROUNDING


NO_LIMIT = PriceLimit()


def price_limit(
    machine: RentedMachine | None, offers: Sequence[MachineOffer], gpu: str, usd_per_hour_cap: float, usd_budget: float
) -> PriceLimit:
    """`machine`: what it joined from, where that was rented here. 0: no cap, no budget."""
    limits = [NO_LIMIT]
    offered = [offer.usd_per_hour for offer in offers if gpu and offer.gpu == gpu and offer.usd_per_hour > 0]
    if machine is not None:
        limits.append(PriceLimit(machine.usd_per_hour, "its machine's price"))
    elif offered:
        limits.append(PriceLimit(max(offered), f"the dearest offer of {gpu}"))
    if usd_per_hour_cap > 0:
        limits.append(PriceLimit(usd_per_hour_cap, "the whole pool's cap"))
    if usd_budget > 0:
        limits.append(PriceLimit(usd_budget / BUDGET_HOURS, "what spends the budget in an hour"))
    return min(limits, key=lambda limit: limit.usd_per_hour)

"""The highest price that a worker may ask without the operator's approval.

A worker declares its own price, and the budget is spent at that price, so the price is a claim that needs a limit. A worker on a
machine that this run rented may ask at most the machine's price; any other at most the price of the most expensive offer of its
GPU. No worker may ask more than the cap of the whole pool, or a price that would spend the budget in `BUDGET_HOURS`. A worker that
asks more stays on standby until the operator activates it, which approves that price and none above it. Pure. Leaves to others:
which of the approved workers are worth their price (planner).
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
    """A limit in USD per hour. `what`: where it comes from, in words."""

    usd_per_hour: float = math.inf
    what: str = "any price"

    def is_exceeded_by(self, usd_per_hour: float) -> bool:
        return usd_per_hour > self.usd_per_hour * ROUNDING


NO_LIMIT = PriceLimit()


def price_limit(
    machine: RentedMachine | None, offers: Sequence[MachineOffer], gpu: str, usd_per_hour_cap: float, usd_budget: float
) -> PriceLimit:
    """The lowest limit that applies. `machine`: the worker's machine if this run rented it. `usd_per_hour_cap`, `usd_budget`: 0
    means none."""
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

"""Renting and releasing machines: offers, rented machines, and one protocol for all providers.

Guarantees of a `Provider`: `rent` makes the machine with the given id or raises. It is idempotent: a second call with the same id
makes no second machine, so a caller that died in between may ask again. `release` ends the machine, at once or at the latest after
the provider's stated grace period; releasing a machine that does not exist is no error. `observe` lists the machines that exist
now, including those that an earlier process rented. Leaves to others: whether to rent (renting, the operator), the journal and
state that outlives the process (provisioner).

Also here: the highest price that a worker may ask without the operator's approval (`price_limit`). A worker declares its own
price, and the budget is spent at that price, so the price is a claim that needs a limit. A worker on a machine that this run
rented may ask at most the machine's price; any other at most the price of the most expensive offer of its GPU or, if none is
offered, `TYPICAL_TIMES` the GPU's typical price. No worker may ask more than the cap of the whole pool, or a price that would
spend the budget in `BUDGET_HOURS`. A worker that asks more stays on standby until the operator activates it, which approves that
price and none above it.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from echo2.base.errors import ConfigError
from echo2.base.ids import RunId
from echo2.cost_model.machines import CPU, GpuType, kind_of_name


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """A kind of machine that can be rented. `rollouts_per_s` 0: assume the speed of measured workers with this GPU.

    `hours_least`: the provider bills at least so many hours, so a machine is not released before, and the budget must pay for
    them. `is_automatic`: whether the planner may rent it without asking. `settings`: provider-specific.
    """

    name: str
    provider: str
    gpu: str = ""
    usd_per_hour: float = 0.0
    rollouts_per_s: float = 0.0
    is_spot: bool = False
    machines_max: int = 8
    hours_least: float = 0.0
    is_automatic: bool = True
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (1 <= len(self.name) <= 40 and self.name.replace("-", "").isalnum() and self.name == self.name.lower()):
            raise ConfigError(f"offer: expected a name of up to 40 of a-z, 0-9 and '-', got {self.name[:60]!r}")
        if not (
            0 <= self.usd_per_hour <= 1e5
            and 0 <= self.rollouts_per_s <= 1e6
            and 1 <= self.machines_max <= 1000
            and 0 <= self.hours_least <= 1000
        ):
            raise ConfigError(
                f"offer {self.name}: expected a price up to 100000, a rate up to 1e6, 1 to 1000 machines, up to 1000 hours, got "
                f"{self.usd_per_hour}, {self.rollouts_per_s}, {self.machines_max}, {self.hours_least}"
            )

    def setting(self, key: str, default: str | None = None) -> str:
        """Returns a provider-specific setting, or `default`. ConfigError if it is missing and there is no default."""
        value = self.settings.get(key, default)
        if value is None:
            raise ConfigError(f"offer {self.name} of {self.provider}: expected a setting {key!r}, it is missing")
        return value

    def allow(self, *keys: str) -> None:
        """Checks that all settings are among `keys`; ConfigError names one that is not."""
        unknown = sorted(set(self.settings) - set(keys))
        if unknown:
            raise ConfigError(
                f"offer {self.name} of {self.provider}: expected settings among {', '.join(keys) or '(none)'}, "
                f"got {unknown[0]!r}"
            )


def machine_prefix(run_id: RunId, offer: str) -> str:
    """The prefix of the ids of an offer's machines, in characters that clouds accept in names."""
    run = re.sub(r"[^a-z0-9]+", "-", f"e-{run_id}".lower())[:16].strip("-")
    return f"{run}-{offer}-"


class MachineState(enum.Enum):
    """Where a machine is in its life. WANTED and RELEASING are saved before the provider is called."""

    WANTED = "wanted"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    RELEASING = "releasing"
    GONE = "gone"


@dataclass(slots=True)
class RentedMachine:
    """`command`: what a person has to run on it; empty if the provider has done so."""

    machine_id: str
    offer: str
    provider: str
    label: str
    state: MachineState
    usd_per_hour: float
    rented_at: float
    ended_at: float | None = None
    token_id: str = ""
    command: str = ""
    notice: str = ""

    @property
    def is_open(self) -> bool:
        return self.state is not MachineState.GONE

    def usd_spent(self, now: float) -> float:
        """What it has cost at its price since it was requested."""
        until = now if self.ended_at is None else self.ended_at
        return self.usd_per_hour * max(0.0, until - self.rented_at) / 3600.0


@dataclass(frozen=True, slots=True)
class ObservedMachine:
    """A machine as its provider sees it now. `notice`: in state ENDING, why the provider takes it away."""

    state: MachineState
    notice: str = ""


class Provider(Protocol):
    """The provider behind one offer. A machine's join link admits one worker."""

    @property
    def name(self) -> str: ...

    async def rent(self, machine_id: str, join_link: str) -> str:
        """Makes the machine, which joins by `join_link`. Returns the command for a person to run, or an empty text.

        ResourceError if no machine is available, Unreachable if the provider does not answer."""
        ...

    async def release(self, machine_id: str) -> None: ...

    async def observe(self) -> dict[str, ObservedMachine]:
        """The machines that exist now, by id. Unreachable if the provider cannot be asked now."""
        ...


BUDGET_HOURS = 1.0  # a run that lasts less is no run
ROUNDING = 1 + 1e-6  # prices cross the wire as floats
# Providers' prices of one kind of GPU differ by a factor of about four; beyond ten a price is a mistake or a try.
TYPICAL_TIMES = 10.0
GPUS_MAX = 8  # of the largest machine that a claim is believed for


@dataclass(frozen=True, slots=True)
class PriceLimit:
    """A limit in USD per hour. `what`: where it comes from, in words."""

    usd_per_hour: float = math.inf
    what: str = "any price"

    def is_exceeded_by(self, usd_per_hour: float) -> bool:
        return usd_per_hour > self.usd_per_hour * ROUNDING


NO_LIMIT = PriceLimit()  # until the fleet sets one


def price_limit(
    machine: RentedMachine | None,
    offers: Sequence[MachineOffer],
    gpu: str,
    usd_per_hour_cap: float,
    usd_budget: float,
    kinds: Mapping[str, GpuType],
) -> PriceLimit:
    """The lowest limit that applies. `machine`: the worker's machine if this run rented it. `usd_per_hour_cap`, `usd_budget`:
    infinite means none. `kinds`: the catalogue of GPUs."""
    limits = []
    offered = [offer.usd_per_hour for offer in offers if gpu and offer.gpu == gpu and offer.usd_per_hour > 0]
    if machine is not None:
        limits.append(PriceLimit(machine.usd_per_hour, "its machine's price"))
    elif offered:
        limits.append(PriceLimit(max(offered), f"the dearest offer of {gpu}"))
    else:
        limits.append(_typical_limit(gpu, kinds))
    limits.append(PriceLimit(usd_per_hour_cap, "the whole pool's cap"))
    limits.append(PriceLimit(usd_budget / BUDGET_HOURS, "what spends the budget in an hour"))
    return min(limits, key=lambda limit: limit.usd_per_hour)


def _typical_limit(gpu: str, kinds: Mapping[str, GpuType]) -> PriceLimit:
    """For a GPU that the catalogue does not know: what the dearest machine of the catalogue typically costs."""
    kind, count = kind_of_name(gpu, kinds)
    if kind in ("", CPU):
        dearest = max(one.usd_per_hour for one in kinds.values())
        return PriceLimit(GPUS_MAX * dearest, f"the typical price of {GPUS_MAX} of the dearest GPUs")
    typical = min(count, GPUS_MAX) * kinds[kind].usd_per_hour
    return PriceLimit(TYPICAL_TIMES * typical, f"{TYPICAL_TIMES:g} times the typical price of {gpu}")

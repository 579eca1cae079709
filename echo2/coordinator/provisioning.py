"""Getting machines and giving them back: what may be rented, what is rented, and one protocol for all providers.

Guarantees of a `Provider`: `rent` makes the machine of that id or raises; asked again for the same id it makes no second
one, so that a caller that died in between may ask again. `release` ends it, at once or at the latest after the
provider's stated grace, and is no error for a machine that is not there. `observe` tells what there is now, also what an
earlier process rented. Leaves to others: whether to rent (fleet_advice, the operator), the journal and what outlives the
process (runtime/provisioner).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Protocol

from echo2.base.errors import ConfigError
from echo2.base.ids import RunId


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """A kind of machine that may be had. `rollouts_per_s` 0: as fast as measured workers of this GPU.

    `is_automatic`: whether the planner may take it without being asked. `settings`: the provider's own.
    """

    name: str
    provider: str
    gpu: str = ""
    usd_per_hour: float = 0.0
    rollouts_per_s: float = 0.0
    is_spot: bool = False
    machines_max: int = 8
    is_automatic: bool = True
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (1 <= len(self.name) <= 40 and self.name.replace("-", "").isalnum() and self.name == self.name.lower()):
            raise ConfigError(f"offer: expected a name of up to 40 of a-z, 0-9 and '-', got {self.name[:60]!r}")
        if not (0 <= self.usd_per_hour <= 1e5 and 0 <= self.rollouts_per_s <= 1e6 and 1 <= self.machines_max <= 1000):
            raise ConfigError(
                f"offer {self.name}: expected a price up to 100000, a rate up to 1000000 and 1 to 1000 machines, got "
                f"{self.usd_per_hour}, {self.rollouts_per_s}, {self.machines_max}"
            )

    def setting(self, key: str, default: str | None = None) -> str:
        """One of the provider's own settings; ConfigError when a needed one is missing."""
        value = self.settings.get(key, default)
        if value is None:
            raise ConfigError(f"offer {self.name} of {self.provider}: expected a setting {key!r}, it is missing")
        return value

    def allow(self, *keys: str) -> None:
        """ConfigError names a setting that the provider does not know."""
        unknown = sorted(set(self.settings) - set(keys))
        if unknown:
            raise ConfigError(
                f"offer {self.name} of {self.provider}: expected settings among {', '.join(keys) or '(none)'}, "
                f"got {unknown[0]!r}"
            )


def machine_prefix(run_id: RunId, offer: str) -> str:
    """What the ids of an offer's machines begin with, in letters that clouds take for names."""
    run = re.sub(r"[^a-z0-9]+", "-", f"e-{run_id}".lower())[:16].strip("-")
    return f"{run}-{offer}-"


class MachineState(enum.Enum):
    """Where a machine is in its life. WANTED and RELEASING are kept before the provider is asked."""

    WANTED = "wanted"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    RELEASING = "releasing"
    GONE = "gone"


@dataclass(slots=True)
class RentedMachine:
    """`command`: what to run on it, where a person has to; empty where the provider has done so."""

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
        """What it has cost by its price, from the moment it was asked for."""
        until = now if self.ended_at is None else self.ended_at
        return self.usd_per_hour * max(0.0, until - self.rented_at) / 3600.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A machine as its provider sees it now. `notice`: why it will be taken away, in state ENDING."""

    state: MachineState
    notice: str = ""


class Provider(Protocol):
    """One offer's provider. `link_uses`: how many workers one join link must let in; 0: any number, over time."""

    @property
    def name(self) -> str: ...

    @property
    def link_uses(self) -> int: ...

    async def rent(self, machine_id: str, join_link: str) -> str:
        """Makes the machine, which joins by `join_link`. Returns the command for a person to run, or nothing.

        ResourceError when there is none to be had, Unreachable when the provider does not answer."""
        ...

    async def release(self, machine_id: str) -> None: ...

    async def observe(self) -> dict[str, Sighting]:
        """The machines that there are, by id. Unreachable when that cannot be told now."""
        ...

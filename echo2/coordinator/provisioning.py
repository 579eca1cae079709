"""Renting and releasing machines: offers, rented machines, and one protocol for all providers.

Guarantees of a `Provider`: `rent` makes the machine with the given id or raises. It is idempotent: a second call with the same id
makes no second machine, so a caller that died in between may ask again. `release` ends the machine, at once or at the latest after
the provider's stated grace period; releasing a machine that does not exist is no error. `observe` lists the machines that exist
now, including those that an earlier process rented. Leaves to others: whether to rent (fleet_advice, the operator), the journal
and state that outlives the process (runtime/provisioner).
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
    """A kind of machine that can be rented. `rollouts_per_s` 0: assume the speed of measured workers with this GPU.

    `is_automatic`: whether the planner may rent it without asking. `settings`: provider-specific.
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
class Sighting:
    """A machine as its provider sees it now. `notice`: in state ENDING, why the provider takes it away."""

    state: MachineState
    notice: str = ""


class Provider(Protocol):
    """The provider behind one offer. `link_uses`: how many workers one join link must admit; 0: any number over time."""

    @property
    def name(self) -> str: ...

    @property
    def link_uses(self) -> int: ...

    async def rent(self, machine_id: str, join_link: str) -> str:
        """Makes the machine, which joins by `join_link`. Returns the command for a person to run, or an empty text.

        ResourceError if no machine is available, Unreachable if the provider does not answer."""
        ...

    async def release(self, machine_id: str) -> None: ...

    async def observe(self) -> dict[str, Sighting]:
        """The machines that exist now, by id. Unreachable if the provider cannot be asked now."""
        ...

"""Reads the offers file: which machines can be rented, where and at what price. TOML, one `[[offer]]` table per offer.

Guarantees: an invalid offer is refused by name before the coordinator starts. Without a file there are two offers, `manual` and
`local`, which are never rented automatically.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echo2.base.errors import ConfigError
from echo2.base.ids import RunId
from echo2.coordinator.money.providers.command import CommandProvider, LocalProvider
from echo2.coordinator.money.providers.machine_setup import ManualProvider, base_arguments
from echo2.coordinator.money.providers.skypilot import SkyPilotProvider
from echo2.coordinator.money.provisioning import MachineOffer, Provider
from echo2.cost_model.snapshot import read_as

OFFERS_MAX = 64  # each is asked for its machines every few seconds
DEFAULT_OFFERS = (
    MachineOffer("manual", "manual", is_automatic=False),
    MachineOffer("local", "local", is_automatic=False),
)


def load_offers(path: Path | None) -> tuple[MachineOffer, ...]:
    """The offers in the file, or the default ones without a file. ConfigError names the file, the offer and the field."""
    if path is None:
        return DEFAULT_OFFERS
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"offers: expected a file at {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"offers: {path}: expected TOML: {error}") from None
    tables = document.get("offer")
    if set(document) != {"offer"} or not isinstance(tables, list) or not 1 <= len(tables) <= OFFERS_MAX:
        raise ConfigError(f"offers: {path}: expected 1 to {OFFERS_MAX} tables [[offer]] and nothing else")
    offers = tuple(_offer(table, f"offers: {path}: offer {number}") for number, table in enumerate(tables, 1))
    names = [offer.name for offer in offers]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigError(f"offers: {path}: expected each name once, got {doubled[0]!r} twice")
    return offers


def _offer(table: Mapping[str, Any], whose: str) -> MachineOffer:
    offer = read_as(MachineOffer, table, whose)
    if offer.provider not in PROVIDERS:
        raise ConfigError(f"{whose}: provider: expected one of {', '.join(PROVIDERS)}, got {offer.provider!r}")
    if not all(isinstance(value, str) for value in offer.settings.values()):
        raise ConfigError(f"{whose}: settings: expected texts")
    if offer.provider == "manual" and table.get("is_automatic"):
        raise ConfigError(f"{whose}: is_automatic: a person has to start machines of the provider manual")
    return replace(offer, is_automatic=offer.is_automatic and offer.provider != "manual")


@dataclass(frozen=True, slots=True)
class Renting:
    """What a provider may need to know about the run. `model_path`: where workers look for the base checkpoint."""

    run_id: RunId
    folder: Path
    model_path: str = ""


PROVIDERS: dict[str, Callable[[MachineOffer, Renting], Provider]] = {
    "manual": lambda offer, run: ManualProvider(offer, run.model_path),
    "local": lambda offer, run: LocalProvider(offer, run.folder / "local-workers", base=base_arguments(run.model_path)),
    "skypilot": lambda offer, run: SkyPilotProvider(offer, run.run_id, model_path=run.model_path),
    "command": lambda offer, run: CommandProvider(offer, run.run_id, run.model_path),
}
"""To add a provider: write a class with the methods of `Provider` in a file of its own, and add a line here."""


MakeProvider = Callable[[MachineOffer, Renting], Provider]


def make_provider(offer: MachineOffer, run: Renting) -> Provider:
    """The provider of one offer. ConfigError for invalid settings or a library that is not installed."""
    make = PROVIDERS.get(offer.provider)
    if make is None:
        raise ConfigError(f"offer {offer.name}: expected a provider of {', '.join(PROVIDERS)}, got {offer.provider!r}")
    return make(offer, run)

"""What this machine costs: from the option, the environment, or its provider's metadata.

`price_of` is the rule and pure; a template of a rented machine may set the environment variable `PRICE_VARIABLE`. Guarantees: the
first source that names a price wins; a text that is not a price raises ConfigError, which names its source. Leaves to others:
asking the provider's metadata service (runtime/provider).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo2.base.errors import ConfigError

PRICE_VARIABLE = "ECHO2_PRICE_USD_PER_HOUR"
PRICE_TAG = "echo2-price-usd-per-hour"
"""The tag or attribute of a cloud machine that carries its price."""
PRICE_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Price:
    usd_per_hour: float
    source: str


def price_of(flag_usd_per_hour: float, environment: Mapping[str, str], metadata: str | None = None) -> Price:
    """The option before the environment before the metadata; if none names a price, 0: a machine of one's own is free."""
    if flag_usd_per_hour > 0:
        return Price(flag_usd_per_hour, "worker.price_usd_per_hour")
    if text := environment.get(PRICE_VARIABLE, "").strip():
        return Price(_parsed(text, PRICE_VARIABLE), PRICE_VARIABLE)
    if metadata is not None and metadata.strip():
        return Price(_parsed(metadata.strip(), f"the provider's tag {PRICE_TAG}"), "provider metadata")
    return Price(0.0, "none given")


def _parsed(text: str, source: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < PRICE_MAX:
        raise ConfigError(f"{source}: expected a price in USD an hour from 0 to {PRICE_MAX:.0f}, got {text[:40]!r}")
    return price

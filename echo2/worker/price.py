"""What this machine costs: from a flag, the environment, or what its provider says of it.

`price_of` is the rule, pure; `PRICE_VARIABLE` is what a template of a rented machine may set. Guarantees: the first
source that names a price wins, a text that is no price is refused with its source. Leaves to others: asking the
provider's metadata service (runtime/provider).
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
    """Flag before environment before metadata; nothing known: free, as a machine of one's own is."""
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

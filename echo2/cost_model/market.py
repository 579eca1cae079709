"""Ranks rental offers by the price of a million useful tokens of this run.

An offer is one machine of one provider at a price per hour. Its tokens/s follow from the sizing rule and the roofline, with the
interval expected for machines of its kind. Time lost while a preempted machine is replaced yields no useful tokens. Guarantees:
pure; an offer on which the model does not fit, or whose GPU has no data sheet, is listed with the reason, never dropped
silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from echo2.base.errors import ResourceError
from echo2.cost_model.machines import MEMORY_TOLERANCE, GpuType, worker_prior
from echo2.cost_model.sizing import ModelSize, RunLengths
from echo2.cost_model.snapshot import JOIN_S, SPOT_HAZARD_PER_HOUR, check_fields, checked

GPUS_MAX = 16  # of the largest machine that a provider in the catalogue offers
RATE_RANGE = (0.51, 1.96)
"""Delivered over predicted tokens/s of nine machines of ten: an assumption, for no GPU has been measured. It supposes that kinds
deviate from the roofline by a third, twice as much as machines of one kind differ from each other."""
EGRESS_USD_PER_GIB: Mapping[str, float] = {
    "aws": 0.09, "gcp": 0.12, "azure": 0.087, "oci": 0.0085, "digitalocean": 0.01, "vultr": 0.01,
}  # fmt: skip
"""List prices of traffic to the internet, mid 2026, for providers that publish one; others count as 0."""


@dataclass(frozen=True, slots=True)
class MarketOffer:
    """One machine. `gpu`: the provider's name for it; `gpu_memory_gib`: per GPU."""

    provider: str
    instance: str
    region: str
    gpu: str
    gpu_count: int
    gpu_memory_gib: float
    usd_per_hour: float
    is_spot: bool

    def __post_init__(self) -> None:
        whose = f"offer {self.provider} {self.instance}"
        checked(whose, "gpu_count", self.gpu_count, 1, GPUS_MAX)
        check_fields(self, whose, "gpu_memory_gib usd_per_hour")


@dataclass(frozen=True, slots=True)
class Ranked:
    """An offer with its predicted rate and price for a run. If it has no rate, `refusal` says why.

    usd_per_million: USD per million useful tokens; usd_low, usd_high: its interval, from the interval of the rate.
    """

    offer: MarketOffer
    kind: str
    sequences: int
    tokens_per_s: float
    usd_per_million: float
    usd_low: float
    usd_high: float
    egress_usd_per_gib: float
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class OfferFilter:
    """Which offers to list. A field that is empty, None or infinite does not filter."""

    providers: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    region: str = ""
    is_spot: bool | None = None
    usd_per_hour_max: float = math.inf

    def lets(self, offer: MarketOffer, kind: str) -> bool:
        return (
            (not self.providers or offer.provider.lower() in self.providers)
            and (not self.gpus or kind.lower() in self.gpus or offer.gpu.lower() in self.gpus)
            and self.region.lower() in offer.region.lower()
            and self.is_spot in (None, offer.is_spot)
            and offer.usd_per_hour <= self.usd_per_hour_max
        )


NO_FILTER = OfferFilter()


def kind_of(offer: MarketOffer, catalogue: Mapping[str, GpuType]) -> str:
    """The catalogue's kind with the same GPU name and the nearest memory size; empty if the catalogue has none."""
    word = _plain(offer.gpu)
    near = [
        (abs(gpu.memory_gib / offer.gpu_memory_gib - 1.0), name)
        for name, gpu in catalogue.items()
        if _plain(name.partition("-")[0]) == word
    ]
    apart, name = min(near, default=(math.inf, ""))
    return name if apart <= MEMORY_TOLERANCE else ""


def useful_share(hazard_per_hour: float, join_s: float) -> float:
    """Share of the paid hours that is left after replacing preempted machines."""
    return 1.0 / (1.0 + hazard_per_hour * join_s / 3600)


def ranked(
    offers: Iterable[MarketOffer],
    size: ModelSize,
    run: RunLengths,
    catalogue: Mapping[str, GpuType],
    tokens_each: float = 0.0,
    wish: OfferFilter = NO_FILTER,
) -> list[Ranked]:
    """Offers in order of USD per million useful tokens; those that cannot serve come last. `tokens_each`: average tokens per
    sequence in the KV cache; 0: half of the longest."""
    kinds: dict[tuple[str, float], str] = {}
    rates: dict[tuple[str, int], tuple[int, float] | str] = {}
    found = []
    for offer in offers:
        named = (offer.gpu, offer.gpu_memory_gib)
        if named not in kinds:
            kinds[named] = kind_of(offer, catalogue)
        kind = kinds[named]
        if not wish.lets(offer, kind):
            continue
        machine = (kind, offer.gpu_count)
        if kind and machine not in rates:
            rates[machine] = _rate(catalogue[kind], offer.gpu_count, size, run, tokens_each)
        found.append(_rank(offer, kind, rates[machine] if kind else f"no data sheet of {offer.gpu}"))
    return sorted(found, key=lambda one: (bool(one.refusal), one.usd_per_million, one.offer.usd_per_hour))


def _rank(offer: MarketOffer, kind: str, rate: tuple[int, float] | str) -> Ranked:
    egress = EGRESS_USD_PER_GIB.get(offer.provider.lower(), 0.0)
    if isinstance(rate, str):
        return Ranked(offer, kind, 0, 0.0, math.inf, math.inf, math.inf, egress, rate)
    (sequences, predicted), (low, high) = rate, RATE_RANGE
    share = useful_share(SPOT_HAZARD_PER_HOUR if offer.is_spot else 0.0, JOIN_S)
    usd = offer.usd_per_hour / (predicted * share * 3600 / 1e6)
    return Ranked(offer, kind, sequences, predicted, usd, usd / high, usd / low, egress)


def _rate(
    gpu: GpuType, gpu_count: int, size: ModelSize, run: RunLengths, tokens_each: float
) -> tuple[int, float] | str:
    """Sequences and tokens/s of a whole machine, or what would fit if the model does not."""
    try:
        prior = worker_prior(gpu, size, run, tokens_each, gpu_count)
    except ResourceError as error:
        return str(error).rpartition("what would fit: ")[2] or str(error)
    return prior.slots, prior.tokens_per_s


SORTS: Mapping[str, Callable[[Ranked], float]] = {
    "tokens": lambda one: one.usd_per_million,
    "price": lambda one: one.offer.usd_per_hour,
    "speed": lambda one: -one.tokens_per_s,
}


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("nvidia", "").replace("_", "")

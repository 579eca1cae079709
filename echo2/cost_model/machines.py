"""What a machine can do before it is measured: its kind, the roofline of its decode and prefill rates, how the model fits on it.

The roofline (Williams, Waterman, Patterson, CACM 2009): a decode step of n sequences reads all weights and every sequence's KV
cache once, and multiplies n tokens with the weights that each of them uses. A prefill step reads all weights once and multiplies
`PREFILL_STEP_TOKENS` tokens, each of which attends to those before it. A step takes the longer of moving and computing, plus
`STEP_S` of overhead. A swap that recomputes caches prefills all cached tokens again, once per version. Pure; one more sequence
never lowers the rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from echo2.base.errors import ConfigError, ResourceError
from echo2.cost_model.sizing import (
    FILL,
    GPU_BYTES,
    Fit,
    ModelSize,
    Quantisation,
    RunLengths,
    cpu_fit,
    gpu_fit,
    spread_speed,
)
from echo2.cost_model.snapshot import JOIN_S, SPOT_HAZARD_PER_HOUR, check_fields, checked, read_as

MEMORY_TOLERANCE = 0.15
"""Largest relative difference between the memory size in a machine's name and the one in the kind's name."""
_COUNT = re.compile(r"^([1-9]\d{0,2}) x (.+)$")  # `8 x H100`
_MEMORY = re.compile(r"^(\d+)gi?b?$")  # `80GB`, `80GiB`, `80g`
# Words in the names of GPUs that tell no kind.
_TRADE_WORDS = frozenset(("nvidia", "geforce", "tesla", "generation", "gpu", "pcie"))
_SOCKET_OR_MEMORY = re.compile(r"^(sxm|hbm)\d?e?$")  # `SXM5`, `HBM3e`: variants of one kind


def kind_of_name(text: str, kinds: Collection[str]) -> tuple[str, int]:
    """Returns the kind and the GPU count; an empty kind if none matches or the machine has GPUs of several kinds."""
    return _kind_of_name(text, tuple(kinds))


@lru_cache(maxsize=4096)
def _kind_of_name(text: str, kinds: tuple[str, ...]) -> tuple[str, int]:
    counted = _COUNT.match(text.strip())
    count, name = (int(counted[1]), counted[2]) if counted else (1, text.strip())
    if name in kinds:
        return name, count
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _TRADE_WORDS]
    words = [word for word in words if not _SOCKET_OR_MEMORY.match(word)]
    sizes = [float(match[1]) for word in words if (match := _MEMORY.match(word))]
    plain = "".join(word for word in words if not _MEMORY.match(word))
    fit = [kind for kind in kinds if kind.partition("-")[0].lower() in (plain, plain.removeprefix("rtx"))]
    if len(fit) > 1 and sizes:
        fit = [kind for kind in fit if abs(_size_of(kind) - sizes[0]) <= MEMORY_TOLERANCE * sizes[0]]
    return (fit[0], count) if len(fit) == 1 else ("", 1)


def _size_of(kind: str) -> float:
    """Memory size in GB from the kind's name (`A100-80G` -> 80); 0 if the name does not give one."""
    match = _MEMORY.match(kind.partition("-")[2].lower())
    return float(match[1]) if match else 0.0


BANDWIDTH_SHARE = 0.7
"""Share of the data sheet's bandwidth that attention and matrix-vector kernels reach; assumed until a machine is measured."""
DECODE_FLOPS_SHARE = 0.5  # share of the data sheet's dense bf16 FLOPs that is reached
STEP_S = 0.003
"""Seconds per step for scheduling, sampling and kernel launches; assumed, of the order that vLLM's authors publish."""

PREFILL_STEP_TOKENS = 2048  # tokens prefilled per step: vLLM's usual budget


@dataclass(frozen=True, slots=True)
class Roofline:
    """The rates of one engine. `speed`: relative to one GPU (`sizing.spread_speed`). `tokens_each`: cached tokens of a sequence on
    average. Quantised weights reduce the bytes read but are not assumed to speed up the matrix products."""

    gpu: GpuType
    size: ModelSize
    speed: float = 1.0
    quantisation: Quantisation = Quantisation.NONE

    def step_s(self, sequences: int, tokens_each: float) -> float:
        cached = sequences * tokens_each * GPU_BYTES * self.size.kv_values_per_token
        return self._longer_s(cached, 2.0 * sequences * self.size.active_parameters)

    def tokens_per_s(self, sequences: int, tokens_each: float) -> float:
        """Decode rate of all sequences together."""
        return sequences / self.step_s(sequences, tokens_each)

    def prefill_tokens_per_s(self, tokens_each: float) -> float:
        """Prefill rate for whole sequences of `tokens_each` tokens, many at a time."""
        attended = 2.0 * self.size.layer_count * self.size.query_width * tokens_each
        return PREFILL_STEP_TOKENS / self._longer_s(
            0.0, PREFILL_STEP_TOKENS * (2.0 * self.size.active_parameters + attended)
        )

    def _longer_s(self, cached: float, computed: float) -> float:
        """Seconds of a step that moves the weights and `cached` bytes, or computes `computed` FLOP, whichever takes longer."""
        moved = self.size.card_bytes(self.quantisation) + cached
        moving_s = moved / (BANDWIDTH_SHARE * self.gpu.bandwidth_gb_per_s * 1e9 * self.speed)
        computing_s = computed / (DECODE_FLOPS_SHARE * self.gpu.train_tflops * 1e12 * self.speed)
        return max(moving_s, computing_s) + STEP_S


TRAIN_FLOPS_SHARE = 0.23
"""Of the data sheet: our step at 4 billion parameters on an H200 (`make gpu`); at 0.6 billion it is 0.1."""
GPUS_PER_WORKER = (1, 2, 4, 8, 16)  # tensor parallelism divides attention heads, whose number is a multiple of these
CPU = "cpu"  # the kind for machines on which the embedded engine generates


@dataclass(frozen=True, slots=True)
class GpuType:
    """One GPU type, from its data sheet. `train_tflops`: dense bf16."""

    name: str
    memory_gib: float
    bandwidth_gb_per_s: float
    usd_per_hour: float
    train_tflops: float

    def __post_init__(self) -> None:
        check_fields(self, f"GPU {self.name}", "memory_gib bandwidth_gb_per_s usd_per_hour train_tflops")

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * (1 << 30))


@dataclass(frozen=True, slots=True)
class WorkerPrior:
    """Assumed performance of a worker with `gpu_count` GPUs. `tokens_per_s`: decode rate with all slots busy;
    `prefill_tokens_per_s`: prefill rate while nothing is decoded. `fit`: how the model fits on it."""

    gpu_count: int
    slots: int
    tokens_per_s: float
    fit: Fit
    prefill_tokens_per_s: float


def parse_catalogue(tables: Mapping[str, object]) -> dict[str, GpuType]:
    if not tables:
        raise ConfigError("catalogue: expected a table for each kind of GPU, got none")
    return {name: read_as(GpuType, table, f"catalogue: GPU {name}", name=name) for name, table in tables.items()}


def gpu_of(catalogue: Mapping[str, GpuType], name: str) -> GpuType:
    if name not in catalogue:
        raise ConfigError(f"gpu: expected one of {', '.join(sorted(catalogue))}, got {name!r}")
    return catalogue[name]


def worker_prior(
    gpu: GpuType, size: ModelSize, run: RunLengths, tokens_each: float = 0.0, gpu_count: int = 0
) -> WorkerPrior:
    """The prior of a worker with `gpu_count` GPUs, laid out as the worker would; 0: the count with the most tokens/s per GPU,
    the smallest of equals. Raises ResourceError if the model does not fit. tokens_each: average cached tokens per sequence; 0:
    half of the longest."""
    if gpu.name == CPU:
        return _prior(gpu, 1, size, cpu_fit(size, gpu.memory_bytes, run), tokens_each, run.quantisation)
    priors, refusal = [], ""
    for count in (gpu_count,) if gpu_count else GPUS_PER_WORKER:
        try:
            fit = gpu_fit(size, [gpu.memory_bytes] * count, run)
            priors.append(_prior(gpu, count, size, fit, tokens_each, run.quantisation))
        except ResourceError as error:
            refusal = str(error)
    if not priors:
        raise ResourceError(f"GPU {gpu.name}: {refusal}")
    return max(priors, key=lambda prior: (round(prior.tokens_per_s / prior.gpu_count, 6), -prior.gpu_count))


def _prior(
    gpu: GpuType, gpu_count: int, size: ModelSize, fit: Fit, tokens_each: float, quantisation: Quantisation
) -> WorkerPrior:
    engine = Roofline(gpu, size, spread_speed(fit.tensor_parallel), quantisation)
    held = tokens_each or fit.sequence_tokens / FILL
    sampled = fit.engine_count * engine.tokens_per_s(fit.sequences, held)
    read = fit.engine_count * engine.prefill_tokens_per_s(held)
    return WorkerPrior(gpu_count, fit.engine_count * fit.sequences, sampled, fit, read)


STEP_S_MIN = 0.1
"""Seconds to draw a batch and launch a step's kernels: thousands of launches of 10 us each, whatever their size. For a small model
this is all the time a step takes."""


def train_s_prior(gpu: GpuType, gpu_count: int, model_billions: float, tokens: float) -> float:
    """Seconds of one optimiser step over `tokens` tokens: 6 FLOP per parameter and token at a typical efficiency, plus the
    minimum time of any step."""
    return STEP_S_MIN + 6 * model_billions * 1e9 * tokens / (gpu_count * gpu.train_tflops * 1e12 * TRAIN_FLOPS_SHARE)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Prefill cost of one worker. `tokens_per_s`: its prefill rate. `recompute_tokens`, `recompute_s`: per version."""

    tokens_per_s: float
    recompute_tokens: float = 0.0
    recompute_s: float = 0.0


def prefill_cost(prior: WorkerPrior, tokens_held: float, *, recomputes: bool) -> PrefillCost:
    """The prefill cost of a worker. `tokens_held`: average cached tokens of a sequence; the total is limited by the cache.
    `recomputes`: whether swaps recompute KV caches."""
    room = prior.fit.engine_count * prior.fit.cache_tokens
    again = min(prior.slots * tokens_held, room) if recomputes else 0.0
    return PrefillCost(prior.prefill_tokens_per_s, again, again / prior.prefill_tokens_per_s)


# ---- rental offers, ranked by the price of a million useful tokens of a run
#
# An offer is one machine of one provider at a price per hour. Time lost while a preempted machine is replaced yields no useful
# tokens. An offer on which the model does not fit, or whose GPU has no data sheet, is listed with the reason.

OFFERED_GPUS_MAX = 16  # of the largest machine that a provider in the catalogue offers
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
        owner = f"offer {self.provider} {self.instance}"
        checked(owner, "gpu_count", self.gpu_count, 1, OFFERED_GPUS_MAX)
        check_fields(self, owner, "gpu_memory_gib usd_per_hour")


@dataclass(frozen=True, slots=True)
class Ranked:
    """An offer with its predicted rate and price for a run. If it has no rate, `refusal` says why. usd_per_million: USD per
    million useful tokens; usd_low, usd_high: its interval, from the interval of the rate."""

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
    rows = []
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
        rows.append(_rank(offer, kind, rates[machine] if kind else f"no data sheet of {offer.gpu}"))
    return sorted(rows, key=lambda row: (bool(row.refusal), row.usd_per_million, row.offer.usd_per_hour))


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
    "tokens": lambda row: row.usd_per_million,
    "price": lambda row: row.offer.usd_per_hour,
    "speed": lambda row: -row.tokens_per_s,
}


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("nvidia", "").replace("_", "")

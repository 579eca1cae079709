"""Reads a scenario of the fleet model from TOML tables: its fleet, learner, prices and faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.fleet_model.lengths import LengthDistribution
from benchmarks.fleet_model.scenario import ColocatedCluster, FleetScenario, PriceChange, WorkerTruth
from echo2.base.errors import ConfigError
from echo2.base.units import parse_bytes
from echo2.cli.plan import Fields, offer_of
from echo2.cli.sizing import DEFAULT_BILLIONS
from echo2.coordinator.money.market import built_in_models
from echo2.cost_model.machines import GpuType, gpu_of, train_s_prior
from echo2.cost_model.question import PlanQuestion, PoolOffer, TokenCounts
from echo2.cost_model.sizing import ModelSize, RunLengths, longest_sequence, size_by_billions
from echo2.cost_model.snapshot import BROADCAST_EFFICIENCY, DownloadMode, LearnerEstimate, PlanConfig

DELTA_SHARE = 0.01
PROMPT_TOKENS = 1024  # a run's default prompt limit, added to the longest completion


def scenario_of(tables: Mapping[str, object], name: str, catalogue: Mapping[str, GpuType]) -> FleetScenario:
    """Parses and checks a scenario file's tables. Raises `ConfigError`."""
    top = Fields(name, {k: v for k, v in tables.items() if not isinstance(v, dict | list)})
    billions = top.number("model_billions", DEFAULT_BILLIONS)
    if not billions > 0:
        raise ConfigError(f"{name}: model_billions: expected a number above 0")
    size = size_by_billions(built_in_models(), billions)
    lengths = _lengths(Fields(f"{name}: lengths", tables.get("lengths", {})))
    worker_tables = tables.get("worker")
    if not isinstance(worker_tables, list) or not worker_tables:
        raise ConfigError(f"{name}: worker: expected at least one [[worker]] table, got {worker_tables!r}")
    offers = [offer_of(table, index, catalogue, gpus=0) for index, table in enumerate(worker_tables)]
    learner = _learner(Fields(f"{name}: learner", tables.get("learner", {})), size, lengths, catalogue)
    baseline = Fields(f"{name}: baseline", tables["baseline"]) if "baseline" in tables else None
    changes = tables.get("price_change", [])
    if not isinstance(changes, list):
        raise ConfigError(f"{name}: price_change: expected [[price_change]] tables, got {changes!r}")
    question = PlanQuestion(
        size, RunLengths(longest_sequence(PROMPT_TOKENS, int(lengths.at(1.0)))), learner, PlanConfig(1),
        TokenCounts(lengths.mean_tokens, lengths.at(0.95), max(lengths.at(1.0), lengths.mean_tokens)),
        tuple(offers), catalogue,
    )  # fmt: skip
    made = FleetScenario(
        name=name,
        learner=learner,
        config=_wishes(Fields(f"{name}: plan", tables.get("plan", {}))),
        lengths=lengths,
        workers=tuple(truth for offer in offers for truth in _machines(question, offer)),
        steps=int(top.number("steps", 60)),
        warmup_steps=int(top.number("warmup_steps", 15)),
        seed=int(top.number("seed", 0)),
        train_cv=top.number("train_cv", 0.0),
        estimate_noise=top.number("estimate_noise", 0.0),
        price_changes=tuple(_price_change(Fields(f"{name}: price_change {i}", one)) for i, one in enumerate(changes)),
        baseline=None if baseline is None else _baseline(baseline),
    )
    top.text("about", "")
    top.done()
    return made


def _lengths(fields: Fields) -> LengthDistribution:
    trace_path = fields.text("trace", "")
    trace: tuple[int, ...] = ()
    if trace_path:
        try:
            trace = tuple(int(line) for line in Path(trace_path).read_text(encoding="utf-8").split())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{fields.table_name}: trace {trace_path}: expected a file of token counts: {error}"
            ) from None
    made = LengthDistribution(
        median_tokens=fields.number("median_tokens", 1000.0),
        sigma=fields.number("sigma", 0.8),
        max_tokens=int(fields.number("max_tokens", 8192)),
        trace=trace,
    )
    fields.text("origin", "")
    fields.done()
    return made


def _learner(
    fields: Fields, size: ModelSize, lengths: LengthDistribution, catalogue: Mapping[str, GpuType]
) -> LearnerEstimate:
    gpu = gpu_of(catalogue, fields.text("gpu", "H100"))
    gpu_count = int(fields.number("gpu_count", 4))
    batch = int(fields.number("rollouts_per_step", 2048))
    whole = float(size.gpu_weight_bytes)
    made = LearnerEstimate(
        rollouts_per_step=batch,
        train_s=fields.seconds("train", train_s_prior(gpu, gpu_count, size.billions, batch * lengths.mean_tokens)),
        link=fields.link(125e6, 125e6, 0.04),
        delta_bytes=fields.parsed("delta_bytes", DELTA_SHARE * whole, parse_bytes),
        full_snapshot_bytes=fields.parsed("full_snapshot_bytes", whole, parse_bytes),
        rollouts_per_group=int(fields.number("rollouts_per_group", 16)),
        encode_s=fields.seconds("encode", 1.0),
        price_usd_per_hour=fields.number("price_usd_per_hour", gpu.usd_per_hour * gpu_count),
    )
    fields.text("origin", "")
    fields.done()
    return made


def _wishes(fields: Fields) -> PlanConfig:
    download = fields.text("download", "background")
    if download not in {one.value for one in DownloadMode}:
        raise ConfigError(f"{fields.table_name}: download: expected background or stalled, got {download!r}")
    made = PlanConfig(
        staleness_bound=int(fields.number("staleness_bound", 4)),
        fixed_kappa=int(fields.number("kappa", 0)),
        target_utilisation=fields.number("target_utilisation", 0.98),
        usd_per_hour_cap=fields.number("usd_per_hour_cap", math.inf),
        usd_budget=fields.number("usd_budget", math.inf),
        download=DownloadMode(download),
        broadcast_efficiency=fields.number("broadcast_efficiency", BROADCAST_EFFICIENCY),
        dwell_s=fields.seconds("dwell", 600.0),
    )
    fields.done()
    return made


def _machines(question: PlanQuestion, offer: PoolOffer) -> list[WorkerTruth]:
    prior = question.prior(offer)
    first = WorkerTruth(
        name="",
        slots=prior.slots,
        sequence_tokens_per_s=prior.tokens_per_s / prior.slots,
        price_usd_per_hour=offer.price_usd_per_hour * prior.gpu_count,
        link=offer.link,
        gpu=offer.gpu,
        hazard_per_hour=offer.hazard_per_hour,
        join_s=offer.join_s,
        apply_s=offer.apply_s,
        swap_s=offer.swap_s,
    )
    return [replace(first, name=f"{offer.key}#{index:05d}") for index in range(offer.count)]


def _price_change(fields: Fields) -> PriceChange:
    made = PriceChange(fields.seconds("at", 0.0), fields.text("gpu", ""), fields.number("factor", 1.0))
    fields.done()
    return made


def _baseline(fields: Fields) -> ColocatedCluster:
    made = ColocatedCluster(
        int(fields.number("gpu_count", 8)), fields.number("gpu_usd_per_hour", 1.3), fields.seconds("step", 1508.0)
    )
    fields.text("origin", "")
    fields.done()
    return made

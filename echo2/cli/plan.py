"""`echo2 plan`: how many of which machines a run needs, what they cost and what limits it. `echo2 offers`: what can be rented."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2.base.errors import ConfigError
from echo2.base.units import format_seconds, parse_bytes, parse_duration_s, parse_rate_bytes_per_s
from echo2.cli import sizing
from echo2.cli.options import config_of
from echo2.cli.sizing import LearnerMachine, audit_s_per_step, lengths_of
from echo2.config.load import read_toml
from echo2.config.run import RunConfig
from echo2.coordinator.money.market import built_in_catalogue, built_in_models, keep, kept_file, newest, recorded
from echo2.cost_model.machines import (
    CPU,
    EGRESS_USD_PER_GIB,
    SORTS,
    GpuType,
    OfferFilter,
    Ranked,
    gpu_of,
    parse_catalogue,
    ranked,
    train_s_prior,
)
from echo2.cost_model.question import PlanQuestion, PoolOffer, TokenCounts, parse_what_if
from echo2.cost_model.sizing import CHECKPOINT_BYTES_PER_S, ModelSize, checkpoint_bytes, size_by_billions, steps_between
from echo2.cost_model.snapshot import DELTA_SHARE, JOIN_S, LearnerEstimate, LinkEstimate, PlanConfig
from echo2.outside import unix_now

BILLIONS_MAX = 10_000  # ten times the largest model that anybody has published

MARKET_COUNT = 48  # more of one kind than a run of the documented sizes rents, so that price decides, not stock
DROPPED_GROUPS = 0.25
"""Assumed share of groups that dynamic sampling, if on, discards: those that the model always or never solves."""
START_S, LOAD_BYTES_PER_S = 60.0, 1e9
"""Assumed seconds before the first step (imports, processes, compilation), beside reading the weights from a local disk."""


def run_plan(args: argparse.Namespace, rest: Sequence[str]) -> int:
    config = config_of(args.files, args.preset, rest)
    catalogue = load_catalogue(args.catalogue)
    fleet = read_toml(args.fleet) if args.fleet else {}
    question, origin = question_of(config, fleet, catalogue, args.billions)
    for name, value in [pair for text in args.what_if for pair in parse_what_if(text)]:
        question = question.what_if(name, value)
    from echo2.cli import plan_text  # imports the planner, needed only here

    prompt = config.sampling.max_prompt_tokens / 2  # assumes prompts of half the longest length
    audit_s = audit_s_per_step(config, prompt, question.tokens.mean, question.learner.train_s)
    run = plan_text.PlannedRun(config.learner.steps, origin, *assumptions(fleet, args.what_if))
    answer = plan_text.planned(question)
    if args.json:
        print(json.dumps(plan_text.as_json(question, answer, run) | {"audit_s_per_step": audit_s}, indent=2))
        return 0
    plan_text.print_answer(question, answer, run, args.explain)
    if uncounted := [name for name, each in config.task.eval_sets.items() if not each.prompts]:
        what = f"the evaluation sets {', '.join(uncounted)}, of as many prompts as their data has"
        plan_text.print_lines(f"not in the plan: {what}; task.eval_sets.NAME.prompts counts them")
    plan_text.print_fits(question, answer)
    gpu, count = learner_gpus(config, fleet, question.model, catalogue)
    bytes_each = gpu.memory_bytes
    machine = LearnerMachine(0, memory_bytes=bytes_each) if gpu.name == CPU else LearnerMachine(count, bytes_each)
    short = sizing.shortages(config, question.model, machine)
    lacks = "".join(f"; {need.what} is SHORT: {need.text}; what would fit: {need.would_fit}" for need in short)
    plan_text.print_lines(sizing.learner_line(config, question.model, machine) + lacks)
    scores = "off" if audit_s is None else f"the learner scores {format_seconds(audit_s)} a step on its own device"
    plan_text.print_lines(f"audit: {scores}")
    return 0


def assumptions(fleet: Mapping[str, object], what_ifs: Sequence[str]) -> tuple[bool, bool]:
    """Whether the mean length is assumed, and whether a worker's price is."""
    lengths, tables = fleet.get("lengths", {}), fleet.get("worker")
    has_mean = isinstance(lengths, Mapping) and "mean_tokens" in lengths
    changed = {name for text in what_ifs for name, _ in parse_what_if(text)}
    priced = isinstance(tables, list) and all("price_usd_per_hour" in row for row in tables)  # question_of read them
    return not has_mean and "mean" not in changed, not priced


# ---- reading


def load_catalogue(path: Path | None) -> dict[str, GpuType]:
    return dict(built_in_catalogue()) if path is None else parse_catalogue(read_toml(path))


class Fields:
    """One TOML table, read by name; every error names table, field, value and what was expected."""

    def __init__(self, name: str, table: object) -> None:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name}: expected a table, got {table!r}")
        self.table_name, self.table = name, dict(table)

    def number(self, name: str, default: float) -> float:
        return float(self._taken(name, default, (int, float), "a number"))

    def whole(self, name: str, default: float) -> int:
        number = self.number(name, default)
        if not math.isfinite(number):
            raise ConfigError(f"{self.table_name}: {name}: expected a whole number, got {number:g}")
        return int(number)

    def text(self, name: str, default: str) -> str:
        return str(self._taken(name, default, (str,), "a text"))

    def seconds(self, name: str, default: float) -> float:
        return self.parsed(name, default, parse_duration_s)

    def parsed(self, name: str, default: float, parse: Callable[[str | float], float]) -> float:
        value = self._taken(name, default, (str, int, float), "a number or a text with a unit")
        try:
            return float(parse(value))
        except ConfigError as error:
            raise ConfigError(f"{self.table_name}: {name}: {error}") from None

    def _taken(self, name: str, default: object, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.table.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ConfigError(f"{self.table_name}: {name}: expected {expected}, got {value!r}")
        return value

    def link(self, uplink: float, downlink: float, rtt_s: float) -> LinkEstimate:
        """Takes the fields uplink, downlink and rtt."""
        up = self.parsed("uplink", uplink, parse_rate_bytes_per_s)
        down = self.parsed("downlink", downlink, parse_rate_bytes_per_s)
        return LinkEstimate(up, down, self.seconds("rtt", rtt_s))

    def done(self) -> None:
        """Raises `ConfigError` if any field was not taken."""
        if self.table:
            raise ConfigError(f"{self.table_name}: no such field: {', '.join(sorted(self.table))}")


def offer_of(table: object, index: int, catalogue: Mapping[str, GpuType], gpus: int = 1) -> PoolOffer:
    """Parses one `[[worker]]` table. `gpus`: GPUs per machine, unless the table has its own number (0: as many as the model needs).
    If the table names a rate, that is the rate of a machine of one GPU, unless it says more."""
    fields = Fields(f"worker {index}", table)
    gpu = gpu_of(catalogue, fields.text("gpu", "RTX4090"))
    provider = fields.text("provider", "")
    tokens_per_s = fields.number("tokens_per_s", 0.0)
    offer = PoolOffer(
        gpu=gpu.name,
        count=fields.whole("count", 1),
        price_usd_per_hour=fields.number("price_usd_per_hour", gpu.usd_per_hour),
        link=fields.link(12.5e6, 50e6, 0.08),
        provider=provider,
        hazard_per_hour=fields.number("hazard_per_hour", 0.0),
        join_s=fields.seconds("join", JOIN_S),
        apply_s=fields.seconds("apply", 1.0),
        swap_s=fields.seconds("swap", 0.0),
        slots=fields.whole("slots", 0),
        tokens_per_s=tokens_per_s,
        egress_usd_per_gib=fields.number("egress_usd_per_gib", EGRESS_USD_PER_GIB.get(provider.lower(), 0.0)),
        gpus=fields.whole("gpus", 1 if tokens_per_s else gpus),
    )
    fields.text("origin", "")
    fields.done()
    return offer


def question_of(
    config: RunConfig, fleet: Mapping[str, object], catalogue: Mapping[str, GpuType], billions: float | None = None
) -> tuple[PlanQuestion, str]:
    """Combines the run's config and the fleet file into one question, with priors for numbers that neither gives; also returns the
    source of the model's size. `billions`: parameters of the model, if neither the fleet file nor the model's config says them."""
    model = Fields("model", fleet.get("model", {}))
    if "billions" in model.table:
        declared = model.number("billions", 0.0)
        billions = declared if billions is None else billions
    if billions is None:
        size, origin = sizing.model_of(config.model.path)
    elif 0 < billions <= BILLIONS_MAX:
        size, origin = size_by_billions(built_in_models(), billions), "as given"
    else:
        raise ConfigError(f"billions: expected a number above 0 and up to {BILLIONS_MAX:,}, got {billions:g}")
    lengths = Fields("lengths", fleet.get("lengths", {}))
    longest = float(config.sampling.max_new_tokens)
    tokens = TokenCounts(
        lengths.number("mean_tokens", sizing.MEAN_SHARE * longest),
        lengths.number("tail_tokens", sizing.TAIL_SHARE * longest),
        lengths.number("max_tokens", longest),
    )
    tables = fleet.get("worker", None)
    if tables is not None and not isinstance(tables, list):
        raise ConfigError(f"fleet: worker: expected [[worker]] tables, got {tables!r}")
    if tables is None:  # MARKET_COUNT of every GPU at its typical price, 100 Mbit/s up, 400 down
        link = LinkEstimate(12.5e6, 50e6, 0.08)
        kinds = [gpu for gpu in catalogue.values() if gpu.name != CPU]
        offers = [PoolOffer(gpu.name, MARKET_COUNT, gpu.usd_per_hour, link) for gpu in kinds]
    else:
        offers = [offer_of(table, i, catalogue) for i, table in enumerate(tables)]
    machine = learner_gpus(config, fleet, size, catalogue)
    learner = _learner(config, Fields("learner", fleet.get("learner", {})), size, tokens.mean, machine)
    for fields in (model, lengths):
        fields.done()
    wishes = PlanConfig(
        staleness_bound=config.staleness.bound,
        fixed_kappa=config.staleness.kappa,
        usd_per_hour_cap=config.coordinator.usd_per_hour_cap,
        usd_budget=config.coordinator.usd_budget,
    )
    return PlanQuestion(
        size, lengths_of(config), learner, wishes, tokens, tuple(offers), catalogue,
        steps=config.learner.steps, recomputes_caches=config.worker.swap_mode == "recompute_kv",
    ), origin  # fmt: skip


def _learner(
    config: RunConfig, fields: Fields, size: ModelSize, mean_tokens: float, machine: tuple[GpuType, int]
) -> LearnerEstimate:
    gpu, gpu_count = machine
    group = config.learner.rollouts_per_prompt
    batch = fields.whole("rollouts_per_step", config.learner.prompts_per_step * group)
    evaluation = round(evaluation_rollouts(config))
    whole = float(size.gpu_weight_bytes)
    train_s = fields.seconds("train", train_s_prior(gpu, gpu_count, size.billions, batch * mean_tokens))
    run = sizing.learner_run(config, size)
    copied = checkpoint_bytes(run.trained_parameters(size), run.published_bytes(size), run.optimizer_state)
    copied_s = fields.seconds("checkpoint", copied / (CHECKPOINT_BYTES_PER_S * gpu_count))
    idle_s = copied_s / (config.learner.checkpoint_every_steps or steps_between(copied_s, train_s, train_s))
    learner = LearnerEstimate(
        rollouts_per_step=batch + evaluation,
        evaluation_rollouts=evaluation,
        train_s=train_s + idle_s,
        idle_s=idle_s,
        link=fields.link(config.learner.uplink_limit or 125e6, 125e6, 0.04),
        delta_bytes=fields.parsed("delta_bytes", DELTA_SHARE * whole, parse_bytes),
        full_snapshot_bytes=fields.parsed("full_snapshot_bytes", whole, parse_bytes),
        rollouts_per_group=fields.whole("rollouts_per_group", min(group, batch)),
        encode_s=fields.seconds("encode", 1.0),
        price_usd_per_hour=fields.number("price_usd_per_hour", gpu.usd_per_hour * gpu_count),
        start_s=fields.seconds("start", START_S + whole / LOAD_BYTES_PER_S),
    )
    dropped = fields.number("dropped_groups", DROPPED_GROUPS if config.learner.drop_equal_groups else 0.0)
    for name in ("gpu", "gpu_count", "origin"):
        fields.table.pop(name, None)
    fields.done()
    return learner.dropping(dropped)


def evaluation_rollouts(config: RunConfig) -> float:
    """Returns the rollouts per step, on average, that workers generate for evaluations."""
    task = config.task
    main_set = sum(task.held_out.values()) * task.eval_samples
    return (main_set + sum(each.prompts * each.samples for each in task.eval_sets.values())) / task.eval_every_steps


def learner_gpus(
    config: RunConfig, fleet: Mapping[str, object], size: ModelSize, catalogue: Mapping[str, GpuType]
) -> tuple[GpuType, int]:
    """Returns the learner's GPU and their number from `[learner]` of the fleet file; by default, the fewest that it fits on."""
    fields = Fields("learner", fleet.get("learner", {}))
    usual = sizing.LEARNER_GPU if sizing.LEARNER_GPU in catalogue else next(iter(catalogue))
    gpu = gpu_of(catalogue, fields.text("gpu", usual))
    fewest = 0 if gpu.name == CPU else sizing.gpus_needed(config, size, gpu.memory_bytes)
    count = fields.whole("gpu_count", fewest)
    if count < 0 or (count == 0 and gpu.name != CPU):
        raise ConfigError(f"learner: gpu_count: expected a number above 0, got {count}")
    return gpu, max(1, count)


def run_offers(args: argparse.Namespace, rest: Sequence[str]) -> int:
    logging.basicConfig(format="echo2: %(message)s", level=logging.WARNING)
    config = config_of(args.files, args.preset, rest)
    gpus = load_catalogue(args.catalogue)
    question, origin = question_of(config, {}, gpus, args.billions)
    size = question.model
    if args.recorded is not None:
        offers = recorded(args.recorded)
    else:
        offers = newest(kept_file(), gpus, must_fetch=args.refresh, may_fetch=not args.offline, age_max_s=args.max_age)
    if args.record is not None:
        keep(offers, args.record)
    spot = True if args.spot else False if args.on_demand else None
    wish = OfferFilter(
        tuple(row.lower() for row in args.provider), tuple(row.lower() for row in args.gpu), args.region, spot,
        args.usd_per_hour_max,
    )  # fmt: skip
    rows = ranked(offers.offers, size, lengths_of(config), gpus, question.tokens_in_cache, wish)
    if not rows:
        raise ConfigError(f"offers: expected one that passes the filters, none of {len(offers.offers)} does")
    rows.sort(key=lambda row: (bool(row.refusal), SORTS[args.sort](row)))
    if args.json:
        print(json.dumps([_plain(row) for row in rows[: args.rows or None]], indent=2))
        return 0
    best: dict[str, Ranked] = {}
    for row in rows:
        best.setdefault(row.kind or row.offer.gpu, row)
    best_rows = list(best.values()) if args.rows is None else rows[: args.rows or None]
    from rich.console import Console

    console, age_s = Console(highlight=False), offers.age_s(unix_now())
    aged = "" if age_s is None else f", fetched {format_seconds(age_s)} ago"
    console.print(
        f"{size.billions:.3g} billion parameters ({origin}), sequences of up to {lengths_of(config).of(size)} tokens\n"
        f"{len(rows)} offers from {offers.source}{aged}\n"
        "Rates are predicted from data sheets; 9 of 10 machines are expected within the interval.",
    )
    console.print(_table([row for row in best_rows if not row.refusal]))
    refused = {f"{row.kind or row.offer.gpu} ({row.refusal})": None for row in rows if row.refusal}
    if refused:
        console.print(f"not for this model: {'; '.join(refused)}")
    if args.rows is None:
        console.print("One row a kind of GPU, its best; --rows 0 shows every offer.")
    return 0


def _table(rows: Sequence[Ranked]) -> Any:
    """Fits 80 columns, as long as no region has more than 16 letters."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("machine", "of", "USD/h", "tokens/s", "USD per million tokens"):
        table.add_column(column, justify="right" if "/" in column else "left", overflow="fold")
    for row in rows:
        offer = row.offer
        usd = f"{row.usd_per_million:.3f} ({row.usd_low:.3f} to {row.usd_high:.3f})"
        egress = f", and {row.egress_usd_per_gib:.3f} a GiB sent" if row.egress_usd_per_gib else ""
        table.add_row(
            f"{offer.gpu_count} x {row.kind or offer.gpu}", f"{offer.provider} {offer.region}".strip(),
            f"{offer.usd_per_hour:.3f}{' spot' if offer.is_spot else ''}", f"{row.tokens_per_s:.0f}", usd + egress,
        )  # fmt: skip
    return table


def _plain(row: Ranked) -> dict[str, object]:
    return {name: None if value == math.inf else value for name, value in dataclasses.asdict(row).items()}

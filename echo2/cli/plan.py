"""`echo2 plan`: how many of which machines a run needs, what they cost and what limits it."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from echo2.base.errors import ConfigError
from echo2.base.units import parse_bytes, parse_duration_s, parse_rate_bytes_per_s
from echo2.cli.learner_room import LEARNER_GPU, LearnerMachine, gpus_needed, verdict
from echo2.cli.options import make_importable
from echo2.cli.run_shape import (
    MEAN_SHARE,
    TAIL_SHARE,
    ForeseenAudit,
    audit_costs,
    audit_line,
    learner_line,
    learner_run,
    lengths_of,
    model_of,
)
from echo2.config.load import load_config, parse_overrides
from echo2.config.run import RunConfig
from echo2.coordinator.runtime import experience_file
from echo2.coordinator.runtime.catalogue import built_in_catalogue, built_in_models
from echo2.coordinator.runtime.quiet import quiet_solver
from echo2.cost_model.catalogue import CPU, GpuType, gpu_of, parse_catalogue, train_s_prior
from echo2.cost_model.checkpoint_interval import CHECKPOINT_BYTES_PER_S, steps_between
from echo2.cost_model.experience import JOIN_S
from echo2.cost_model.memory import checkpoint_bytes
from echo2.cost_model.offers import EGRESS_USD_PER_GIB
from echo2.cost_model.plan import Plan
from echo2.cost_model.prefill import PrefillWork
from echo2.cost_model.question import WHAT_IF, PlanQuestion, PoolOffer, TokenCounts, parse_what_if
from echo2.cost_model.sizing import ModelSize, size_by_billions
from echo2.cost_model.snapshot import Hysteresis, LearnerEstimate, LinkEstimate, PlanConfig

MARKET_COUNT = 48
DROPPED_GROUPS = 0.25
"""Assumed share of groups that dynamic sampling, if on, discards: those that the model always or never solves."""
DELTA_SHARE = 0.01  # bytes of a step's delta per byte of bf16 weights; 0.7 % to 0.9 % measured, plus the container


def add_plan_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `echo2 plan`."""
    text = "how many of which machines a run needs, what they cost and what limits it"
    parser = subparsers.add_parser("plan", help=text, description=text)
    parser.set_defaults(command=_run, takes_overrides=True)
    parser.add_argument("files", nargs="*", type=Path, metavar="RUN.toml", help="the run's config; defaults without")
    parser.add_argument("--preset", help="local, lan or wan")
    parser.add_argument("--fleet", type=Path, metavar="FLEET.toml", help="machines on offer, learner and lengths")
    parser.add_argument(
        "--catalogue", type=Path, metavar="GPUS.toml", help="priors by GPU instead of the built-in ones"
    )
    parser.add_argument(
        "--billions",
        type=float,
        default=0.0,
        metavar="N",
        help="parameters of the model, where its config.json is not here",
    )
    parser.add_argument("--what-if", action="append", default=[], metavar="NAME=VALUE,..", help=", ".join(WHAT_IF))
    parser.add_argument(
        "--live", metavar="RUN", help="what to do next with a running run: its folder or an operator's link"
    )
    parser.add_argument("--history", metavar="RUN", help="how a running run's predictions came out")
    parser.add_argument(
        "--learner-usd-per-hour",
        type=float,
        default=0.0,
        metavar="USD",
        help="with --live: what the learner costs beside workers",
    )
    parser.add_argument("--offline", action="store_true", help="with --live: fetch no prices")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--explain", action="store_true", help="show the calculation")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="cost and utilisation against S and kappa")


def _run(own: argparse.Namespace, rest: Sequence[str]) -> int:
    if own.live or own.history:
        from echo2.cli.plan_live import show  # imports gRPC, needed only here

        return show(own.live or own.history, own.history is not None, own)
    make_importable(own.files)
    config = load_config(own.files, own.preset, parse_overrides(rest))
    catalogue = load_catalogue(own.catalogue)
    fleet = read_toml(own.fleet) if own.fleet else {}
    question, origin = question_of(config, fleet, catalogue, own.billions)
    for name, value in [pair for text in own.what_if for pair in parse_what_if(text)]:
        question = question.what_if(name, value)
    from echo2.cli.plan_answer import (  # imports the planner, needed only here
        PlannedRun,
        as_json,
        plot,
        print_answer,
        print_fits,
    )

    with quiet_solver():
        question, answer, audited = _planned(config, question)
        if own.plot:
            plot(question, own.plot)
        told = as_json(question, answer, PlannedRun(config.learner.steps, origin)) if own.json else {}
    if own.json:
        print(json.dumps(told | {"audit": asdict(audited) if audited else None}, indent=2))
    else:
        print_answer(question, answer, PlannedRun(config.learner.steps, origin), own.explain)
        print_fits(question)
        gpu, gpu_count = learner_gpus(config, fleet, question.model, catalogue)
        here = LearnerMachine(gpu_count, gpu.memory_bytes)
        if gpu.name == CPU:
            here = LearnerMachine(0, memory_bytes=gpu.memory_bytes)
        print(
            learner_line(config, question.model, here.gpu_count, gpu.memory_bytes)
            + verdict(config, question.model, here)
        )
        print(audit_line(audited))
    return 0


def _planned(config: RunConfig, question: PlanQuestion) -> tuple[PlanQuestion, Plan, ForeseenAudit | None]:
    """Returns the question, its answer and the audit's cost. Plans twice if workers keep KV caches, since which rollouts they may
    score then depends on the planned period and pool."""
    from echo2.cost_model.egress import plan_with_egress

    audited = _audit(config, question, 0.0)
    question = replace(question, prefill=_prefill_work(config, question, audited))
    answer = plan_with_egress(question.snapshot(), question.wishes)
    if audited is None or config.worker.swap_mode != "keep_kv":
        return question, answer, audited
    audited = _audit(config, question, _kept_share(question, answer))
    question = replace(question, prefill=_prefill_work(config, question, audited))
    answer = plan_with_egress(question.snapshot(), question.wishes)
    return question, answer, _audit(config, question, _kept_share(question, answer))


def _audit(config: RunConfig, question: PlanQuestion, kept_share: float) -> ForeseenAudit | None:
    prompt = config.sampling.max_prompt_tokens / 2  # assumes prompts of half the longest length
    return audit_costs(config, prompt, question.tokens.mean, question.learner.train_s, kept_share)


def _prefill_work(config: RunConfig, question: PlanQuestion, audited: ForeseenAudit | None) -> PrefillWork:
    """Converts the audit's share from tokens trained on to tokens sampled, which include evaluations and discarded groups."""
    learner = question.learner
    trained = learner.trained_rollouts / learner.rollouts_per_step
    share = audited.fleet_share * trained if audited else 0.0
    return PrefillWork(config.worker.swap_mode == "recompute_kv", share)


def _kept_share(question: PlanQuestion, answer: Plan) -> float:
    """Returns the share of tokens in rollouts during which a new version arrives, on the pool's machines."""
    from echo2.cost_model.prefill import kept_cache_share

    workers = {worker.worker_id: worker for worker in question.snapshot().workers}
    pool = [workers[one] for one in answer.pool] or list(workers.values())
    rate = sum(worker.rollouts_per_s for worker in pool)
    mean_s = sum(worker.rollouts_per_s * worker.rollout_s_mean for worker in pool) / rate
    tokens, period_s = question.tokens, answer.kappa * question.learner.train_s
    return kept_cache_share(tokens.mean, tokens.tail, tokens.longest, mean_s / tokens.mean, period_s)


# ---- reading


def read_toml(path: Path) -> dict[str, object]:
    """Reads a TOML file. Raises `ConfigError` that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable TOML file, got: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected TOML, got a syntax error: {error}") from None


def load_catalogue(path: Path | None) -> dict[str, GpuType]:
    """Loads the user's catalogue, or the built-in one if `path` is None."""
    if path is not None:
        return parse_catalogue(read_toml(path))
    return dict(built_in_catalogue())


class Fields:
    """One TOML table, read by name; every error names table, field, value and what was expected."""

    def __init__(self, whose: str, table: object) -> None:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{whose}: expected a table, got {table!r}")
        self.whose = whose
        self.table = dict(table)

    def number(self, name: str, default: float) -> float:
        """Takes a bare number."""
        value = self.table.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.whose}: {name}: expected a number, got {value!r}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """Takes a text."""
        value = self.table.pop(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.whose}: {name}: expected a text, got {value!r}")
        return value

    def rate(self, name: str, default: float) -> float:
        """Takes bytes/s, from `300mbit` or a number."""
        return self._parsed(name, default, parse_rate_bytes_per_s)

    def seconds(self, name: str, default: float) -> float:
        """Takes seconds, from `80ms` or a number."""
        return self._parsed(name, default, parse_duration_s)

    def size(self, name: str, default: float) -> float:
        """Takes bytes, from `120MB` or a number."""
        return float(self._parsed(name, default, parse_bytes))

    def _parsed(self, name: str, default: float, parse: Callable[[str | float], float]) -> float:
        value = self.table.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{self.whose}: {name}: expected a number or a text with a unit, got {value!r}")
        try:
            return parse(value)
        except ConfigError as error:
            raise ConfigError(f"{self.whose}: {name}: {error}") from None

    def link(self, uplink: float, downlink: float, rtt_s: float) -> LinkEstimate:
        """Takes the fields uplink, downlink and rtt."""
        return LinkEstimate(
            self.rate("uplink", uplink), self.rate("downlink", downlink), self.seconds("rtt", rtt_s)
        )  # fmt: skip

    def done(self) -> None:
        """Raises `ConfigError` if any field was not taken."""
        if self.table:
            raise ConfigError(f"{self.whose}: no such field: {', '.join(sorted(self.table))}")


def offer_of(table: object, index: int, catalogue: Mapping[str, GpuType], gpus: int = 1) -> PoolOffer:
    """Parses one `[[worker]]` table. `gpus`: GPUs per machine, unless the table has its own number (0: as many as the model needs).
    If the table names a rate, that is the rate of a machine of one GPU, unless it says more."""
    fields = Fields(f"worker {index}", table)
    gpu = gpu_of(catalogue, fields.text("gpu", "RTX4090"))
    provider = fields.text("provider", "")
    tokens_per_s = fields.number("tokens_per_s", 0.0)
    made = PoolOffer(
        gpu=gpu.name,
        count=int(fields.number("count", 1)),
        price_usd_per_hour=fields.number("price_usd_per_hour", gpu.usd_per_hour),
        link=fields.link(12.5e6, 50e6, 0.08),
        provider=provider,
        hazard_per_hour=fields.number("hazard_per_hour", 0.0),
        join_s=fields.seconds("join", JOIN_S),
        apply_s=fields.seconds("apply", 1.0),
        swap_s=fields.seconds("swap", 0.0),
        slots=int(fields.number("slots", 0)),
        tokens_per_s=tokens_per_s,
        egress_usd_per_gib=fields.number("egress_usd_per_gib", EGRESS_USD_PER_GIB.get(provider.lower(), 0.0)),
        gpus=int(fields.number("gpus", 1 if tokens_per_s else gpus)),
    )
    fields.text("origin", "")
    fields.done()
    return made


def question_of(
    config: RunConfig, fleet: Mapping[str, object], catalogue: Mapping[str, GpuType], billions: float = 0.0
) -> tuple[PlanQuestion, str]:
    """Combines the run's config and the fleet file into one question, with priors for numbers that neither gives; also returns the
    source of the model's size. `billions` 0: take the size from the fleet file or the model's config."""
    model = Fields("model", fleet.get("model", {}))
    told = size_of(billions or model.number("billions", 0.0))
    size, origin = (told, "as given") if told is not None else model_of(config.model.path)
    lengths = Fields("lengths", fleet.get("lengths", {}))
    longest = float(config.sampling.max_new_tokens)
    tokens = TokenCounts(
        lengths.number("mean_tokens", MEAN_SHARE * longest),
        lengths.number("tail_tokens", TAIL_SHARE * longest),
        lengths.number("max_tokens", longest),
    )
    tables = fleet.get("worker", None)
    if tables is not None and not isinstance(tables, list):
        raise ConfigError(f"fleet: worker: expected [[worker]] tables, got {tables!r}")
    offers = _market(catalogue) if tables is None else [offer_of(one, i, catalogue) for i, one in enumerate(tables)]
    machine = learner_gpus(config, fleet, size, catalogue)
    learner = _learner(config, Fields("learner", fleet.get("learner", {})), size, tokens.mean, machine)
    for fields in (model, lengths):
        fields.done()
    known = experience_file.known(experience_file.place(config.coordinator.machines_file))
    return PlanQuestion(
        size, lengths_of(config), learner, _wishes(config), tokens, tuple(offers), catalogue, known
    ), origin


def size_of(billions: float) -> ModelSize | None:
    """Returns the size of a model with `billions` parameters; None for 0."""
    return size_by_billions(built_in_models(), billions) if billions > 0 else None


def _market(catalogue: Mapping[str, GpuType]) -> list[PoolOffer]:
    """Offers to assume without a fleet file: MARKET_COUNT of every GPU at its typical price, 100 Mbit/s up, 400 down."""
    link = LinkEstimate(12.5e6, 50e6, 0.08)
    return [PoolOffer(g.name, MARKET_COUNT, g.usd_per_hour, link) for g in catalogue.values() if g.name != "cpu"]


def _learner(
    config: RunConfig, fields: Fields, size: ModelSize, mean_tokens: float, machine: tuple[GpuType, int]
) -> LearnerEstimate:
    gpu, gpu_count = machine
    group = config.learner.rollouts_per_prompt
    batch = int(fields.number("rollouts_per_step", config.learner.prompts_per_step * group))
    evaluation = round(evaluation_rollouts(config))
    whole = float(size.gpu_weight_bytes)
    train_s = fields.seconds("train", train_s_prior(gpu, gpu_count, size.billions, batch * mean_tokens))
    run = learner_run(config, size)
    copied = checkpoint_bytes(run.trained_parameters(size), run.published_bytes(size))
    copied_s = fields.seconds("checkpoint", copied / (CHECKPOINT_BYTES_PER_S * gpu_count))
    idle_s = copied_s / (config.learner.checkpoint_every_steps or steps_between(copied_s, train_s, train_s))
    made = LearnerEstimate(
        rollouts_per_step=batch + evaluation,
        evaluation_rollouts=evaluation,
        train_s=train_s + idle_s,
        idle_s=idle_s,
        link=fields.link(config.broadcast.uplink_limit or 125e6, 125e6, 0.04),
        delta_bytes=fields.size("delta_bytes", DELTA_SHARE * whole),
        full_snapshot_bytes=fields.size("full_snapshot_bytes", whole),
        rollouts_per_group=int(fields.number("rollouts_per_group", min(group, batch))),
        encode_s=fields.seconds("encode", 1.0),
        price_usd_per_hour=fields.number("price_usd_per_hour", gpu.usd_per_hour * gpu_count),
    )
    dropped = fields.number("dropped_groups", DROPPED_GROUPS if config.learner.drop_equal_groups else 0.0)
    for name in ("gpu", "gpu_count", "origin"):
        fields.table.pop(name, None)
    fields.done()
    return made.dropping(dropped)


def evaluation_rollouts(config: RunConfig) -> float:
    """Returns the rollouts per step, on average, that workers generate for evaluations."""
    task = config.task
    asked = sum(task.held_out.values()) * task.eval_samples + sum(
        one.prompts * one.samples for one in task.eval_sets.values()
    )
    return asked / task.eval_every_steps


def learner_gpus(
    config: RunConfig, fleet: Mapping[str, object], size: ModelSize, catalogue: Mapping[str, GpuType]
) -> tuple[GpuType, int]:
    """Returns the learner's GPU and their number from `[learner]` of the fleet file; by default, the fewest that it fits on."""
    fields = Fields("learner", fleet.get("learner", {}))
    usual = LEARNER_GPU if LEARNER_GPU in catalogue else next(iter(catalogue))
    gpu = gpu_of(catalogue, fields.text("gpu", usual))
    count = int(fields.number("gpu_count", 0 if gpu.name == CPU else gpus_needed(config, size, gpu.memory_bytes)))
    if count < 0 or (count == 0 and gpu.name != CPU):
        raise ConfigError(f"learner: gpu_count: expected a number above 0, got {count}")
    return gpu, max(1, count)


def _wishes(config: RunConfig) -> PlanConfig:
    return PlanConfig(
        staleness_bound=config.staleness.bound,
        fixed_kappa=config.staleness.kappa,
        target_utilisation=config.coordinator.target_utilisation,
        usd_per_hour_cap=config.coordinator.usd_per_hour_cap,
        usd_budget=config.coordinator.usd_budget,
        hysteresis=Hysteresis(),
    )

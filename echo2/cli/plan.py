"""`echo2 plan`: how many of which machines a run needs, what they cost and what limits it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echo2.base.errors import ConfigError
from echo2.base.units import format_bytes, parse_bytes, parse_duration_s, parse_rate_bytes_per_s
from echo2.config.load import load_config, parse_overrides
from echo2.config.run import RunConfig
from echo2.cost_model.advice import advise
from echo2.cost_model.catalogue import Gpu, gpu_of, parse_catalogue, train_s_prior
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.question import WHAT_IF, Offer, PlanQuestion, TokenCounts, billions_in, parse_what_if
from echo2.cost_model.snapshot import Hysteresis, LearnerEstimate, LinkEstimate, PlanConfig

MARKET_COUNT = 48
DELTA_SHARE = 0.01  # of all bf16 bytes, a step; between the 0.7 % and 0.9 % measured, with the container
MEAN_SHARE, TAIL_SHARE = 0.35, 0.85  # of the longest completion, where no lengths are given
DEFAULT_BILLIONS = 8.0


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
    parser.add_argument("--what-if", action="append", default=[], metavar="NAME=VALUE,..", help=", ".join(WHAT_IF))
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--explain", action="store_true", help="print the sums")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="cost and utilisation against S and kappa")


def _run(own: argparse.Namespace, rest: Sequence[str]) -> int:
    config = load_config(own.files, own.preset, parse_overrides(rest))
    catalogue = load_catalogue(own.catalogue)
    question = question_of(config, read_toml(own.fleet) if own.fleet else {}, catalogue)
    for name, value in [pair for text in own.what_if for pair in parse_what_if(text)]:
        question = question.what_if(name, value)
    with solver_kept_quiet():
        answer = plan(question.snapshot(), question.wishes)
        if own.plot:
            _plot(question, own.plot)
        told = as_json(question, answer) if own.json else {}
    if own.json:
        print(json.dumps(told, indent=2))
        return 0
    console = Console(highlight=False)
    _print_plan(console, question, answer)
    _print_alternatives(console, question, answer)
    if own.explain:
        _print_sums(console, question, answer)
    if not answer.is_feasible:
        for advice in advise(question.snapshot(), question.wishes):
            console.print(f"  would do alone: {advice.change} ({advice.usd_per_hour:.2f} USD/h)")
    return 0


@contextmanager
def solver_kept_quiet() -> Iterator[None]:
    """The integer solver's library prints a line of its own on rare occasions: to standard error, so that JSON stays JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


# ---- reading


def read_toml(path: Path) -> dict[str, object]:
    """A TOML file, or `ConfigError` naming it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable TOML file, got: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected TOML, got a syntax error: {error}") from None


def load_catalogue(path: Path | None) -> dict[str, Gpu]:
    """The user's catalogue, or the built-in one."""
    if path is not None:
        return parse_catalogue(read_toml(path))
    return parse_catalogue(tomllib.loads((files("echo2.cost_model") / "gpus.toml").read_text(encoding="utf-8")))


class Fields:
    """One TOML table, read by name; every error names table, field, value and what was expected."""

    def __init__(self, whose: str, table: object) -> None:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{whose}: expected a table, got {table!r}")
        self.whose = whose
        self.table = dict(table)

    def number(self, name: str, default: float) -> float:
        """A bare number."""
        value = self.table.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.whose}: {name}: expected a number, got {value!r}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """A text."""
        value = self.table.pop(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.whose}: {name}: expected a text, got {value!r}")
        return value

    def rate(self, name: str, default: float) -> float:
        """Bytes/s from `300mbit` or a number."""
        return parse_rate_bytes_per_s(self._with_unit(name, default))

    def seconds(self, name: str, default: float) -> float:
        """Seconds from `80ms` or a number."""
        return parse_duration_s(self._with_unit(name, default))

    def size(self, name: str, default: float) -> float:
        """Bytes from `120MB` or a number."""
        return float(parse_bytes(self._with_unit(name, default)))

    def _with_unit(self, name: str, default: float) -> str | float:
        value = self.table.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{self.whose}: {name}: expected a number or a text with a unit, got {value!r}")
        return value

    def link(self, uplink: float, downlink: float, rtt_s: float) -> LinkEstimate:
        """Fields uplink, downlink and rtt."""
        return LinkEstimate(
            self.rate("uplink", uplink), self.rate("downlink", downlink), self.seconds("rtt", rtt_s)
        )  # fmt: skip

    def done(self) -> None:
        """Raises when a field is left that nobody asked for."""
        if self.table:
            raise ConfigError(f"{self.whose}: no such field: {', '.join(sorted(self.table))}")


def offer_of(table: object, index: int, catalogue: Mapping[str, Gpu]) -> Offer:
    """One `[[worker]]` table."""
    fields = Fields(f"worker {index}", table)
    gpu = gpu_of(catalogue, fields.text("gpu", "RTX4090"))
    made = Offer(
        gpu=gpu.name,
        count=int(fields.number("count", 1)),
        price_usd_per_hour=fields.number("price_usd_per_hour", gpu.usd_per_hour),
        link=fields.link(12.5e6, 50e6, 0.08),
        provider=fields.text("provider", ""),
        hazard_per_hour=fields.number("hazard_per_hour", 0.0),
        join_s=fields.seconds("join", 120.0),
        apply_s=fields.seconds("apply", 1.0),
        swap_s=fields.seconds("swap", 0.0),
        slots=int(fields.number("slots", 0)),
        tokens_per_s=fields.number("tokens_per_s", 0.0),
    )
    fields.text("origin", "")
    fields.done()
    return made


def question_of(config: RunConfig, fleet: Mapping[str, object], catalogue: Mapping[str, Gpu]) -> PlanQuestion:
    """The run's config and the fleet file as one question; what neither says is a prior."""
    model = Fields("model", fleet.get("model", {}))
    billions = model.number("billions", billions_in(config.model.path) or DEFAULT_BILLIONS)
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
    learner = _learner(config, Fields("learner", fleet.get("learner", {})), billions, tokens.mean, catalogue)
    for fields in (model, lengths):
        fields.done()
    return PlanQuestion(billions, learner, _wishes(config), tokens, tuple(offers), catalogue)


def _market(catalogue: Mapping[str, Gpu]) -> list[Offer]:
    """Without a fleet file: plenty of every GPU at its typical price, 100 Mbit/s up, 400 down."""
    link = LinkEstimate(12.5e6, 50e6, 0.08)
    return [Offer(g.name, MARKET_COUNT, g.usd_per_hour, link) for g in catalogue.values() if g.name != "cpu"]


def _learner(
    config: RunConfig, fields: Fields, billions: float, mean_tokens: float, catalogue: Mapping[str, Gpu]
) -> LearnerEstimate:
    group = config.learner.rollouts_per_prompt
    batch = int(fields.number("rollouts_per_step", config.learner.prompts_per_step * group))
    gpu = gpu_of(catalogue, fields.text("gpu", "H100"))
    gpu_count = int(fields.number("gpu_count", 4))
    whole = 2e9 * billions
    made = LearnerEstimate(
        rollouts_per_step=batch,
        train_s=fields.seconds("train", train_s_prior(gpu, gpu_count, billions, batch * mean_tokens)),
        link=fields.link(config.broadcast.uplink_limit or 125e6, 125e6, 0.04),
        delta_bytes=fields.size("delta_bytes", DELTA_SHARE * whole),
        full_snapshot_bytes=fields.size("full_snapshot_bytes", whole),
        rollouts_per_group=int(fields.number("rollouts_per_group", min(group, batch))),
        encode_s=fields.seconds("encode", 1.0),
        price_usd_per_hour=fields.number("price_usd_per_hour", gpu.usd_per_hour * gpu_count),
    )
    fields.text("origin", "")
    fields.done()
    return made


def _wishes(config: RunConfig) -> PlanConfig:
    return PlanConfig(
        staleness_bound=config.staleness.bound,
        fixed_kappa=config.staleness.kappa,
        target_utilisation=config.coordinator.target_utilisation,
        usd_per_hour_cap=config.coordinator.usd_per_hour_cap,
        usd_budget=config.coordinator.usd_budget,
        hysteresis=Hysteresis(),
    )


# ---- answering


def alternatives(question: PlanQuestion) -> dict[str, Plan]:
    """Side by side: cheapest, fastest (a quarter more rate, target 1), fewest workers; and the paper's kappa."""
    snapshot, wishes = question.snapshot(), question.wishes
    fast = replace(wishes, target_utilisation=1.0, hysteresis=replace(wishes.hysteresis, add_margin=0.25))
    alike = replace(snapshot, workers=tuple(replace(one, price_usd_per_hour=1.0) for one in snapshot.workers))
    fewest = plan(alike, replace(wishes, usd_per_hour_cap=0.0))
    prices = {one.worker_id: one.price_usd_per_hour for one in snapshot.workers}
    priced = sum(prices[worker] for worker in fewest.pool)
    useful = fewest.predicted_utilisation * question.learner.rollouts_per_step / question.learner.train_s * 3600
    learner_usd = question.learner.price_usd_per_hour
    found = {
        "cheapest": plan(snapshot, wishes),
        "fastest": plan(snapshot, fast),
        "fewest workers": replace(
            fewest, usd_per_hour=priced,
            usd_per_useful_rollout=(priced + learner_usd) / useful if useful > 0 else math.inf,
        ),
    }  # fmt: skip
    if not wishes.fixed_kappa:
        default = max(1, wishes.staleness_bound - 1)
        found[f"kappa = S-1 = {default}"] = plan(snapshot, replace(wishes, fixed_kappa=default))
    return found


def pool_by_kind(answer: Plan) -> dict[str, int]:
    """How many of which machine."""
    return dict(sorted(Counter(worker.rpartition("#")[0] for worker in answer.pool).items()))


def as_json(question: PlanQuestion, answer: Plan) -> dict[str, object]:
    """The plan with everything that was asked, for programs."""
    told = dataclasses.asdict(answer)
    told["binding"] = answer.binding.value
    told["terms"] = [{**term, "limit_kind": term["limit_kind"].value} for term in told["terms"]]
    told["pool_by_kind"] = pool_by_kind(answer)
    told["staleness_bound"] = question.wishes.staleness_bound
    told["learner"] = dataclasses.asdict(question.learner)
    told["alternatives"] = {
        name: {
            "kappa": one.kappa, "workers": len(one.pool), "usd_per_hour": one.usd_per_hour,
            "predicted_utilisation": one.predicted_utilisation, "is_feasible": one.is_feasible,
            "pool_by_kind": pool_by_kind(one),
        }
        for name, one in alternatives(question).items()
    }  # fmt: skip
    if not answer.is_feasible:
        told["advice"] = [dataclasses.asdict(one) for one in advise(question.snapshot(), question.wishes)]
    return told


# ---- printing


def _print_plan(console: Console, question: PlanQuestion, answer: Plan) -> None:
    learner = question.learner
    console.print(
        f"{question.model_billions:g} billion parameters, S = {question.wishes.staleness_bound}, "
        f"R = {learner.rollouts_per_step} rollouts a step, T_train = {learner.train_s:.1f} s"
    )
    console.print(answer.reason)
    table = Table(title="terms of the inequality")
    for column in ("term", "formula", "value", "limit", "unit", "slack", "mend by"):
        table.add_column(column, overflow="fold")
    for term in answer.terms:
        mark = " *" if term.limit_kind is answer.binding else ""
        table.add_row(
            term.limit_kind.value + mark, term.formula, f"{term.value:.4g}", f"{term.limit:.4g}", term.unit,
            f"{term.slack:+.1%}", term.remedy,
        )  # fmt: skip
    console.print(table)


def _print_alternatives(console: Console, question: PlanQuestion, answer: Plan) -> None:
    table = Table(title="alternatives")
    columns = ("plan", "kappa", "pool", "USD/h", "USD per 1000 useful rollouts", "utilisation", "T_bcast", "in flight")
    for column in columns:
        table.add_column(column, overflow="fold")
    for name, one in alternatives(question).items():
        pool = ", ".join(f"{count} x {kind}" for kind, count in pool_by_kind(one).items()) or "nobody"
        table.add_row(
            name, str(one.kappa), pool, f"{one.usd_per_hour:.2f}", f"{1000 * one.usd_per_useful_rollout:.3f}",
            f"{one.predicted_utilisation:.3f}" + ("" if one.is_feasible else " (not feasible)"),
            f"{one.broadcast_s:.1f} s", str(one.in_flight_cap_rollouts),
        )  # fmt: skip
    console.print(table)
    console.print(f"solver: {answer.solver}; the greedy's pool is {answer.greedy_gap:.2%} dearer; * marks what binds")


def _print_sums(console: Console, question: PlanQuestion, answer: Plan) -> None:
    """Every relation with its numbers put in."""
    learner, kappa, bound = question.learner, answer.kappa, question.wishes.staleness_bound
    train_s, batch, rate = learner.train_s, learner.rollouts_per_step, answer.throughput_rollouts_per_s
    size = learner.artifact_bytes(kappa)
    staleness = next(term for term in answer.terms if term.formula.startswith("T_bcast"))
    batch_s = batch / rate if rate > 0 else math.inf
    rollout_s = staleness.value - answer.broadcast_s - batch_s
    lines = [
        f"artifact    {format_bytes(learner.delta_bytes)} x (kappa = {kappa})^{learner.delta_growth:g} = "
        f"{format_bytes(size)}",
        f"transfer    fluid bound of {format_bytes(size)} over {format_bytes(learner.link.uplink_bytes_per_s)}/s and "
        f"the pool's links / {question.wishes.broadcast_efficiency:g} = {answer.transfer_s:.2f} s",
        f"T_bcast     transfer + encode + round trips + apply = {answer.broadcast_s:.2f} s",
        f"(2) rate    mu_pool = {rate:.4g} against R/T_train = {batch}/{train_s:.4g} = {batch / train_s:.4g} /s",
        f"(2) links   transfer = {answer.transfer_s:.2f} against kappa*T_train = {kappa}*{train_s:.4g} = "
        f"{kappa * train_s:.4g} s",
        f"(3)         T_bcast + L_roll + R/mu_pool = {answer.broadcast_s:.4g} + {rollout_s:.4g} + {batch_s:.4g} = "
        f"{staleness.value:.4g} against (S-kappa+1)*T_train = ({bound}-{kappa}+1)*{train_s:.4g} = "
        f"{staleness.limit:.4g} s",
        f"in flight   {answer.in_flight_cap_rollouts} rollouts at most",
        f"price       {answer.usd_per_hour:.2f} (pool) + {learner.price_usd_per_hour:.2f} (learner) USD/h over "
        f"{3600 * answer.predicted_utilisation * batch / train_s:.0f} useful rollouts/h = "
        f"{answer.usd_per_useful_rollout:.5f} USD",
    ]
    console.print("\n".join(lines), soft_wrap=True)


def _plot(question: PlanQuestion, path: Path) -> None:
    """Cost and utilisation of each kappa, and of the chosen one against S."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    snapshot, wishes = question.snapshot(), question.wishes
    kappas = list(range(1, wishes.staleness_bound + 1))
    by_kappa = [plan(snapshot, replace(wishes, fixed_kappa=kappa)) for kappa in kappas]
    bounds = list(range(1, max(8, wishes.staleness_bound) + 1))
    by_bound = [plan(snapshot, replace(wishes, staleness_bound=bound, fixed_kappa=0)) for bound in bounds]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharey="row")
    for column, (name, at, plans) in enumerate((("kappa", kappas, by_kappa), ("S", bounds, by_bound))):
        axes[0][column].plot(at, [one.usd_per_hour for one in plans], "o-")
        axes[1][column].plot(at, [one.predicted_utilisation for one in plans], "o-")
        axes[1][column].axhline(wishes.target_utilisation, linestyle=":")
        axes[1][column].set_xlabel(name)
    axes[0][0].set_ylabel("pool, USD/h")
    axes[1][0].set_ylabel("predicted utilisation")
    axes[0][0].set_title(f"S = {wishes.staleness_bound}")
    axes[0][1].set_title("best kappa")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"plot {path}: expected a place that can be written, got: {error.strerror}") from None
    finally:
        pyplot.close(figure)

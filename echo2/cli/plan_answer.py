"""The answer of `echo2 plan`: alternatives side by side, as tables, sums, JSON and a plot."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echo2.base.errors import ConfigError
from echo2.base.units import format_bytes
from echo2.cli.run_shape import FIT_COLUMNS, fit_rows
from echo2.cost_model.advice import advise
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.question import PlanQuestion


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
    told["machines"] = [
        dict(zip(FIT_COLUMNS, row, strict=True))
        for row in fit_rows(question.model, question.lengths, question.catalogue.values())
    ]
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


def print_answer(question: PlanQuestion, answer: Plan, with_sums: bool) -> None:
    """Tables, the sums if asked for, and advice where nothing is feasible."""
    console = Console(highlight=False)
    _print_plan(console, question, answer)
    _print_alternatives(console, question, answer)
    if with_sums:
        _print_sums(console, question, answer)
    if not answer.is_feasible:
        for advice in advise(question.snapshot(), question.wishes):
            console.print(f"  would do alone: {advice.change} ({advice.usd_per_hour:.2f} USD/h)")


def _print_plan(console: Console, question: PlanQuestion, answer: Plan) -> None:
    learner = question.learner
    console.print(
        f"{question.model.billions:.3g} billion parameters, S = {question.wishes.staleness_bound}, "
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


def print_fits(question: PlanQuestion) -> None:
    """How the model goes on each kind of machine: what a worker there will say of itself, too."""
    longest = question.lengths.of(question.model)
    table = Table(title=f"one worker by kind of machine, sequences of up to {longest} tokens")
    for column in FIT_COLUMNS:
        table.add_column(column, overflow="fold")
    for row in fit_rows(question.model, question.lengths, question.catalogue.values()):
        table.add_row(*row)
    Console(highlight=False).print(table)


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


def plot(question: PlanQuestion, path: Path) -> None:
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

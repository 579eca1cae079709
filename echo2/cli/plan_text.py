"""Prints the answer of `echo2 plan`: what to rent, what the run costs, alternatives, the calculation; also as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from echo2.base.errors import ResourceError
from echo2.base.units import counted, format_bytes, format_seconds
from echo2.cli.process import COLUMNS_MAX, wrapped
from echo2.cli.sizing import FIT_COLUMNS, fit_rows
from echo2.coordinator.planning.pool_plan import feasible_plan, make_plan
from echo2.cost_model.plan import FORMULAS, Limit, Plan, Term
from echo2.cost_model.question import Advice, PlanQuestion, PoolOffer, advise
from echo2.cost_model.snapshot import LearnerEstimate

PRICE_RANGE = (0.5, 2.0)
"""Real prices over those of the catalogue: offers of one kind of GPU differ by so much between providers (`echo2 offers`)."""


def planned(question: PlanQuestion) -> Plan:
    """The answer to a question, egress prices included."""
    return make_plan(question.snapshot(), question.wishes)


def advice_of(question: PlanQuestion, answer: Plan) -> tuple[Advice, ...]:
    """Changes that would make an infeasible answer feasible; each was tried."""
    return advise(question, answer, lambda changed: feasible_plan(changed.snapshot(), changed.wishes))


def alternatives(question: PlanQuestion, answer: Plan) -> dict[str, Plan | None]:
    """Plans by name, None if not feasible: cheapest (the answer itself), fastest (a quarter more rate, target 1), fewest workers,
    kappa = S - 1 as in the paper, and single cards, if the answer takes machines of several; none beside an infeasible answer."""
    if not answer.is_feasible:
        return {"cheapest": answer}
    snapshot, wishes = question.snapshot(), question.wishes
    fast = replace(wishes, target_utilisation=1.0, add_margin=0.25)
    equal = [replace(w, price_usd_per_hour=1.0, egress_usd_per_gib=0.0) for w in snapshot.workers]
    alike = replace(snapshot, workers=tuple(equal))
    if (fewest := feasible_plan(alike, replace(wishes, usd_per_hour_cap=math.inf, usd_budget=math.inf))) is not None:
        prices = {w.worker_id: w.price_usd_per_hour for w in snapshot.workers}
        priced, useful = sum(prices[worker] for worker in fewest.pool), _useful_per_hour(question, fewest)
        usd = (priced + question.learner.price_usd_per_hour) / useful if useful > 0 else math.inf
        fewest = replace(fewest, usd_per_hour=priced, usd_per_useful_rollout=usd)
    pools = {"cheapest": answer, "fastest": feasible_plan(snapshot, fast), "fewest workers": fewest}
    default = max(1, wishes.staleness_bound - 1)
    if not wishes.fixed_kappa and answer.kappa != default:
        pools[f"kappa = S-1 = {default}"] = feasible_plan(snapshot, replace(wishes, fixed_kappa=default))
    cards = tuple(replace(card, gpus=1) for card in question.offers if card.gpus in (0, 1) and card.count)
    if cards and any(question.prior(offer).gpu_count > 1 for offer in pool_offers(question, answer)):
        with contextlib.suppress(ResourceError):  # on no single card does the model fit
            pools["single cards"] = feasible_plan(replace(question, offers=cards).snapshot(), wishes)
    return pools


def pool_by_kind(answer: Plan) -> dict[str, int]:
    return dict(sorted(Counter(worker.rpartition("#")[0] for worker in answer.pool).items()))


def _useful_per_hour(question: PlanQuestion, answer: Plan) -> float:
    learner = question.learner
    trained_s = learner.train_s * learner.training_share
    return answer.predicted_utilisation * learner.trained_rollouts / trained_s * 3600


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The run to plan. `origin`: source of the model's size. `mean_is_assumed`: the mean length is a share of the limit;
    `prices_are_assumed`: some machines' prices are those of the catalogue."""

    steps: int
    origin: str
    mean_is_assumed: bool = False
    prices_are_assumed: bool = False


def hours_of(question: PlanQuestion, answer: Plan, run: PlannedRun) -> float:
    """Hours of the whole run at this plan's utilisation; infinite if nothing is generated."""
    busy_s = run.steps * question.learner.train_s * question.learner.training_share
    return busy_s / answer.predicted_utilisation / 3600 if answer.predicted_utilisation > 0 else math.inf


def costs_of(question: PlanQuestion, answer: Plan, run: PlannedRun) -> dict[str, float]:
    """What the whole run takes, with the learner; `usd_low` and `usd_high` if prices are assumed."""
    hours = hours_of(question, answer, run)
    usd = hours * (answer.usd_per_hour + question.learner.price_usd_per_hour)
    low, high = PRICE_RANGE if run.prices_are_assumed else (1.0, 1.0)
    return {"steps": run.steps, "hours": hours, "usd": usd, "usd_low": usd * low, "usd_high": usd * high}


def as_json(question: PlanQuestion, answer: Plan, run: PlannedRun) -> dict[str, object]:
    answer_json = dataclasses.asdict(answer)
    answer_json["binding"] = answer.binding.value
    for term in answer_json["terms"]:
        kind = term["limit_kind"]
        term |= {"limit_kind": kind.value, "formula": FORMULAS[kind]}
    answer_json["pool_by_kind"] = pool_by_kind(answer)
    answer_json["machines"] = [
        dict(zip(FIT_COLUMNS, row, strict=True))
        for row in fit_rows(question.model, question.lengths, question.catalogue.values())
    ]
    answer_json["prefill"] = {
        offer.key: {"is_measured": question.is_measured(offer), **dataclasses.asdict(question.prefill_cost(offer))}
        for offer in pool_offers(question, answer)
    }
    answer_json["left_out"] = {offer.machine: would for offer, would in question.refused.items()}
    answer_json["staleness_bound"] = question.wishes.staleness_bound
    answer_json["learner"] = dataclasses.asdict(question.learner)
    answer_json["model"] = {"billions": question.model.billions, "origin": run.origin}
    answer_json["run"] = costs_of(question, answer, run)
    answer_json["lengths"] = dataclasses.asdict(question.tokens) | {"mean_is_assumed": run.mean_is_assumed}
    answer_json["alternatives"] = {
        name: {
            "kappa": item.kappa, "workers": len(item.pool), "usd_per_hour": item.usd_per_hour,
            "predicted_utilisation": item.predicted_utilisation, "is_feasible": item.is_feasible,
            "pool_by_kind": pool_by_kind(item),
        }
        for name, item in alternatives(question, answer).items() if item is not None
    }  # fmt: skip
    if not answer.is_feasible:
        answer_json["advice"] = [dataclasses.asdict(item) for item in advice_of(question, answer)]
    return {name: _finite(value) for name, value in answer_json.items()}


def _finite(value: object) -> object:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- printing


def print_answer(question: PlanQuestion, answer: Plan, run: PlannedRun, with_sums: bool) -> None:
    """Prints what to rent, or what would make the run feasible; then tables, and the calculation if `with_sums`."""
    learner = question.learner
    tokens = question.tokens
    how = " (assumed; --what-if mean=N, or [lengths] mean_tokens in the fleet file)" if run.mean_is_assumed else ""
    print_lines(
        f"model    {question.model.billions:.3g} billion parameters ({run.origin})\n"
        f"step     {_step_text(learner)}; S = {question.wishes.staleness_bound}\n"
        f"lengths  {tokens.mean:.0f} tokens a rollout on average{how}, 95 % below {tokens.tail:.0f}, at most "
        f"{tokens.longest:.0f}\n"
        f"prices   {PRICES_ASSUMED if run.prices_are_assumed else 'as the fleet file names them'}"
    )
    if learner.dropped_rollouts:
        print_lines(
            f"dropped  {learner.dropped_share:.0%} of the groups are assumed to have equal rewards, which dynamic sampling throws "
            f"away: workers make {learner.rollouts_per_step} rollouts a step (--what-if dropped=0.4 takes another share)"
        )
    for offer, would in question.refused.items():
        print_lines(f"left out {offer.machine}: the model does not fit; what would fit: {would}")
    if answer.pool:
        _print_price(question, answer, run)
    if not answer.is_feasible:
        _print_what_would_do(question, answer)
    _print_terms(answer)
    if answer.is_feasible:
        _print_alternatives(question, answer)
    if with_sums and answer.pool:
        _print_sums(question, answer)


def print_lines(text: str, style: str = "") -> None:
    """Prints lines, each continued below the text behind its label."""
    for line in text.splitlines():
        _console().print(wrapped(line, 9), style=style, markup=False, soft_wrap=True)


def _console() -> Console:
    return Console(highlight=False, width=min(COLUMNS_MAX, Console().width))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


PRICES_ASSUMED = "assumed, mid 2026, 0.5-2 times (echo2 offers lists real ones; price_usd_per_hour in the fleet file)"


def _step_text(learner: LearnerEstimate) -> str:
    text = f"{learner.trained_rollouts} rollouts"
    if learner.evaluation_rollouts:
        text += f" and {learner.evaluation_rollouts} of evaluations"
    text += f", {format_seconds(learner.train_s - learner.idle_s)} of training"
    if learner.idle_s >= 5e-4 * learner.train_s:
        text += f", {format_seconds(learner.idle_s)} of checkpoints"
    return text


def _pool(question: PlanQuestion, answer: Plan) -> str:
    offers, kinds = {offer.key: offer for offer in question.offers}, pool_by_kind(answer)
    return ", ".join(_machines(question, offers[kind], count) for kind, count in kinds.items()) or "no worker"


def pool_offers(question: PlanQuestion, answer: Plan) -> list[PoolOffer]:
    offers = {offer.key: offer for offer in question.offers}
    return [offers[kind] for kind in pool_by_kind(answer)]


def _machines(question: PlanQuestion, offer: PoolOffer, count: int) -> str:
    gpus = question.prior(offer).gpu_count
    kind = f"{offer.provider}/{offer.gpu}" if offer.provider else offer.gpu
    return f"{count} x {kind}" if gpus == 1 else f"{counted(count, 'worker')} of {gpus} x {kind}"


def _print_price(question: PlanQuestion, answer: Plan, run: PlannedRun) -> None:
    costs, learner_usd = costs_of(question, answer, run), question.learner.price_usd_per_hour
    busy = f"the learner trains {answer.predicted_utilisation:.0%} of the time"
    total, steps = answer.usd_per_hour + learner_usd, "step" if answer.kappa == 1 else f"{answer.kappa} steps"
    low, high = costs["usd_low"], costs["usd_high"]
    digits = 0 if low >= 100 else 2
    usd = f"${costs['usd']:,.2f}" + (
        f" (${low:,.{digits}f} to ${high:,.{digits}f} at such prices)" if low < high else ""
    )
    print_lines(
        f"rent     {_pool(question, answer)}; publish every {steps}; {busy}\n"
        f"price    workers ${answer.usd_per_hour:.2f}/h + learner ${learner_usd:.2f}/h = ${total:.2f}/h\n"
        f"the run  {counted(run.steps, 'step')}: about {format_seconds(3600 * costs['hours'])} and {usd}",
        style="bold",
    )


def _print_what_would_do(question: PlanQuestion, answer: Plan) -> None:
    """Prints changes that would make the run feasible; each was tried with the planner."""
    term = answer.binding_term
    busy, target = f"{answer.predicted_utilisation:.0%} of the time", f"{question.wishes.target_utilisation:.0%}"
    what = "this budget" if term.limit_kind is Limit.USD_BUDGET else "these machines"
    print_lines(f"not feasible with {what}: the learner would train {busy}, not {target}: {term.text}", "bold")
    notes = advice_of(question, answer)
    for advice in notes:
        print_lines(
            f"would do {advice.change}; workers ${advice.usd_per_hour:.2f}/h\n         --what-if {advice.what_if}"
        )
    if not notes:
        print_lines("no change of one or two of S, uplink, machines, cap, budget and learner up to 64-fold would do")


def verdict(term: Term) -> str:
    """Compares a term with its limit in words that make sense at any distance from it."""
    if term.is_met:
        return "OK"
    if not (math.isfinite(term.value) and term.limit > 0):
        return "never"
    ratio = term.value / term.limit
    if term.limit_kind is Limit.THROUGHPUT:
        return f"{ratio:.1%} of it" if ratio > 0 else "nothing is generated"
    return f"{ratio:.3g} times it"


def _print_terms(answer: Plan) -> None:
    table = _table("what limits the run", "term", "value and limit", "verdict")
    for term in answer.terms:
        mark = ", limiting" if term.limit_kind is answer.binding and term.is_met else ""
        table.add_row(term.limit_kind.value, term.text, verdict(term) + mark)
    _console().print(table)


def _print_alternatives(question: PlanQuestion, answer: Plan) -> None:
    table = _table(
        "alternatives, workers and learner together",
        "plan", "steps a version", "pool", "$/h", "$ per 1000 rollouts", "busy", "spread in", "in flight",
    )  # fmt: skip
    for name, plan in alternatives(question, answer).items():
        if plan is None:
            table.add_row(name, "", "not feasible", *[""] * 5)
            continue
        table.add_row(
            name, str(plan.kappa), _pool(question, plan), f"{plan.usd_per_hour + question.learner.price_usd_per_hour:.2f}",
            f"{1000 * plan.usd_per_useful_rollout:.3f}", f"{plan.predicted_utilisation:.0%}",
            format_seconds(plan.broadcast_s), str(plan.in_flight_cap_rollouts),
        )  # fmt: skip
    _console().print(table)


def print_fits(question: PlanQuestion, answer: Plan) -> None:
    """Prints how the model fits the pool's kinds of machine; a worker there will report the same. `--json` has all kinds."""
    kinds = [question.catalogue[gpu] for gpu in dict.fromkeys(offer.gpu for offer in pool_offers(question, answer))]
    longest = question.lengths.of(question.model)
    table = _table(f"one worker by kind of machine, sequences of up to {longest} tokens", *FIT_COLUMNS)
    for row in fit_rows(question.model, question.lengths, kinds):
        table.add_row(*row)
    _console().print(table)


def _print_sums(question: PlanQuestion, answer: Plan) -> None:
    """Prints every relation with its numbers filled in."""
    learner, kappa, bound = question.learner, answer.kappa, question.wishes.staleness_bound
    train_s, batch, rate = learner.train_s, learner.rollouts_per_step, answer.throughput_rollouts_per_s
    size = learner.artifact_bytes(kappa)
    staleness = next(term for term in answer.terms if term.limit_kind is Limit.STALENESS)
    batch_s = batch / rate if rate > 0 else math.inf
    rollout_s = staleness.value - answer.broadcast_s - batch_s
    lines = [
        f"artifact    {format_bytes(learner.delta_bytes)} x (kappa = {kappa})^{learner.delta_growth:g}, at most a whole version of "
        f"{format_bytes(learner.full_snapshot_bytes)} = {format_bytes(size)}",
        f"transfer    fluid bound of {format_bytes(size)} over {format_bytes(learner.link.uplink_bytes_per_s)}/s and "
        f"the pool's links / {question.wishes.broadcast_efficiency:g} = {answer.transfer_s:.2f} s",
        f"T_bcast     transfer + encode + round trips + apply = {answer.broadcast_s:.2f} s",
        *(f"prefill     {o.key}: {_prefill_text(question, o, answer.kappa)}" for o in pool_offers(question, answer)),
        f"(1) rate    mu_pool = {rate:.4g} against R/T_train = {batch}/{train_s:.4g} = {batch / train_s:.4g} /s",
        f"(2) links   transfer = {answer.transfer_s:.2f} against kappa*T_train = {kappa}*{train_s:.4g} = {kappa * train_s:.4g} s",
        f"(3)         T_bcast + L_roll + R/mu_pool = {answer.broadcast_s:.4g} + {rollout_s:.4g} + {batch_s:.4g} = "
        f"{staleness.value:.4g} against (S-kappa+1)*T_train = ({bound}-{kappa}+1)*{train_s:.4g} = "
        f"{staleness.limit:.4g} s",
        f"in flight   {answer.in_flight_cap_rollouts} rollouts at most",
        *_egress_lines(question, kappa),
        f"price       {answer.usd_per_hour:.2f} (pool) + {learner.price_usd_per_hour:.2f} (learner) USD/h over "
        f"{_useful_per_hour(question, answer):.0f} useful rollouts/h = {answer.usd_per_useful_rollout:.5f} USD",
    ]
    print_lines("\n".join(lines))


def _prefill_text(question: PlanQuestion, offer: PoolOffer, kappa: int) -> str:
    """Describes what a machine prefills besides sampling, and what rate that leaves."""
    cost, worker = question.prefill_cost(offer), question.worker(offer, 0)
    if question.is_measured(offer):
        return "in its measured rate"
    again = f"caches of {cost.recompute_tokens:.0f} tokens again at each version, {format_seconds(cost.recompute_s)}"
    again = again if cost.recompute_tokens else "no cache is recomputed"
    left = max(0.0, 1.0 - worker.swap_s / (kappa * question.learner.train_s))
    return (
        f"{cost.tokens_per_s:.0f} tokens/s read, {worker.tokens_per_s:.0f} sampled; {again}: {left:.1%} of the sampling is left, "
        f"{left * worker.tokens_per_s / question.tokens.mean:.4g} rollouts/s each"
    )


def _egress_lines(question: PlanQuestion, kappa: int) -> list[str]:
    charged = {
        card.provider or card.gpu: card.egress_usd_per_gib for card in question.offers if card.egress_usd_per_gib
    }
    sent = question.learner.sent_gib_per_hour(kappa)
    each = ", ".join(f"{name} {usd:g} USD/GiB = {sent * usd:.3f} USD/h" for name, usd in sorted(charged.items()))
    return [f"egress      {sent:.3g} GiB/h a worker: {each} (in its price)"] if charged else []

"""If nothing is feasible: finds the smallest change of one number, or of two, that makes a plan feasible, by planning again.

Guarantees: each piece of advice was tried with exactly the change it names, and gives a feasible plan; `what_if` is that change
in the syntax of `echo2 plan --what-if`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from echo2.base.errors import ConfigError
from echo2.base.units import format_bytes
from echo2.cost_model.plan import Plan
from echo2.cost_model.question import OFFER_WORKERS_MAX, PlanQuestion, parse_what_if
from echo2.cost_model.snapshot import STALENESS_BOUND_MAX

# What one can rent or set: steps of a quarter to a half.
FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)

Planner = Callable[[PlanQuestion], Plan | None]
"""Plans a question; None if nothing is feasible."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, in words and as a what-if, with the price and utilisation of the resulting plan."""

    change: str
    what_if: str
    usd_per_hour: float
    predicted_utilisation: float
    usd_per_step: float  # of training, workers and learner together


def usd_per_step(question: PlanQuestion, plan: Plan) -> float:
    """What a step costs, workers and learner together; infinite if nothing is trained."""
    learner = question.learner
    if plan.predicted_utilisation <= 0:
        return math.inf
    step_s = learner.train_s * learner.training_share / plan.predicted_utilisation
    return (plan.usd_per_hour + learner.price_usd_per_hour) * step_s / 3600


Lever = Callable[[PlanQuestion, float], tuple[str, str] | None]
"""A number changed by a factor, as NAME=VALUE and in words; None if it has nothing to change."""


def advise(question: PlanQuestion, effort: Plan, planned: Planner) -> tuple[Advice, ...]:
    """For each lever that suffices alone, the smallest of `FACTORS` that does. If none suffices, the same for pairs of levers.
    `effort`: the infeasible plan. A slower learner is no advice where the steps then cost more than with `effort`."""
    levers = [
        _bound,
        _uplink,
        *(_more(offer.gpu) for offer in question.offers[:1] if offer.count),
        _cap,
        _budget,
        _train,
    ]
    most_usd = usd_per_step(question, effort)
    for count in (1, 2):
        found = [(chosen, _least(question, chosen, planned)) for chosen in combinations(levers, count)]
        kept = tuple(one for chosen, one in found if one and (_train not in chosen or one.usd_per_step <= most_usd))
        if kept:
            return kept
    return ()


def _least(question: PlanQuestion, levers: tuple[Lever, ...], planned: Planner) -> Advice | None:
    """The smallest factor, applied to all `levers`, that gives a feasible plan. Bisection, because levers are monotone; the largest
    comes first, since most levers do not help at all. With a budget a slower learner is not: it also takes more hours."""
    is_monotone = not (_train in levers and question.wishes.usd_budget < math.inf)
    low, high = 0, len(FACTORS)
    best: Advice | None = None
    tried: dict[str, Advice | None] = {}  # several factors may give the same change, at a number's own limit
    while low < high:
        middle = high - 1 if is_monotone and not tried else (low + high) // 2
        steps = [step for lever in levers if (step := lever(question, FACTORS[middle])) is not None]
        if len(steps) < len(levers):
            return None
        what_if = ",".join(changed for changed, _ in steps)
        if what_if not in tried:
            try:
                tried[what_if] = _tried(question, what_if, " and ".join(words for _, words in steps), planned)
            except ConfigError:  # beyond a number's limit: less may do
                high = middle
                continue
        if (answer := tried[what_if]) is not None:
            best, high = answer, middle
        elif is_monotone and len(tried) == 1:
            return None
        else:
            low = middle + 1
    return best


def _tried(question: PlanQuestion, what_if: str, words: str, planned: Planner) -> Advice | None:
    """The advice to change just that, None if it does not help. `ConfigError` for what cannot be asked."""
    for name, value in parse_what_if(what_if):
        question = question.what_if(name, value)
    answer = planned(question)
    if answer is None:
        return None
    usd = usd_per_step(question, answer)
    return Advice(words, what_if, answer.usd_per_hour, answer.predicted_utilisation, usd)


def _bound(question: PlanQuestion, factor: float) -> tuple[str, str] | None:
    now = question.wishes.staleness_bound
    bound = min(STALENESS_BOUND_MAX, max(now + 1, round(now * factor)))
    return (f"S={bound}", f"staleness bound S = {bound}") if bound > now else None


def _uplink(question: PlanQuestion, factor: float) -> tuple[str, str] | None:
    rate = round(question.learner.link.uplink_bytes_per_s * factor)
    return f"uplink={rate}B/s", f"a learner uplink of {format_bytes(rate)}/s"


def _more(gpu: str) -> Lever:
    def lever(question: PlanQuestion, factor: float) -> tuple[str, str] | None:
        now = sum(offer.count for offer in question.offers if offer.gpu == gpu)
        count = min(OFFER_WORKERS_MAX, max(now + 1, round(now * factor)))
        return f"count.{gpu}={count}", f"{count} x {gpu} on offer"

    return lever


def _cap(question: PlanQuestion, factor: float) -> tuple[str, str] | None:
    cap = question.wishes.usd_per_hour_cap * factor
    return (f"cap={cap:.2f}", f"a cap of ${cap:.2f}/h") if 0 < cap < math.inf else None


def _budget(question: PlanQuestion, factor: float) -> tuple[str, str] | None:
    budget = question.wishes.usd_budget * factor
    return (f"budget={budget:.2f}", f"a budget of ${budget:,.2f}") if 0 < budget < math.inf else None


def _train(question: PlanQuestion, factor: float) -> tuple[str, str] | None:
    train_s = (question.learner.train_s - question.learner.idle_s) * factor
    return f"train={train_s:.6g}s", f"a learner {factor:g} times slower ({train_s:.3g} s a step)"

"""If nothing is feasible: finds the smallest change of one number, or of two, that makes a plan feasible, by planning again.

Guarantees: each piece of advice was tried with exactly the change it names, and gives a feasible plan; `what_if` is that
change in the syntax of `echo2 plan --what-if`. Leaves to others: whether the change is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from echo2.base.errors import ConfigError
from echo2.base.units import format_bytes
from echo2.cost_model.plan import Plan
from echo2.cost_model.question import OFFER_WORKERS_MAX, PlanQuestion
from echo2.cost_model.snapshot import STALENESS_BOUND_MAX

FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)

Planner = Callable[[PlanQuestion], Plan]


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, in words and as a what-if, with the price and utilisation of the resulting plan."""

    change: str
    what_if: str
    usd_per_hour: float
    predicted_utilisation: float


@dataclass(frozen=True, slots=True)
class _Step:
    """One changed number: as NAME=VALUE and in words."""

    what_if: str
    words: str


Lever = Callable[[PlanQuestion, float], _Step | None]


def advise(question: PlanQuestion, planned: Planner) -> tuple[Advice, ...]:
    """For each lever that suffices alone, the smallest of `FACTORS` that does. If none suffices, the same for pairs of levers."""
    levers = [_bound, _uplink, *(_more(offer.gpu) for offer in question.offers[:1] if offer.count), _cap, _train]
    alone = [one for lever in levers if (one := _least(question, (lever,), planned)) is not None]
    if alone:
        return tuple(alone)
    return tuple(one for pair in combinations(levers, 2) if (one := _least(question, pair, planned)) is not None)


def _least(question: PlanQuestion, levers: tuple[Lever, ...], planned: Planner) -> Advice | None:
    """The smallest factor, applied to all `levers`, that gives a feasible plan. Bisection, because levers are monotone."""
    low, high = 0, len(FACTORS)
    best: Advice | None = None
    while low < high:
        middle = (low + high) // 2
        steps = [step for lever in levers if (step := lever(question, FACTORS[middle])) is not None]
        if len(steps) < len(levers):
            return None
        answer = _tried(question, steps, planned)
        if answer is not None and answer.is_feasible:
            words = " and ".join(step.words for step in steps)
            what_if = ",".join(step.what_if for step in steps)
            best, high = Advice(words, what_if, answer.usd_per_hour, answer.predicted_utilisation), middle
        else:
            low = middle + 1
    return best


def _tried(question: PlanQuestion, steps: list[_Step], planned: Planner) -> Plan | None:
    try:
        for step in steps:
            name, _, value = step.what_if.partition("=")
            question = question.what_if(name, value)
    except ConfigError:
        return None
    return planned(question)


def _bound(question: PlanQuestion, factor: float) -> _Step | None:
    now = question.wishes.staleness_bound
    bound = min(STALENESS_BOUND_MAX, max(now + 1, round(now * factor)))
    return _Step(f"S={bound}", f"staleness bound S = {bound}") if bound > now else None


def _uplink(question: PlanQuestion, factor: float) -> _Step | None:
    rate = round(question.learner.link.uplink_bytes_per_s * factor)
    return _Step(f"uplink={rate}B/s", f"a learner uplink of {format_bytes(rate)}/s")


def _more(gpu: str) -> Lever:
    def lever(question: PlanQuestion, factor: float) -> _Step | None:
        now = sum(offer.count for offer in question.offers if offer.gpu == gpu)
        count = min(OFFER_WORKERS_MAX, max(now + 1, round(now * factor)))
        return _Step(f"count.{gpu}={count}", f"{count} x {gpu} on offer")

    return lever


def _cap(question: PlanQuestion, factor: float) -> _Step | None:
    cap = question.wishes.usd_per_hour_cap * factor
    return _Step(f"cap={cap:.2f}", f"a cap of ${cap:.2f}/h") if cap else None


def _train(question: PlanQuestion, factor: float) -> _Step | None:
    train_s = (question.learner.train_s - question.learner.idle_s) * factor
    return _Step(f"train={train_s:.6g}s", f"a learner {factor:g} times slower ({train_s:.3g} s a step)")

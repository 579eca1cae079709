"""The input of `echo2 plan`: a model, a learner, rollout lengths and the machines on offer; and what would make it feasible.

Guarantees: `snapshot()` and `wishes` are what the live planner would get if its measurements equalled the priors; a what-if
changes one named number. Bad values raise `ConfigError` naming the field, the value and the range. Each piece of advice was
tried with exactly the change it names, and gives a feasible plan.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.ids import PeerId
from echo2.base.units import format_bytes, parse_duration_s, parse_rate_bytes_per_s
from echo2.cost_model.machines import STEP_S_MIN, GpuType, PrefillCost, WorkerPrior, gpu_of, prefill_cost, worker_prior
from echo2.cost_model.sizing import ModelSize, RunLengths
from echo2.cost_model.snapshot import (
    JOIN_S,
    STALENESS_BOUND_MAX,
    FleetSnapshot,
    LearnerEstimate,
    LinkEstimate,
    PlanConfig,
    WorkerEstimate,
    check_fields,
    checked,
)

if TYPE_CHECKING:
    from echo2.cost_model.plan import Plan  # loads numpy

OFFER_WORKERS_MAX = 20_000  # twice the largest fleet that echo2 is tested with
MACHINE_GPUS_MAX = 64  # the largest power of two in a rack of 72: an engine divides attention heads


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """`count` identical machines on offer. gpus: per machine; 0: the count that gives the most tokens/s per dollar.
    price_usd_per_hour: per GPU. slots and tokens_per_s: 0 takes the catalogue's prior."""

    gpu: str
    count: int
    price_usd_per_hour: float
    link: LinkEstimate
    provider: str = ""
    hazard_per_hour: float = 0.0
    join_s: float = JOIN_S
    apply_s: float = 1.0
    swap_s: float = 0.0
    slots: int = 0
    tokens_per_s: float = 0.0
    egress_usd_per_gib: float = 0.0
    gpus: int = 0

    def __post_init__(self) -> None:
        owner = f"offer of {self.gpu}"
        checked(owner, "count", self.count, 0, OFFER_WORKERS_MAX)
        checked(owner, "gpus", self.gpus, 0, MACHINE_GPUS_MAX)
        names = "price_usd_per_hour hazard_per_hour join_s apply_s swap_s slots tokens_per_s egress_usd_per_gib"
        check_fields(self, owner, least_0=names)

    @property
    def key(self) -> str:
        """Identifies the kind of machine: provider, GPU count if above 1, GPU."""
        machine = f"{self.gpus}x{self.gpu}" if self.gpus > 1 else self.gpu
        return f"{self.provider}/{machine}" if self.provider else machine

    @property
    def machine(self) -> str:
        return f"{self.gpus or 'any number of'} x {self.gpu}"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Rollout lengths in tokens: mean, 95th percentile (`tail`), limit (`longest`)."""

    mean: float
    tail: float
    longest: float

    def __post_init__(self) -> None:
        check_fields(self, "lengths", positive="mean")
        checked("lengths", "tail tokens", self.tail, 1.0, self.longest)
        checked("lengths", "longest tokens", self.longest, self.mean)


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    model: ModelSize
    lengths: RunLengths
    learner: LearnerEstimate
    wishes: PlanConfig
    tokens: TokenCounts
    offers: tuple[PoolOffer, ...]
    catalogue: Mapping[str, GpuType]
    recomputes_caches: bool = False
    steps: int = 0  # of the whole run, which the budget pays for; 0: unknown

    @property
    def tokens_in_cache(self) -> float:
        """Average number of tokens that a running sequence has in the KV cache: half of the prompt limit plus the tokens
        generated so far. Long rollouts weigh more, because they occupy their slot longer."""
        from echo2.cost_model.relations import unit_lengths  # loads numpy, so only on demand

        prompt = max(0.0, self.lengths.of(self.model) - self.tokens.longest) / 2
        lengths = unit_lengths(self.tokens.mean, self.tokens.tail, self.tokens.longest)
        return prompt + self.tokens.mean * float((lengths**2).mean()) / 2

    def prior(self, offer: PoolOffer) -> WorkerPrior:
        """Slots and rate of one offered machine. Raises ResourceError if the model does not fit."""
        gpu = gpu_of(self.catalogue, offer.gpu)
        prior = worker_prior(gpu, self.model, self.lengths, self.tokens_in_cache, offer.gpus)
        return replace(prior, slots=offer.slots or prior.slots, tokens_per_s=offer.tokens_per_s or prior.tokens_per_s)

    def is_measured(self, offer: PoolOffer) -> bool:
        """Whether the rate was given. Such a rate already includes prefill."""
        return offer.tokens_per_s > 0

    def prefill_cost(self, offer: PoolOffer) -> PrefillCost:
        """Cost of the prefill that one offered machine does besides sampling; none if its rate was measured."""
        recomputes = self.recomputes_caches and not self.is_measured(offer)
        return prefill_cost(self.prior(offer), self.tokens_in_cache, recomputes=recomputes)

    def worker(self, offer: PoolOffer, index: int) -> WorkerEstimate:
        """One offered machine as the planner sees it. Offers are priced per GPU, the result per worker."""
        prior, cost = self.prior(offer), self.prefill_cost(offer)
        rate = prior.tokens_per_s
        speed = rate / prior.slots
        return WorkerEstimate(
            worker_id=PeerId(f"{offer.key}#{index:04d}"),
            rollouts_per_s=rate / self.tokens.mean,
            price_usd_per_hour=offer.price_usd_per_hour * prior.gpu_count,
            link=offer.link,
            rollout_s_mean=self.tokens.mean / speed,
            rollout_s_tail=self.tokens.tail / speed,
            rollout_s_max=self.tokens.longest / speed,
            tokens_per_s=rate,
            join_s=offer.join_s,
            hazard_per_hour=offer.hazard_per_hour,
            apply_s=offer.apply_s,
            swap_s=offer.swap_s or cost.recompute_s,
            egress_usd_per_gib=offer.egress_usd_per_gib,
        )

    def snapshot(self) -> FleetSnapshot:
        """All offered machines that the model fits on, in standby. Raises ResourceError if it fits on none."""
        workers: list[WorkerEstimate] = []
        counts: Counter[str] = Counter()
        for offer in filter(lambda offer: offer.count, self.offers):
            with contextlib.suppress(ResourceError):
                first, begin = self.worker(offer, 0), counts[offer.key]
                names = (PeerId(f"{offer.key}#{begin + index:04d}") for index in range(offer.count))
                workers += [replace(first, worker_id=name) for name in names]
                counts[offer.key] += offer.count
        if not workers and (refused := self.refused):
            each = "; ".join(f"{offer.machine}: {would}" for offer, would in refused.items())
            raise ResourceError(f"no machine on offer holds the model; what would fit: {each}")
        return FleetSnapshot(0.0, self.learner, tuple(workers), steps_left=self.steps)

    @property
    def refused(self) -> dict[PoolOffer, str]:
        """Offered machines on which the model does not fit, each with what would fit."""
        refusals = {}
        for offer in self.offers:
            try:
                self.prior(offer)
            except ResourceError as error:
                refusals[offer] = str(error).rpartition("what would fit: ")[2]
        return refusals

    def what_if(self, name: str, text: str) -> PlanQuestion:
        """This question with one number changed; `WHAT_IF` lists the names."""
        try:
            return self._changed(name, text)
        except ConfigError as error:
            reason = str(error)
            raise ConfigError(reason if reason.startswith("what-if") else f"what-if {name}={text}: {reason}") from None

    def _changed(self, name: str, text: str) -> PlanQuestion:
        kind, _, of = name.partition(".")
        if kind not in WHAT_IF or bool(of) != (kind in ("price", "count")):
            raise ConfigError(f"what-if: expected one of {', '.join(WHAT_IF)}, got {name!r}")
        learner, wishes = self.learner, self.wishes
        if kind in FIELDS:
            part, field_name = FIELDS[kind]
            value = _number(name, text)
            changed = replace(getattr(self, part), **{field_name: int(value) if kind == "kappa" else value})
            return replace(self, **{part: changed})
        match kind:
            case "S":
                bound = int(_number(name, text))
                kappa = min(wishes.fixed_kappa, bound)
                return replace(self, wishes=replace(wishes, staleness_bound=bound, fixed_kappa=kappa))
            case "uplink":
                link = replace(learner.link, uplink_bytes_per_s=parse_rate_bytes_per_s(text))
                return replace(self, learner=replace(learner, link=link))
            case "train":
                return replace(self, learner=replace(learner, train_s=parse_duration_s(text) + learner.idle_s))
            case "R":
                more = learner.training(int(_number(name, text)))
                return replace(self, learner=trained_in(more, more.trained_rollouts / learner.trained_rollouts))
            case "mean":
                tokens = replace(self.tokens, mean=_number(name, text))
                tokens = replace(tokens, tail=max(tokens.tail, min(1.5 * tokens.mean, tokens.longest)))
                return replace(self, tokens=tokens, learner=trained_in(learner, tokens.mean / self.tokens.mean))
            case "dropped":
                return replace(self, learner=learner.dropping(_number(name, text)))
            case "worker_uplink":
                rate = parse_rate_bytes_per_s(text)
                offers = (replace(o, link=replace(o.link, uplink_bytes_per_s=rate)) for o in self.offers)
                return replace(self, offers=tuple(offers))
            case _:
                return self._with_offer(kind, of, _number(name, text))

    def _with_offer(self, kind: str, of: str, value: float) -> PlanQuestion:
        """Changes the price of all offers of one GPU, or their count together: of several the last has what the others do not;
        adds an offer if the GPU was not on offer."""
        gpu = gpu_of(self.catalogue, of)
        offers = list(self.offers)
        if all(offer.gpu != of for offer in offers):
            link = offers[0].link if offers else LinkEstimate(12.5e6, 50e6, 0.08)
            offers.append(PoolOffer(of, 0, gpu.usd_per_hour, link))
        places, left = [place for place, offer in enumerate(offers) if offer.gpu == of], int(value)
        for place in places:
            if kind == "price":
                offers[place] = replace(offers[place], price_usd_per_hour=value)
            else:
                count = left if place == places[-1] else min(left, offers[place].count)
                offers[place], left = replace(offers[place], count=count), left - count
        return replace(self, offers=tuple(offers))


FIELDS = {
    "kappa": ("wishes", "fixed_kappa"), "target": ("wishes", "target_utilisation"), "cap": ("wishes", "usd_per_hour_cap"),
    "budget": ("wishes", "usd_budget"), "delta": ("learner", "delta_bytes"), "tail": ("tokens", "tail"),
}  # fmt: skip
"""What-ifs that set one field of one part of the question."""
WHAT_IF = (
    "S", "kappa", "uplink", "train", "R", "mean", "delta", "tail", "target", "cap", "budget", "dropped", "worker_uplink", "price",
    "count",
)  # fmt: skip


def trained_in(learner: LearnerEstimate, tokens_ratio: float) -> LearnerEstimate:
    """This learner with a step of `tokens_ratio` times the tokens, in whose proportion training takes time, `STEP_S_MIN` apart."""
    training_s = learner.train_s - learner.idle_s
    fixed_s = min(STEP_S_MIN, training_s)
    return replace(learner, train_s=fixed_s + (training_s - fixed_s) * tokens_ratio + learner.idle_s)


def parse_what_if(text: str) -> list[tuple[str, str]]:
    """`uplink=1gbit,S=4,price.RTX4090=0.3` -> pairs."""
    pairs = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"what-if: expected NAME=VALUE such as uplink=1gbit or S=4, got {part!r}")
        pairs.append((name.strip(), value.strip()))
    return pairs


def billions_in(name: str) -> float | None:
    """The parameter count in a model's name, in billions: `Qwen3-8B` -> 8; None if it has none."""
    match = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z])", name)
    return float(match[1]) if match else None


def _number(name: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)) or name in ("cap", "budget"):
            return value
    raise ConfigError(f"what-if {name}: expected a number, got {text!r}")


# ---- if nothing is feasible: the smallest change of one number, or of two, that makes a plan feasible, by planning again

# What one can rent or set: steps of a quarter to a half.
FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)

Planner = Callable[[PlanQuestion], "Plan | None"]
"""Plans a question; None if nothing is feasible."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, in words and in the syntax of `echo2 plan --what-if`, with the price and utilisation of the resulting plan."""

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
    more = (_more(offer.gpu) for offer in question.offers[:1] if offer.count)
    levers: list[Lever] = [_bound, _uplink, *more, _cap, _budget, _train]
    most_usd = usd_per_step(question, effort)
    for count in (1, 2):
        tries = [(group, _least(question, group, planned)) for group in combinations(levers, count)]
        advice = tuple(hint for group, hint in tries if hint and (_train not in group or hint.usd_per_step <= most_usd))
        if advice:
            return advice
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

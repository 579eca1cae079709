"""A plan: the decision, its terms, the one that binds, what would mend a broken one, and the reason, as frozen values.

Every number in a text is computed from the evaluation.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from echo2.base.ids import PeerId
from echo2.base.units import format_bytes
from echo2.cost_model.relations import Evaluation
from echo2.cost_model.snapshot import STALENESS_BOUND_MAX, FleetSnapshot, PlanConfig, WorkerState, is_spent

UTILISATION_TOLERANCE = 0.005
"""A rehearsal is no more accurate than this, so the target counts as reached from so far below it."""


class Limit(enum.Enum):
    """Which term of the capacity inequality limits the plan."""

    THROUGHPUT = "throughput"
    REWARDS = "rewards"
    BROADCAST = "broadcast"
    STALENESS = "staleness"
    USD_PER_HOUR = "usd_per_hour"
    USD_BUDGET = "usd_budget"


FORMULAS = {
    Limit.THROUGHPUT: "mu_pool >= target*R/T_train",
    Limit.REWARDS: "rewards/s >= target*R/T_train",
    Limit.BROADCAST: "transfer <= kappa*T_train",
    Limit.STALENESS: "T_bcast + L_roll + R/mu_pool <= (S-kappa+1)*T_train",
    Limit.USD_PER_HOUR: "pool price",
    Limit.USD_BUDGET: "spent + steps left",
}


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: `value` against `limit`. `slack` is the unused share of the limit, negative if the term is violated."""

    limit_kind: Limit
    value: float
    limit: float
    unit: str
    slack: float
    remedy: str = ""  # which number to change, and to what; empty while the term is met

    @property
    def is_met(self) -> bool:
        return self.slack >= -1e-6

    @property
    def text(self) -> str:
        value = f"{self.value:.3g}"
        match self.limit_kind:
            case Limit.THROUGHPUT | Limit.REWARDS:
                does = "workers make" if self.limit_kind is Limit.THROUGHPUT else "reward processes judge"
                if self.is_met:
                    return f"{does} {value} rollouts/s, enough for the {self.limit:.3g} that the learner needs"
                return f"{does} {value} of the {self.limit:.3g} rollouts/s that the learner needs"
            case Limit.BROADCAST:
                return f"a version takes {value} s on the links and the next comes after {self.limit:.3g} s"
            case Limit.STALENESS if math.isinf(self.value):
                return f"no worker fills a batch, and S allows {self.limit:.3g} s for it"
            case Limit.STALENESS:
                return f"a version, a long rollout and a batch take {value} of the {self.limit:.3g} s that S allows"
            case Limit.USD_PER_HOUR:
                return f"workers cost {self.value:.2f} of the {self.limit:.10g} USD/h that the cap allows"
            case Limit.USD_BUDGET:
                return (
                    f"with the steps left the workers cost {self.value:.2f} of the {self.limit:.10g} USD of the budget"
                )


@dataclass(frozen=True, slots=True)
class Plan:
    """The pool, the publication period, the cap on rollouts in flight, and the reasons. pool: worker IDs, sorted. activate,
    drain: the changes relative to the workers that are active now. in_flight_cap_rollouts: most rollouts that may be offered
    and not yet trained on. broadcast_s: T_bcast, including encode and apply; transfer_s: the part of it that occupies the
    links. over_provisioned_since_s: since when a much cheaper pool has been known. short_since_s: since when the pool has been
    slightly short of its terms. egress_usd_per_hour: the part of `usd_per_hour` that providers charge for traffic.
    utilisation_spread: standard deviation of the utilisation over time, as machines are lost and replaced. usd_to_finish: what
    the steps left cost, 0 if their number is unknown. could_use_more: whether more machines like the pool's make a learner that
    waits busier."""

    kappa: int
    pool: tuple[PeerId, ...]
    activate: tuple[PeerId, ...]
    drain: tuple[PeerId, ...]
    in_flight_cap_rollouts: int
    predicted_utilisation: float
    broadcast_s: float
    transfer_s: float
    throughput_rollouts_per_s: float
    usd_per_hour: float
    usd_per_useful_rollout: float
    is_feasible: bool
    terms: tuple[Term, ...]
    binding: Limit
    reason: str
    over_provisioned_since_s: float | None = None
    short_since_s: float | None = None
    egress_usd_per_hour: float = 0.0
    utilisation_spread: float = 0.0
    usd_to_finish: float = 0.0
    could_use_more: bool = True

    @property
    def binding_term(self) -> Term:
        return next(term for term in self.terms if term.limit_kind is self.binding)

    def term_lines(self) -> tuple[str, ...]:
        """One line per term, what limits most first."""
        ordered = sorted(self.terms, key=lambda term: term.slack)
        return tuple(f"{'met' if term.is_met else 'short'}: {term.text}" for term in ordered)


def usd_to_finish(snapshot: FleetSnapshot, pool: Evaluation) -> float:
    """What the steps left cost with this pool, its start included: joins, and the learner's own before the first step."""
    learner, chosen = snapshot.learner, np.flatnonzero(pool.chosen).tolist()
    if not snapshot.steps_left:
        return 0.0
    step_s = learner.train_s / max(pool.utilisation, 1e-6)
    joins_usd_s = sum(
        snapshot.workers[row].price_usd_per_hour * snapshot.workers[row].join_s
        for row in chosen
        if snapshot.workers[row].state is not WorkerState.ACTIVE
    )
    return (pool.usd_per_hour * (snapshot.steps_left * step_s + learner.start_s) + joins_usd_s) / 3600


def plan_of(
    snapshot: FleetSnapshot,
    config: PlanConfig,
    evaluation: Evaluation,
    why: str,
    over_provisioned_since_s: float | None = None,
    short_since_s: float | None = None,
    is_bound_by_budget: bool = False,
    could_use_more: bool = True,
) -> Plan:
    """The plan for a rehearsed evaluation; `why` begins its reason. It is feasible if all its own terms are met and its own
    utilisation reaches the target. `is_bound_by_budget`: a busier pool is known, and the budget does not pay for it."""
    assert evaluation.is_rehearsed, "a plan's utilisation comes from a rehearsal"
    learner, workers = snapshot.learner, snapshot.workers
    pool = sorted(workers[row].worker_id for row in np.flatnonzero(evaluation.chosen).tolist())
    active = {worker.worker_id for worker in workers if worker.state is WorkerState.ACTIVE}
    terms = tuple(_terms(snapshot, config, evaluation, could_use_more))

    def place(term: Term) -> tuple[bool, bool, float]:
        # Where rewards are too few, a pool has no more rate than they can use: its rate is then short as well, and not the reason.
        is_no_reason = term.limit_kind is Limit.THROUGHPUT and not could_use_more
        return term.limit_kind is not Limit.REWARDS or term.is_met, is_no_reason, term.slack

    binding = min(terms, key=place)
    if is_bound_by_budget:
        binding = next(term for term in terms if term.limit_kind is Limit.USD_BUDGET)
    useful_per_hour = evaluation.utilisation * learner.trained_rollouts / learner.train_s * 3600
    usd = evaluation.usd_per_hour + learner.price_usd_per_hour
    is_feasible = binding.is_met and evaluation.utilisation >= config.target_utilisation - UTILISATION_TOLERANCE
    return Plan(
        kappa=evaluation.kappa,
        pool=tuple(pool),
        activate=tuple(worker_id for worker_id in pool if worker_id not in active),
        drain=tuple(sorted(active - set(pool))),
        in_flight_cap_rollouts=evaluation.in_flight_cap(learner.rollouts_per_group),
        predicted_utilisation=evaluation.utilisation * learner.training_share,
        broadcast_s=evaluation.point.broadcast_s,
        transfer_s=evaluation.point.transfer_s,
        throughput_rollouts_per_s=evaluation.point.throughput,
        usd_per_hour=evaluation.usd_per_hour,
        usd_per_useful_rollout=usd / useful_per_hour if useful_per_hour > 0 else math.inf,
        is_feasible=is_feasible,
        terms=terms,
        binding=binding.limit_kind,
        reason=_reason(evaluation, config, binding, len(pool), is_feasible, why, learner.training_share),
        egress_usd_per_hour=learner.sent_gib_per_hour(evaluation.kappa)
        * sum(workers[row].egress_usd_per_gib for row in np.flatnonzero(evaluation.chosen).tolist()),
        utilisation_spread=evaluation.spread,
        usd_to_finish=usd_to_finish(snapshot, evaluation),
        could_use_more=could_use_more,
        over_provisioned_since_s=over_provisioned_since_s,
        short_since_s=short_since_s,
    )


def _terms(snapshot: FleetSnapshot, config: PlanConfig, pool: Evaluation, could_use_more: bool) -> Iterator[Term]:
    point, learner = pool.point, snapshot.learner
    have, need = point.throughput, config.target_utilisation * point.rollouts_per_step / point.train_s
    remedy = f"add workers worth {need - have:.3g} rollouts/s" if have < need else ""
    if remedy and not could_use_more:
        remedy = "raise S, or take shorter rollouts or faster links: more workers like these would not help"
    yield Term(Limit.THROUGHPUT, have, need, "rollouts/s", have / need - 1, remedy)
    if math.isfinite(learner.rewards_per_s):
        have = learner.rewards_per_s
        remedy = ""
        if have < need:
            remedy = (
                f"let {math.ceil(need * learner.reward_s)} processes compute rewards (now {learner.reward_processes}; a reward "
                f"takes {learner.reward_s:.3g} s): give the learner a machine with more cores (a quarter do so), or "
                "name a Ray cluster (task.ray): more workers would not help"
            )
        yield Term(Limit.REWARDS, have, need, "rewards/s", have / need - 1, remedy)
    slack = 1 - point.transfer_s / pool.period_s
    remedy = ""
    if slack < 0:
        size = learner.artifact_bytes(point.kappa)
        needed = size / (config.broadcast_efficiency * pool.period_s)
        rows = np.flatnonzero(pool.chosen).tolist()
        uplinks = learner.link.uplink_bytes_per_s + sum(snapshot.workers[row].link.uplink_bytes_per_s for row in rows)
        whose, lack = "the learner's uplink and each downlink", needed
        if uplinks < len(rows) * needed:
            whose, lack = "the uplinks of the learner and the workers together", len(rows) * needed
        remedy = f"give {whose} {format_bytes(lack)}/s (a version is {format_bytes(size)}), or publish less often"
    yield Term(Limit.BROADCAST, point.transfer_s, pool.period_s, "s", slack, remedy)
    value, limit = point.staleness_use_s, point.staleness_budget_s
    slack = 1 - value / limit if limit > 0 else -math.inf
    yield Term(Limit.STALENESS, value, limit, "s", slack, _staleness_remedy(pool) if slack < 0 else "")
    if config.usd_per_hour_cap < math.inf:
        yield _ceiling(Limit.USD_PER_HOUR, pool.usd_per_hour, config.usd_per_hour_cap, "USD/h")
    if config.usd_budget < math.inf:
        total = snapshot.spent_usd + usd_to_finish(snapshot, pool)
        yield _ceiling(Limit.USD_BUDGET, total, config.usd_budget, "USD")


def _ceiling(kind: Limit, value: float, limit: float, unit: str) -> Term:
    slack = 1 - value / limit if limit else -math.inf if value else 0.0
    is_over = slack < 0 or (kind is Limit.USD_BUDGET and is_spent(value, limit))
    enough = math.ceil(100 * value - 1e-6) / 100  # in whole cents, and never below the value
    remedy = f"raise it to {enough:.2f} {unit}, or take longer with a smaller pool" if is_over else ""
    return Term(kind, value, limit, unit, slack, remedy)


def _staleness_remedy(pool: Evaluation) -> str:
    """Each single number whose change would satisfy (3) on its own, with the value it needs. A change that is lost in rounding is
    not told."""
    point = pool.point
    over_s = point.staleness_use_s - point.staleness_budget_s
    if math.isinf(over_s):
        return "add workers: none can generate"
    bound = point.staleness_bound + math.ceil(over_s / point.train_s - 1e-9)
    remedies = [f"raise S to {bound}"] if bound <= STALENESS_BOUND_MAX else []
    if point.rollout_s > over_s:
        shorter, now = f"{point.rollout_s - over_s:.3g}", f"{point.rollout_s:.3g}"
        if shorter != now:
            remedies.append(f"shorten the longest rollouts to {shorter} s (now {now} s)")
    if point.transfer_s > over_s:
        factor = f"{point.transfer_s / (point.transfer_s - over_s):.2g}"
        if factor != "1":
            remedies.append(f"use links {factor} times as fast (a transfer takes {point.transfer_s:.3g} s)")
    if point.batch_s > over_s:
        factor = f"{point.batch_s / (point.batch_s - over_s):.2g}"
        if factor != "1":
            remedies.append(f"use {factor} times the pool")
    sync = " (S = 0 is synchronous: the learner waits in every step)" if point.staleness_bound == 0 else ""
    return ", or ".join(remedies) + sync


def _reason(
    pool: Evaluation, config: PlanConfig, binding: Term, count: int, is_feasible: bool, why: str, share: float
) -> str:
    every = "step" if pool.kappa == 1 else f"{pool.kappa} steps"
    spread = f" (plus or minus {pool.spread:.1%} as machines are lost)" if pool.spread >= 0.0005 else ""
    head = (
        f"{why}: {count} worker{'' if count == 1 else 's'} at {pool.usd_per_hour:.2f} USD/h, publishing every {every}, "
        f"{pool.utilisation * share:.1%} utilisation predicted{spread}"
    )
    nearest = f"closest to its limit: {binding.limit_kind.value} ({binding.slack:.1%} slack)"
    if is_feasible:
        return f"{head}; {nearest}"
    if binding.is_met:
        return f"{head}, target {config.target_utilisation:.0%}; {nearest}"
    return f"{head}; {binding.text}" + (f"; to fix it, {binding.remedy}" if binding.remedy else "")

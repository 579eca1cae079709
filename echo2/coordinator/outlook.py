"""Turns offers into candidates as the planner of a running run would see them, and formats what to do next as JSON for the page
and `echo2 plan --live`.

A machine's rate comes from measured workers of its kind in this run, if there are any; else from the data sheet and what earlier
runs measured for the kind. Guarantees: pure; the answer is valid JSON (no infinities or NaN). Leaves to others: describing the run
(runtime/outlook), comparing the actions (cost_model/next_actions).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from echo2.base.ids import PeerId
from echo2.coordinator.provisioning import MachineOffer
from echo2.cost_model.catalogue import CPU, GpuType
from echo2.cost_model.experience import Experience
from echo2.cost_model.kinds import kind_of_name
from echo2.cost_model.next_actions import Candidate, Interval, NextAction, NextActions, Outlook
from echo2.cost_model.offers import MarketOffer, Ranked, Ranker
from echo2.cost_model.plan import Limit, Plan, Term
from echo2.cost_model.rates import belief
from echo2.cost_model.sizing import ModelSize, RunLengths
from echo2.cost_model.snapshot import FleetSnapshot, LinkEstimate, WorkerEstimate

USUAL_LINK = LinkEstimate(12.5e6, 50e6, 0.08)
WORKERS_TOLD_MAX = 50
TAIL_OVER_MEAN, LONGEST_OVER_MEAN = 2.4, 2.8
"""Tail (95th percentile) and longest rollout times over the mean, if no worker has been measured; as in `echo2 plan`."""


@dataclass(frozen=True, slots=True)
class RunWork:
    """The work of a machine in this run. `tokens_each`: tokens in one sequence's KV cache; `tokens_per_rollout`: mean."""

    size: ModelSize
    lengths: RunLengths
    tokens_each: float
    tokens_per_rollout: float


def cheapest_of_each(offers: Iterable[MarketOffer]) -> list[MarketOffer]:
    """The cheapest offer in any region for each provider, GPU, GPU count, GPU memory, and spot or on-demand."""
    found: dict[tuple[str, str, int, float, bool], MarketOffer] = {}
    for one in offers:
        key = (one.provider, one.gpu, one.gpu_count, one.gpu_memory_gib, one.is_spot)
        known = found.get(key)
        if known is None or one.usd_per_hour < known.usd_per_hour:
            found[key] = one
    return list(found.values())


def few_of(offers: Iterable[MarketOffer], most: int) -> list[MarketOffer]:
    """The cheapest offer for each kind of machine; of these, at most `most`, those with the lowest price per GiB of memory."""
    known = cheapest_of_each(offers)
    return sorted(known, key=lambda one: one.usd_per_hour / (one.gpu_count * one.gpu_memory_gib))[:most]


def own_offers(
    offers: Iterable[MachineOffer], catalogue: Mapping[str, GpuType]
) -> list[tuple[MachineOffer, MarketOffer]]:
    """The coordinator's own offers with a price above 0, at most 16 GPUs, and a GPU in the catalogue, each also as a market
    offer."""
    found = []
    for one in offers:
        kind, count = kind_of_name(one.gpu, catalogue)
        if kind and kind != CPU and one.usd_per_hour > 0 and count <= 16:
            gpu = catalogue[kind]
            row = MarketOffer(
                one.provider, one.name, "", kind.partition("-")[0], count, gpu.memory_gib, one.usd_per_hour, one.is_spot
            )
            found.append((one, row))
    return found


class Candidates:
    """Makes candidates from offers. `measured`: workers of this run, each with the name of its GPU."""

    def __init__(
        self,
        snapshot: FleetSnapshot,
        measured: Sequence[tuple[str, WorkerEstimate]],
        work: RunWork,
        catalogue: Mapping[str, GpuType],
        experience: Experience,
    ) -> None:
        self._ranker = Ranker(work.size, work.lengths, catalogue, experience, work.tokens_each)
        self._work, self._experience, self._workers = work, experience, snapshot.workers
        self._kin: dict[tuple[str, int], list[float]] = {}
        for name, worker in measured:
            self._kin.setdefault(kind_of_name(name, catalogue), []).append(worker.rollouts_per_s)

    def of_market(self, offers: Iterable[MarketOffer]) -> list[Candidate]:
        return [self._candidate(one) for one in self._ranker.ranked(cheapest_of_each(offers)) if not one.refusal]

    def of_run(self, offers: Iterable[tuple[MachineOffer, MarketOffer]], rented: Mapping[str, int]) -> list[Candidate]:
        """Candidates from the coordinator's own offers that have room. `rented`: machines rented now, by offer name."""
        found = []
        for own, row in offers:
            (ranked,) = self._ranker.ranked([row])
            room = max(0, own.machines_max - rented.get(own.name, 0))
            if not ranked.refusal and room:
                found.append(replace(self._candidate(ranked, own.rollouts_per_s), offer=own.name, room=room))
        return found

    def _candidate(self, one: Ranked, told_rate: float = 0.0) -> Candidate:
        """The candidate with its rate: the offer's own if it names one, else the measured one, else the expected one."""
        known = self._experience.belief(one.kind)
        kin = self._kin.get((one.kind, one.offer.gpu_count), [])
        rate, low, high = (
            one.tokens_per_s / self._work.tokens_per_rollout,
            known.low / known.ratio,
            known.high / known.ratio,
        )
        if kin:
            rate = median(kin)
            near = belief([min(2.0, max(0.5, each / rate)) for each in kin])
            low, high = near.low / near.ratio, near.high / near.ratio
        rate = told_rate or rate
        mean_s = max(1, one.sequences) / rate
        worker = WorkerEstimate(
            PeerId(f"{one.offer.provider}/{one.offer.instance}/{one.offer.region}"), rate, one.offer.usd_per_hour, self._link(),
            mean_s, mean_s * self._longer("rollout_s_tail", TAIL_OVER_MEAN),
            rollout_s_max=mean_s * self._longer("rollout_s_max", LONGEST_OVER_MEAN),
            tokens_per_s=rate * self._work.tokens_per_rollout,
            apply_s=self._usual("apply_s", 1.0), swap_s=self._usual("swap_s", 0.0), provider=one.offer.provider,
            egress_usd_per_gib=one.egress_usd_per_gib,
            join_s=self._experience.join_s(one.offer.provider, one.kind, one.offer.is_spot),
            hazard_per_hour=self._experience.hazard_per_hour(one.offer.provider, one.kind, one.offer.is_spot),
        )  # fmt: skip
        return Candidate(
            worker, one.kind, one.offer.gpu_count, one.offer.provider, one.offer.region, one.offer.is_spot, low, high,
            len(kin) or one.machines_measured,
        )  # fmt: skip

    def _usual(self, name: str, default: float) -> float:
        values = [getattr(one, name) for one in self._workers]
        return median(values) if values else default

    def _longer(self, name: str, default: float) -> float:
        """How many times the mean rollout time the field `name` is in this run (median over the workers); at least 1."""
        ratios = [getattr(one, name) / one.rollout_s_mean for one in self._workers if getattr(one, name) > 0]
        return max(1.0, median(ratios)) if ratios else default

    def _link(self) -> LinkEstimate:
        links = [one.link for one in self._workers]
        if not links:
            return USUAL_LINK
        return LinkEstimate(
            median(one.uplink_bytes_per_s for one in links), median(one.downlink_bytes_per_s for one in links),
            median(one.rtt_s for one in links),
        )  # fmt: skip


# ---- as JSON


def limits_text(plan: Plan) -> str:
    """What limits the run, in words: each broken term, most limiting first; if all hold, the tightest."""
    broken = sorted((term for term in plan.terms if not term.is_met), key=lambda term: term.slack)
    is_short = any(term.limit_kind is Limit.THROUGHPUT for term in broken)
    # Too few workers also fill a batch too slowly, which breaks the staleness term as well: name the cause first.
    broken.sort(key=lambda term: is_short and term.limit_kind is not Limit.THROUGHPUT)
    if broken:
        return "; ".join(_term_text(term) for term in broken)
    return f"nothing: all terms hold; the tightest is {_term_text(plan.binding_term)}"


def _term_text(term: Term) -> str:
    match term.limit_kind:
        case Limit.THROUGHPUT:
            return f"workers make {term.value:.3g} of the {term.limit:.3g} rollouts/s that the learner needs"
        case Limit.BROADCAST:
            return f"a version takes {term.value:.3g} s on the links and the next comes after {term.limit:.3g} s"
        case Limit.STALENESS:
            value = f"{term.value:.3g} s" if math.isfinite(term.value) else "for ever"
            return f"a version, a long rollout and a batch take {value} of the {term.limit:.3g} s that S allows"
        case Limit.USD_PER_HOUR | Limit.USD_BUDGET:
            return f"{term.formula} is {term.value:.4g} of {term.limit:.4g} {term.unit}"


def value_of(
    found: NextActions,
    measured: float,
    limits: str,
    prices: str,
    names: Mapping[PeerId, str],
    at_work: frozenset[PeerId],
) -> dict[str, Any]:
    """The next actions as JSON. `measured`: the learner's utilisation; `limits`: what limits the run, in words; `prices`: source
    of the offers."""
    return {
        "is_known": True, "measured_utilisation": _finite(measured), "limits": limits, "prices": prices,
        "before": outlook_value(found.before),
        "actions": [_action(one, names, at_work) for one in found.actions],
    }  # fmt: skip


def _action(one: NextAction, names: Mapping[PeerId, str], at_work: frozenset[PeerId]) -> dict[str, Any]:
    value: dict[str, Any] = {
        "what": one.what.value, "text": one.text, "count": one.count, "after": outlook_value(one.after),
        "workers": [
            {"id": worker, "name": names.get(worker, worker), "is_at_work": worker in at_work}
            for worker in one.workers[:WORKERS_TOLD_MAX]
        ],
        "offer": "",
    }  # fmt: skip
    if one.candidate is not None:
        value |= {
            "kind": one.candidate.kind, "provider": one.candidate.provider, "is_spot": one.candidate.is_spot,
            "usd_per_hour_each": one.candidate.worker.price_usd_per_hour, "machines_measured": one.candidate.machines_measured,
            "offer": one.candidate.offer,
        }  # fmt: skip
    return value


def outlook_value(one: Outlook) -> dict[str, Any]:
    return {
        "utilisation": _interval(one.utilisation), "usd_per_hour": _finite(one.usd_per_hour),
        "usd_per_million_tokens": _interval(one.usd_per_million_tokens), "hours_left": _interval(one.hours_left),
        "kappa": one.kappa,
    }  # fmt: skip


def _interval(one: Interval | None) -> dict[str, float | None] | None:
    if one is None:
        return None
    return {"expected": _finite(one.expected), "low": _finite(one.low), "high": _finite(one.high)}


def _finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) and abs(value) < 1e7 else None

"""Replaces an evaluation's closed-form utilisation by that of a rehearsal.

Guarantees: pure; at most one rehearsal per evaluation in `refined`. Leaves to others: which pools to evaluate.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from echo2.cost_model.explanation import in_flight_cap
from echo2.cost_model.rehearsal import ROLLOUTS_MAX, Rehearsal, longest_of, rehearse, unit_lengths
from echo2.cost_model.search import Evaluation, Search
from echo2.cost_model.snapshot import DownloadMode

TAKES, LONGER_STEPS = 3, 80


def refined(search: Search, found: Evaluation) -> Evaluation:
    """`found` with its utilisation from a rehearsal, which models groups, slots, the distribution of lengths and the cap.

    Skips the rehearsal if many groups per step average chance out and the relations hold even for the longest rollout:
    it would then only confirm the closed form.
    """
    point = found.point
    if found.is_refined or not found.chosen.any():
        return found
    longest_s = longest_of(found.rollout_tail_s, found.rollout_longest_s)
    worst_s = point.staleness_use_s + max(0.0, longest_s - point.rollout_s)
    is_calm = found.utilisation >= 1.0 and worst_s <= point.staleness_budget_s and found.least_slack >= 0
    if is_calm and point.rollouts_per_step > ROLLOUTS_MAX:
        return replace(found, is_refined=True)
    return replace(found, utilisation=rehearse(rehearsal_of(search, found)).utilisation, is_refined=True)


def confirmed(search: Search, found: Evaluation) -> Evaluation:
    """`found`, already rehearsed, with the mean utilisation of that and of `TAKES` longer rehearsals. The best of many rehearsed
    pools is partly just the luckiest; more rehearsals correct for that."""
    if not found.chosen.any():
        return found
    told = rehearsal_of(search, found)
    again = [rehearse(replace(told, take=take), LONGER_STEPS).utilisation for take in range(1, TAKES + 1)]
    return replace(found, utilisation=(found.utilisation + sum(again)) / (1 + TAKES))


def rehearsal_of(search: Search, found: Evaluation) -> Rehearsal:
    """The run to rehearse for `found`. A worker's slots are those that its rate keeps full (Little's law)."""
    columns, learner, point = search.columns, search.snapshot.learner, found.point
    rows = np.flatnonzero(found.chosen)
    slots = columns.slots[rows]
    size, group = learner.artifact_bytes(point.kappa), learner.rollouts_per_group
    return Rehearsal(
        staleness_bound=point.staleness_bound,
        kappa=point.kappa,
        train_s=point.train_s,
        encode_s=learner.encode_s,
        groups_per_step=math.ceil(learner.rollouts_per_step / group),
        rollouts_per_group=group,
        cap_groups=in_flight_cap(found, group) // group,
        slots=slots,
        rollout_s=slots / columns.rate[rows],
        latency_s=columns.latency_s[rows] - learner.encode_s,
        swap_s=columns.swap_s[rows],
        lengths=unit_lengths(*_shape(search, found)),
        transfer_s=lambda spans: point.transfer_s * learner.artifact_bytes(spans) / size,
        is_stalled=search.config.download is DownloadMode.STALLED,
    )


def _shape(search: Search, found: Evaluation) -> tuple[float, float, float]:
    """Mean, 95th percentile and maximum rollout time in seconds, averaged over the pool, weighted by rate."""
    columns, rows = search.columns, np.flatnonzero(found.chosen)
    shares = columns.rate[rows] / columns.rate[rows].sum()
    means, tails, longest = columns.mean_s[rows], columns.rollout_tail_s[rows], columns.longest_s[rows]
    return float(shares @ means), float(shares @ tails), float(shares @ longest)

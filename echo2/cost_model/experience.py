"""What earlier runs learned about each kind of machine: speed, preemptions, time until the first rollout.

One record covers one kind at one provider in one run, spot or not. Rates are stored as delivered over predicted tokens/s
(roofline), so that they carry over to other models and lengths. Guarantees: pure; a record refuses values beyond what a data
sheet allows; a run counts as at most `MACHINES_OF_A_RUN` machines, however many workers it has; with three or more runs, a run
far from the median of all is left out. So a worker or a run that lies about its kind moves a belief by no more than its share.
Leaves to others: the file (coordinator/runtime/experience_file), what a run observed (coordinator/sightings).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from echo2.base.errors import ConfigError
from echo2.cost_model.rates import Belief, belief
from echo2.cost_model.roofline import BANDWIDTH_SHARE

JOIN_S = 300.0
"""Prior of the seconds from renting a machine to its first rollout (image, model, first weights)."""
SPOT_HAZARD_PER_HOUR = 0.05
"""Prior of a spot machine's preemptions per hour."""
PRIOR_HOURS, PRIOR_JOINS = 20.0, 2.0
"""Weights of the two priors above, in hours watched and in joins timed."""
RATIO_LEAST, RATIO_MOST = 0.02, 1.0 / BANDWIDTH_SHARE
"""Allowed range of delivered over predicted tokens/s: more would exceed the data sheet's bandwidth, so the machine cannot be of
that kind."""
APART = 1.5
"""Machines of a kind differ by less than this factor; ratios further from the median are left out."""
CLAIMS_LEAST = 3
"""Workers that state their own kind count only if this many agree; one machine that the run itself rented is enough."""
MACHINES_OF_A_RUN = 8
RUNS_TO_COMPARE = 3
HOURS_OF_A_RUN, JOINS_OF_A_RUN = 500.0, 32
HAZARD_MOST_PER_HOUR = 6.0
JOIN_S_MOST = 3600.0
AGE_MOST_S = 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class KindRecord:
    """What one run observed of one kind. `ratios`: one per machine. `hours`: machine hours, in which `losses` machines were lost.
    `joins_s`: seconds from renting to the first rollout, one per join. Raises ConfigError for a value out of range."""

    run_id: str
    kind: str
    provider: str
    is_spot: bool
    unix_s: float
    ratios: tuple[float, ...] = ()
    hours: float = 0.0
    losses: int = 0
    joins_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        whose = f"record of {self.kind or 'no kind'} in run {self.run_id or '?'}"
        if not (
            self.run_id and self.kind and len(self.run_id) <= 64 and len(self.kind) <= 40 and len(self.provider) <= 64
        ):
            raise ConfigError(
                f"{whose}: expected a run of up to 64 letters, a kind of up to 40, a provider of up to 64"
            )
        if not (len(self.ratios) <= MACHINES_OF_A_RUN and len(self.joins_s) <= JOINS_OF_A_RUN):
            raise ConfigError(f"{whose}: expected at most {MACHINES_OF_A_RUN} machines and {JOINS_OF_A_RUN} joins")
        ranges = [("ratio", one, RATIO_LEAST, RATIO_MOST) for one in self.ratios]
        ranges += [("join", one, 0.0, JOIN_S_MOST) for one in self.joins_s]
        ranges += [("hours", self.hours, 0.0, HOURS_OF_A_RUN), ("losses", self.losses, 0.0, HOURS_OF_A_RUN)]
        ranges += [("time", self.unix_s, 0.0, 1e11)]
        for name, value, least, most in ranges:
            if not (math.isfinite(value) and least <= value <= most):
                raise ConfigError(f"{whose}: {name}: expected {least:g} to {most:g}, got {value}")

    @property
    def key(self) -> tuple[str, str, str, bool]:
        return self.run_id, self.kind, self.provider, self.is_spot


def agreed_ratios(claimed: Iterable[float], certain: Iterable[float]) -> tuple[float, ...]:
    """Selects which ratios of one run and kind count. `certain`: from machines that the run itself rented; `claimed`: from
    workers that stated their own kind.

    Leaves out impossible ratios, then those far from the median (of the certain ones, if there are any). Claims alone count
    only if there are at least `CLAIMS_LEAST`. Reduces more than `MACHINES_OF_A_RUN` ratios to even quantiles.
    """
    sure = [one for one in certain if RATIO_LEAST <= one <= RATIO_MOST]
    said = [one for one in claimed if RATIO_LEAST <= one <= RATIO_MOST]
    if not sure and len(said) < CLAIMS_LEAST:
        return ()
    centre = median(sure or said)
    near = sorted(one for one in (*sure, *said) if centre / APART <= one <= centre * APART)
    if not sure and len(near) < CLAIMS_LEAST:
        return ()
    return _share_of_a_run(near)


def merged(known: Iterable[KindRecord], more: Iterable[KindRecord], most: int) -> tuple[KindRecord, ...]:
    """Merges both, newest last, and keeps the newest `most`. Of two records with the same key, keeps the one with more hours."""
    found: dict[tuple[str, str, str, bool], KindRecord] = {}
    for one in (*known, *more):
        old = found.get(one.key)
        if old is None or (one.hours, len(one.ratios)) >= (old.hours, len(old.ratios)):
            found[one.key] = one
    return tuple(sorted(found.values(), key=lambda one: (one.unix_s, one.key))[-most:])


@dataclass(frozen=True)
class Experience:
    """The records of all earlier runs."""

    records: tuple[KindRecord, ...] = ()

    @classmethod
    def of(cls, records: Iterable[KindRecord], now_unix_s: float) -> Experience:
        """The experience of `records` no older than `AGE_MOST_S`."""
        return cls(tuple(one for one in records if now_unix_s - one.unix_s <= AGE_MOST_S))

    @cached_property
    def ratios(self) -> Mapping[str, tuple[float, ...]]:
        """The ratios that count, by kind, one per machine."""
        by_kind: dict[str, dict[str, list[float]]] = {}
        for one in self.records:
            by_kind.setdefault(one.kind, {}).setdefault(one.run_id, []).extend(one.ratios)
        return {kind: _of_runs([runs[run] for run in sorted(runs) if runs[run]]) for kind, runs in by_kind.items()}

    @cached_property
    def _beliefs(self) -> dict[str, Belief]:
        return {}

    def belief(self, kind: str) -> Belief:
        """How the next machine of this kind compares with the roofline."""
        if kind not in self._beliefs:
            self._beliefs[kind] = belief(self.ratios.get(kind, ()))
        return self._beliefs[kind]

    @cached_property
    def _hazards(self) -> dict[tuple[str, str, bool], float]:
        return {}

    def hazard_per_hour(self, provider: str, kind: str, is_spot: bool) -> float:
        """Expected losses per hour of this kind at this provider. Its prior is the rate of all spot (or all non-spot) machines."""
        rented = (provider, kind, is_spot)
        if rented not in self._hazards:
            self._hazards[rented] = self._hazard(*rented)
        return self._hazards[rented]

    def _hazard(self, provider: str, kind: str, is_spot: bool) -> float:
        alike = [one for one in self.records if one.is_spot == is_spot]
        own = [one for one in alike if (one.provider.lower(), one.kind) == (provider.lower(), kind)]
        rate = SPOT_HAZARD_PER_HOUR if is_spot else 0.0
        for seen in (alike, own):
            hours, losses = sum(one.hours for one in seen), sum(one.losses for one in seen)
            rate = (PRIOR_HOURS * rate + losses) / (PRIOR_HOURS + hours)
        return min(rate, HAZARD_MOST_PER_HOUR)

    def join_s(self, provider: str, kind: str, is_spot: bool) -> float:
        """Expected seconds from renting to the first rollout: the prior, updated by all joins at this provider, then by those of
        this kind."""
        at_provider = [one for one in self.records if one.provider.lower() == provider.lower()]
        own = [one for one in at_provider if (one.kind, one.is_spot) == (kind, is_spot)]
        found = JOIN_S
        for seen in (at_provider, own):
            joins = [join for one in seen for join in one.joins_s]
            if joins:
                found = (PRIOR_JOINS * found + len(joins) * median(joins)) / (PRIOR_JOINS + len(joins))
        return found

    def newest_unix_s(self) -> float | None:
        return max((one.unix_s for one in self.records), default=None)


NO_EXPERIENCE = Experience()


def _of_runs(runs: list[list[float]]) -> tuple[float, ...]:
    """All runs' ratios, each run reduced to its share; with three or more runs, without those far from the median run."""
    if len(runs) >= RUNS_TO_COMPARE:
        centre = median(median(one) for one in runs)
        runs = [one for one in runs if centre / APART <= median(one) <= centre * APART]
    return tuple(ratio for one in runs for ratio in _share_of_a_run(one))


def _share_of_a_run(ratios: list[float]) -> tuple[float, ...]:
    """The ratios, ascending; even quantiles if there are more than `MACHINES_OF_A_RUN`."""
    rising, most = sorted(ratios), MACHINES_OF_A_RUN
    if len(rising) <= most:
        return tuple(rising)
    return tuple(rising[int((index + 0.5) * len(rising) / most)] for index in range(most))

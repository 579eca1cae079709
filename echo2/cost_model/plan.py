"""The planner's output: the decision, its numbers and its reasons, as frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from echo2.base.ids import PeerId


class Limit(enum.Enum):
    """Which term of the capacity inequality limits the plan."""

    THROUGHPUT = "throughput"
    BROADCAST = "broadcast"
    STALENESS = "staleness"
    USD_PER_HOUR = "usd_per_hour"
    USD_BUDGET = "usd_budget"


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: `value` against `limit`. `slack` is the unused share of the limit, negative if the term is violated."""

    limit_kind: Limit
    formula: str
    value: float
    limit: float
    unit: str
    slack: float
    remedy: str = ""  # which number to change, and to what; empty while the term is met

    @property
    def is_met(self) -> bool:
        return self.slack >= -1e-6

    def text(self, is_binding: bool = False) -> str:
        """One line for the page and the log."""
        mark = " <- binds" if is_binding else ""
        held = "met" if self.is_met else "BROKEN"
        return f"{self.formula}: {self.value:.4g} against {self.limit:.4g} {self.unit}, {held}{mark}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The pool, the publication period, the cap on rollouts in flight, and the reasons.

    pool: worker IDs, sorted. activate, drain: the changes relative to the workers that are active now.
    in_flight_cap_rollouts: most rollouts that may be offered and not yet trained on. broadcast_s: T_bcast, including
    encode and apply; transfer_s: the part of it that occupies the links. greedy_gap: by what share the greedy pool would
    cost more; 0 if greedy was the solver or found the same price. over_provisioned_since_s: since when a much cheaper pool
    has been known. short_since_s: since when the pool has been slightly short of its terms.
    egress_usd_per_hour: the part of `usd_per_hour` that providers charge for traffic.
    """

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
    solver: str
    greedy_gap: float = 0.0
    over_provisioned_since_s: float | None = None
    short_since_s: float | None = None
    egress_usd_per_hour: float = 0.0

    @property
    def binding_term(self) -> Term:
        return next(term for term in self.terms if term.limit_kind is self.binding)

    def term_lines(self) -> tuple[str, ...]:
        """The inequality, one term per line, with the binding term marked."""
        return tuple(term.text(term.limit_kind is self.binding) for term in self.terms)

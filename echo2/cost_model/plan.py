"""What the planner answers: the decision, its numbers and its reasons, as frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from echo2.base.ids import PeerId


class Limit(enum.Enum):
    """Which term of the inequality holds the plan back."""

    THROUGHPUT = "throughput"
    BROADCAST = "broadcast"
    STALENESS = "staleness"
    USD_PER_HOUR = "usd_per_hour"
    USD_BUDGET = "usd_budget"


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: `value` against `limit`. `slack` is the share of the limit left, negative when it is broken."""

    limit_kind: Limit
    formula: str
    value: float
    limit: float
    unit: str
    slack: float
    remedy: str = ""  # what change of which number would mend it; empty while it holds

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
    """Who works, how often a version is published, how much may be in flight, and why.

    pool: worker ids, sorted; activate and drain: what changes against the workers that are active now.
    in_flight_cap_rollouts: offered and not trained yet. broadcast_s: T_bcast, encode and apply included; transfer_s
    its part that occupies links. greedy_gap: how much dearer the greedy's pool would be, as a share; 0 when greedy
    was the solver or found the same price. over_provisioned_since_s: since when a much cheaper pool has been known;
    short_since_s: since when the pool has been a little short of its terms.
    egress_usd_per_hour: of `usd_per_hour`, what providers charge for traffic.
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
        """The inequality, one term a line, the binding one marked."""
        return tuple(term.text(term.limit_kind is self.binding) for term in self.terms)

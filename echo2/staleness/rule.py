"""The staleness rule, used at admission and again at consumption.

A token sampled by version v may be trained on at step t (t optimiser steps are complete) only if v >= t - S.
A rollout is judged by its oldest token. Guarantees: this comparison is made nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import VersionSpan


def lag_of(step: Step, oldest_version: Version) -> int:
    """Lag in steps between the training step and the oldest token's version; never negative for honest versions."""
    return step - oldest_version


def is_admissible(step: Step, oldest_version: Version, staleness_bound: int) -> bool:
    """Whether a rollout whose oldest token was sampled by `oldest_version` may be trained on at `step`."""
    return lag_of(step, oldest_version) <= staleness_bound


def may_begin(version: Version, consume_step: int, staleness_bound: int) -> bool:
    """Whether a worker at `version` may begin a group that the learner expects to train on at `consume_step`.

    This paces the fleet: groups that would be too old by then are never begun.
    """
    return is_admissible(Step(consume_step), version, staleness_bound)


# The ledger of trained groups, and of how old their tokens were.
#
# Guarantees: a group enters once, and never with a token over the bound; both are assertions, because admission
# must have refused such a group before.


@dataclass(slots=True)
class Ledger:
    """`trained` maps a group to the step that trained it; groups are trained entirely or not at all."""

    staleness_bound: int
    trained: dict[GroupId, Step] = field(default_factory=dict)
    tokens_by_lag: Counter[int] = field(default_factory=Counter)

    def is_trained(self, group_id: GroupId) -> bool:
        return group_id in self.trained

    def record(self, group_id: GroupId, step: Step, spans: Iterable[VersionSpan]) -> None:
        """Records that `group_id`, whose tokens have `spans`, is trained at `step`."""
        assert group_id not in self.trained, f"group {group_id} was trained at step {self.trained[group_id]} already"
        spans = list(spans)
        for span in spans:
            assert is_admissible(step, span.version, self.staleness_bound), (
                f"group {group_id}: a token of version {span.version} at step {step} is over the bound "
                f"{self.staleness_bound}"
            )
        self.trained[group_id] = step
        for span in spans:
            self.tokens_by_lag[lag_of(step, span.version)] += span.count

    def forget_before(self, step: Step) -> None:
        """Drops the ids of groups trained before `step`, which the caller has closed everywhere. Counts stay."""
        self.trained = {group: at for group, at in self.trained.items() if at >= step}

    def over_stale_tokens(self) -> int:
        """Tokens trained over the bound. Always 0, but counted from the record, so that the dashboard shows a measurement."""
        return sum(count for lag, count in self.tokens_by_lag.items() if lag > self.staleness_bound)

    def histogram(self) -> Mapping[int, int]:
        return dict(sorted(self.tokens_by_lag.items()))

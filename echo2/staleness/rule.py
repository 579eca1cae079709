"""The staleness rule, used at admission and again at consumption.

A token sampled by version v may be trained on at step t (t optimiser steps are complete) only if v >= t - S.
A rollout is judged by its oldest token. Guarantees: this comparison is made nowhere else.
"""

from __future__ import annotations

from echo2.base.ids import Step, Version


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

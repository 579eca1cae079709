from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.cost_model import capacity
from echo2.cost_model.capacity import OperatingPoint
from echo2.cost_model.snapshot import PlanConfig

positive = st.floats(0.01, 1e4)


def point(bound: int, kappa: int, broadcast: float, rollout: float = 0.3, rate: float = 1.25) -> OperatingPoint:
    """In units of T_train = 1 and R = 1."""
    return OperatingPoint(bound, kappa, 1.0, 1.0, broadcast, 0.0, rollout, rate)


@given(positive, positive, st.integers(1, 16), positive)
def test_stalled_relation_and_its_utilisation_agree(
    batch: float, train_s: float, kappa: int, broadcast_s: float
) -> None:
    free_s = kappa * train_s - broadcast_s  # relation (1) solved for mu_pool
    needed = kappa * batch / free_s if free_s > 0 else math.inf
    if math.isinf(needed):
        assert capacity.utilisation_stalled(batch, train_s, kappa, broadcast_s, 1e9) < 1
    else:
        assert capacity.utilisation_stalled(batch, train_s, kappa, broadcast_s, needed * 1.001) == pytest.approx(1.0)
        assert capacity.utilisation_stalled(batch, train_s, kappa, broadcast_s, needed * 0.9) < 1


def test_the_paper_default_starves_on_a_slow_network_and_a_shorter_period_does_not() -> None:
    """S=6, T_bcast = 3*T_train: no pool saves kappa = 5, and kappa = 3 needs no bigger one."""
    assert capacity.default_kappa(6) == 5
    assert capacity.utilisation_background(point(6, 5, 3.0)) < 0.8
    assert capacity.utilisation_background(point(6, 5, 3.0, rate=100.0)) < 0.8
    assert capacity.utilisation_background(point(6, 3, 3.0, rollout=0.2)) == pytest.approx(1.0)


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.0, 6.0), st.floats(0.0, 3.0), st.floats(0.2, 5.0))
def test_staleness_relation_decides_whether_its_utilisation_is_one(
    bound: int, kappa: int, broadcast: float, rollout: float, rate: float
) -> None:
    kappa = min(kappa, bound)
    found = point(bound, kappa, broadcast, rollout, rate)
    use = capacity.utilisation_of_staleness(bound, kappa, 1.0, found.staleness_use_s)
    assert 0 < use <= 1
    assert (use == 1.0) == (found.staleness_use_s <= found.staleness_budget_s * (1 + 1e-12))


@given(st.integers(1, 12), st.data())
def test_utilisation_never_falls_with_a_faster_broadcast_shorter_rollouts_or_more_rate(
    bound: int, data: st.DataObject
) -> None:
    kappa = data.draw(st.integers(1, bound))
    broadcast = data.draw(st.floats(0.01, float(kappa)))
    rollout, rate = (data.draw(st.floats(0.01, 5.0)) for _ in range(2))
    base = capacity.utilisation_background(point(bound, kappa, broadcast, rollout, rate))
    for better in (
        point(bound, kappa, broadcast * 0.5, rollout, rate),
        point(bound, kappa, broadcast, rollout * 0.5, rate),
        point(bound, kappa, broadcast, rollout, rate * 2),
    ):
        assert capacity.utilisation_background(better) >= base - 1e-9


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.data())
def test_closed_form_is_the_cycle_mean_of_the_step_recurrence(bound: int, data: st.DataObject) -> None:
    kappa = data.draw(st.integers(1, bound))
    broadcast = data.draw(st.floats(0.01, float(kappa)))
    found = point(bound, kappa, broadcast, data.draw(st.floats(0.0, 3.0)), data.draw(st.floats(1.05, 3.0)))
    closed = capacity.utilisation_of_staleness(bound, kappa, 1.0, found.staleness_use_s)
    assert capacity.utilisation_of_steps(found, 1200) == pytest.approx(closed, abs=0.01)


def test_a_synchronous_run_waits_for_the_version_the_rollout_and_the_batch_of_every_step() -> None:
    """S = 0: step t trains on version t alone, so nothing overlaps."""
    sync = point(0, 1, 0.5, rollout=0.3, rate=2.0)
    assert capacity.utilisation_background(sync) == pytest.approx(1 / (1 + 0.5 + 0.3 + 0.5))
    assert capacity.utilisation_of_steps(sync) == pytest.approx(1 / (1 + 0.5 + 0.3 + 0.5), rel=0.02)
    assert list(PlanConfig(0).kappas) == [1]


def test_no_rate_means_no_utilisation() -> None:
    assert capacity.utilisation_stalled(1.0, 1.0, 1, 0.1, 0.0) == 0.0
    assert capacity.utilisation_background(point(4, 2, 0.1, rate=0.0)) == 0.0

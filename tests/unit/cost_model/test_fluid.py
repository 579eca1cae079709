from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.cost_model.capacity import OperatingPoint
from echo2.cost_model.fluid import FluidInputs, log_normal_quantiles, predict


def inputs(bound: int, kappa: int, transfer: float, rate: float = 1.25, cap: float = 2.0) -> FluidInputs:
    """T_train = 1 s, R = 256, rollouts of 0.3 s on average and 1.2 s at most."""
    point = OperatingPoint(bound, kappa, 256.0, 1.0, transfer, 0.0, 0.75, rate * 256)
    return FluidInputs(point, log_normal_quantiles(0.3, 0.75, 1.2), 8, rate * 256 * 0.3, cap * 256)


@given(st.floats(0.01, 1e3), st.floats(1.0, 3.0))
def test_quantiles_have_the_mean_and_the_tail_that_were_measured(mean_s: float, ratio: float) -> None:
    quantiles = log_normal_quantiles(mean_s, mean_s * ratio, points=4000)
    assert np.all(np.diff(quantiles) >= 0)
    assert quantiles.mean() == pytest.approx(mean_s, rel=0.02)
    assert quantiles[int(0.95 * 4000)] == pytest.approx(mean_s * ratio, rel=0.02)


def test_a_wide_bound_and_enough_rate_keep_the_learner_busy() -> None:
    assert predict(inputs(6, 2, 0.5)).utilisation == pytest.approx(1.0, abs=1e-6)


def test_too_little_rate_is_the_share_that_it_gives() -> None:
    assert predict(inputs(8, 2, 0.2, rate=0.7)).utilisation == pytest.approx(0.7, abs=0.02)


def test_one_step_bound_serialises_generation_and_training() -> None:
    assert predict(inputs(1, 1, 0.5)).utilisation < 0.7


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.data())
def test_utilisation_is_a_share_and_falls_with_a_much_slower_broadcast(bound: int, data: st.DataObject) -> None:
    kappa = data.draw(st.integers(1, bound))
    transfer = data.draw(st.floats(0.05, float(kappa)))
    fast, slow = predict(inputs(bound, kappa, transfer / 2)), predict(inputs(bound, kappa, transfer))
    assert 0 < slow.utilisation <= 1
    assert slow.utilisation <= fast.utilisation + 0.01
    assert 0 <= slow.dropped < 0.5


def test_nothing_comes_of_nothing() -> None:
    assert predict(inputs(4, 2, 0.5, rate=0.0)).utilisation == 0.0

import random

import pytest
from hypothesis import given, strategies as st

from echo2.cost_model.relations import WINDOW, DeltaSizeEstimator, RobustEstimator


@given(st.floats(0.1, 1e6), st.sampled_from([0.5, 0.7, 1.4, 2.0]), st.integers(0, 10**6))
def test_outliers_do_not_move_the_estimate_and_changes_are_followed(truth: float, factor: float, seed: int) -> None:
    rng, one = random.Random(seed), RobustEstimator()
    for index in range(40):
        one.observe(truth * (1000.0 if index % 7 == 3 else rng.uniform(0.95, 1.05)))
    assert len(one.values) == WINDOW and one.value_or(0.0) == pytest.approx(truth, rel=0.06)
    for _ in range(3):
        one.observe(truth * factor * rng.uniform(0.97, 1.03))
    assert one.value_or(0.0) == pytest.approx(truth * factor, rel=0.05)


def test_a_prior_is_outweighed_by_three_observations() -> None:
    one = RobustEstimator(values=[10.0, 10.0])
    assert one.value_or(0.0) == 10.0
    for _ in range(3):
        one.observe(4.0)
    assert one.value_or(0.0) == 4.0


def test_delta_sizes_are_carried_to_other_periods_by_the_fitted_growth() -> None:
    sizes = DeltaSizeEstimator()
    assert sizes.at(4) == 0.0
    for steps in (1, 4):
        sizes.observe(50.0 * steps**0.5, steps)
    assert sizes.growth == pytest.approx(0.5)
    assert sizes.at(16) == pytest.approx(200.0)

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import MalformedMessage
from echo2.cost_model.estimates import WINDOW, DeltaSizeEstimator, Predicted, PredictionLog, RobustEstimator


@given(st.floats(0.1, 1e6), st.integers(0, 10**6))
def test_outliers_do_not_move_the_estimate(truth: float, seed: int) -> None:
    rng = random.Random(seed)
    one = RobustEstimator("train_s")
    for index in range(40):
        one.observe(truth * (1000.0 if index % 7 == 3 else rng.uniform(0.95, 1.05)), float(index))
    found = one.estimate()
    assert found is not None and found.count == WINDOW
    assert found.value == pytest.approx(truth, rel=0.06)
    assert found.error < 0.05 * found.value


def test_a_prior_fades_and_old_observations_are_forgotten() -> None:
    one = RobustEstimator("rate", prior=10.0, age_max_s=100.0)
    assert one.value_or(0.0) == 10.0
    one.observe(2.0, 0.0)
    assert 2.0 < one.value_or(0.0) < 10.0
    for index in range(30):
        one.observe(4.0, 200.0 + index)
    assert one.value_or(0.0) == pytest.approx(4.0, rel=0.1)
    assert one.estimate().count == 30  # type: ignore[union-attr]


def test_delta_sizes_are_carried_to_other_periods_by_the_fitted_growth() -> None:
    sizes = DeltaSizeEstimator(prior_bytes=100.0)
    assert sizes.at(4).value == pytest.approx(100 * 4**0.75)  # type: ignore[union-attr]
    for steps in (1, 4):
        sizes.observe(50.0 * steps**0.5, steps, 0.0)
    assert sizes.growth == pytest.approx(0.5)
    assert sizes.at(16).value == pytest.approx(200.0)  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_bad_telemetry_is_refused_by_name_and_changes_nothing(value: float) -> None:
    one = RobustEstimator("uplink_bytes_per_s")
    one.observe(5.0, 0.0)
    with pytest.raises(MalformedMessage, match="uplink_bytes_per_s.*expected.*got"):
        one.observe(value, 1.0)
    assert one.value_or(0.0) == 5.0
    with pytest.raises(MalformedMessage, match="delta steps"):
        DeltaSizeEstimator().observe(1.0, 0, 0.0)


def test_prediction_errors_are_measured_minus_predicted() -> None:
    log = PredictionLog()
    assert log.measure(Predicted.UTILISATION, 0.9, 0.0) is None
    log.predict(Predicted.UTILISATION, 1.0, 1.0)
    comparison = log.measure(Predicted.UTILISATION, 0.9, 2.0)
    assert comparison is not None and comparison.error == pytest.approx(-0.1)
    assert log.bias(Predicted.UTILISATION) == pytest.approx(-0.1)
    assert log.mean_absolute_error(Predicted.BROADCAST_S) is None


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.4, 2.0])
def test_a_change_of_the_truth_is_followed_within_three_observations_and_an_outlier_is_not(factor: float) -> None:
    rng, one = random.Random(3), RobustEstimator("train_s")
    for index in range(40):
        one.observe(60.0 * rng.uniform(0.97, 1.03), float(index))
    one.observe(60.0 * 5, 40.0)
    assert one.value_or(0.0) == pytest.approx(60.0, rel=0.03)
    for index in range(3):
        one.observe(60.0 * factor * rng.uniform(0.97, 1.03), 41.0 + index)
    assert one.value_or(0.0) == pytest.approx(60.0 * factor, rel=0.05)

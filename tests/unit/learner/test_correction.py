"""Corrections: each weight's definition, bounds, masks, and the effective sample size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import ConfigError
from echo2.learner.correction import (
    Correction,
    CorrectionConfig,
    Segments,
    correction_weights,
    learning_rate_scale,
    score_norm_sq_proxy,
)

SEGMENTS = Segments(torch.tensor([0, 0, 1, 1]), torch.tensor([True, True, True, False]), 2)
PROXIMAL = torch.tensor([-1.0, -1.0, -2.0, math.nan])
BEHAVIOUR = torch.tensor([-1.0 - math.log(4.0), -1.0 - math.log(3.0), -2.0 + math.log(4.0), -1.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Correction.NONE, [1, 1, 1, 0]),
        (Correction.BEHAVIOUR_RATIO, [1, 1, 1, 0]),
        (Correction.TIS_TOKEN, [2, 2, 0.25, 0]),
        (Correction.TIS_SEQUENCE, [2, 2, 0.25, 0]),
        (Correction.MASKED, [4, 3, 0, 0]),
        (Correction.MASKED_SEQUENCE, [0, 0, 0, 0]),
        (Correction.DECOUPLED, [4, 3, 0.25, 0]),
    ],
)
def test_each_correction_weighs_tokens_as_defined_and_nothing_off_the_mask(
    kind: Correction, expected: list[float]
) -> None:
    result = correction_weights(PROXIMAL, BEHAVIOUR, SEGMENTS, CorrectionConfig(kind))
    torch.testing.assert_close(result.weights_T, torch.tensor(expected, dtype=torch.float32))
    assert not bool(result.altered_T[3])


def test_the_sequence_weight_is_the_product_over_the_rollout() -> None:
    result = correction_weights(PROXIMAL, BEHAVIOUR, SEGMENTS, CorrectionConfig(Correction.TIS_SEQUENCE, cap=100.0))
    torch.testing.assert_close(result.weights_T, torch.tensor([12.0, 12.0, 0.25, 0.0]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0), st.integers(0, 2)), min_size=1, max_size=12),
    st.sampled_from(list(Correction)),
)
def test_weights_are_finite_not_negative_and_one_when_the_policies_agree(
    tokens: list[tuple[float, float, int]], kind: Correction
) -> None:
    proximal_T = torch.tensor([t[0] for t in tokens])
    behaviour_T = torch.tensor([t[1] for t in tokens])
    segments = Segments(torch.tensor([t[2] for t in tokens]), torch.ones(len(tokens), dtype=torch.bool), 3)
    config = CorrectionConfig(kind)
    weights_T = correction_weights(proximal_T, behaviour_T, segments, config).weights_T
    assert bool(torch.isfinite(weights_T).all()) and bool((weights_T >= 0).all())
    if kind in (Correction.TIS_TOKEN, Correction.TIS_SEQUENCE):
        assert float(weights_T.max()) <= config.cap
    same_T = correction_weights(proximal_T, proximal_T, segments, config).weights_T
    assert same_T.tolist() == [1.0] * len(tokens)


def test_the_learning_rate_scale_is_the_root_and_has_a_floor() -> None:
    assert learning_rate_scale(0.25) == pytest.approx(0.5)
    assert learning_rate_scale(0.0, floor=0.1) == 0.1
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        learning_rate_scale(math.nan)


def test_the_score_norm_proxy_is_zero_for_sure_tokens_and_grows_with_doubt() -> None:
    segments = Segments(torch.tensor([0, 0, 1, 1]), torch.tensor([True, True, True, False]), 2)
    norm_sq_R = score_norm_sq_proxy(torch.tensor([0.0, 0.0, math.log(0.5), -9.0]), segments)
    assert norm_sq_R.tolist() == pytest.approx([0.0, 0.25])


def test_a_band_that_does_not_hold_one_and_a_cap_of_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="band"):
        CorrectionConfig(Correction.MASKED, mask_low=1.5)
    with pytest.raises(ConfigError, match="cap"):
        CorrectionConfig(Correction.TIS_TOKEN, cap=0.0)

"""Every family of models trains on what its workers sample, or is refused by name."""

import pytest

from tests.contract.families import FAMILIES, RATIO_OFF_MAX, outcome_of

REFUSED = {"Mamba"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learners_policy_is_the_workers_at_lag_0(family: str) -> None:
    """Windows of attention, sinks, a router's correction bias and states: beyond the window, in rows that share a prompt."""
    found = outcome_of(*FAMILIES[family])
    assert found.is_counted, "the planner's count is the model's"
    assert not found.misplaced, "an engine that reads the model's files gets each tensor as it is in them"
    if family in REFUSED:
        assert isinstance(found.ratio_off, str) and FAMILIES[family][0] in found.ratio_off
    else:
        assert isinstance(found.ratio_off, float) and found.ratio_off <= RATIO_OFF_MAX, found


def test_a_model_whose_code_takes_no_rows_is_refused_by_name() -> None:
    found = outcome_of("bloom", {"n_layer": 3, "n_head": 4}).ratio_off
    assert isinstance(found, str) and "bloom: the learner cannot lay out its sequences in rows: ValueError" in found

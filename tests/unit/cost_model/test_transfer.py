from __future__ import annotations

import pytest

from echo2.cost_model.snapshot import LinkEstimate
from echo2.cost_model.transfer import FluidBroadcast, fluid_bound_s


def test_each_term_of_the_fluid_bound_can_bind() -> None:
    seed = LinkEstimate(10.0, 1e9)
    assert fluid_bound_s(100.0, seed, []) == 0.0
    assert fluid_bound_s(100.0, seed, [LinkEstimate(50.0, 1e9)] * 3) == pytest.approx(10.0)
    assert fluid_bound_s(100.0, seed, [LinkEstimate(50.0, 5.0)] * 3) == pytest.approx(20.0)
    assert fluid_bound_s(100.0, seed, [LinkEstimate(1e-9, 1e9)] * 3) == pytest.approx(30.0)


def test_prediction_adds_efficiency_and_round_trips() -> None:
    seed, receivers = LinkEstimate(10.0, 1e9, 0.1), [LinkEstimate(50.0, 1e9, 0.3), LinkEstimate(50.0, 1e9, 0.2)]
    assert FluidBroadcast(0.5).predict(100.0, seed, receivers) == pytest.approx(20.0 + 0.4)

"""What is believed of a kind of machine: priors, one machine, many, and that intervals hold what they say."""

from __future__ import annotations

import math
import random

import pytest

from echo2.base.errors import ConfigError
from echo2.cost_model.rates import COVERAGE, belief


def test_without_a_machine_the_roofline_stands_with_a_wide_interval() -> None:
    told = belief([])
    assert told.ratio == 1.0 and told.machines == 0
    assert told.low == pytest.approx(1 / told.high) and told.high > 1.5


def test_one_machine_moves_the_belief_most_of_the_way_and_ten_nearly_all() -> None:
    one, ten = belief([0.5]), belief([0.5] * 10)
    assert 0.5 < ten.ratio < one.ratio < 0.65
    assert ten.high / ten.low < one.high / one.low < belief([]).high / belief([]).low


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_intervals_hold_the_next_machine_as_often_as_they_say(count: int) -> None:
    """Kinds and machines are drawn from other laws than the model's: heavy tails between kinds, uniform within one."""
    draw, held, trials = random.Random(7), 0, 1500
    for _ in range(trials):
        kind = 0.25 * draw.gauss(0, 1) / math.sqrt(draw.gammavariate(2.5, 1 / 2.5))
        ratios = [math.exp(kind + draw.uniform(-0.3, 0.3)) for _ in range(count + 1)]
        told = belief(ratios[:-1])
        held += told.low <= ratios[-1] <= told.high
    assert held / trials >= COVERAGE - 0.05


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf, 1e3])
def test_what_no_machine_does_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="delivered over predicted"):
        belief([ratio])

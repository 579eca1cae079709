"""What a terminal shows of each step, and what a row says of an optimiser that is somebody else's."""

from __future__ import annotations

import pytest

from echo2.learner.pace import StepPace, step_line
from echo2.learner.runtime.record import optimiser_fields
from echo2.learner.runtime.trainer import StepResult

ROW = {"step": 12, "reward/mean": 0.4128, "tokens": 16_400, "step_s": 1.5, "phase/wait_s": 0.5}


def test_a_step_is_one_line_with_its_number_reward_rate_and_the_time_left() -> None:
    pace = StepPace()
    pace.made(11, 100.0)
    assert step_line(ROW, 200, pace) == "step 12/200  reward 0.413  8,200 tokens/s  2 s a step (25% waiting)"
    pace.made(12, 104.0)
    assert (
        step_line(ROW, 200, pace)
        == "step 12/200  reward 0.413  4,100 tokens/s  4 s a step (25% waiting)  12.5 min left"
    )
    assert "left" not in step_line(ROW | {"step": 200}, 200, pace)
    assert all(len(step_line(ROW, 100_000, pace)) <= width for width in (100, 120))


def test_the_pace_is_that_of_the_newest_steps() -> None:
    pace = StepPace()
    assert pace.seconds_per_step is None
    for step in range(100):
        pace.made(step, 10.0 * step if step < 50 else 500 + 2.0 * (step - 50))
    assert pace.seconds_per_step == pytest.approx(2.0)


def test_a_row_says_nothing_of_an_optimiser_that_is_not_ours() -> None:
    theirs = StepResult(1, {}, None, None, None, False, 10, 5)
    ours = StepResult(1, {}, None, 0.0, 1e-6, False, 10, 5)
    assert optimiser_fields(theirs) == {}
    assert optimiser_fields(ours) == {"grad_norm": 0.0, "lr": 1e-6}

"""How often a checkpoint: the least of what checkpoints and training again cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.cost_model.memory import KILLED_EVERY_S, REPLAY_S, STEPS_MAX, steps_between

SECONDS = st.floats(1e-3, 3600.0)


def test_the_worked_example_and_both_ends() -> None:
    assert steps_between(2.8, 209.0, 209.0) == 3, "8B on 8 GPUs: a kill costs 10 minutes instead of 70"
    assert steps_between(0.05, 1.0, 1.0) == STEPS_MAX, "quick steps, as it always was"
    assert steps_between(60.0, 1200.0, 1300.0) == 1
    assert steps_between(1.0, 0.0, 0.0) == STEPS_MAX, "nothing was trained yet"


@given(SECONDS, SECONDS, st.floats(1.0, 10.0))
def test_no_other_number_within_the_bounds_costs_much_less(checkpoint_s: float, train_s: float, waiting: float) -> None:
    step_s = waiting * train_s

    def cost(steps: int) -> float:
        return checkpoint_s / (steps * step_s) + steps * train_s / (2 * KILLED_EVERY_S)

    found = steps_between(checkpoint_s, train_s, step_s)
    assert 1 <= found <= STEPS_MAX and (found == 1 or found * train_s <= REPLAY_S)
    allowed = [steps for steps in range(1, STEPS_MAX + 1) if steps == 1 or steps * train_s <= REPLAY_S]
    assert cost(found) <= 1.3 * min(map(cost, allowed)), "rounded down: a step less loses little"

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.learner.offers import OfferConfig, Reminders, cap_groups, consume_step, groups_wanted

CONFIGS = st.builds(
    lambda groups, n, bound: OfferConfig(groups * n, n, bound),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(0, 16),
)


@given(config=CONFIGS, planned=st.none() | st.integers(0, 10_000), in_flight=st.integers(0, 2000))
def test_in_flight_never_passes_the_cap_and_one_batch_always_fits(
    config: OfferConfig, planned: int | None, in_flight: int
) -> None:
    cap = cap_groups(config, planned)
    assert config.groups_per_step <= cap <= config.groups_per_step * (config.staleness_bound + 1)
    assert groups_wanted(config, planned, in_flight) == max(0, cap - in_flight)


@given(config=CONFIGS, step=st.integers(0, 1000), ahead=st.integers(0, 1000))
def test_consume_step_counts_the_batches_ahead(config: OfferConfig, step: int, ahead: int) -> None:
    estimate = consume_step(config, step, ahead)
    assert (estimate - step) * config.groups_per_step <= ahead < (estimate - step + 1) * config.groups_per_step


def test_without_a_plan_two_batches_are_in_flight() -> None:
    assert cap_groups(OfferConfig(192, 8, 4), None) == 48
    assert cap_groups(OfferConfig(192, 8, 0), None) == 24


def test_a_wait_is_told_soon_and_then_ever_less_often() -> None:
    reminders = Reminders()
    assert [s for s in range(100) if reminders.is_due(float(s))] == [3, 9, 27, 57, 87]
    assert [s for s in range(12) if reminders.is_due(float(s))] == [3, 9], "another wait begins anew"
    assert not any(reminders.is_due(0.0) for _ in range(100)), "nothing waits"

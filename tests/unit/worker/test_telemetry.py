from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.worker.telemetry import RateWindow


@given(rate=st.floats(1, 1000), idle_s=st.floats(0, 100), busy_s=st.floats(1, 15))
def test_rates_are_those_of_busy_time_however_long_the_worker_stood_idle(
    rate: float, idle_s: float, busy_s: float
) -> None:
    window = RateWindow()
    now = idle_s
    window.busy(True, now)
    tokens = 0
    steps = 50
    for _ in range(steps):
        now += busy_s / steps
        window.sampled(round(rate * busy_s / steps), now)
        tokens += round(rate * busy_s / steps)
        window.busy(True, now)
    assert window.rates(now).tokens_per_s == pytest.approx(tokens / busy_s, rel=1e-6)
    window.busy(False, now)
    assert window.rates(now + 1000).tokens_per_s == pytest.approx(tokens / busy_s, rel=1e-6)
    assert window.sampled_tokens == tokens


def test_old_work_leaves_the_window() -> None:
    window = RateWindow(window_s=10.0)
    window.busy(True, 0.0)
    for second in range(1, 61):
        window.sampled(100 if second <= 30 else 10, float(second))
        window.busy(True, float(second))
    assert window.rates(60.0).tokens_per_s == pytest.approx(10, rel=0.15)


def test_durations_give_mean_and_tail() -> None:
    window = RateWindow()
    window.busy(True, 0.0)
    for i in range(1, 101):
        window.finished(float(i), 1.0)
    rates = window.rates(2.0)
    assert rates.rollout_s_mean == pytest.approx(50.5)
    assert rates.rollout_s_p95 == 96.0
    assert rates.rollouts_per_s == pytest.approx(50.0)

"""."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.outside import monotonic
from echo2.worker import rates as rate
from echo2.worker.engines.engine import Engine, EngineStats, GenerateRequest
from echo2.worker.rates import TOKENS_EACH, RateProbe, RateWindow


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


SLOTS = 4


@dataclass
class Fake:
    """Samples `tokens_per_s` from `starts_after_s` on, in all slots together; never more than was asked for."""

    tokens_per_s: float
    starts_after_s: float
    slot_count: int = SLOTS
    open: set[str] = field(default_factory=set)
    began: float | None = None

    def submit(self, request: GenerateRequest) -> None:
        self.began = self.began or monotonic()
        self.open.add(request.request_id)

    def stats(self) -> EngineStats:
        worked_s = 0.0 if self.began is None else max(0.0, monotonic() - self.began - self.starts_after_s)
        tokens = min(SLOTS * TOKENS_EACH, int(worked_s * self.tokens_per_s))
        return cast(EngineStats, type("Stats", (), {"sampled_tokens": 1_000 + tokens})())

    async def abort(self, request_id: str) -> None:
        self.open.discard(request_id)


def probed(engine: Fake) -> float:
    return asyncio.run(RateProbe(cast(Engine, engine)).run())


@pytest.mark.parametrize("starts_after_s", [0.0, 1.5])
def test_the_wait_for_the_first_token_is_not_part_of_the_rate(starts_after_s: float) -> None:
    """vLLM's first step takes more than a second on a CPU; its rate was told as 0."""
    engine = Fake(60.0, starts_after_s)
    assert probed(engine) == pytest.approx(60.0, rel=0.25) and not engine.open


def test_an_engine_that_samples_nothing_has_no_rate_and_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "FIRST_TOKEN_S_MAX", 0.2)
    began = monotonic()
    assert probed(Fake(0.0, 0.0)) == 0.0 and monotonic() - began < 2.0


def test_a_fast_engine_is_done_at_the_first_look() -> None:
    assert probed(Fake(1e9, 0.0)) > 1_000

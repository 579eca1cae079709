"""A finished learner stays as long as it is needed, and no longer than its limit."""

from __future__ import annotations

from echo2.learner.lingering import QUIET_S, Lingering


def leaves_after_s(needed_until_s: float, limit_s: float, again_at_s: float | None = None) -> float:
    lingering, now = Lingering(100.0, limit_s), 100.0
    while True:
        at_s = now - 100.0
        if lingering.is_over(at_s < needed_until_s or at_s == again_at_s, now):
            return at_s
        now += 0.25


def test_it_leaves_once_nobody_has_needed_it_for_a_while() -> None:
    assert leaves_after_s(0.0, 20.0) == QUIET_S
    assert leaves_after_s(5.0, 20.0) == 4.75 + QUIET_S


def test_a_worker_that_comes_back_in_the_quiet_is_waited_for() -> None:
    assert leaves_after_s(1.0, 20.0, again_at_s=3.0) == 3.0 + QUIET_S


def test_it_leaves_at_its_limit_whoever_still_fetches() -> None:
    assert leaves_after_s(1000.0, 20.0) == 20.0
    assert leaves_after_s(0.0, 0.0) == 0.0

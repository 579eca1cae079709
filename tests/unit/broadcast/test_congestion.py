"""The choice of congestion control: fast after a pause, the usual one then, fast again where packets are lost at random."""

from __future__ import annotations

import random

from echo2.broadcast.pace import IDLE_S, START_S, CongestionChooser, Control

TICK_S = 0.1


def _run(
    chooser: CongestionChooser, begun_at: float, seconds: float, loss: float = 0.0, queue_s: float = 0.02
) -> list[Control]:
    """Looks at a node that sends 200 segments a tick, each lost with `loss`."""
    rng, seen = random.Random(7), []
    for tick in range(round(seconds / TICK_S)):
        now = begun_at + tick * TICK_S
        chooser.sent(sum(rng.random() < loss for _ in range(200)), queue_s, now)
        seen.append(chooser.control(now))
    return seen


def test_sending_begins_fast_and_goes_on_as_usual() -> None:
    chooser = CongestionChooser()
    assert chooser.control(0.0) is Control.FAST
    seen = _run(chooser, 10.0, 30.0)
    first = round(START_S / TICK_S)
    assert set(seen[: first - 1]) == {Control.FAST}
    assert set(seen[first + 1 :]) == {Control.USUAL}


def test_a_pause_is_a_new_beginning_and_a_short_one_is_none() -> None:
    chooser = CongestionChooser()
    _run(chooser, 0.0, START_S + 1)
    assert chooser.control(START_S + 1.0 + 0.5 * IDLE_S) is Control.USUAL
    assert chooser.control(START_S + 1.5 + IDLE_S) is Control.FAST
    seen = _run(chooser, START_S + 10, START_S + 5)
    assert seen[0] is Control.FAST
    assert seen[-1] is Control.USUAL


def test_random_loss_keeps_the_fast_one_until_it_ends() -> None:
    chooser = CongestionChooser()
    seen = _run(chooser, 0.0, 40.0, loss=0.001)
    assert set(seen[round((START_S + 8) / TICK_S) :]) == {Control.FAST}
    assert _run(chooser, 40.0, 20.0)[-1] is Control.USUAL


def test_losses_of_a_full_queue_and_of_a_burst_are_no_random_loss() -> None:
    chooser = CongestionChooser()
    assert _run(chooser, 0.0, 60.0, loss=0.01, queue_s=0.055)[-1] is Control.USUAL
    for _ in range(3):
        chooser.sent(150, 0.03, 60.0)
    assert chooser.control(60.0) is Control.USUAL


def test_what_is_lost_while_the_rate_is_searched_does_not_count() -> None:
    chooser = CongestionChooser()
    assert _run(chooser, 0.0, START_S - 0.5, loss=0.05)[-1] is Control.FAST
    assert _run(chooser, START_S - 0.5, 2.0)[-1] is Control.USUAL
    assert not chooser.is_lossy

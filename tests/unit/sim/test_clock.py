from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.sim.clock import VirtualClock


@given(st.lists(st.floats(0, 100), max_size=30))
def test_events_happen_in_order_of_time_then_of_scheduling(times: list[float]) -> None:
    clock, seen = VirtualClock(), []
    for index, when in enumerate(times):
        clock.at(when, lambda index=index, when=when: seen.append((when, index)))  # type: ignore[misc]
    clock.run(100.0)
    assert seen == sorted(seen)
    assert len(seen) == len(times) and clock.now() == 100.0


def test_the_past_is_now_and_stop_ends_the_run() -> None:
    clock, seen = VirtualClock(), []

    def first() -> None:
        clock.at(1.0, lambda: seen.append(clock.now()))
        clock.after(1.0, clock.stop)
        clock.after(2.0, lambda: seen.append(-1.0))

    clock.at(5.0, first)
    clock.run(100.0)
    assert seen == [5.0] and clock.now() == 6.0

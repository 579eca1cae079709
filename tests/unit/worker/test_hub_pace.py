"""A download from the hub is judged by its rate, not by how large it is."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from echo2.worker.hub_pace import KEYFRAME_TIMES, STALLED_S, HubPace

OF_32B = 65_500_000_000


def given_up_at(bytes_per_s: float, keyframe_s: float, whole_bytes: int = OF_32B, until_s: int = 3600) -> float | None:
    pace = HubPace(0.0, whole_bytes)
    for now in range(0, until_s, 5):
        came = min(whole_bytes, int(bytes_per_s * now))
        pace.seen(came, now)
        if pace.why_given_up(keyframe_s, now):
            return float(now)
        if came == whole_bytes:
            return None
    return None


def test_a_large_model_on_a_usual_link_is_waited_for() -> None:
    """32B at 400 Mbit/s takes 22 minutes, a keyframe over the same link nearly as long."""
    assert given_up_at(50e6, keyframe_s=0.7 * OF_32B / 50e6) is None


def test_a_hub_that_is_much_slower_than_peers_is_given_up_soon() -> None:
    found = given_up_at(5e6, keyframe_s=0.7 * OF_32B / 50e6)
    assert found is not None and found <= 60


@given(st.floats(0, 1800), st.floats(1e6, 1e9))
def test_a_download_that_stops_is_given_up_within_its_time(stops_at: float, bytes_per_s: float) -> None:
    pace, now = HubPace(0.0, OF_32B), 0.0
    while not pace.why_given_up(math.inf, now):
        pace.seen(int(bytes_per_s * min(now, stops_at)), now)
        now += 5.0
        assert now <= stops_at + STALLED_S + 10.0


def test_one_that_gets_faster_is_judged_by_its_last_minute() -> None:
    pace, keyframe_s = HubPace(0.0, OF_32B), 1000.0
    needed = OF_32B / (KEYFRAME_TIMES * keyframe_s)
    came = 0.0
    for now in range(0, 200, 5):
        came += 5 * needed * (0.1 if now < 20 else 2.0)
        pace.seen(int(came), now)
        assert not pace.why_given_up(keyframe_s, now), now

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import Version
from echo2.worker.demand import REPEAT_S, Demand


def test_a_standing_request_is_not_repeated_before_its_time() -> None:
    demand = Demand()
    assert demand.request(0, True, 0.0) is None  # no weights yet
    demand.live(Version(1), 4)
    assert demand.request(0, True, 0.0) == (4, Version(1))
    assert demand.request(0, True, 1.0) is None
    assert demand.repeat_at() == REPEAT_S
    assert demand.request(0, True, REPEAT_S) == (4, Version(1))


def test_a_new_version_renews_the_request_because_it_may_open_newer_groups() -> None:
    demand = Demand()
    demand.live(Version(1), 4)
    demand.request(0, True, 0.0)
    demand.live(Version(2), 4)
    assert demand.request(0, True, 0.1) == (4, Version(2))


def test_a_worker_that_is_not_willing_takes_its_request_back() -> None:
    demand = Demand()
    demand.live(Version(1), 4)
    demand.request(0, True, 0.0)
    assert demand.request(0, False, 0.1) == (0, Version(1))
    assert demand.request(0, False, 100.0) is None


def test_slots_that_fall_free_while_a_lease_travels_are_asked_for_ahead() -> None:
    demand = Demand()
    demand.live(Version(1), 8)
    demand.request(0, True, 0.0)
    demand.granted(1, 0.5)  # a lease travels half a second
    for i in range(20):
        demand.finished(i * 0.25)  # four rollouts a second
    assert demand.cover() == 3
    assert demand.level(8, True) == 3


@given(
    slots=st.integers(1, 64),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=60),
    finishing=st.lists(st.integers(0, 8), min_size=1, max_size=60),
)
def test_slots_are_full_after_each_answer_and_never_overfilled_by_more_than_cover_and_a_group(
    slots: int, sizes: list[int], finishing: list[int]
) -> None:
    demand = Demand()
    demand.live(Version(1), slots)
    held = 0
    now = 0.0
    for size, ended in zip(sizes, finishing, strict=False):
        now += 0.1
        for _ in range(min(held, ended)):
            held -= 1
            demand.finished(now)
        level = demand.level(held, True)
        demand.request(held, True, now)
        granted = 0
        while granted < level:
            demand.granted(size, now + 0.01)
            granted += size
        held += granted
        assert slots <= held <= 2 * slots + 2 * max(sizes)

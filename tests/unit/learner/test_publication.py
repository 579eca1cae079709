from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import Step, Version
from echo2.learner.publication import PublicationConfig, PublicationSchedule
from echo2.staleness.rule import is_admissible


@given(bound=st.integers(0, 16), fixed=st.none() | st.integers(1, 16), planned=st.none() | st.integers(1, 16))
def test_the_newest_version_is_admissible_until_the_next_one(
    bound: int, fixed: int | None, planned: int | None
) -> None:
    schedule = PublicationSchedule(PublicationConfig(bound, fixed), planned_kappa=planned)
    for step in range(1, 40):
        assert is_admissible(Step(step - 1), schedule.newest, bound)
        if schedule.is_due(Step(step)):
            schedule.begin(Version(step))


def test_a_fixed_kappa_wins_over_the_plan_and_default_is_one_less_than_the_bound() -> None:
    assert PublicationSchedule(PublicationConfig(6, 2), planned_kappa=4).kappa == 2
    assert PublicationSchedule(PublicationConfig(6), planned_kappa=4).kappa == 4
    assert PublicationSchedule(PublicationConfig(6)).kappa == 5
    assert PublicationSchedule(PublicationConfig(1)).kappa == 1


@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_a_joiner_never_fetches_more_than_two_keyframes_nor_a_longer_chain(sizes: list[int]) -> None:
    schedule = PublicationSchedule(PublicationConfig(4, 1, chain_max=8))
    schedule.keyframe_published(Version(0), 1000)
    for step, size in enumerate(sizes, start=1):
        schedule.begin(Version(step))
        schedule.delta_published(Version(step), size)
        if schedule.is_keyframe_due:
            schedule.keyframe_published(Version(step), 1000)
        assert schedule.chain_bytes <= 1000 and schedule.chain_length < 8

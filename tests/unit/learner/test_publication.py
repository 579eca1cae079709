from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import Step, Version
from echo2.broadcast.artifact import ArtifactId, ArtifactKey
from echo2.broadcast.route import ArtifactOffer, WorkerLink, plan_catch_up
from echo2.learner.publishing.schedule import (
    MERGED_LAG_MAX,
    BaseSchedule,
    Merge,
    MergeSchedule,
    PublicationSchedule,
    SettingChoice,
)
from echo2.staleness.rule import is_admissible
from echo2.weights import CodecSetting


@given(bound=st.integers(0, 16), fixed=st.none() | st.integers(1, 16), planned=st.none() | st.integers(1, 16))
def test_the_newest_version_is_admissible_until_the_next_one(
    bound: int, fixed: int | None, planned: int | None
) -> None:
    schedule = PublicationSchedule(bound, fixed, planned_kappa=planned)
    for step in range(1, 40):
        assert is_admissible(Step(step - 1), schedule.newest, bound)
        if schedule.is_due(Step(step)):
            schedule.begin(Version(step))


def test_a_fixed_kappa_wins_over_the_plan_and_default_is_one_less_than_the_bound() -> None:
    assert PublicationSchedule(6, 2, planned_kappa=4).kappa == 2
    assert PublicationSchedule(6, planned_kappa=4).kappa == 4
    assert PublicationSchedule(6).kappa == 5
    assert PublicationSchedule(1).kappa == 1


@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_a_joiner_never_fetches_more_than_two_keyframes_nor_a_longer_chain(sizes: list[int]) -> None:
    schedule = PublicationSchedule(4, 1, chain_max=8)
    schedule.keyframe_published(Version(0), 1000)
    for step, size in enumerate(sizes, start=1):
        schedule.begin(Version(step))
        schedule.delta_published(Version(step), size)
        if schedule.is_keyframe_due:
            schedule.keyframe_published(Version(step), 1000)
        assert schedule.chain_bytes <= 1000 and schedule.chain_length < 8


@given(lags=st.lists(st.integers(1, 5), min_size=1, max_size=150), start=st.integers(0, 149))
def test_merges_join_halves_that_left_before_and_any_lag_takes_few_pieces(lags: list[int], start: int) -> None:
    schedule, versions = MergeSchedule(), [Version(0)]
    edges: dict[tuple[Version, Version], ArtifactOffer] = {}
    for lag in lags:
        version = Version(versions[-1] + lag)
        edges[versions[-1], version] = ArtifactOffer(
            ArtifactKey(b""), ArtifactId(version, versions[-1]), 1, is_pushed=False
        )
        for merge in schedule.published(version, versions[-1]):
            assert {(merge.parent, merge.middle), (merge.middle, version)} <= edges.keys()
            edges[merge.parent, version] = ArtifactOffer(
                ArtifactKey(b""), ArtifactId(version, merge.parent), 1, is_pushed=False
            )
        versions.append(version)
    behind = len(lags) - min(start, len(lags) - 1)
    way = plan_catch_up(versions[-1 - behind], versions[-1], list(edges.values()), WorkerLink())
    assert way is not None
    assert len(way.offers) <= 2 * math.log2(min(behind, MERGED_LAG_MAX)) + 1 + behind // MERGED_LAG_MAX


def test_merging_begins_anew_where_the_chain_was_broken() -> None:
    schedule = MergeSchedule()
    assert schedule.published(Version(5), Version(4)) == []
    assert schedule.published(Version(6), Version(5)) == [Merge(Version(4), Version(5), Version(6))]
    assert schedule.published(Version(9), Version(8)) == [], "what led to 8 was published by another process"
    assert schedule.published(Version(10), Version(9)) == [Merge(Version(8), Version(9), Version(10))]


def test_a_delta_from_the_base_that_saves_little_is_not_made_again() -> None:
    schedule = BaseSchedule()
    schedule.left(499, 1000)
    assert schedule.at == 0
    schedule.left(501, 1000)
    assert schedule.at is None and schedule.step([Merge(Version(0), Version(8), Version(16))] * 9) is None


WEIGHTS = 16 * 10**9


def test_a_slow_uplink_takes_dense_and_a_quick_one_fast() -> None:
    choice = SettingChoice()
    assert not choice.choose(WEIGHTS, 0.0)
    assert choice.setting is CodecSetting.FAST and "not known" in choice.reason
    assert choice.choose(WEIGHTS, 2e6)
    assert choice.setting is CodecSetting.DENSE and "sending" in choice.reason
    assert choice.choose(WEIGHTS, 1e9)
    assert choice.setting is CodecSetting.FAST


def test_what_was_measured_counts_and_a_small_gain_changes_nothing() -> None:
    choice = SettingChoice()
    choice.choose(WEIGHTS, 40e6)
    before = choice.setting
    assert before is CodecSetting.FAST, "190 MB at 40 MB/s take less than the 7.3 s of dense decoding"
    choice.encoded(CodecSetting.FAST, WEIGHTS, WEIGHTS // 20, 10.0)
    assert choice.choose(WEIGHTS, 20e6), "five per cent changed: sending takes 40 s, dense is worth its decoding"
    choice.encoded(CodecSetting.DENSE, WEIGHTS, WEIGHTS // 34, 20.0)
    for rate in (20.5e6, 21e6, 21.5e6):
        assert not choice.choose(WEIGHTS, rate)

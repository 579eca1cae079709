"""Versions out: what is on the disk before a byte leaves, and what a newcomer makes of them."""

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from echo2.base.errors import StateError
from echo2.base.ids import Step, Version
from echo2.broadcast.artifact import ArtifactId, ArtifactKey
from echo2.broadcast.route import ArtifactOffer, WorkerLink, plan_catch_up
from echo2.config.run import StalenessSection
from echo2.learner.publishing.publisher import VersionPublisher
from echo2.learner.publishing.schedule import (
    BASE_REACH,
    MERGED_LAG_MAX,
    BaseSchedule,
    Merge,
    MergeSchedule,
    PublicationSchedule,
    SettingChoice,
    encode_cores,
)
from echo2.learner.rollouts.journal import Journal, began, read_journal
from echo2.staleness.rule import is_admissible
from echo2.weights import CodecSetting, HostWeights, fingerprint
from echo2.wire.gen.echo2.v1.coordinator_pb2 import VersionPublished
from tests.unit.learner.fleet import FollowerBroadcaster


def schedule_of(bound: int, kappa: int = 0, **more: Any) -> PublicationSchedule:
    return PublicationSchedule(StalenessSection(bound=bound, kappa=kappa), **more)


class Watching(FollowerBroadcaster):
    """Notes whether all of the journal was on the disk as an artifact left. `meanwhile`: called once, as one leaves. `is_sealed`:
    an earlier process has sealed it."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal, self.was_kept = journal, list[bool]()
        self.meanwhile: list[Callable[[], None]] = []
        self.is_busy = self.is_sealed = False

    async def publish(self, *arguments: Any, **named: Any) -> int:
        assert not self.is_busy, "one replaces the other if they are the same"
        self.is_busy = True
        self.was_kept.append(self.journal._synced == self.journal._appended)
        while self.meanwhile:
            self.meanwhile.pop()()
            for _ in range(9):
                await asyncio.sleep(0)
        self.is_busy = False
        return 100 if self.is_sealed else await super().publish(*arguments, **named)


class Port:
    """Keeps the versions that workers may sample with, and what the coordinator is told."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.told: list[VersionPublished] = []

    def on_version(self, version: Version) -> None:
        self.versions.append(version)

    def on_artifact(self, artifact: VersionPublished) -> None:
        self.told.append(artifact)

    def fail(self, error: BaseException) -> None:
        raise error


async def test_that_a_version_may_have_left_is_on_the_disk_before_its_first_byte_does(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(began("r", Step(0), 0, (Version(0),)))
    port, out = Port(), list[Version]()

    def weights(number: int) -> dict[str, torch.Tensor]:
        return {"w": torch.full((8,), float(number)).bfloat16()}

    broadcaster = Watching(journal)
    publisher = VersionPublisher(broadcaster, journal, schedule_of(2), port, 7)
    broadcaster.meanwhile.append(lambda: publisher.replace_lost("a chunk"))
    await publisher.take_up(weights(0), Version(0), None)
    await publisher.publish_soon(Version(1), weights(1))
    await publisher.settled()
    del broadcaster.versions[0]  # what was lost meanwhile is replaced after it
    assert broadcaster.versions == [(0, None), (1, 0)] and broadcaster.was_kept == [True] * 3
    publisher.replace_lost("a chunk")  # a keyframe takes its place, at once or behind the version that is leaving
    await publisher.settled()
    assert broadcaster.versions[2:] == [(1, None)]
    await publisher.publish_soon(Version(2), weights(2))
    publisher.replace_lost("a chunk")
    await publisher.settled()
    assert [x for x in broadcaster.versions[3:] if x[1] in (1, None)] == [(2, 1), (2, None)]
    assert publisher._task is not None
    broadcaster.meanwhile.append(lambda: out.append(publisher.newest_version))
    await publisher.publish_soon(Version(3), weights(3))
    publisher._task.add_done_callback(lambda _: publisher.replace_lost("a chunk"))
    await publisher.settled()
    assert publisher._task.done(), "also what took the place of something lost as that ended"
    assert out == [2], "a version that is leaving is not out yet"
    for version in (4, 5):
        await publisher.publish_soon(Version(version), weights(version))
    await publisher.settled()
    assert [version for version, parent in broadcaster.versions if parent is not None] == [1, 2, 3, 4, 5]
    broadcaster.is_sealed = True
    await publisher.publish_soon(Version(6), weights(6))
    await publisher.settled()
    broadcaster.is_sealed = False
    assert publisher.newest_fingerprint == fingerprint(weights(6), 7) == int(port.told[-1].fingerprint, 16)
    again = VersionPublisher(broadcaster, journal, schedule_of(2), port, 7)
    await again.take_up(weights(6), Version(6), None, weights(0))
    broadcaster.meanwhile.append(lambda: again.replace_lost("a chunk"))
    await again.settled()
    assert broadcaster.versions[-2:] == [(6, None)] * 2, "also what is lost while the delta from the base leaves"
    journal.close()
    assert port.versions == [1, 2, 3, 4, 5, 6]
    records, _ = read_journal(tmp_path, Step(0))
    told = [record.published for _, record in records if record.HasField("published")]
    expected = [(version, is_out) for version in port.versions for is_out in (False, True)]
    assert [(one.version, bool(one.fingerprint)) for one in told] == expected


class Failing(FollowerBroadcaster):
    """`fails`: whether the next artifact that nobody waits for finds no room."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        super().__init__()
        self.fails = fails

    async def publish(self, *arguments: Any, is_pushed: bool, **named: Any) -> int:
        if arguments[0].parent is not None and not is_pushed and self.fails():
            raise StateError("dropped while being published; the store is too small")
        return await super().publish(*arguments, is_pushed=is_pushed, **named)


class Learning:
    """Random walks of some weights, published by one learner process after another."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.base = self.newest = {"w": torch.randn(4096, generator=self.generator).bfloat16()}
        self.weights = {Version(0): self.base}
        self.is_poor = self.chance.random() < 0.3
        self.broadcaster = Failing(lambda: self.is_poor and self.chance.random() < 0.2)
        self.journal = Journal(folder)
        self.journal.begin(began("r", Step(0), 0, (Version(0),)))
        self.checked: set[tuple[int, int]] = set()
        self.with_base = 0
        self.is_calm = self.chance.random() < 0.5

    def moved(self) -> dict[str, torch.Tensor]:
        """Another value for some elements; now and then for all, so that a delta from the base saves nothing."""
        share = 0.004 if self.is_calm else self.chance.choice([0.005, 0.02, 0.05, 0.05, 1.0])
        noise = torch.randn(4096, generator=self.generator).bfloat16()
        is_hit = torch.rand(4096, generator=self.generator) < share
        return {"w": torch.where(is_hit, noise, self.newest["w"])}

    async def process(self, count: int) -> None:
        """One process of the learner: takes up the newest version, with the base at hand or not, and publishes `count` more."""
        schedule = schedule_of(2, 1, chain_max=self.chance.choice([4, 16]))
        self.broadcaster.spread_bytes_per_s = self.chance.choice([0.0, 1e3])  # deltas are coded fast, or densely
        publisher = VersionPublisher(self.broadcaster, self.journal, schedule, Port(), 7)
        version = max(self.weights)
        base = self.base if version > 0 and self.chance.random() < 0.7 else None
        await publisher.take_up(self.newest, version, None, base)
        await publisher.settled()
        self.has_base = version == 0 or base is not None
        schedule.newest = version
        for _ in range(count):
            version = Version(version + self.chance.choice([1, 1, 2]))
            self.newest = self.weights[version] = self.moved()
            await publisher.publish_soon(version, self.newest)
            await publisher.settled()
            assert len(publisher._plain) <= 1, "copies of dense deltas are kept until they are merged"
            self.check()

    def check(self) -> None:
        """Whatever leads from the base, or from any version, to another gives that version's bits; and the newest is in reach."""
        for parent, target in self.broadcaster.kept:
            if parent < 0:
                continue
            if (parent, target) not in self.checked:
                host = HostWeights.from_tensors(self.weights[Version(parent)], Version(parent), 7)
                self.broadcaster.apply(host, parent, target)
                assert torch.equal(host.tensors()["w"], self.weights[Version(target)]["w"]), (parent, target)
                self.checked.add((parent, target))
        newest = max(self.weights)
        deltas = [
            ArtifactOffer(ArtifactKey(b""), ArtifactId(Version(b), Version(a)), len(data))
            for (a, b), data in self.broadcaster.kept.items()
            if a >= 0
        ]
        from_base = plan_catch_up(Version(0), newest, deltas, WorkerLink())
        keyframe = max(version for parent, version in self.broadcaster.kept if parent < 0)
        after_keyframe = plan_catch_up(Version(keyframe), newest, deltas, WorkerLink())
        assert keyframe == newest or after_keyframe is not None, "a newcomer without the base"
        if from_base is not None:
            host = HostWeights.from_tensors(self.base, Version(0), 7)
            for piece in from_base.offers:
                self.broadcaster.apply(host, piece.artifact.parent, piece.artifact.version)
            assert torch.equal(host.tensors()["w"], self.newest["w"]), "a newcomer with the base"
            if self.is_calm and self.has_base and not self.is_poor:  # else a keyframe is hardly larger
                reached = max(target for parent, target in self.broadcaster.kept if parent == 0)
                behind = sum(version > reached for version in self.weights)
                assert behind < BASE_REACH, "the delta from the base is renewed"
            self.with_base += 1


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_newcomers_reach_the_newest_version(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    learning = Learning(seed, tmp_path_factory.mktemp("journal"))

    async def scene() -> None:
        for _ in range(3):
            await learning.process(learning.chance.randrange(4, 40))

    asyncio.run(scene())
    learning.journal.close()
    assert learning.with_base > 0


@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_the_delta_from_the_base_is_renewed_also_after_a_kill_as_a_version_left(
    tmp_path: Path, is_cut_off: bool
) -> None:
    learning, schedule = Learning(0, tmp_path), schedule_of(2, 1)
    learning.is_calm, learning.is_poor, before, newest = True, False, Version(1), Version(2)
    for version in range(1, 2 + BASE_REACH + 1):
        learning.weights[Version(version)] = learning.newest = learning.moved()
    weights, schedule.newest = learning.weights, newest
    here = before if is_cut_off else newest
    learning.broadcaster.host = HostWeights.from_tensors(weights[here], here, 7)
    publisher = VersionPublisher(learning.broadcaster, learning.journal, schedule, Port(), 7)
    cut_off = (before, weights[before]) if is_cut_off else None
    await publisher.take_up(weights[newest], newest, cut_off, learning.base)
    await publisher.settled()
    for version in range(newest + 1, newest + BASE_REACH + 1):
        await publisher.publish_soon(Version(version), weights[Version(version)])
        await publisher.settled()
    learning.journal.close()
    assert [target for parent, target in learning.broadcaster.kept if parent == 0] == [newest, newest + BASE_REACH]


@given(bound=st.integers(0, 16), fixed=st.integers(0, 16), planned=st.none() | st.integers(1, 16))
def test_versions_are_admissible_until_the_next(bound: int, fixed: int, planned: int | None) -> None:
    schedule = schedule_of(bound, min(fixed, max(1, bound)), planned_kappa=planned)
    for step in range(1, 40):
        assert is_admissible(Step(step - 1), schedule.newest, bound)
        if schedule.is_due(Step(step)):
            schedule.begin(Version(step))


def test_a_fixed_kappa_wins_over_the_plan_and_default_is_one_less_than_the_bound() -> None:
    assert schedule_of(6, 2, planned_kappa=4).kappa == 2
    assert schedule_of(6, 4, planned_kappa=2).kappa == 2, "the operator has lowered S to 2"
    assert schedule_of(6, planned_kappa=4).kappa == 4
    assert schedule_of(6).kappa == 5
    assert schedule_of(1).kappa == schedule_of(0).kappa == 1


@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_a_joiner_never_fetches_more_than_two_keyframes_nor_a_longer_chain(sizes: list[int]) -> None:
    schedule = schedule_of(4, 1, chain_max=8)
    schedule.keyframe_published(1000)
    for step, size in enumerate(sizes, start=1):
        schedule.begin(Version(step))
        schedule.delta_published(Version(step), size, 0)
        if schedule.is_keyframe_due:
            schedule.keyframe_published(1000)
        assert schedule.chain_bytes <= 1000 and schedule.chain_length < 8


@given(lags=st.lists(st.integers(1, 5), min_size=1, max_size=150), start=st.integers(0, 149))
def test_merges_join_halves_that_left_before_and_any_lag_takes_few_pieces(lags: list[int], start: int) -> None:
    schedule, versions = MergeSchedule(), [Version(0)]
    edges: set[tuple[Version, Version]] = set()
    for lag in lags:
        version = Version(versions[-1] + lag)
        edges.add((versions[-1], version))
        for merge in schedule.published(version, versions[-1]):
            assert {(merge.parent, merge.middle), (merge.middle, version)} <= edges
            edges.add((merge.parent, version))
        versions.append(version)
    offers = [ArtifactOffer(ArtifactKey(b""), ArtifactId(b, a), 1, is_pushed=False) for a, b in sorted(edges)]
    behind = len(lags) - min(start, len(lags) - 1)
    way = plan_catch_up(versions[-1 - behind], versions[-1], offers, WorkerLink())
    assert way is not None
    assert len(way.offers) <= 2 * math.log2(min(behind, MERGED_LAG_MAX)) + 1 + behind // MERGED_LAG_MAX


def test_merging_begins_anew_where_the_chain_was_broken_and_not_where_a_delta_from_the_base_saves_little() -> None:
    schedule = MergeSchedule()
    assert schedule.published(Version(5), Version(4)) == []
    assert schedule.published(Version(6), Version(5)) == [Merge(Version(4), Version(5), Version(6))]
    assert schedule.published(Version(9), Version(8)) == [], "what led to 8 was published by another process"
    assert schedule.published(Version(10), Version(9)) == [Merge(Version(8), Version(9), Version(10))]
    of_base = BaseSchedule()
    of_base.left(499, 1000)
    assert of_base.at == 0
    of_base.left(501, 1000)
    assert of_base.at is None and of_base.step([Merge(Version(0), Version(8), Version(16))] * 9) is None


WEIGHTS = 16 * 10**9


def test_a_slow_uplink_takes_dense_and_a_quick_one_fast_by_what_was_measured_and_not_for_a_small_gain() -> None:
    cores = [encode_cores(device, count) for device, count in (("cuda", 1), ("cuda", 5), ("cuda", 64), ("cpu", 64))]
    assert cores == [1, 2, 3, 1], "half of the machine's beside a GPU, for the three blocks coded at a time"
    choice = SettingChoice()
    assert not choice.choose(WEIGHTS, 0.0)
    assert choice.setting is CodecSetting.FAST and "not known" in choice.reason
    assert choice.choose(WEIGHTS, 2e6)
    assert choice.setting is CodecSetting.DENSE and "sending" in choice.reason
    assert choice.choose(WEIGHTS, 1e9)
    assert choice.setting is CodecSetting.FAST
    assert not choice.choose(WEIGHTS, 40e6), "190 MB at 40 MB/s take less than the 7.3 s of dense decoding"
    choice.encoded(CodecSetting.FAST, WEIGHTS, WEIGHTS // 20, 10.0)
    assert choice.choose(WEIGHTS, 20e6), "five per cent changed: sending takes 40 s, dense is worth its decoding"
    choice.encoded(CodecSetting.DENSE, WEIGHTS, WEIGHTS // 34, 20.0)
    for rate in (32.5e6, 33e6, 35e6):  # fast takes a tenth less at the most
        assert not choice.choose(WEIGHTS, rate)

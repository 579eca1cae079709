"""Versions out: what is on the disk before a byte leaves, and what a newcomer makes of them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo2.base.ids import Step, Version
from echo2.broadcast.artifact import ArtifactId, ArtifactKey
from echo2.broadcast.route import ArtifactOffer, WorkerLink, plan_catch_up
from echo2.learner.publishing.publisher import PublishedArtifact, VersionPublisher
from echo2.learner.publishing.schedule import BASE_REACH, PublicationSchedule
from echo2.learner.rollouts.journal import Journal, SegmentBegan, VersionPublished, read_journal
from echo2.weights import Encoding, HostWeights
from tests.unit.learner.fleet import FollowerBroadcaster


class Watching(FollowerBroadcaster):
    """Notes whether all of the journal was on the disk as an artifact left."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal, self.was_kept = journal, list[bool]()

    async def publish(
        self, version: Version, parent: Version | None, encoding: Encoding, full_snapshot_bytes: int
    ) -> int:
        self.was_kept.append(self.journal._synced == self.journal._appended)
        return await super().publish(version, parent, encoding, full_snapshot_bytes)


class Port:
    """Keeps the versions that workers may sample with."""

    def __init__(self) -> None:
        self.versions: list[Version] = []

    def on_version(self, version: Version) -> None:
        self.versions.append(version)

    def on_artifact(self, artifact: PublishedArtifact) -> None: ...

    def fail(self, error: BaseException) -> None:
        raise error


def test_that_a_version_may_have_left_is_on_the_disk_before_its_first_byte_does(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(SegmentBegan("r", Step(0), 0, (Version(0),)))
    port = Port()

    async def scene() -> None:
        broadcaster = Watching(journal)
        publisher = VersionPublisher(broadcaster, journal, PublicationSchedule(2), port, 7)
        await publisher.take_up({"w": torch.zeros(8, dtype=torch.bfloat16)}, Version(0), None)
        await publisher.publish_soon(Version(1), {"w": torch.ones(8, dtype=torch.bfloat16)})
        await publisher.settled()
        assert broadcaster.versions[:2] == [(0, None), (1, 0)] and broadcaster.was_kept[:2] == [True, True]

    asyncio.run(scene())
    journal.close()
    assert port.versions == [1]
    records, _ = read_journal(tmp_path, Step(0))
    told = [record for _, record in records if isinstance(record, VersionPublished)]
    assert [(one.version, bool(one.fingerprint)) for one in told] == [(1, False), (1, True)]


class Learning:
    """Random walks of some weights, published by one learner process after another."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.base = self.newest = {"w": torch.randn(4096, generator=self.generator).bfloat16()}
        self.weights = {Version(0): self.base}
        self.broadcaster = FollowerBroadcaster()
        self.journal = Journal(folder)
        self.journal.begin(SegmentBegan("r", Step(0), 0, (Version(0),)))
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
        schedule = PublicationSchedule(2, 1, chain_max=self.chance.choice([4, 16]))
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
            if self.is_calm and self.has_base:  # else a keyframe is hardly larger
                reached = max(target for parent, target in self.broadcaster.kept if parent == 0)
                behind = sum(version > reached for version in self.weights)
                assert behind < BASE_REACH, "the delta from the base is renewed"
            self.with_base += 1


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_what_a_newcomer_with_the_base_or_without_follows_leads_to_the_newest_version(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    learning = Learning(seed, tmp_path_factory.mktemp("journal"))

    async def scene() -> None:
        for _ in range(3):
            await learning.process(learning.chance.randrange(4, 40))

    asyncio.run(scene())
    learning.journal.close()
    assert learning.with_base > 0

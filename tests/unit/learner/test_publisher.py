"""Versions out: what is on the disk before a byte leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from echo2.base.ids import Step, Version
from echo2.learner.history import SegmentBegan, VersionPublished
from echo2.learner.publication import PublicationConfig, PublicationSchedule
from echo2.learner.runtime.journal import Journal, read_journal
from echo2.learner.runtime.publisher import PublisherCalls, VersionPublisher
from echo2.weights import Encoding
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


def test_that_a_version_may_have_left_is_on_the_disk_before_its_first_byte_does(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(SegmentBegan("r", Step(0), 0, (Version(0),)))
    left: list[Version] = []

    async def scene() -> None:
        broadcaster = Watching(journal)
        publisher = VersionPublisher(
            broadcaster, journal, PublicationSchedule(PublicationConfig(2)), PublisherCalls(left=left.append), 7
        )
        await publisher.take_up({"w": torch.zeros(8, dtype=torch.bfloat16)}, Version(0), None)
        await publisher.publish_soon(Version(1), {"w": torch.ones(8, dtype=torch.bfloat16)})
        await publisher.settled()
        assert broadcaster.versions[:2] == [(0, None), (1, 0)] and broadcaster.was_kept[:2] == [True, True]

    asyncio.run(scene())
    journal.close()
    assert left == [1]
    records, _ = read_journal(tmp_path, Step(0))
    told = [record for _, record in records if isinstance(record, VersionPublished)]
    assert [(one.version, bool(one.fingerprint)) for one in told] == [(1, False), (1, True)]

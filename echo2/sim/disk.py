"""Simulated disks: what a learner, a coordinator and a worker keep there, and what is left of it after a crash.

Guarantees: a kill loses nothing that was written (the system holds it); a power cut keeps what was synced and any
prefix of the rest, and a write that it tore is not there; a full disk refuses writes with `DiskFull`; what rots is
changed bytes, found by whoever checks them. Leaves to others: framing and checksums, tested on real files.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from echo2.base.errors import DiskFull
from echo2.base.ids import Step, Version
from echo2.broadcast.manifest import ArtifactKey, Chunk, Header, Seal
from echo2.coordinator.saved import Changes, SavedState
from echo2.learner.history import Began, Record


@dataclass(slots=True)
class Disk:
    whose: str
    is_full: bool = False

    def check_room(self, what: str) -> None:
        if self.is_full:
            raise DiskFull(f"{what}: no space left on the disk of {self.whose}")


# ---- the learner's


@dataclass(slots=True)
class KeptCheckpoint:
    step: Step
    weights: dict[str, Tensor]
    published: dict[str, Tensor]
    published_version: Version
    journal_from: Step
    batcher: dict[str, Any]


@dataclass(slots=True)
class LearnerDisk(Disk):
    """Journal records with their segment, how many are safe from a power cut, and whole checkpoints."""

    records: list[tuple[Step, Record]] = field(default_factory=list)
    synced: int = 0
    checkpoints: list[KeptCheckpoint] = field(default_factory=list)
    segment: Step = field(default_factory=lambda: Step(0))
    is_unreadable: bool = False

    def append(self, record: Record) -> None:
        self.check_room("journal")
        self.records.append((self.segment, record))

    def begin(self, first: Began) -> None:
        self.check_room("journal")
        self.segment = first.step
        self.records.append((first.step, first))
        self.sync()

    def sync(self) -> None:
        self.check_room("journal")
        self.synced = len(self.records)

    def keep(self, checkpoint: KeptCheckpoint) -> None:
        """By a rename, once all of it is there. Two are kept, and the segments that the older of them needs."""
        self.check_room(f"checkpoint of step {checkpoint.step}")
        others = [one for one in self.checkpoints if one.step != checkpoint.step]
        self.checkpoints = [*others, checkpoint][-2:]
        needed = self.checkpoints[0].journal_from
        safe = self.records[: self.synced]
        self.records = [one for one in self.records if one[0] >= needed]
        self.synced = len([one for one in safe if one[0] >= needed])

    def tear_badly(self) -> None:
        """A journal whose torn end nobody cuts off: it cannot be read any more."""
        self.is_unreadable = True

    def power_cut(self, rng: random.Random) -> int:
        """Returns how many records are lost."""
        kept = rng.randint(self.synced, len(self.records))
        lost = len(self.records) - kept
        del self.records[kept:]
        return lost


# ---- the coordinator's


@dataclass(slots=True)
class CoordinatorDisk(Disk):
    """All or nothing, durable when `write` returns, as the SQLite store is."""

    state: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"groups": {}, "leases": {}, "members": {}, "meta": {}}
    )

    def write(self, changes: Changes) -> None:
        if changes.is_empty():
            return
        self.check_room("state")
        kept = self.state
        for group in changes.groups:
            kept["groups"][group.spec.group_id] = copy.deepcopy(group)
        for lease in changes.leases:
            kept["leases"][lease.lease_id] = copy.deepcopy(lease)
        for member in changes.members:
            kept["members"][member.peer_id] = copy.deepcopy(member)
        kept["meta"].update(changes.meta)
        for name in changes.groups_dropped:
            kept["groups"].pop(name, None)
        for name in changes.leases_dropped:
            kept["leases"].pop(name, None)

    def load(self) -> SavedState:
        kept = copy.deepcopy(self.state)
        return SavedState(
            groups=tuple(kept["groups"].values()),
            leases=tuple(kept["leases"].values()),
            members=tuple(kept["members"].values()),
            meta=kept["meta"],
        )


# ---- a broadcast node's chunks


@dataclass(slots=True)
class KeptArtifact:
    header: Header
    chunks: dict[int, Chunk] = field(default_factory=dict)
    seal: Seal | None = None


@dataclass(slots=True)
class ChunkDisk(Disk):
    artifacts: dict[ArtifactKey, KeptArtifact] = field(default_factory=dict)

    def create(self, key: ArtifactKey, header: Header) -> None:
        self.check_room("chunks")
        self.artifacts.setdefault(key, KeptArtifact(header))

    def put(self, key: ArtifactKey, chunk: Chunk) -> None:
        self.check_room("chunks")
        self.artifacts[key].chunks[chunk.index] = chunk

    def put_seal(self, key: ArtifactKey, seal: Seal) -> None:
        self.check_room("chunks")
        self.artifacts[key].seal = seal

    def rot(self, rng: random.Random) -> str | None:
        """Flips a bit of one kept chunk; returns which."""
        places = [(key, index) for key, kept in self.artifacts.items() for index in kept.chunks]
        if not places:
            return None
        key, index = rng.choice(places)
        kept = self.artifacts[key]
        data = bytearray(kept.chunks[index].payload)
        if not data:
            return None
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        kept.chunks[index] = replace(kept.chunks[index], payload=bytes(data))
        return f"chunk {index} of {kept.header.artifact}"

    def tear(self, rng: random.Random) -> int:
        """A power cut: the last chunks of artifacts that were not sealed yet are gone."""
        lost = 0
        for kept in self.artifacts.values():
            if kept.seal is None:
                for index in [index for index in kept.chunks if rng.random() < 0.3]:
                    del kept.chunks[index]
                    lost += 1
        return lost

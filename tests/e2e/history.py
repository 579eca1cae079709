"""What a run of real processes leaves behind, and what must be true of it.

The learner deletes journal segments that no checkpoint needs; `Archive` keeps a second name of each, so that the whole
history can be judged at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import Rollout
from echo2.learner.rollouts.journal import read_journal
from echo2.wire.gen.echo2.v1.journal_pb2 import JournalRecord
from echo2.wire.rollout import rollout_from_message


class Archive:
    """Hard links to the journal's segments, made as they appear."""

    def __init__(self, journal: Path, folder: Path) -> None:
        self.journal, self.folder = journal, folder
        folder.mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        """Call it now and then while the run lasts."""
        for path in self.journal.glob("segment-*"):
            with contextlib.suppress(OSError):
                os.link(path, self.folder / path.name)

    def records(self) -> list[JournalRecord]:
        return [record for _, record in read_journal(self.folder, Step(0))[0]]


@dataclass(slots=True)
class Judged:
    """The history of a run, as its journal has it."""

    trained: dict[GroupId, Step] = field(default_factory=dict)
    groups_of: dict[Step, tuple[GroupId, ...]] = field(default_factory=dict)
    finished: dict[tuple[GroupId, int], Rollout] = field(default_factory=dict)
    dropped: set[GroupId] = field(default_factory=set)
    sizes: dict[GroupId, int] = field(default_factory=dict)
    fingerprints: dict[Version, str] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)


def judge(records: list[JournalRecord], staleness_bound: int) -> Judged:
    """Puts the records together; fails where one contradicts another."""
    found = Judged()
    for record in records:
        match record.WhichOneof("kind"):
            case "opened":
                found.sizes[GroupId(record.opened.group.group_id)] = record.opened.group.rollout_count
            case "rollout":
                rollout = rollout_from_message(record.rollout.rollout)
                name = (rollout.group_id, rollout.index)
                known = found.finished.setdefault(name, rollout)
                assert known == rollout, f"rollout {name} was admitted twice, with other tokens"
            case "batch":
                step, names = Step(record.batch.step), tuple(GroupId(each.group_id) for each in record.batch.groups)
                assert found.groups_of.setdefault(step, names) == names, (
                    f"step {step} was drawn twice, with other groups"
                )
                for group_id in names:
                    at = found.trained.setdefault(group_id, step)
                    assert at == step, f"group {group_id} was trained at steps {at} and {step}"
            case "closed":
                found.dropped.add(GroupId(record.closed.group_id))
            case "published" if fingerprint := record.published.fingerprint:
                version = Version(record.published.version)
                known_print = found.fingerprints.setdefault(version, fingerprint)
                assert known_print == fingerprint, f"version {version} was published with two fingerprints"
            case _:
                pass
    _judge_tokens(found, staleness_bound)
    return found


def _judge_tokens(found: Judged, staleness_bound: int) -> None:
    for group_id, step in found.trained.items():
        assert group_id not in found.dropped, f"group {group_id} was dropped and trained"
        for index in range(found.sizes[group_id]):
            rollout = found.finished.get((group_id, index))
            assert rollout is not None, f"step {step} trained rollout {index} of {group_id}, which was never admitted"
            for span in rollout.version_spans:
                lag = step - span.version
                found.lags[lag] += span.count
                assert 0 <= lag <= staleness_bound, f"step {step} trained a token of version {span.version}"


def nothing_is_lost(found: Judged, still_open: set[GroupId], last_step: int) -> None:
    """Every admitted rollout was trained, dropped for a stated reason, or was still waiting at the end."""
    assert sorted(found.groups_of) == list(range(last_step)), "a step is missing from the journal"
    for group_id, index in found.finished:
        is_known = group_id in found.trained or group_id in found.dropped or group_id in still_open
        assert is_known, f"rollout {index} of {group_id} was admitted and is neither trained, dropped nor waiting"

"""The records of the learner's journal, and the state restored from them after a restart.

Guarantees: replaying a journal from a checkpoint's step gives every batch drawn since, in order, with the tokens and rewards that
it was trained on; every admitted rollout that was neither trained on nor dropped; every answer of an evaluation that has no
result yet; and every version that may have been published. Applying a record twice is idempotent. Leaves to others: disks
(journal), training again (replay).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.base.errors import StateError
from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import GroupSpec, Rollout, Work
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Batch, Draw, Group, SentTokens, is_driven, is_later_turn, root_of, turn_of


@dataclass(frozen=True, slots=True)
class SegmentBegan:
    """First record of a journal segment, begun after `step` steps and `cursor` drawn prompts. `published`: versions that
    workers may still name."""

    run_id: str
    step: Step
    cursor: int
    published: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    draw: Draw
    spec: GroupSpec


@dataclass(frozen=True, slots=True)
class Finished:
    """A rollout, or one turn of it, is finished. `senders`: which worker reported which tokens."""

    rollout: Rollout
    senders: tuple[SentTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchDrawn:
    """A batch was drawn. `rewards[g][i]`: the reward of rollout i of the g-th group; None if scoring failed."""

    step: Step
    group_ids: tuple[GroupId, ...]
    rewards: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The version is about to be published (`fingerprint` empty), or was published."""

    version: Version
    fingerprint: str


@dataclass(frozen=True, slots=True)
class EpisodeScored:
    """An agent's episode ended with this reward for its `chains` of calls; None: it failed. Journalled because the reward
    cannot be computed again.

    `lost`: chains that do not count. If not `is_final`, another episode took its seat.
    """

    group_id: GroupId
    chains: tuple[int, ...]
    reward: float | None
    lost: tuple[int, ...] = ()
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class GroupDropped:
    group_id: GroupId


Record = SegmentBegan | Opened | Finished | BatchDrawn | VersionPublished | GroupDropped | EpisodeScored


@dataclass(slots=True)
class History:
    """The state that the records since a checkpoint add up to. `opened_in`: the journal segment of each group."""

    cursor: int = 0
    groups: dict[GroupId, Group] = field(default_factory=dict)
    opened_in: dict[GroupId, Step] = field(default_factory=dict)
    drawn: dict[Step, BatchDrawn] = field(default_factory=dict)
    published: dict[Version, str] = field(default_factory=dict)
    dropped: set[GroupId] = field(default_factory=set)

    def apply(self, record: Record, segment: Step) -> None:
        """Adds a record. `segment`: the step at which the record's journal segment begins."""
        match record:
            case SegmentBegan():
                self.cursor = max(self.cursor, record.cursor)
                for version in record.published:
                    self.published.setdefault(version, "")
            case Opened():
                if record.spec.work is Work.TRAIN:  # the questions of an evaluation have numbers of their own
                    self.cursor = max(self.cursor, record.draw.cursor + 1)
                self._open(record, segment)
            case Finished():
                group = self.groups.get(record.rollout.group_id)
                if group is not None:
                    group.rollouts[record.rollout.index] = record.rollout
                    group.senders[record.rollout.index] = record.senders
            case BatchDrawn():
                self.drawn[record.step] = record
            case VersionPublished():
                self.published[record.version] = record.fingerprint or self.published.get(record.version, "")
            case GroupDropped():
                self.dropped.add(record.group_id)
            case EpisodeScored():
                group = self.groups.get(record.group_id)
                if group is not None:
                    group.end_seat(record.lost, None, is_final=False)
                    group.end_seat(record.chains, record.reward, is_final=record.is_final)

    def _open(self, record: Opened, segment: Step) -> None:
        spec = record.spec
        if spec.group_id not in self.groups or spec.group_id in self.dropped:  # a version may be evaluated again
            self.dropped.discard(spec.group_id)
            self.groups[spec.group_id] = Group.opened(spec, record.draw)
            self.opened_in[spec.group_id] = segment
            root = self.groups.get(root_of(spec.group_id))
            if is_driven(spec.group_id) and is_later_turn(spec.group_id) and root is not None:
                while len(root.rollouts) <= turn_of(spec.group_id, 0).index:
                    root.add_chain()

    def restore(self, groups: OpenGroups) -> None:
        """Adds every group that a later batch or an unfinished evaluation may need; `groups` must be at the checkpoint's step."""
        groups.published = sorted({*groups.published, *self.published})
        trained_before = (drawn.group_ids for step, drawn in self.drawn.items() if step < groups.next_step)
        gone = self.dropped.union(*trained_before)
        for group_id, group in self.groups.items():
            root = root_of(group_id)
            if not {group_id, root} & gone and not groups.ledger.is_trained(root):
                groups.groups[group_id] = group

    def next_batch(self, groups: OpenGroups) -> Batch | None:
        """Draws the batch recorded for the next step again; None if none is recorded. Raises `StateError` if the journal lacks the
        rollouts of one of its groups."""
        record = self.drawn.get(groups.next_step)
        if record is None:
            return None
        missing = [group_id for group_id in record.group_ids if group_id not in groups.groups]
        if missing:
            raise StateError(
                f"journal: expected the rollouts of group {missing[0]} before step {record.step} trained on it, "
                "found none"
            )
        return groups.draw_recorded(record.group_ids, record.rewards)


def drawn_of(batch: Batch) -> BatchDrawn:
    """The record of a batch: enough to draw it again."""
    rewards = []
    for group in batch.groups:
        known = {rollout.index: reward for rollout, reward in zip(group.rollouts, group.rewards, strict=True)}
        rewards.append(tuple(known.get(index) for index in range(group.spec.rollout_count)))
    return BatchDrawn(batch.step, tuple(group.spec.group_id for group in batch.groups), tuple(rewards))

"""One prompt group: the draw that it came from, its rollouts and their rewards.

Guarantees: a group's id is a function of its draw, so that after a restart the same draw gives the same group. Leaves to
others: every decision (batcher).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams
from echo2.learner.episodes import SentTokens, is_later_turn
from echo2.learner.segment import empty_rollout

EXAM_MARK = "e"
"""First letter of the ids of evaluation groups."""
AGENT_MARK = "a"
"""First letter of the ids of groups whose prompts come from agents, call by call, and not from the task."""
AGENT_EXAM_MARK = "x"
"""First letter of the ids of groups with both properties: agents play held-out problems."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Prompt number `cursor` of the run. `retry`: 0 for the first try, then counts up."""

    cursor: int
    retry: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams

    def again(self) -> Draw:
        """The same prompt with the same seed: a worker that lets a group fail or go stale cannot force another sample."""
        return replace(self, retry=self.retry + 1)


def group_id_of(cursor: int, retry: int, *, is_driven: bool = False) -> GroupId:
    mark = AGENT_MARK if is_driven else "g"
    return GroupId(f"{mark}{cursor:08d}" if retry == 0 else f"{mark}{cursor:08d}r{retry}")


def is_driven(group_id: GroupId) -> bool:
    """Whether the group is an agent's problem, or one call of an agent."""
    return group_id.startswith((AGENT_MARK, AGENT_EXAM_MARK))


def is_driven_root(group_id: GroupId) -> bool:
    """Whether the group stands for the episodes of one problem. It is never leased; the agents' calls are."""
    return is_driven(group_id) and not is_later_turn(group_id)


def exam_group_id(version: Version, number: int, retry: int, *, is_driven: bool = False) -> GroupId:
    """The id of question `number` of the evaluation of `version`."""
    mark = AGENT_EXAM_MARK if is_driven else EXAM_MARK
    return GroupId(f"{mark}{version:08d}-{number:05d}" + (f"r{retry}" if retry else ""))


def exam_version_of(group_id: GroupId) -> Version | None:
    """The version that a group (or a turn of one) evaluates; None for a training group."""
    if not group_id.startswith((EXAM_MARK, AGENT_EXAM_MARK)):
        return None
    return Version(int(group_id[1:].partition("-")[0]))


@dataclass(slots=True)
class Group:
    """A prompt's rollouts and rewards.

    `rollouts`: one entry per index, empty at first. `scored`: indices whose reward is known, or whose scoring failed.
    `senders`: by index, which worker reported which tokens. `pruned`: number of rollouts given up as hopeless. `seats_open`:
    number of agents' episodes that have not ended; in a group of agents each rollout is one chain of calls and has no tokens.
    """

    spec: GroupSpec
    draw: Draw
    rollouts: list[Rollout]
    rewards: dict[int, float | None] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    lease_attempt: int = 0
    senders: dict[int, tuple[SentTokens, ...]] = field(default_factory=dict)
    pruned: int = 0
    seats_open: int = 0

    @property
    def is_sampled(self) -> bool:
        return all(rollout.is_finished for rollout in self.rollouts)

    @property
    def is_ready(self) -> bool:
        return self.seats_open == 0 and len(self.scored) == len(self.rollouts)

    @property
    def begun_rollouts(self) -> int:
        if is_driven_root(self.spec.group_id):
            return len(self.rollouts)
        return sum(bool(rollout.token_ids) for rollout in self.rollouts)

    @property
    def oldest_version(self) -> Version:
        """The oldest version of all tokens; a version beyond all others if there are no tokens."""
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=Version(1 << 62))


def opened_group(spec: GroupSpec, draw: Draw) -> Group:
    """A group before its first sampled token."""
    if is_driven_root(spec.group_id):
        return Group(spec, draw, [], seats_open=spec.rollout_count)
    return Group(spec, draw, [empty_rollout(spec.group_id, index) for index in range(spec.rollout_count)])


def add_chain(group: Group) -> int:
    """Adds a chain of an agent's calls; returns its index."""
    index = len(group.rollouts)
    group.rollouts.append(replace(empty_rollout(group.spec.group_id, index), finish_reason=FinishReason.STOP))
    return index


def end_seat(group: Group, chains: Iterable[int], reward: float | None, *, is_final: bool) -> None:
    """Records that an episode with these `chains` ended with `reward`. If not `is_final`, it was lost, and its seat stays
    open for another episode."""
    for chain in chains:
        while len(group.rollouts) <= chain:
            add_chain(group)
        group.rewards[chain] = reward if is_final else None
        group.scored.add(chain)
    group.seats_open -= is_final

"""One prompt on its way: the draw that it came from, the rollouts held of it, their rewards.

Guarantees: a group's id is a function of its draw, so that after a restart the same draw is the same group. Leaves to
others: every decision (batcher).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import GroupSpec, Rollout, SamplingParams
from echo2.learner.episodes import SentTokens

EXAM_MARK = "e"
"""With which ids of groups begin that evaluate; those to train on begin with another letter."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Prompt number `cursor` of the run, in its `retry`-th try after the first."""

    cursor: int
    retry: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams

    def again(self) -> Draw:
        """The same prompt by the same random numbers: who makes a group fail, or stale, does not draw another sample by it."""
        return replace(self, retry=self.retry + 1)


def group_id_of(cursor: int, retry: int) -> GroupId:
    return GroupId(f"g{cursor:08d}" if retry == 0 else f"g{cursor:08d}r{retry}")


def exam_group_id(version: Version, number: int, retry: int) -> GroupId:
    """Of question `number` of the evaluation of `version`."""
    return GroupId(f"{EXAM_MARK}{version:08d}-{number:05d}" + (f"r{retry}" if retry else ""))


def exam_version_of(group_id: GroupId) -> Version | None:
    """The version that a group, or a turn of one, evaluates; None of one to train on."""
    if not group_id.startswith(EXAM_MARK):
        return None
    return Version(int(group_id[len(EXAM_MARK) :].partition("-")[0]))


@dataclass(slots=True)
class Group:
    """`rollouts` has one entry an index, empty at first; `scored`: indices whose reward is known, or known to fail.

    `senders`: by index, who reported which of its tokens. `pruned`: how many of its rollouts were given up.
    """

    spec: GroupSpec
    draw: Draw
    rollouts: list[Rollout]
    rewards: dict[int, float | None] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    lease_attempt: int = 0
    senders: dict[int, tuple[SentTokens, ...]] = field(default_factory=dict)
    pruned: int = 0

    @property
    def is_sampled(self) -> bool:
        return all(rollout.is_finished for rollout in self.rollouts)

    @property
    def is_ready(self) -> bool:
        return len(self.scored) == len(self.rollouts)

    @property
    def begun_rollouts(self) -> int:
        return sum(bool(rollout.token_ids) for rollout in self.rollouts)

    @property
    def oldest_version(self) -> Version:
        """Of all its tokens; the newest possible while it has none."""
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=Version(1 << 62))

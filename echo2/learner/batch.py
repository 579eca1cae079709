"""What a step trains on: complete groups with their rewards, as the shelf hands them out.

Leaves to others: which groups (shelf), tensors (runtime/collate).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import Step
from echo2.base.rollout import GroupSpec, Rollout
from echo2.learner.episodes import Insertion, SentTokens


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A complete group as it is trained on. Rollouts whose reward failed are left out, so it may be ragged.

    `rollouts` hold the sampled tokens alone. `insertions` holds, for each of them, what the world said in between,
    which is read and not trained on; empty for a group of one turn. `senders` says who reported which tokens.
    """

    spec: GroupSpec
    cursor: int
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float, ...]
    insertions: tuple[tuple[Insertion, ...], ...] = ()
    senders: tuple[tuple[SentTokens, ...], ...] = ()

    def text_of(self, index: int) -> tuple[list[int], list[int]]:
        """All tokens behind the prompt of its rollout `index`, the world's among them, and the places of the sampled ones."""
        token_ids = self.rollouts[index].token_ids
        text: list[int] = []
        sampled_at: list[int] = []
        begin = 0
        for insertion in self.insertions[index] if self.insertions else ():
            sampled_at += range(len(text), len(text) + insertion.position - begin)
            text += [*token_ids[begin : insertion.position], *insertion.token_ids]
            begin = insertion.position
        sampled_at += range(len(text), len(text) + len(token_ids) - begin)
        text += token_ids[begin:]
        return text, sampled_at

    def tokens_of(self, index: int) -> int:
        """All tokens behind the prompt of its rollout `index`, the world's included."""
        said = self.insertions[index] if self.insertions else ()
        return len(self.rollouts[index].token_ids) + sum(len(insertion.token_ids) for insertion in said)


@dataclass(frozen=True, slots=True)
class Batch:
    """What step `step` trains on: `step` optimiser steps are complete before it."""

    step: Step
    groups: tuple[TrainGroup, ...]

    @property
    def rollout_count(self) -> int:
        return sum(len(group.rollouts) for group in self.groups)

"""What a step trains on: complete groups with their rewards, as drawn from the shelf.

Leaves to others: which groups (shelf), tensors (runtime/collate).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.base.ids import Step
from echo2.base.rollout import GroupSpec, Rollout
from echo2.learner.episodes import Insertion, SentTokens


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A complete group. Rollouts whose reward failed are left out, so it may be ragged.

    `rollouts` hold only the sampled tokens. `insertions` holds, for each rollout, the environment's tokens in between, which
    the model reads but is not trained on; empty if all rollouts have one turn. `senders`: which worker reported which tokens.
    """

    spec: GroupSpec
    cursor: int
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float, ...]
    insertions: tuple[tuple[Insertion, ...], ...] = ()
    senders: tuple[tuple[SentTokens, ...], ...] = ()

    def text_of(self, index: int) -> tuple[list[int], list[int]]:
        """All tokens after the prompt of rollout `index`, the environment's included, and the indices of the sampled ones."""
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
        """Number of tokens after the prompt of rollout `index`, the environment's included."""
        said = self.insertions[index] if self.insertions else ()
        return len(self.rollouts[index].token_ids) + sum(len(insertion.token_ids) for insertion in said)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups that optimiser step `step`, counted from 0, trains on."""

    step: Step
    groups: tuple[TrainGroup, ...]

    @property
    def rollout_count(self) -> int:
        return sum(len(group.rollouts) for group in self.groups)

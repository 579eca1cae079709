"""A planned micro-batch as tensors.

Guarantees: a completion attends to its prompt and to itself only, its positions count on from the prompt's end, and
padding attends to itself (a row of a softmax is never empty). Leaves to others: the layout (learner/packing).

Shapes: B rows, W positions of a row, T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from echo2.learner.batch import TrainGroup
from echo2.learner.packing import GroupLengths, MicroBatch


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """What the forward pass takes. `predictor_T`: flat position (row * W + column) whose hidden state predicts token i.

    `mask_BWW` is True where attention is allowed; None for a row layout that plain causal attention serves.
    """

    token_ids_BW: Tensor
    positions_BW: Tensor
    mask_BWW: Tensor
    predictor_T: Tensor
    target_T: Tensor

    def to(self, device: torch.device) -> PackedInputs:
        if device.type == "cpu":
            return self
        moved = (t.to(device, non_blocking=True) for t in (self.token_ids_BW, self.positions_BW, self.mask_BWW))
        ids, positions, mask = moved
        return PackedInputs(ids, positions, mask, self.predictor_T.to(device), self.target_T.to(device))


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`inputs`, and for each of its T tokens what is known of it. `sequence_T` counts rollouts over the micro-batch."""

    inputs: PackedInputs
    behaviour_T: Tensor
    sequence_T: Tensor
    rollout_R: Tensor  # index of each rollout in the flat list of the whole batch

    @property
    def token_count(self) -> int:
        return int(self.sequence_T.numel())

    def behind(self, rollouts: int) -> PackedBatch:
        """The same of groups that stand behind so many rollouts of the whole batch."""
        return replace(self, rollout_R=self.rollout_R + rollouts) if rollouts else self


def lengths_of(groups: Sequence[TrainGroup]) -> list[GroupLengths]:
    return [GroupLengths(len(g.spec.prompt_token_ids), tuple(map(g.tokens_of, range(len(g.rollouts))))) for g in groups]


def collate(groups: Sequence[TrainGroup], micro: MicroBatch) -> PackedBatch:
    """Lays out one micro-batch of `groups`."""
    first_rollout = _flat_offsets(groups)
    shape = (len(micro.rows), micro.width)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    # Two tokens see one another if both are of one unit and the earlier is of the prompt (part 0) or of the same part.
    unit, part = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    predictors: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    sequence: list[int] = []
    flat: list[int] = []
    for b, row in enumerate(micro.rows):
        column = 0
        for number, piece in enumerate(row):
            group = groups[piece.group]
            prompt = group.spec.prompt_token_ids
            start, end = column, column + piece.tokens
            unit[b, start:end] = number
            ids[b, start : start + len(prompt)] = torch.tensor(prompt)
            positions[b, start : start + len(prompt)] = torch.arange(len(prompt))
            last_of_prompt = b * micro.width + start + len(prompt) - 1
            column = start + len(prompt)
            for member_number, member in enumerate(piece.members):
                rollout = group.rollouts[member]
                text, sampled_at = group.text_of(member)
                count = len(text)
                ids[b, column : column + count] = torch.tensor(text)
                positions[b, column : column + count] = torch.arange(len(prompt), len(prompt) + count)
                part[b, column : column + count] = member_number + 1
                base = b * micro.width + column
                predictors += [base + place - 1 if place else last_of_prompt for place in sampled_at]
                targets += rollout.token_ids
                behaviour += group.spec.sampling.trained_logprobs(rollout.logprobs, rollout.raw_logprobs)
                sequence += [len(flat)] * len(rollout.token_ids)
                flat.append(first_rollout[piece.group] + member)
                column += count
    inputs = PackedInputs(ids, positions, _mask(unit, part), torch.tensor(predictors), torch.tensor(targets))
    return PackedBatch(inputs, torch.tensor(behaviour, dtype=torch.float32), torch.tensor(sequence), torch.tensor(flat))


def _mask(unit_BW: Tensor, part_BW: Tensor) -> Tensor:
    width = unit_BW.shape[1]
    same_unit = unit_BW[:, :, None] == unit_BW[:, None, :]
    visible_part = (part_BW[:, None, :] == 0) | (part_BW[:, :, None] == part_BW[:, None, :])
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return same_unit & visible_part & causal  # padding is a unit of its own, causal: it sees itself


def _flat_offsets(groups: Sequence[TrainGroup]) -> list[int]:
    offsets = [0]
    for group in groups:
        offsets.append(offsets[-1] + len(group.rollouts))
    return offsets

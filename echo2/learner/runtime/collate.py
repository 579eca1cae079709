"""Turns a planned micro-batch into tensors.

Guarantees: a completion attends only to its prompt and to itself, and its positions continue from the prompt's end. Leaves to
others: the layout (learner/packing), masks (attention).

Shapes: B rows, W positions per row, P = B * W, T sampled tokens, R rollouts; in a mixture of experts, L routers that each choose
K experts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from echo2.base.errors import MalformedMessage
from echo2.base.routing import RoutingShape, unpacked
from echo2.learner.batch import TrainGroup
from echo2.learner.packing import GroupLengths, MicroBatch
from echo2.learner.runtime.attention import UnitTree

_log = logging.getLogger("echo2.learner")


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Inputs of the forward pass. `predictor_T`: flat position (row * W + column) whose hidden state predicts each sampled token.
    `experts_PLK`: int16, the experts that routers replay at each flat position; negative where routers choose themselves."""

    token_ids_BW: Tensor
    positions_BW: Tensor
    tree: UnitTree
    predictor_T: Tensor
    target_T: Tensor
    experts_PLK: Tensor | None = None

    def to(self, device: torch.device) -> PackedInputs:
        if device.type == "cpu":
            return self
        given = (self.token_ids_BW, self.positions_BW, self.predictor_T, self.target_T)
        ids, positions, predictor, target = (tensor.to(device, non_blocking=True) for tensor in given)
        experts = None if self.experts_PLK is None else self.experts_PLK.to(device, non_blocking=True)
        return PackedInputs(ids, positions, self.tree.to(device), predictor, target, experts)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Inputs, and facts about each of the T sampled tokens. `behaviour_T`: float32 log-probabilities under the behaviour policy.
    `sequence_T`: the token's rollout, numbered within the micro-batch."""

    inputs: PackedInputs
    behaviour_T: Tensor
    sequence_T: Tensor
    rollout_R: Tensor  # index of each rollout in the flat list of the whole batch

    @property
    def token_count(self) -> int:
        return int(self.sequence_T.numel())

    def behind(self, rollouts: int) -> PackedBatch:
        """The same batch with its rollout numbers shifted by `rollouts`, the rollouts of the whole batch before its groups."""
        return replace(self, rollout_R=self.rollout_R + rollouts) if rollouts else self


def collated(
    groups: Sequence[TrainGroup], layout: Iterable[MicroBatch], multiple: int = 1, routing: RoutingShape | None = None
) -> Iterator[PackedBatch]:
    """Yields each micro-batch as tensors, in order; prepares only the next one while the caller computes."""
    rest = iter(layout)
    first = next(rest, None)
    if first is None:
        return
    made = collate(groups, first, multiple, routing)
    with ThreadPoolExecutor(1, "collate") as pool:  # starts its thread only for a second micro-batch
        for micro in rest:
            following = pool.submit(collate, groups, micro, multiple, routing)
            yield made
            made = following.result()
        yield made


def lengths_of(groups: Sequence[TrainGroup]) -> list[GroupLengths]:
    return [GroupLengths(len(g.spec.prompt_token_ids), tuple(map(g.tokens_of, range(len(g.rollouts))))) for g in groups]


def collate(
    groups: Sequence[TrainGroup], micro: MicroBatch, multiple: int = 1, routing: RoutingShape | None = None
) -> PackedBatch:
    """Lays out one micro-batch of `groups`, its rows padded to a multiple of `multiple` positions. With `routing`, includes the
    experts that a model with that routing shape replays."""
    first_rollout = _flat_offsets(groups)
    width = -(-micro.width // multiple) * multiple
    shape = (len(micro.rows), width)
    # In numpy: each rollout takes several writes of a few tokens, and torch needs ten times as long for each.
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    unit = np.tile(-np.arange(1, width + 1, dtype=np.int32), (len(micro.rows), 1))
    part = np.zeros(shape, np.int32)
    counting = np.arange(width, dtype=np.int64)
    experts_PLK = None
    if routing is not None:
        size = (shape[0] * width, routing.routers, routing.chosen)
        experts_PLK = torch.full(size, -1, dtype=torch.int16)
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
            ids[b, start : start + len(prompt)] = prompt
            positions[b, start : start + len(prompt)] = counting[: len(prompt)]
            last_of_prompt = b * width + start + len(prompt) - 1
            if experts_PLK is not None and routing is not None:
                _lay_prompt(experts_PLK, group, b * width + start, routing)
            column = start + len(prompt)
            for member_number, member in enumerate(piece.members):
                rollout = group.rollouts[member]
                text, sampled_at = group.text_of(member)
                count = len(text)
                ids[b, column : column + count] = text
                positions[b, column : column + count] = counting[len(prompt) : len(prompt) + count]
                part[b, column : column + count] = member_number + 1
                base = b * width + column
                places = [base + place - 1 if place else last_of_prompt for place in sampled_at]
                if experts_PLK is not None and routing is not None:
                    _lay_rows(experts_PLK, rollout.routing.tokens, places, routing)
                predictors += places
                targets += rollout.token_ids
                behaviour += group.spec.sampling.trained_logprobs(rollout.logprobs, rollout.raw_logprobs)
                sequence += [len(flat)] * len(rollout.token_ids)
                flat.append(first_rollout[piece.group] + member)
                column += count
    tree = UnitTree(torch.from_numpy(unit), torch.from_numpy(part))
    laid = torch.from_numpy(ids), torch.from_numpy(positions)
    inputs = PackedInputs(*laid, tree, torch.tensor(predictors), torch.tensor(targets), experts_PLK)
    return PackedBatch(inputs, torch.tensor(behaviour, dtype=torch.float32), torch.tensor(sequence), torch.tensor(flat))


def _lay_prompt(experts_PLK: Tensor, group: TrainGroup, start: int, routing: RoutingShape) -> None:
    """Lays out the routing of a group's prompt, which only one rollout of the group reports."""
    rows = next((rollout.routing.prompt for rollout in group.rollouts if rollout.routing.prompt), b"")
    _lay_rows(experts_PLK, rows, range(start, start + len(group.spec.prompt_token_ids) - 1), routing)


def _lay_rows(experts_PLK: Tensor, rows: bytes, places: Sequence[int], routing: RoutingShape) -> None:
    """Lays out the routing of `places`; if it is missing or does not fit this model, the model's own routers choose."""
    if not rows or len(rows) != len(places) * routing.row_bytes:
        return
    try:
        experts_PLK[list(places)] = torch.from_numpy(unpacked(rows, routing))
    except MalformedMessage as error:
        _log.warning("a rollout is trained on by the model's own routing: %s", error)


def _flat_offsets(groups: Sequence[TrainGroup]) -> list[int]:
    offsets = [0]
    for group in groups:
        offsets.append(offsets[-1] + len(group.rollouts))
    return offsets

"""A planned micro-batch as tensors.

Guarantees: a completion attends to its prompt and to itself only, and its positions count on from the prompt's end. Leaves to
others: the layout (learner/packing), masks (attention).

Shapes: B rows, W positions of a row, P = B * W, T sampled tokens; of a mixture of experts L routers, each of which chooses K.
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
    """What the forward pass takes. `predictor_T`: flat position (row * W + column) whose hidden state predicts token i.
    `experts_PLK`: for every flat position, the experts that routers replay; negative where they choose themselves."""

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


def collated(
    groups: Sequence[TrainGroup], layout: Iterable[MicroBatch], multiple: int = 1, routing: RoutingShape | None = None
) -> Iterator[PackedBatch]:
    """Each micro-batch as tensors, in order: the next one is made while the caller computes with the last, no more."""
    rest = iter(layout)
    first = next(rest, None)
    if first is None:
        return
    made = collate(groups, first, multiple, routing)
    with ThreadPoolExecutor(1, "collate") as pool:  # starts its thread only where there is a second one
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
    """Lays out one micro-batch of `groups`, its rows padded to a `multiple` of positions; with what a model of that shape
    replays of its routing, where one is given."""
    first_rollout = _flat_offsets(groups)
    width = -(-micro.width // multiple) * multiple
    shape = (len(micro.rows), width)
    # In numpy: there are several writes a rollout, each of a few tokens, and torch takes ten times as long for one.
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
    """Of a group one rollout says its prompt's routing."""
    rows = next((rollout.routing.prompt for rollout in group.rollouts if rollout.routing.prompt), b"")
    _lay_rows(experts_PLK, rows, range(start, start + len(group.spec.prompt_token_ids) - 1), routing)


def _lay_rows(experts_PLK: Tensor, rows: bytes, places: Sequence[int], routing: RoutingShape) -> None:
    """What does not fit this model, or was not told, is left to its own routers."""
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

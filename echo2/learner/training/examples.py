"""The layout of examples that a training client chose itself, and the losses over them.

The losses are summed over targets, not averaged, so that the gradients of any number of calls add up to that of one; a client
divides by its weights or advantages. Their definitions are those of Tinker's API. Leaves to others: the forward pass (model), the
update (trainer).

Shapes: N tokens of an example, K targets of each token (`base/examples`), T targets of a packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from echo2.base.examples import ClientLoss, Example
from echo2.learner.training.loss import masked_log_ratio
from echo2.learner.training.packing import GroupLengths, MicroBatch, PackedInputs, UnitTree


def collate_examples(
    examples: Sequence[Example], micro: MicroBatch, multiple: int = 1
) -> tuple[PackedInputs, np.ndarray]:
    """Lays out one micro-batch, its rows padded to a multiple of `multiple`; returns it with the place of each of its T targets
    among those of all examples, joined in order."""
    begins = np.cumsum([0, *(example.targets_NK.size for example in examples)])
    width = -(-micro.width // multiple) * multiple
    shape = (len(micro.rows), width)
    ids, positions, part = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    unit = np.tile(-np.arange(1, width + 1, dtype=np.int32), (len(micro.rows), 1))
    predictors, targets, places = [], [], []
    for b, row in enumerate(micro.rows):
        column = 0
        for number, piece in enumerate(row):
            example = examples[piece.group]
            count, per_token = example.targets_NK.shape
            span = slice(column, column + count)
            unit[b, span], ids[b, span], positions[b, span] = number, example.token_ids_N, np.arange(count)
            predictors.append(np.repeat(b * width + column + np.arange(count), per_token))
            targets.append(example.targets_NK.reshape(-1))
            places.append(begins[piece.group] + np.arange(count * per_token))
            column += count
    tree = UnitTree(torch.from_numpy(unit), torch.from_numpy(part))
    predictor_T, target_T = (torch.from_numpy(np.concatenate(parts)) for parts in (predictors, targets))
    laid = torch.from_numpy(ids), torch.from_numpy(positions)
    return PackedInputs(*laid, tree, predictor_T, target_T), np.concatenate(places)


def example_lengths(examples: Sequence[Example]) -> list[GroupLengths]:
    return [GroupLengths(0, (len(example.token_ids_N),)) for example in examples]


# ---- losses: each target's, with gradient. r is the ratio current over sampling policy, A the advantage


def client_losses(loss: ClientLoss, logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Each target's loss."""
    return _LOSSES[loss.name](loss, logprobs_T, columns)


def _cross_entropy(_: ClientLoss, logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    # Replaced, not multiplied: a target of weight 0 may have a log-probability of minus infinity.
    return torch.where(columns["weights"] == 0, 0.0, -logprobs_T * columns["weights"])


def _importance_sampling(_: ClientLoss, logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return -_ratio(logprobs_T, columns) * columns["advantages"]


def _ppo(how: ClientLoss, logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    ratio_T, advantage_T = _ratio(logprobs_T, columns), columns["advantages"]
    return -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(how.clip_low, how.clip_high) * advantage_T)


def _cispo(how: ClientLoss, logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    weight_T = _ratio(logprobs_T, columns).detach().clamp(how.clip_low, how.clip_high) * columns["advantages"]
    return torch.where(weight_T == 0, 0.0, -weight_T * logprobs_T)


def _dro(how: ClientLoss, logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """-(A log p - beta / 2 (log r)^2)."""
    log_ratio_T = _log_ratio(logprobs_T, columns)
    gained_T = torch.where(columns["advantages"] == 0, 0.0, logprobs_T * columns["advantages"])
    return 0.5 * how.beta * log_ratio_T.square() - gained_T


def _log_ratio(logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return masked_log_ratio(logprobs_T, columns["logprobs"], torch.isfinite(logprobs_T))


def _ratio(logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return _log_ratio(logprobs_T, columns).exp()


_LOSSES: Mapping[str, Callable[[ClientLoss, Tensor, Mapping[str, Tensor]], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}  # one for each of LOSS_COLUMNS

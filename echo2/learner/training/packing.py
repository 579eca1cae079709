"""How a batch is laid out for the forward pass: prompts shared, completions packed into rows, rows into micro-batches.

Guarantees: every completion is placed exactly once, whole, in a unit that begins with its prompt; a micro-batch has at most
`token_budget` positions, padding included, unless a single row is longer. The layout depends only on the lengths, so a
batch that is replayed is computed in the same order. Tensors and masks: `collate`.

A unit is one prompt followed by some of its completions; a completion attends to its prompt and itself, never to a sibling.
So n completions of a prompt cost one pass over the prompt instead of n. Units are packed into rows, first fit, longest
first. Rows with a mask are kept short (`row_tokens`) because the cost of dense attention grows with the square of a row's
length; attention by units has no such limit, but costs some time a part. `cheapest` compares both.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from echo2.base.errors import MalformedMessage
from echo2.base.rollout import ClientLoss, Example, RoutingShape, unpacked
from echo2.learner.rollouts.groups import TrainGroup
from echo2.learner.training.loss import masked_log_ratio

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """`token_budget`: positions per micro-batch. `row_tokens`: length to which rows are filled; if the batch's longest
    completion with its prompt is longer, that length applies instead. `is_packed`: whether a row may hold several
    completions; else each has a row to itself."""

    token_budget: int
    row_tokens: int
    is_packed: bool = True


@dataclass(frozen=True, slots=True)
class GroupLengths:
    prompt: int
    completions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """The prompt of `group`, followed by its completions `members` (indices within the group), in that order."""

    group: int
    members: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of units, each padded to `width`. `by_units`: attention goes unit by unit, without a mask."""

    width: int
    rows: tuple[tuple[Unit, ...], ...]
    by_units: bool = False

    @property
    def positions(self) -> int:
        return self.width * len(self.rows)


def plan_microbatches(groups: Sequence[GroupLengths], limits: PackingLimits) -> list[MicroBatch]:
    longest = max((g.prompt + c for g in groups for c in g.completions), default=0)
    row_tokens = max(longest, min(limits.row_tokens, limits.token_budget))
    units = [unit for index, group in enumerate(groups) for unit in _units(index, group, row_tokens, limits)]
    units.sort(key=lambda unit: -unit.tokens)
    rows = _first_fit(units, row_tokens) if limits.is_packed else [[unit] for unit in units]
    return _stacked(sorted(rows, key=_row_tokens, reverse=True), limits.token_budget)


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """What attention costs a layer, in operations like those of `position`, which all of the model's take: `pair` of positions,
    `part` of a unit."""

    position: float
    pair: float
    part: float

    def of(self, layout: Sequence[MicroBatch], groups: Sequence[GroupLengths]) -> float:
        return sum(self._of_micro(micro, groups) for micro in layout)

    def _of_micro(self, micro: MicroBatch, groups: Sequence[GroupLengths]) -> float:
        if not micro.by_units:
            return self.position * micro.positions + self.pair * micro.positions * micro.width
        cost = self.position * micro.positions
        for unit in (unit for row in micro.rows for unit in row):
            group = groups[unit.group]
            after = [group.completions[member] for member in unit.members]
            pairs = group.prompt * (group.prompt / 2 + sum(after)) + sum(length * length / 2 for length in after)
            cost += self.pair * pairs + self.part * (2 + len(after))
        return cost


def cheapest(groups: Sequence[GroupLengths], limits: PackingLimits, costs: AttentionCosts) -> list[MicroBatch]:
    """The cheaper of two layouts: rows of `limits.row_tokens` with a mask, or rows as long as the budget, unit by unit."""
    masked = plan_microbatches(groups, limits)
    long_rows = plan_microbatches(groups, replace(limits, row_tokens=limits.token_budget))
    by_units = [replace(micro, by_units=True) for micro in long_rows]
    return min(masked, by_units, key=lambda layout: costs.of(layout, groups))


def _units(index: int, group: GroupLengths, row_tokens: int, limits: PackingLimits) -> list[Unit]:
    units: list[Unit] = []
    members: list[int] = []
    tokens = group.prompt
    for member, length in enumerate(group.completions):
        if members and (tokens + length > row_tokens or not limits.is_packed):
            units.append(Unit(index, tuple(members), tokens))
            members, tokens = [], group.prompt
        members.append(member)
        tokens += length
    if members:
        units.append(Unit(index, tuple(members), tokens))
    return units


def _first_fit(units: Sequence[Unit], row_tokens: int) -> list[list[Unit]]:
    rows: list[list[Unit]] = []
    free: list[int] = []
    for unit in units:
        place = next((i for i, room in enumerate(free) if room >= unit.tokens), None)
        if place is None:
            rows.append([unit])
            free.append(row_tokens - unit.tokens)
        else:
            rows[place].append(unit)
            free[place] -= unit.tokens
    return rows


def _row_tokens(row: Sequence[Unit]) -> int:
    return sum(unit.tokens for unit in row)


def _stacked(rows: Sequence[Sequence[Unit]], token_budget: int) -> list[MicroBatch]:
    """Stacks rows, given longest first, into micro-batches. Each is as wide as its first row."""
    stacks: list[list[tuple[Unit, ...]]] = []
    for row in rows:
        if stacks and (len(stacks[-1]) + 1) * _row_tokens(stacks[-1][0]) <= token_budget:
            stacks[-1].append(tuple(row))
        else:
            stacks.append([tuple(row)])
    return [MicroBatch(_row_tokens(stack[0]), tuple(stack)) for stack in stacks]


BLOCK, BAND_BLOCKS = 128, 16
"""Positions per side of a block: FlexAttention's own default. Blocks of a band: with one, a mask of 16,384 took an H200 40 ms."""


class Attention(enum.Enum):
    DENSE = "dense"  # torch's scaled_dot_product_attention with a mask of W x W
    FLEX = "flex"  # torch's FlexAttention with a block mask; no gradient on a CPU


@dataclass(frozen=True, slots=True)
class UnitTree:
    """Unit and part of each position: `unit_BW` and `part_BW`, int32. Each padding position is its own unit. `places_BW`: the
    place of each position in its own sequence, where attention reaches back over a `window` of places only."""

    unit_BW: Tensor
    part_BW: Tensor
    places_BW: Tensor | None = None
    window: int = 0

    def to(self, device: torch.device) -> UnitTree:
        return UnitTree(self.unit_BW.to(device, non_blocking=True), self.part_BW.to(device, non_blocking=True))

    def visible(self, b: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether position `query` attends to position `key` in row `b`; the arguments are index tensors that broadcast."""
        part = self.part_BW[b, key]
        same_part = (part == 0) | (part == self.part_BW[b, query])
        allowed = (self.unit_BW[b, key] == self.unit_BW[b, query]) & same_part & (key <= query)
        if self.places_BW is None:
            return allowed
        return allowed & (self.places_BW[b, query] - self.places_BW[b, key] < self.window)


def dense_mask(tree: UnitTree) -> Tensor:
    """Returns a bool mask of shape (B, W, W), True where attention is allowed."""
    rows, width = tree.unit_BW.shape
    at = torch.arange(max(rows, width), device=tree.unit_BW.device)
    return tree.visible(at[:rows, None, None], at[None, :width, None], at[None, None, :width])


def block_mask(tree: UnitTree) -> BlockMask:
    """Finds the blocks with any allowed pair, and those with only allowed pairs, for which FlexAttention evaluates no mask.
    Works through bands of 2,048 queries, so that no W x W tensor exists (32 MiB for a row of 16,384) and a GPU has few calls."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, width = tree.unit_BW.shape
    assert width % BLOCK == 0, "rows of whole blocks"
    blocks, device = width // BLOCK, tree.unit_BW.device
    any_BNN = torch.zeros(rows, blocks, blocks, dtype=torch.bool, device=device)
    all_BNN = torch.zeros_like(any_BNN)
    b, key = torch.arange(rows, device=device)[:, None, None], torch.arange(width, device=device)[None, None, :]
    for first in range(0, blocks, BAND_BLOCKS):
        band = slice(first, min(first + BAND_BLOCKS, blocks))
        query = torch.arange(band.start * BLOCK, band.stop * BLOCK, device=device)[None, :, None]
        allowed = tree.visible(b, query, key).view(rows, band.stop - first, BLOCK, blocks, BLOCK)
        any_BNN[:, band] = allowed.any(4).any(2)
        all_BNN[:, band] = allowed.all(4).all(2)
    partial, full = _ordered(any_BNN & ~all_BNN), _ordered(all_BNN)

    def mask_mod(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return tree.visible(b, query, key)

    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(width, width))


def _ordered(held_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Number of blocks per band of queries, and their indices in ascending order, with a head dimension of 1."""
    numbers_BN = held_BNN.sum(-1, dtype=torch.int32)
    indices_BNN = torch.argsort(held_BNN.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return numbers_BN[:, None], indices_BNN[:, None]


_log = logging.getLogger("echo2.learner")


@dataclass(frozen=True, slots=True)
class UnitSpan:
    """A unit in row `row`: its prompt at positions `begin` .. `prompt_end`, then completions that end at `ends`."""

    row: int
    begin: int
    prompt_end: int
    ends: tuple[int, ...]

    def parts(self) -> Iterator[tuple[slice, slice, bool]]:
        """Queries, keys, and whether a query attends only to keys up to itself. Together they are all allowed pairs."""
        prompt = slice(self.begin, self.prompt_end)
        if self.prompt_end > self.begin:  # chats may share nothing, and the kernel would divide by its length
            yield prompt, prompt, True
            yield slice(self.prompt_end, self.ends[-1]), prompt, False
        for begin, end in pairwise((self.prompt_end, *self.ends)):
            yield slice(begin, end), slice(begin, end), True


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Inputs of the forward pass. `predictor_T`: flat position (row * W + column) whose hidden state predicts each sampled token.
    `experts_PLK`: int16, the experts that routers replay at each flat position; negative where routers choose themselves. `spans`:
    the units, where attention goes by them."""

    token_ids_BW: Tensor
    positions_BW: Tensor
    tree: UnitTree
    predictor_T: Tensor
    target_T: Tensor
    experts_PLK: Tensor | None = None
    spans: tuple[UnitSpan, ...] = ()

    def to(self, device: torch.device) -> PackedInputs:
        if device.type == "cpu":
            return self
        tensors = (self.token_ids_BW, self.positions_BW, self.predictor_T, self.target_T)
        ids, positions, predictor, target = (tensor.to(device, non_blocking=True) for tensor in tensors)
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


def collated(
    groups: Sequence[TrainGroup], layout: Iterable[MicroBatch], multiple: int = 1, routing: RoutingShape | None = None,
    rollouts_before: int = 0,
) -> Iterator[PackedBatch]:  # fmt: skip
    """Yields each micro-batch as tensors, in order; prepares only the next one while the caller computes."""
    rest = iter(layout)
    first = next(rest, None)
    if first is None:
        return
    how = (multiple, routing, rollouts_before)
    batch = collate(groups, first, *how)
    with ThreadPoolExecutor(1, "collate") as pool:  # starts its thread only for a second micro-batch
        for micro in rest:
            following = pool.submit(collate, groups, micro, *how)
            yield batch
            batch = following.result()
        yield batch


def lengths_of(groups: Sequence[TrainGroup]) -> list[GroupLengths]:
    return [GroupLengths(len(g.spec.prompt_token_ids), tuple(map(g.tokens_of, range(len(g.rollouts))))) for g in groups]


def collate(
    groups: Sequence[TrainGroup], micro: MicroBatch, multiple: int = 1, routing: RoutingShape | None = None,
    rollouts_before: int = 0,
) -> PackedBatch:  # fmt: skip
    """Lays out one micro-batch of `groups`, its rows padded to a multiple of `multiple` positions. With `routing`, includes the
    experts that a model with that routing shape replays. `rollouts_before`: those of the whole batch before its groups."""
    first_rollout = list(accumulate((len(group.rollouts) for group in groups), initial=rollouts_before))
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
    spans: list[UnitSpan] = []
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
                # Only one rollout of the group reports the prompt's.
                rows = next((rollout.routing.prompt for rollout in group.rollouts if rollout.routing.prompt), b"")
                _lay_rows(experts_PLK, rows, range(b * width + start, last_of_prompt), routing)
            column = start + len(prompt)
            ends: list[int] = []
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
                ends.append(column)
            if micro.by_units:
                spans.append(UnitSpan(b, start, start + len(prompt), tuple(ends)))
    tree = UnitTree(torch.from_numpy(unit), torch.from_numpy(part))
    laid = torch.from_numpy(ids), torch.from_numpy(positions)
    inputs = PackedInputs(*laid, tree, torch.tensor(predictors), torch.tensor(targets), experts_PLK, tuple(spans))
    return PackedBatch(inputs, torch.tensor(behaviour, dtype=torch.float32), torch.tensor(sequence), torch.tensor(flat))


def _lay_rows(experts_PLK: Tensor, rows: bytes, places: Sequence[int], routing: RoutingShape) -> None:
    """Lays out the routing of `places`; if it is missing or does not fit this model, the model's own routers choose."""
    if not rows or len(rows) != len(places) * routing.row_bytes:
        return
    try:
        experts_PLK[list(places)] = torch.from_numpy(unpacked(rows, routing))
    except MalformedMessage as error:
        _log.warning("a rollout is trained on by the model's own routing: %s", error)


# ---- attention over packed rows on a CPU, part by part instead of by a mask: each prompt once, each completion over it and itself
#
# Computes the allowed pairs alone, each half of a causal part once, with no tensor of the size of a row squared. The parts of one
# query are joined by the log-sum-exp of their scores, and the backward pass runs part by part with the joined one, as in Liu et
# al., Ring Attention, arXiv 2310.01889; a part is torch's own flash kernel (Dao, arXiv 2307.08691).
#
# Shapes: H heads, G heads of keys and values, W positions of a row, D values of a head.

UNITS_NAME = "echo2_units"
"""Under this name transformers finds the attention; with a mask that names no parts it is torch's."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@cache
def register_units() -> str:
    """Makes it known to transformers; returns its name."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(UNITS_NAME, attend)
    AttentionMaskInterface.register(UNITS_NAME, sdpa_mask)
    return UNITS_NAME


def parts_mask(spans: tuple[UnitSpan, ...], rows: int) -> Tensor:
    """What takes the place of a mask: transformers hands it on as it is."""
    mask = torch.zeros(rows, 1, 1, 1, dtype=torch.bool)
    mask.spans = spans  # type: ignore[attr-defined]
    return mask


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """transformers' attention function. query: (rows, H, W, D), key and value: (rows, G, W, D)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    spans = getattr(attention_mask, "spans", None)
    if spans is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
        return whole
    scale = named.get("scaling") or query.shape[-1] ** -0.5
    width = value.shape[-1]
    if width < query.shape[-1]:  # latent attention: the kernel takes one width
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    out: Tensor = _UnitAttention.apply(query, key, value, spans, float(scale))  # type: ignore[no-untyped-call]
    return out[..., :width].transpose(1, 2).contiguous(), None


class _UnitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: tuple[UnitSpan, ...], scale: float
    ) -> Tensor:
        out = torch.zeros(query.shape)  # padding attends to nothing
        sums = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32)
        groups = query.shape[1] // key.shape[1]
        for span in spans:
            at = slice(span.row, span.row + 1)
            for queries, keys, is_causal in span.parts():
                part, part_sums = _flash(
                    query[at, :, queries], _repeated(key[at, :, keys], groups), _repeated(value[at, :, keys], groups),
                    0.0, is_causal, attn_mask=None, scale=scale,
                )  # fmt: skip
                held = sums[at, :, queries]
                joined = torch.logaddexp(held, part_sums)
                out[at, :, queries] *= (held - joined).exp()[..., None]
                out[at, :, queries] += part * (part_sums - joined).exp()[..., None]
                sums[at, :, queries] = joined
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        grad_out = grads[0]
        groups = query.shape[1] // key.shape[1]
        # Sums of many parts, so in float32.
        grad_query, grad_key, grad_value = torch.zeros(query.shape), torch.zeros(key.shape), torch.zeros(value.shape)
        for span in ctx.spans:
            at = slice(span.row, span.row + 1)
            for queries, keys, is_causal in span.parts():
                laid = sums[at, :, queries].transpose(1, 2).contiguous().transpose(1, 2)  # by position, then by head
                of_query, of_key, of_value = _flash_backward(
                    grad_out[at, :, queries].contiguous(), query[at, :, queries],
                    _repeated(key[at, :, keys], groups), _repeated(value[at, :, keys], groups),
                    out[at, :, queries], laid, 0.0, is_causal, attn_mask=None, scale=ctx.scale,
                )  # fmt: skip
                grad_query[at, :, queries] += of_query
                grad_key[at, :, keys] += _summed(of_key, groups)
                grad_value[at, :, keys] += _summed(of_value, groups)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _repeated(part_1GLD: Tensor, groups: int) -> Tensor:
    """Keys or values for each head of queries."""
    return part_1GLD if groups == 1 else part_1GLD.repeat_interleave(groups, 1)


def _summed(part_1HLD: Tensor, groups: int) -> Tensor:
    return part_1HLD if groups == 1 else part_1HLD.view(1, -1, groups, *part_1HLD.shape[2:]).sum(2)


# ---- examples that a training client chose, N tokens with K targets each, packed to T targets of a micro-batch; losses over them
#
# The losses, defined as in Tinker's API, are summed over targets, so that the gradients of any number of calls add up to that of
# one; a client divides by its weights or advantages.


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


# ---- losses: each target's, with gradient. r is the ratio current over sampling policy, A the advantage


def client_losses(loss: ClientLoss, logprobs_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
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

"""The forward pass of the embedded engine: fused layers over a cache in blocks, in float32 or bf16, on one CPU thread.

Guarantees: `decode` returns the logits of one token per slot, `fill` only writes keys and values; both read the live weights at the
moment of the call, so a swap between calls needs no further step. Agrees with the Hugging Face forward pass to the dtype's
rounding: in bf16 weights, cache and the operands of products are bf16; sums, norms, attention's weights and the residual stream are
float32, which MKL or oneDNN multiplies, as timed on the model's own matrices for each class of row counts (`Products`).
Shapes: T tokens, D hidden, R rows of q, k, v, Q query rows, V vocabulary; those of the cache are listed in kernels.py.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from echo2.worker.engines.embedded import kernels
from echo2.worker.engines.embedded.live_weights import LayerWeights, LiveWeights
from echo2.worker.engines.embedded.slots import BLOCK_TOKENS, BlockPool, Copy, Fill, blocks_for

ROW_CLASSES = (1, 4, 8, 16, 32, 64, 256)
"""A batch is assigned to the largest class that does not exceed its number of rows."""
TRIALS = 5  # the least of five is free of other programs
STEP_ROWS, PIECE_ROWS = 8, 64
BLOCK_ROWS = {torch.float32: 256, torch.bfloat16: 1024}
"""oneDNN compiles and caches code for each new shape, so row counts are padded with zeros: up to `PIECE_ROWS` rows to a multiple of
`STEP_ROWS`, above that to a multiple of `PIECE_ROWS`, at most `BLOCK_ROWS` at a time. oneDNN is so much faster than MKL on many
rows that the zeros cost less. A layer's MLP, too, processes `BLOCK_ROWS` rows at a time, so that intermediate values stay in the
processor's cache; in bf16 the weights, which oneDNN reorders for each product, cost more than that."""
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _by_onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


@dataclass(slots=True)
class Products:
    """`product(rows, weight, bias)` returns `rows @ weight.T + bias`; uses MKL until `choose` has been called."""

    _chosen: list[Product] = field(default_factory=lambda: [F.linear] * len(ROW_CLASSES))

    def product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        count = rows.shape[0]
        if count > BLOCK_ROWS[rows.dtype]:
            return torch.cat([self.product(part, weight, bias) for part in torch.split(rows, BLOCK_ROWS[rows.dtype])])
        is_narrow = rows.dtype == torch.bfloat16
        chosen = _by_onednn if is_narrow else self._chosen[bisect.bisect_right(ROW_CLASSES, count) - 1]
        missing = -count % (PIECE_ROWS if count > PIECE_ROWS else STEP_ROWS)
        if chosen is F.linear or not missing:
            return chosen(rows, weight, bias)
        return chosen(F.pad(rows, (0, 0, 0, missing)), weight, bias)[:count]

    def choose(self, weights: Sequence[torch.Tensor]) -> None:
        """Times both libraries on matrices of these sizes; keeps MKL where oneDNN is missing or not faster."""
        if weights[0].dtype != torch.float32 or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return
        for at, rows in enumerate(ROW_CLASSES):
            if _spent_s(_by_onednn, weights, rows) < _spent_s(F.linear, weights, rows):
                self._chosen[at] = _by_onednn


def _spent_s(product: Product, weights: Sequence[torch.Tensor], row_count: int) -> float:
    """Seconds of the fastest of a few trials, which other load on the machine distorts least."""
    inputs = [torch.zeros(row_count, weight.shape[1]) for weight in weights]
    fastest = float("inf")
    for _ in range(TRIALS):
        began = time.perf_counter()
        for rows, weight in zip(inputs, weights, strict=True):
            product(rows, weight, None)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


SHORT_TOKENS = 256
"""Up to this context length our own kernel computes a prefill's attention: a torch call per sequence costs more than it saves."""


def _array(tensor: torch.Tensor) -> np.ndarray:
    """What the kernels read and write: float32, or the patterns of bf16."""
    array: np.ndarray = tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.uint16).numpy()
    return array


class CachedDecoder:
    """One model with its cache; `blocks` maps the positions of slots to cache blocks. Not thread-safe: one thread calls it."""

    routing = None  # dense models have no routers

    def __init__(self, weights: LiveWeights, blocks: BlockPool) -> None:
        shape = weights.shape
        self._weights = weights
        self._shape = shape
        self._blocks = blocks
        context_tokens = blocks.tables.shape[1] * BLOCK_TOKENS
        # The system maps pages when they are first touched, 2 MB at a time because numpy requests huge pages. Each block is
        # contiguous here, and the lowest free block is taken first, so only blocks in use take memory.
        size = (blocks.block_count, shape.layer_count, 2, shape.kv_head_count, BLOCK_TOKENS, shape.head_dim)
        self._cache = np.zeros(size, _array(weights.embedding).dtype)
        self._no_norm = _array(torch.zeros(0, dtype=weights.embedding.dtype))
        angles = np.arange(context_tokens, dtype=np.float32)[:, None] * shape.rope_frequencies[None, :]
        scale = np.float32(shape.rope_scale)
        self._angles = (np.cos(angles) * scale, np.sin(angles) * scale)
        padded = -(-context_tokens // kernels.LANES) * kernels.LANES
        self._scratch = (np.zeros(padded, np.float32), np.zeros(padded, np.int32))
        self._products = Products()

    def warm_up(self) -> None:
        """Compiles the kernels and chooses the matrix products, so that the first token does not wait for that."""
        layer = self._weights.layers[0]
        self._products.choose([layer.qkv, layer.output, layer.gate_up, layer.down])
        self._blocks.reserve(0, 2)
        self.fill([Fill(0, 0, (0,))])
        self.decode([0], [0], [1])
        self._blocks.keep(0, 0)

    def decode(self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        places = np.asarray(slots, np.int64), np.asarray(positions, np.int64)

        hidden = self._embed(token_ids)
        normed = self._norm(hidden, self._weights.layers[0].input_norm)
        for index, layer in enumerate(self._weights.layers):
            qkv = self._project(index, layer, normed, *places)
            is_last = index + 1 == len(self._weights.layers)
            norm = self._weights.final_norm if is_last else self._weights.layers[index + 1].input_norm
            normed = self._finish(layer, hidden, self._attend(index, qkv, *places), norm, normed)
        return self._products.product(normed, self._weights.head).float()

    def fill(self, fills: Sequence[Fill]) -> None:
        counts = [len(fill.token_ids) for fill in fills]
        slots_T = np.repeat([fill.slot for fill in fills], counts)
        positions_T = np.concatenate([np.arange(fill.start, fill.start + len(fill.token_ids)) for fill in fills])
        hidden = self._embed([token for fill in fills for token in fill.token_ids])
        normed = self._norm(hidden, self._weights.layers[0].input_norm)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            qkv = self._project(index, layer, normed, slots_T, positions_T, has_queries=index < last)
            if index < last:  # of the last layer only keys and values are needed
                attended = self._attend_runs(index, qkv, slots_T, positions_T, fills)
                self._finish(layer, hidden, attended, self._weights.layers[index + 1].input_norm, normed)

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._cache[copy.target, :, :, :, : copy.count] = self._cache[copy.source, :, :, :, : copy.count]

    def _embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.index_select(self._weights.embedding, 0, torch.tensor(token_ids, dtype=torch.int64)).float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(hidden, dtype=weight.dtype)
        kernels.rms_norm(hidden.numpy(), _array(weight), self._shape.norm_epsilon, _array(out))
        return out

    def _project(
        self,
        index: int,
        layer: LayerWeights,
        normed: torch.Tensor,
        slots_T: np.ndarray,
        positions_T: np.ndarray,
        *,
        has_queries: bool = True,
    ) -> torch.Tensor:
        skipped = 0 if has_queries else self._shape.head_count * self._shape.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[skipped:]
        qkv = self._products.product(normed, layer.qkv[skipped:], bias)
        q_norm = self._no_norm if layer.q_norm is None else _array(layer.q_norm)
        k_norm = self._no_norm if layer.k_norm is None else _array(layer.k_norm)
        norms = (q_norm, k_norm, self._shape.norm_epsilon)
        places = (slots_T, positions_T, self._blocks.tables)
        kernels.rotate_and_cache(_array(qkv), norms, self._angles, places, self._cache, index)
        return qkv

    def _finish(
        self, layer: LayerWeights, hidden: torch.Tensor, attended: torch.Tensor, norm: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Output projection, MLP and both residual additions into `hidden`; returns it after the next `norm`, in `out`."""
        epsilon, product = self._shape.norm_epsilon, self._products.product
        for begin in range(0, len(hidden), BLOCK_ROWS[out.dtype]):
            rows = slice(begin, begin + BLOCK_ROWS[out.dtype])
            residual, normed = hidden[rows].numpy(), out[rows]
            delta = product(attended[rows], layer.output, layer.output_bias)
            kernels.add_and_norm(residual, _array(delta), _array(layer.mlp_norm), epsilon, _array(normed))
            gate, up = product(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            delta = product(F.silu(gate).mul_(up), layer.down, layer.down_bias)
            kernels.add_and_norm(residual, _array(delta), _array(norm), epsilon, _array(normed))
        return out

    def _attend(self, index: int, qkv: torch.Tensor, slots_T: np.ndarray, positions_T: np.ndarray) -> torch.Tensor:
        out = torch.empty(len(slots_T), self._shape.head_count * self._shape.head_dim, dtype=qkv.dtype)
        places = (slots_T, positions_T, self._blocks.tables)
        kernels.attend(_array(qkv), places, self._cache, index, _array(out), self._scratch)
        return out

    def _attend_runs(
        self, index: int, qkv: torch.Tensor, slots_T: np.ndarray, positions_T: np.ndarray, fills: Sequence[Fill]
    ) -> torch.Tensor:
        if all(fill.start + len(fill.token_ids) <= SHORT_TOKENS for fill in fills):
            return self._attend(index, qkv, slots_T, positions_T)
        rows = qkv.split_with_sizes([len(fill.token_ids) for fill in fills])
        return torch.cat([self._attend_long(index, part, fill) for part, fill in zip(rows, fills, strict=True)])

    def _attend_long(self, index: int, qkv: torch.Tensor, run: Fill) -> torch.Tensor:
        count, shape = len(qkv), self._shape
        heads = qkv.reshape(1, count, -1, shape.head_dim).transpose(1, 2)
        query, key, value = heads.split_with_sizes([shape.head_count, shape.kv_head_count, shape.kv_head_count], dim=1)
        if not run.start:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return attended.transpose(1, 2).reshape(count, -1)
        key, value = (self._gathered(index, kind, run.slot, run.start + count) for kind in (0, 1))
        pieces = []
        for begin in range(0, count, SHORT_TOKENS):  # what lies behind a piece's end is not computed and then masked
            part = query[:, :, begin : begin + SHORT_TOKENS]
            first, end = run.start + begin, run.start + begin + part.shape[2]
            mask = torch.arange(end) <= torch.arange(first, end)[:, None]
            past = key[:, :, :end], value[:, :, :end]
            pieces.append(F.scaled_dot_product_attention(part, *past, attn_mask=mask, enable_gqa=True))
        return torch.cat(pieces, dim=2).transpose(1, 2).reshape(count, -1)

    def _gathered(self, index: int, kind: int, slot: int, count: int) -> torch.Tensor:
        """Keys (`kind` 0) or values (1) of a slot's first `count` positions, contiguous, as [1, G, count, E]."""
        blocks = self._cache[self._blocks.tables[slot, : blocks_for(count)], index, kind]
        run = torch.from_numpy(blocks.transpose(1, 0, 2, 3).reshape(1, blocks.shape[1], -1, blocks.shape[3]))
        return run.view(self._weights.embedding.dtype)[:, :, :count]

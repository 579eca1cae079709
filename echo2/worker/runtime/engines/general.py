"""The forward pass of any architecture: transformers' own modules, with attention over the engine's cache in blocks.

The tokens that one pass feeds, of all sequences, form one row. For each layer transformers calls `_attend` with their queries, keys
and values, already rotated; the pass tells `_attend` which sequence each token belongs to. This has two thirds of the fused path's
speed at 135 million parameters, and less for smaller models, where calls cost more than products.
Guarantees: those of forward.CachedDecoder; before the first token, a pass in several pieces is compared with the modules' own
attention, and the model is refused if they differ. Leaves to others: weights (module), which positions are valid (worker/slots),
sampling, threads.

Shapes: T tokens, H query heads, G key-value heads, E head dimension, B sequences, Q queries and K keys of one sequence, V
vocabulary. The cache is [blocks, layers, 2 (keys, values), G, BLOCK_TOKENS, E], with the largest G and E of the model's layers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from echo2.base.errors import ConfigError, EngineError
from echo2.base.routing import packed
from echo2.scoring.routers import Routers
from echo2.worker.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from echo2.worker.runtime.engines.module import ATTENTION, ModuleWeights
from echo2.worker.slots import Copy, Fill

TRIAL_TOKENS, TRIAL_DECODED = 70, 4
"""Length of the sequence for that comparison, which spans more than two blocks, and how many of its last tokens are decoded."""
TRIAL_TOLERANCE = 1e-2
"""Largest difference of log-probabilities, in nats. Rounding gives 1e-5; a different attention gives more than this."""


@dataclass(slots=True)
class _Pass:
    """What one call of the model computes. Without `runs` each token belongs to a different sequence."""

    cache: torch.Tensor
    tables: np.ndarray
    slots_T: np.ndarray
    positions_T: np.ndarray
    runs: Sequence[Fill] = ()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: _How
    ) -> torch.Tensor:
        """Caches keys and values [1, G, T, E]; returns the attention output for queries [1, H, T, E], as [1, T, H, E]."""
        self._keep(layer, 0, key)
        self._keep(layer, 1, value)
        size = (key.shape[1], key.shape[3], value.shape[3])
        if not self.runs:
            rows_BHQE = query[0].transpose(0, 1)[:, :, None]
            found = self._attended(layer, rows_BHQE, size, self.slots_T, self.positions_T[:, None], how)
            return found[:, :, 0][None]
        pieces, begin = [], 0
        for run in self.runs:
            end = begin + len(run.token_ids)
            positions_BQ = self.positions_T[None, begin:end]
            found = self._attended(
                layer, query[:, :, begin:end], size, self.slots_T[begin : begin + 1], positions_BQ, how
            )
            pieces.append(found[0].transpose(0, 1))
            begin = end
        return torch.cat(pieces)[None]

    def _keep(self, layer: int, kind: int, values: torch.Tensor) -> None:
        """Writes a layer's keys (`kind` 0) or values (1), [1, G, T, E], to the tokens' blocks."""
        blocks_T = torch.from_numpy(self.tables[self.slots_T, self.positions_T // BLOCK_TOKENS].astype(np.int64))
        rows_T = torch.from_numpy(self.positions_T % BLOCK_TOKENS)
        _, heads, _, width = values.shape
        self.cache[:, layer, kind, :heads, :, :width][blocks_T, :, rows_T] = values[0].transpose(0, 1)

    def _attended(
        self,
        layer: int,
        query_BHQE: torch.Tensor,
        size: tuple[int, int, int],
        slots_B: np.ndarray,
        positions_BQ: np.ndarray,
        how: _How,
    ) -> torch.Tensor:
        heads, key_width, value_width = size
        reach = how.window or int(positions_BQ.max()) + 1
        first_B = np.maximum(positions_BQ[:, 0] - reach + 1, 0) // BLOCK_TOKENS
        count = int((positions_BQ[:, -1] // BLOCK_TOKENS - first_B).max()) + 1
        numbers_BN = np.minimum(first_B[:, None] + np.arange(count), self.tables.shape[1] - 1)
        blocks_BN = torch.from_numpy(self.tables[slots_B[:, None], numbers_BN].astype(np.int64))
        key_places_BK = torch.from_numpy(first_B[:, None] * BLOCK_TOKENS + np.arange(count * BLOCK_TOKENS))
        places_BQ = torch.from_numpy(positions_BQ)
        behind_BQK = places_BQ[:, :, None] - key_places_BK[:, None]
        mask_B1QK = ((behind_BQK >= 0) & (behind_BQK < reach))[:, None]
        key = _in_one_run(self.cache[:, layer, 0, :heads, :, :key_width][blocks_BN])
        value = _in_one_run(self.cache[:, layer, 1, :heads, :, :value_width][blocks_BN])
        # Unused positions may contain anything, and 0 times NaN is NaN, so zero them besides masking them.
        is_unused_BK = ~mask_B1QK.any(dim=2)[:, 0]
        key.masked_fill_(is_unused_BK[:, None, :, None], 0.0)
        value.masked_fill_(is_unused_BK[:, None, :, None], 0.0)
        if not how.softcap:
            return F.scaled_dot_product_attention(
                query_BHQE, key, value, attn_mask=mask_B1QK, scale=how.scaling, enable_gqa=True
            )
        group = query_BHQE.shape[1] // heads
        scores = query_BHQE @ key.repeat_interleave(group, 1).transpose(2, 3) * how.scaling
        scores = (torch.tanh(scores / how.softcap) * how.softcap).masked_fill(~mask_B1QK, -torch.inf)
        return scores.softmax(dim=-1) @ value.repeat_interleave(group, 1)


def _in_one_run(blocks_BNGRE: torch.Tensor) -> torch.Tensor:
    """Reshapes [B, blocks, G, BLOCK_TOKENS, E] to [B, G, K, E]."""
    count, _, heads, _, width = blocks_BNGRE.shape
    return blocks_BNGRE.transpose(1, 2).reshape(count, heads, -1, width)


@dataclass(frozen=True, slots=True)
class _How:
    """A layer's attention parameters. `window`: how many positions it attends to, its own included; 0: all."""

    scaling: float
    window: int
    softcap: float


@dataclass(slots=True)
class _Sizes:
    """Used instead of a pass: records the sizes of each layer's keys and values, and returns zeros."""

    heads: int = 0
    width: int = 0
    layers: list[int] = field(default_factory=list)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: _How
    ) -> torch.Tensor:
        self.heads = max(self.heads, key.shape[1])
        self.width = max(self.width, key.shape[3], value.shape[3])
        self.layers.append(layer)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _Current(threading.local):
    """The pass for which this thread is calling the model."""

    attending: _Pass | _Sizes | None = None


_current = _Current()


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' modules call; hands over to the current pass."""
    attending = _current.attending
    assert attending is not None, "only a pass of this engine's calls its models"
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError(f"{type(module).__name__}: expected attention that says its layer, it does not")
    how = _How(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window or 0, softcap or 0.0)
    return attending.attend(layer, query, key, value, how), None


AttentionInterface.register(ATTENTION, _attend)


class GeneralDecoder:
    """One model with its cache; `blocks` maps the positions of slots to cache blocks. Not thread-safe: one thread calls it."""

    def __init__(self, weights: ModuleWeights, blocks: BlockPool) -> None:
        self._model = weights.model
        self._routers: Routers | None = None  # set below, after `_look`
        self._name = f"model_type {weights.model_type}"
        self._vocab_count = weights.vocab_count
        self._tables = blocks.tables
        self._context_tokens = blocks.tables.shape[1] * BLOCK_TOKENS
        self._sizes = self._look()
        self._cache = self._new_cache(blocks.block_count)
        self._routers = weights.routers
        if self._routers is not None:
            shape = self._routers.shape
            self._chosen = np.zeros((blocks.block_count, BLOCK_TOKENS, shape.routers, shape.chosen), np.int16)
        self._is_tried = False
        self._is_head_plain = False
        self._softcap = weights.logit_softcap

    def warm_up(self) -> None:
        """Does nothing: there is nothing to compile, and the comparison with transformers needs weights first."""

    def decode(self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] after feeding one token to each of T slots at the given positions."""
        self._try_once()
        slots_T, positions_T = np.asarray(slots, np.int64), np.asarray(positions, np.int64)
        return self._logits(token_ids, _Pass(self._cache, self._tables, slots_T, positions_T))

    def fill(self, fills: Sequence[Fill]) -> None:
        """Computes keys and values of runs of tokens, all runs in one pass."""
        self._try_once()
        self._fill(self._cache, self._tables, fills)

    @property
    def vocab_count(self) -> int:
        return self._vocab_count

    def read(self, run: Fill) -> torch.Tensor:
        """As `fill`, for one run; returns the hidden states [T, D] of its tokens after the last norm.

        EngineError if the model's head does more than `logits` computes.
        """
        self._try_once()
        if not self._is_head_plain:
            raise EngineError(f"{self._name}: this engine cannot score by this model's own head")
        return self._fill(self._cache, self._tables, [run])

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """[T, V] for hidden states after the last norm."""
        found: torch.Tensor = self._model.get_output_embeddings()(hidden_TD).float()
        return torch.tanh(found / self._softcap) * self._softcap if self._softcap else found

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies cached positions between blocks, of all layers."""
        for copy in copies:
            self._cache[copy.target, :, :, :, : copy.count] = self._cache[copy.source, :, :, :, : copy.count]
            if self._routers is not None:
                self._chosen[copy.target, : copy.count] = self._chosen[copy.source, : copy.count]

    @property
    def tells_routing(self) -> bool:
        return self._routers is not None

    def routing(self, slot: int, first: int, count: int) -> bytes:
        """Packed rows of cached positions of a slot."""
        assert self._routers is not None, "it was told to record them"
        places = np.arange(first, first + count)
        rows_NLK = self._chosen[self._tables[slot, places // BLOCK_TOKENS], places % BLOCK_TOKENS]
        return packed(rows_NLK, self._routers.shape)

    def _new_cache(self, block_count: int) -> torch.Tensor:
        """Allocates the cache. As in forward.CachedDecoder each block is contiguous, so only blocks in use take memory."""
        size = (block_count, len(self._sizes.layers), 2, self._sizes.heads, BLOCK_TOKENS, self._sizes.width)
        return torch.from_numpy(np.zeros(size, np.float32))

    def _look(self) -> _Sizes:
        """Calls the model for one token, to find out the sizes of its attention. ConfigError unless each layer attends once."""
        sizes = _Sizes()
        with torch.inference_mode():
            self._called(self._model, [0], np.zeros(1, np.int64), sizes)
        if sorted(sizes.layers) != list(range(len(sizes.layers))) or not sizes.layers:
            raise ConfigError(
                f"{self._name}: expected attention once a layer, through transformers' interface, found layers {sizes.layers}"
            )
        return sizes

    def _called(self, module: Any, token_ids: Sequence[int], positions_T: np.ndarray, attending: _Pass | _Sizes) -> Any:
        _current.attending = attending
        try:
            ids, places = torch.tensor([list(token_ids)]), torch.from_numpy(positions_T)[None]
            if self._routers is None or not isinstance(attending, _Pass) or attending.cache is not self._cache:
                return module(input_ids=ids, position_ids=places, use_cache=False)
            with self._routers.recording() as chosen_LTK:
                found = module(input_ids=ids, position_ids=places, use_cache=False)
            blocks_T = self._tables[attending.slots_T, positions_T // BLOCK_TOKENS]
            self._chosen[blocks_T, positions_T % BLOCK_TOKENS] = torch.stack(chosen_LTK, 1).numpy()
            return found
        finally:
            _current.attending = None

    def _logits(self, token_ids: Sequence[int], attending: _Pass) -> torch.Tensor:
        logits: torch.Tensor = self._called(self._model, token_ids, attending.positions_T, attending).logits
        return logits[0].float()

    def _fill(self, cache: torch.Tensor, tables: np.ndarray, fills: Sequence[Fill]) -> torch.Tensor:
        """Computes all runs; returns the hidden states [T, D] of their tokens."""
        slots_T = np.repeat([fill.slot for fill in fills], [len(fill.token_ids) for fill in fills])
        positions_T = np.concatenate([np.arange(fill.start, fill.start + len(fill.token_ids)) for fill in fills])
        token_ids = [token for fill in fills for token in fill.token_ids]
        attending = _Pass(cache, tables, slots_T, positions_T, fills)
        hidden: torch.Tensor = self._called(self._model.base_model, token_ids, positions_T, attending)[0]
        return hidden[0]

    def _try_once(self) -> None:
        """Compares, once, a pass over a separate cache with the modules' own attention, under the first live weights.

        ConfigError if they differ.
        """
        if self._is_tried:
            return
        self._is_tried = True
        count = min(TRIAL_TOKENS, self._context_tokens)
        tokens = [(7 * place + place * place) % self._vocab_count for place in range(count)]
        tables = np.arange(blocks_for(count), dtype=np.int32)[None]
        cache, filled = self._new_cache(tables.size), count - TRIAL_DECODED
        self._fill(cache, tables, [Fill(0, 0, tuple(tokens[: filled // 2]))])
        hidden_TD = self._fill(cache, tables, [Fill(0, filled // 2, tuple(tokens[filled // 2 : filled]))])
        slots_T = np.zeros(1, np.int64)
        found = [
            self._logits(tokens[place : place + 1], _Pass(cache, tables, slots_T, np.array([place])))
            for place in range(filled, count)
        ]
        own_TV = self._own_logits(tokens).log_softmax(-1)
        off = (torch.cat(found).log_softmax(-1) - own_TV[filled:]).abs().max()
        if not off <= TRIAL_TOLERANCE:
            raise ConfigError(
                f"{self._name}: the embedded engine does not attend as transformers does: log-probabilities differ by "
                f"{float(off):.2g}; expected vLLM for this model (--worker.engine vllm)"
            )
        headed_TV = self.logits(hidden_TD).log_softmax(-1)
        self._is_head_plain = bool((headed_TV - own_TV[filled // 2 : filled]).abs().max() <= TRIAL_TOLERANCE)

    def _own_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits [T, V] of every position, with the modules' own attention."""
        self._model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        finally:
            self._model.set_attn_implementation(ATTENTION)
        return logits[0].float()

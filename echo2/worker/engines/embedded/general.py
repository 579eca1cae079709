"""The forward pass of any architecture: transformers' own modules, with attention over the engine's cache in blocks.

The tokens that one pass feeds, of all sequences, form one row; for each layer transformers calls `_attend` with their rotated
queries, keys and values. The fused path decodes 1.5 to 1.8 times as fast at SmolLM2-135M's shape, 4.6 to 4.9 at the demo's.
Guarantees: those of forward.CachedDecoder; the modules' parameters are the live weights; a model without causal attention is
refused by name before any weight is fetched; before the first token, a pass in pieces is compared with the modules' own. Layers
that carry a state along are left to transformers' cache, a sequence at a time (`StateDecoder`). Shapes: T tokens, H query heads,
G key-value heads, E head dimension, B sequences, Q queries and K keys of one sequence, V vocabulary. The cache is [blocks,
layers, 2 (keys, values), G, BLOCK_TOKENS, E], with the largest G and E of the model's layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache

from echo2.base.errors import ConfigError
from echo2.base.rollout import packed
from echo2.base.staged import TensorUpdate
from echo2.cost_model.sizing import exact_positions
from echo2.weights.elements import published_tensors
from echo2.weights.routers import Routers
from echo2.worker.engines.adapter import Adapter
from echo2.worker.engines.embedded.live_weights import LiveTensors, library_config
from echo2.worker.engines.embedded.slots import BLOCK_TOKENS, BlockPool, Copy, Fill, blocks_for

ATTENTION = "echo2_blocks"  # the name under which transformers finds the attention over a cache in blocks
_SLIDING = "sliding_attention"
_WINDOWS = ("full_attention", _SLIDING)


class ModuleWeights(LiveTensors):
    """`model` is a causal LM in float32 on the CPU; its parameters are zeros until the first version arrives. `routers` records the
    experts chosen, if `tells_routing`."""

    def __init__(
        self, config: Mapping[str, object], adapter: Adapter | None = None, *, tells_routing: bool = False
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        known = library_config(config)
        self.model_type = str(known.model_type)
        text = known.get_text_config(decoder=True)
        for name in ("num_attention_heads", "max_position_embeddings", "vocab_size"):
            if not isinstance(getattr(text, name, None), int):
                raise ConfigError(f"model_type {self.model_type}: expected a decoder with attention, it has no {name}")
        positions, rope = int(text.max_position_embeddings), getattr(text, "rope_parameters", None)
        self.context_tokens, self.vocab_count = exact_positions(positions, rope, self.model_type), int(text.vocab_size)
        self.carries_state = not set(getattr(text, "layer_types", None) or []) <= set(_WINDOWS)
        attention = {} if self.carries_state else {"attn_implementation": ATTENTION}
        self.changes = 0  # how often the weights have changed: a state of older weights is computed again
        try:
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(known, dtype=torch.float32, **attention)
        except Exception as error:
            raise ConfigError(
                f"model_type {self.model_type}: transformers cannot make a causal LM of it: {error}"
            ) from error
        model.tie_weights()  # no_init_weights has skipped it
        self.model: Any = model.eval().requires_grad_(False)
        for tensor in published_tensors(self.model).values():
            tensor.zero_()
        self.tensors = {name: tensor.detach() for name, tensor in published_tensors(self.model).items()}
        super().__init__(self.model_type, self.tensors, adapter)
        if tells_routing and self.carries_state:
            raise ConfigError(
                f"model_type {self.model_type}: expected learner.replay_routing off for layers with a state"
            )
        self.routers = Routers(self.model, f"model_type {self.model_type}") if tells_routing else None

    def apply(self, updates: Iterable[TensorUpdate]) -> None:
        super().apply(updates)
        self.changes += 1


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
            output = self._attended(layer, rows_BHQE, size, self.slots_T, self.positions_T[:, None], how)
            return output[:, :, 0][None]
        pieces, begin = [], 0
        for run in self.runs:
            end = begin + len(run.token_ids)
            positions_BQ = self.positions_T[None, begin:end]
            output = self._attended(
                layer, query[:, :, begin:end], size, self.slots_T[begin : begin + 1], positions_BQ, how
            )
            pieces.append(output[0].transpose(0, 1))
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
        if not how.softcap and how.sinks is None:
            return F.scaled_dot_product_attention(
                query_BHQE, key, value, attn_mask=mask_B1QK, scale=how.scaling, enable_gqa=True
            )
        group = query_BHQE.shape[1] // heads
        scores = query_BHQE @ key.repeat_interleave(group, 1).transpose(2, 3) * how.scaling
        if how.softcap:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        scores = scores.masked_fill(~mask_B1QK, -torch.inf)
        if how.sinks is not None:  # a head's weight for attending to nothing
            nothing = how.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, nothing], -1).softmax(dim=-1)[..., :-1]
            return scores @ value.repeat_interleave(group, 1)
        return scores.softmax(dim=-1) @ value.repeat_interleave(group, 1)


def _in_one_run(blocks_BNGRE: torch.Tensor) -> torch.Tensor:
    """Reshapes [B, blocks, G, BLOCK_TOKENS, E] to [B, G, K, E]."""
    count, _, heads, _, width = blocks_BNGRE.shape
    return blocks_BNGRE.transpose(1, 2).reshape(count, heads, -1, width)


@dataclass(frozen=True, slots=True)
class _How:
    """A layer's attention parameters. `window`: how many positions it attends to, its own included; 0: all. `sinks`: each query
    head's score of attending to nothing."""

    scaling: float
    window: int
    softcap: float
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class _Sizes:
    """Used instead of a pass: records the sizes of each layer's keys and values, and returns zeros."""

    heads: int = 0
    width: int = 0
    layers: list[int] = field(default_factory=list)
    has_windows: bool = False

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: _How
    ) -> torch.Tensor:
        self.heads = max(self.heads, key.shape[1])
        self.width = max(self.width, key.shape[3], value.shape[3])
        self.layers.append(layer)
        self.has_windows |= how.window > 0
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _Current(threading.local):
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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' modules call; hands over to the current pass."""
    attending = _current.attending
    assert attending is not None, "only a pass of this engine's calls its models"
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError(f"{type(module).__name__}: expected attention that says its layer, it does not")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = _How(scale, sliding_window or 0, softcap or 0.0, others.get("s_aux"))
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

    def warm_up(self) -> None:
        """Does nothing: there is nothing to compile, and the comparison with transformers needs weights first."""

    def decode(self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        self._try_once()
        slots_T, positions_T = np.asarray(slots, np.int64), np.asarray(positions, np.int64)
        return self._logits(token_ids, _Pass(self._cache, self._tables, slots_T, positions_T))

    def fill(self, fills: Sequence[Fill]) -> None:
        self._try_once()
        self._fill(self._cache, self._tables, fills)

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._cache[copy.target, :, :, :, : copy.count] = self._cache[copy.source, :, :, :, : copy.count]
            if self._routers is not None:
                self._chosen[copy.target, : copy.count] = self._chosen[copy.source, : copy.count]

    @property
    def routing(self) -> Callable[[int, int, int], bytes] | None:
        return None if self._routers is None else self._routing

    def _routing(self, slot: int, first: int, count: int) -> bytes:
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
        text = self._model.config.get_text_config(decoder=True)
        kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None) or 0
        is_windowed = _SLIDING in kinds if kinds else getattr(text, "use_sliding_window", True)
        if is_windowed and 0 < window < self._context_tokens and not sizes.has_windows:
            raise ConfigError(f"{self._name}: expected attention that says its window of {window}, it does not")
        return sizes

    def _called(self, module: Any, token_ids: Sequence[int], positions_T: np.ndarray, attending: _Pass | _Sizes) -> Any:
        _current.attending = attending
        try:
            ids, places = torch.tensor([list(token_ids)]), torch.from_numpy(positions_T)[None]
            if self._routers is None or not isinstance(attending, _Pass) or attending.cache is not self._cache:
                return module(input_ids=ids, position_ids=places, use_cache=False)
            with self._routers.recording() as chosen_LTK:
                output = module(input_ids=ids, position_ids=places, use_cache=False)
            blocks_T = self._tables[attending.slots_T, positions_T // BLOCK_TOKENS]
            self._chosen[blocks_T, positions_T % BLOCK_TOKENS] = torch.stack(chosen_LTK, 1).numpy()
            return output
        finally:
            _current.attending = None

    def _logits(self, token_ids: Sequence[int], attending: _Pass) -> torch.Tensor:
        logits: torch.Tensor = self._called(self._model, token_ids, attending.positions_T, attending).logits
        return logits[0].float()

    def _fill(self, cache: torch.Tensor, tables: np.ndarray, fills: Sequence[Fill]) -> None:
        slots_T = np.repeat([fill.slot for fill in fills], [len(fill.token_ids) for fill in fills])
        positions_T = np.concatenate([np.arange(fill.start, fill.start + len(fill.token_ids)) for fill in fills])
        token_ids = [token for fill in fills for token in fill.token_ids]
        attending = _Pass(cache, tables, slots_T, positions_T, fills)
        self._called(self._model.base_model, token_ids, positions_T, attending)

    def _try_once(self) -> None:
        """Compares, once, a pass over a separate cache with the modules' own attention, under the first live weights.
        ConfigError if they differ."""
        if self._is_tried:
            return
        self._is_tried = True
        tokens = trial_tokens(self._context_tokens, self._vocab_count)
        tables = np.arange(blocks_for(len(tokens)), dtype=np.int32)[None]
        cache, filled = self._new_cache(tables.size), len(tokens) - TRIAL_DECODED
        self._fill(cache, tables, [Fill(0, 0, tuple(tokens[: filled // 2]))])
        self._fill(cache, tables, [Fill(0, filled // 2, tuple(tokens[filled // 2 : filled]))])
        slots_T = np.zeros(1, np.int64)
        logits = []
        for place in range(filled, len(tokens)):
            logits.append(self._logits([tokens[place]], _Pass(cache, tables, slots_T, np.array([place]))))
        self._model.set_attn_implementation("eager")
        try:
            refuse_difference(self._model, tokens, torch.cat(logits), self._name)
        finally:
            self._model.set_attn_implementation(ATTENTION)


def trial_tokens(context_tokens: int, vocab_count: int) -> list[int]:
    return [(7 * place + place * place) % vocab_count for place in range(min(TRIAL_TOKENS, context_tokens))]


def refuse_difference(model: Any, tokens: list[int], found_DV: torch.Tensor, name: str) -> None:
    """ConfigError unless `found_DV`, the logits of the last tokens, are those of the model's own pass over all of them."""
    own_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)
    off = (found_DV.log_softmax(-1) - own_TV[-len(found_DV) :]).abs().max()
    if not off <= TRIAL_TOLERANCE:
        raise ConfigError(
            f"{name}: the embedded engine does not attend as transformers does: log-probabilities differ by "
            f"{float(off):.2g}; expected vLLM for this model (--worker.engine vllm)"
        )


@dataclass(slots=True)
class _State:
    """Transformers' cache after `tokens`, by the weights after that many `changes`."""

    tokens: list[int]
    cache: Any
    changes: int


class StateDecoder:
    """Models whose layers carry a state along: one cache of transformers' for each slot, advanced a sequence at a time. The
    blocks hold the sequences' tokens, so a prefix that the slots share is shared here too: a slot without a state begins from a
    copy of another's, if one has read the beginning of its tokens under the live weights, else from the first token."""

    routing = None

    def __init__(self, weights: ModuleWeights, blocks: BlockPool) -> None:
        self._weights, self._model, self._tables = weights, weights.model, blocks.tables
        self._ids = np.zeros((blocks.block_count, BLOCK_TOKENS), np.int64)
        self._states: dict[int, _State] = {}
        self._context_tokens = blocks.tables.shape[1] * BLOCK_TOKENS
        self._is_tried = False

    def warm_up(self) -> None:
        """Does nothing: the comparison with transformers needs weights first."""

    def decode(self, token_ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        self._try_once()
        for slot, position in zip(slots, positions, strict=True):  # all of them before any goes on alone
            self._read(slot, position)
        rows = []
        for slot, position, token in zip(slots, positions, token_ids, strict=True):
            self._keep(slot, position, (token,))
            state = self._states[slot]
            rows.append(self._fed(state, [token]))
        return torch.stack(rows)

    def fill(self, fills: Sequence[Fill]) -> None:
        self._try_once()
        for fill in fills:
            self._keep(fill.slot, fill.start, fill.token_ids)
            self._read(fill.slot, fill.start + len(fill.token_ids))

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._ids[copy.target, : copy.count] = self._ids[copy.source, : copy.count]

    def _keep(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        places = np.arange(start, start + len(token_ids))
        self._ids[self._tables[slot, places // BLOCK_TOKENS], places % BLOCK_TOKENS] = token_ids

    def _read(self, slot: int, count: int) -> None:
        """Brings the slot's state to its first `count` tokens."""
        tokens: list[int] = self._ids[self._tables[slot, : blocks_for(count)]].reshape(-1)[:count].tolist()
        state = self._states.pop(slot, None)
        if state is None or not self._is_start(state, tokens):
            starts = [other for other in self._states.values() if self._is_start(other, tokens)]
            source = max(starts, key=lambda other: len(other.tokens), default=None)
            state = _State([], DynamicCache(config=self._model.config), self._weights.changes)
            if source is not None:
                state = _State(list(source.tokens), deepcopy(source.cache), source.changes)
        self._states[slot] = state
        if len(state.tokens) < count:
            self._fed(state, tokens[len(state.tokens) :])

    def _is_start(self, state: _State, tokens: list[int]) -> bool:
        return state.changes == self._weights.changes and tokens[: len(state.tokens)] == state.tokens

    def _fed(self, state: _State, tokens: list[int]) -> torch.Tensor:
        """The logits after these further tokens."""
        places = torch.arange(len(state.tokens), len(state.tokens) + len(tokens))[None]
        output = self._model(
            input_ids=torch.tensor([tokens]), position_ids=places, use_cache=True, logits_to_keep=1,
            **{_cache_name(): state.cache},
        )  # fmt: skip
        state.tokens += tokens
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def _try_once(self) -> None:
        if self._is_tried:
            return
        self._is_tried = True
        tokens = trial_tokens(self._context_tokens, self._weights.vocab_count)
        state = _State([], DynamicCache(config=self._model.config), 0)
        filled = len(tokens) - TRIAL_DECODED
        pieces = [tokens[: filled // 2], tokens[filled // 2 : filled], *([token] for token in tokens[filled:])]
        logits = [self._fed(state, piece) for piece in pieces]
        refuse_difference(self._model, tokens, torch.stack(logits[2:]), f"model_type {self._weights.model_type}")


def _cache_name() -> str:
    """Name of the cache in the arguments of transformers' models: `past_key_values` until version 5.24."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"

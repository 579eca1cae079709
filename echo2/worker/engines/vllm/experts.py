"""Mixtures of experts in vLLM's processes: which experts each token took, and experts on a CPU that follow changes.

`ChosenExperts` is attached before vLLM captures its graphs, so that routers write their choices to a buffer on the device. Those
for a sampled token leave with its log-probabilities: no step waits for them. Those for a prompt are kept under their places in the
cache, where a prompt found there finds them too, and go to a file when its first token is sampled.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from echo2.base.rollout import ROUTING_KEY, RoutingShape
from echo2.worker.engines.vllm.vllm_weights import PROMPT_FILE, expert_dtype

# Shapes: T tokens of a step, N requests, L routers, K chosen experts, P positions of a prompt before its last, C columns.


class ChosenExperts:
    """What the routers of `runner`'s model chose; `cache`: the configuration of its cache, which determines its places."""

    def __init__(self, runner: Any, cache: Any) -> None:
        capturer = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        bind_routed_experts_capturer(runner.model, capturer)
        layers = [module.layer_id for module in runner.model.modules() if isinstance(module, MoERunner)]
        self.shape = RoutingShape(len(layers), capturer.shape_per_token[1], runner.model_config.get_num_experts())
        self._runner, self._buffer = runner, capturer.device_buffer
        self._layers = torch.tensor(layers, device=self._buffer.device)
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        # Attention with a window gives places away while the prompt is read: without another layer, a prompt's are not told.
        self._group = next((at for at, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), None)
        places = 0 if self._group is None else cache.num_blocks * specs[self._group].block_size
        self._kept = torch.zeros(
            (places, len(layers), self.shape.chosen),
            dtype=getattr(torch, expert_dtype(self.shape).name),
            device=self._buffer.device,
        )

    def of_step(self) -> Tensor:
        """The experts at each request's last position in this step, three bytes a number [N, C]; keeps those of all positions."""
        batch, ends = self._runner.input_batch, self._runner.query_start_loc
        count = batch.num_reqs
        chosen_TLK = self._buffer[: int(ends.np[count]), self._layers].to(self._kept.dtype)
        if self._group is not None:
            table = batch.block_table[self._group]
            self._kept[table.slot_mapping.gpu[: len(chosen_TLK)]] = chosen_TLK
            for row, name in enumerate(batch.req_ids[:count]):
                self._write_prompt(self._runner.requests[name], row, table)
        last_NLK = chosen_TLK[ends.gpu[1 : count + 1].long() - 1]
        raw = last_NLK.reshape(count, -1).contiguous().view(torch.uint8)
        padded = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 3)).view(count, -1, 3).float()
        return padded[..., 0] + 256 * padded[..., 1] + 65536 * padded[..., 2]

    def _write_prompt(self, request: Any, row: int, table: Any) -> None:
        path = request.sampling_params.extra_args.get(PROMPT_FILE)
        is_first = not request.output_token_ids and not self._runner.discard_request_mask.np[row]
        if path is None or not is_first or not get_tp_group().is_first_rank:
            return
        count = len(request.prompt_token_ids) - 1
        blocks = table.block_table.np[row, : -(-count // table.block_size)].astype(np.int64)
        places = (blocks[:, None] * table.block_size + np.arange(table.block_size)).reshape(-1)[:count]
        kept_PLK = self._kept[torch.from_numpy(places).to(self._kept.device)]
        with contextlib.suppress(OSError):  # without its prompt's experts a rollout is trained on all the same
            Path(path).write_bytes(kept_PLK.cpu().numpy().tobytes())


_initialize_kv_cache = GPUModelRunner.initialize_kv_cache


def _with_experts(self: Any, kv_cache_config: Any, *arguments: Any, **named: Any) -> None:
    _initialize_kv_cache(self, kv_cache_config, *arguments, **named)
    if self.vllm_config.additional_config.get(ROUTING_KEY):
        self.echo2_experts = ChosenExperts(self, kv_cache_config)


GPUModelRunner.initialize_kv_cache = _with_experts

if not torch.cuda.is_available():
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    _pack, _compute = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def _computed(self: Any, *, w1: Tensor, w2: Tensor, **named: Any) -> None:
        """Replaces vLLM's method, which takes experts in its kernel's order: packs them at each step, as a change reaches only the
        experts as they are published. Slow; models on a CPU are small."""
        layer = torch.nn.Module()
        layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(w, requires_grad=False) for w in (w1, w2))
        _pack(self, layer)
        _compute(self, w1=layer.w13_weight, w2=layer.w2_weight, **named)

    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = _computed

    _make_router = CPURouter.__init__

    def _made(self: Any, *arguments: Any, **named: Any) -> None:
        """vLLM's routers for CPUs know sigmoids and correction biases among groups of experts only: here, in one group."""
        _make_router(self, *arguments, **named)
        has_bias = self.e_score_correction_bias is not None
        is_known = (
            self.use_grouped_topk or self.custom_routing_function is not None or self.scoring_func == "sqrtsoftplus"
        )
        if not is_known and (has_bias or self.scoring_func == "sigmoid"):
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    CPURouter.__init__ = _made

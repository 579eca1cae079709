"""Runs inside vLLM's worker process: the weight map, updates in place, the fingerprint, both log-probabilities, draws by the
leases' seeds, LoRA adapters in memory, and layers that vLLM rounded when it loaded them.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by collective RPC. Importing this
module stops vLLM's CPU backend from packing linear weights, since a packed copy would go on computing with the old weights; so it
must be imported before the model is built. An adapter never touches the disk: vLLM's own layers determine where its tensors go, it
is registered once, and later changes are written in place. A master is rounded by the layer's own vLLM method on its own device, so
that the values written in place equal those of a fresh load; a layer rounded by any other method is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.layers.utils as vllm_layers
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod, OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from echo2.base.errors import EchoError, EngineError
from echo2.base.rng import uniform
from echo2.worker.engines.vllm.experts import ChosenExperts
from echo2.worker.engines.vllm.vllm_weights import ADAPTER_ID, POSITION, RAW_LOGPROB_ID, STREAM, Entry, read_patches
from echo2.worker.engines.vllm.weight_map import RoundedLayer, WeightMap, record_map, record_pieces

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, the model is as its loader expects it: without LoRA's wrappers around layers."""
    wrapped = [(name, module) for name, module in model.named_modules() if hasattr(module, "base_layer")]
    for name, module in wrapped:
        _put(model, name, module.base_layer)
    try:
        yield
    finally:
        for name, module in wrapped:
            _put(model, name, module)


def _put(model: torch.nn.Module, name: str, module: Any) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def map_adapter(runner: Any, shapes: Mapping[str, tuple[int, ...]], factor: float) -> WeightMap:
    """Registers an adapter with these tensors, whose product is scaled by `factor`, and returns the map to its live values.
    EngineError, naming the tensor, if vLLM has no LoRA layer for it."""
    manager = runner.lora_manager._adapter_manager
    runner.lora_manager.remove_all_adapters()

    def load(probes: Mapping[str, torch.Tensor]) -> None:
        rank = next(shape[0] for name, shape in shapes.items() if name.endswith(_A))
        manager.add_adapter(LoRAModel(ADAPTER_ID, rank, _layers(probes)))
        manager.activate_adapter(ADAPTER_ID)

    scaled = {}
    for name, pieces in record_pieces(load, shapes, manager.lora_config.lora_dtype).items():
        if not pieces:
            raise EngineError(f"tensor {name}: vLLM has no LoRA layer that takes it")
        scaled[name] = [replace(piece, factor=factor if name.endswith(_B) else 1.0) for piece in pieces]
    return WeightMap(shapes, scaled)


def _layers(probes: Mapping[str, torch.Tensor]) -> dict[str, LoRALayerWeights]:
    layers = {}
    for name, a in probes.items():
        if not name.endswith(_A):
            continue
        module = name.removeprefix(_PREFIX).removesuffix(_A)
        b = probes.get(f"{_PREFIX}{module}{_B}")
        if b is None:
            raise EngineError(f"tensor {name}: expected its partner {module}{_B}, got none")
        layers[module] = LoRALayerWeights(module, a.shape[0], a.shape[0], a, b, scaling=1.0)
    return layers


_DONE = "_already_called_process_weights_after_loading"


def rounded_layers(model: torch.nn.Module) -> list[RoundedLayer]:
    """The layers that vLLM rounded, in the model's order, each with a master of zeros. EngineError for an unsupported method."""
    layers = []
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method) is Fp8PtpcOnlineLinearMethod:
            layers.append(_layer(name, module))
        elif isinstance(method, OnlineLinearBase | OnlineMoEMethodBase):
            raise EngineError(
                f"{name}: expected layers rounded by {Fp8PtpcOnlineLinearMethod.__name__}, got {type(method).__name__}, "
                "which cannot be fed with changes; expected worker.quantisation none"
            )
    return layers


def _layer(name: str, module: Any) -> RoundedLayer:
    live = {key: each.data for key, each in module.named_parameters(recurse=False) if key != "bias"}
    size = (module.output_size_per_partition, module.input_size_per_partition)
    master = torch.zeros(size, dtype=module.orig_dtype, device="cpu")
    layer = RoundedLayer(name, master, live, partial(_rounded, module, live["weight"].device))
    expected, got = _forms(live), _forms(layer.rounded(master))
    if expected != got:
        raise EngineError(f"{name}: expected rounding anew to give {expected}, got {got}")
    return layer


def _forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}


def _rounded(module: Any, device: torch.device, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rounds a master with vLLM's own method, on a copy of the layer object that holds only the master."""
    double = object.__new__(type(module))
    double.__dict__.update({key: value for key, value in module.__dict__.items() if key != _DONE})
    double._parameters = {"weight": torch.nn.Parameter(master.to(device), requires_grad=False)}
    with torch.no_grad(), device:
        module.quant_method.process_weights_after_loading(double)
    return {name: each.data for name, each in double._parameters.items() if each is not None}


@contextmanager
def _masters_in_place(model: torch.nn.Module, layers: Sequence[RoundedLayer]) -> Iterator[None]:
    """Within the context, the layers are as the model's loader expects them: with the masters instead of the rounded values."""
    replaced: list[tuple[Any, Any]] = []
    try:
        for layer in layers:
            module: Any = model.get_submodule(layer.name)
            replaced.append((module, module._parameters))
            weight = ModelWeightParameter(
                data=layer.master, input_dim=1, output_dim=0, weight_loader=module.weight_loader
            )
            others = {name: each for name, each in module._parameters.items() if name not in layer.live}
            module._parameters = {"weight": weight, **others}
        yield
    finally:
        for module, parameters in replaced:
            module._parameters = parameters


def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
    """Replaces vLLM's function of this name, which packs weights when they are loaded: for oneDNN, or for AMX where it is there."""
    layer.cpu_linear = torch.nn.functional.linear


vllm_layers.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm

_make_latent = MultiHeadLatentAttentionWrapper.__init__


def _made_latent(self: Any, *arguments: Any, **named: Any) -> None:
    """For these models transformers' norms of latents have this epsilon, whatever the config's `rms_norm_eps`, which vLLM takes."""
    _make_latent(self, *arguments, **named)
    if get_current_vllm_config().model_config.hf_text_config.model_type in (
        "deepseek_v2", "deepseek_v3", "glm4_moe_lite",
    ):  # fmt: skip
        for norm in (self.q_a_layernorm, self.kv_a_layernorm):
            if norm is not None:
                norm.variance_epsilon = 1e-6


MultiHeadLatentAttentionWrapper.__init__ = _made_latent

SUMS_MAX = 1 << 24  # cumulative probabilities held at a time: 128 MiB that vLLM's memory planning does not include
_BACKENDS_AS_LOADED = ("TRITON", "BATCHED_TRITON", "CPU")  # the last as experts.py changes it

Shapes = list[tuple[str, list[int]]]


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Replaces vLLM's function of this name, which repeats per-sequence values for each drafted token. vLLM's CPU kernel writes
    to a copy, so that drafts would be verified with uninitialised temperature and top-k."""
    counts = torch.diff(cu_num_tokens, prepend=torch.zeros_like(cu_num_tokens[:1]))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


_top_k_top_p = rejection_sampler.apply_top_k_top_p


def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Replaces vLLM's function of this name, whose CPU path fails if no token of a batch was drafted."""
    return _top_k_top_p(logits, k, p) if len(logits) else logits


_rotate = RotaryEmbedding.forward_cpu


def forward_cpu(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
    """Replaces vLLM's method of this name, whose kernel rotates wrong elements of queries [tokens, heads, size], as those of latent
    attention are."""
    return (_rotate if query.ndim == 2 else RotaryEmbedding.forward_native)(self, positions, query, key)


if not torch.cuda.is_available():
    RotaryEmbedding.forward_cpu = forward_cpu
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


class SeededDraws(torch.nn.Module):
    """Replaces vLLM's draw from filtered logits: the random number of each position (base/rng) determines its token. So tokens do
    not depend on the rest of the batch, and a sequence that another worker continues keeps its random stream."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._runner = model_runner

    def forward(
        self, logits: torch.Tensor, generators: object, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The drawn token of each row, and the log-probabilities of the sampling distribution [rows, vocabulary], float32."""
        logprobs = _top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
        states = (self._runner.requests[name] for name in self._runner.input_batch.req_ids[: len(logits)])
        places = (place_of(state.sampling_params.extra_args, len(state.output_token_ids)) for state in states)
        numbers = torch.tensor([uniform(*place) for place in places], dtype=torch.float64, device=logits.device)
        rows = max(1, SUMS_MAX // logits.shape[-1])
        parts = zip(torch.split(logprobs, rows), torch.split(numbers, rows), strict=True)
        return torch.cat([_picked(*part) for part in parts]), logprobs


def place_of(stream: dict[str, Any], sampled_tokens: int) -> tuple[int, int]:
    """The random stream of a request, and the position in it of the token that it draws next."""
    return stream[STREAM], stream[POSITION] + sampled_tokens


def _picked(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    sums = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    picked = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)
    return picked.clamp_(max=logprobs.shape[-1] - 1)[:, 0]


class SamplerOfBoth(Sampler):  # type: ignore[misc]
    """vLLM's sampler, except that it reports the token's raw log-probability in place of the likeliest alternative's, and where its
    experts are recorded, those in place of others'."""

    experts: ChosenExperts | None = None

    def forward(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raw = self.compute_logprobs(logits)
        output = super().forward(logits, *args, **kwargs)
        reported = output.logprobs_tensors
        _report_raw(reported, raw, output.sampled_token_ids[:, :1].long())
        if self.experts is not None:
            reported.logprobs[:, 2:] = self.experts.of_step()
            others = reported.logprob_token_ids[:, 2:]
            others.copy_(RAW_LOGPROB_ID - 1 - torch.arange(others.shape[1], device=others.device))
        return output


class RejectionSamplerOfBoth(RejectionSampler):  # type: ignore[misc]
    """As SamplerOfBoth, for vLLM's sampler of drafted tokens."""

    def _get_logprobs_tensors(
        self, count: int, metadata: Any, logits: torch.Tensor, target: Any, bonus: Any, sampled: torch.Tensor
    ) -> Any:
        reported = super()._get_logprobs_tensors(count, metadata, logits, target, bonus, sampled)
        # Each sequence's rows of logits are consecutive: one per drafted token and one more. vLLM drops rejected tokens
        # later, so their entries do not matter.
        first = torch.zeros_like(metadata.cu_num_sampled_tokens)
        first[1:] = metadata.cu_num_sampled_tokens[:-1]
        rows = (first[:, None] + torch.arange(sampled.shape[1], device=first.device)).flatten()
        raw = self.sampler.compute_logprobs(logits[rows.clamp_(max=len(logits) - 1)])
        _report_raw(reported, raw, sampled.flatten().clamp(min=0)[:, None].long())
        return reported


def _report_raw(reported: Any, raw: torch.Tensor, sampled: torch.Tensor) -> None:
    """Puts the raw log-probability of each sampled token into the second entry of its row, if there is one."""
    if reported is None or reported.logprob_token_ids.ndim != 2 or reported.logprobs.shape[1] < 2:
        return
    reported.logprob_token_ids[:, 1] = RAW_LOGPROB_ID
    reported.logprobs[:, 1] = raw.gather(1, sampled)[:, 0]


class WorkerExtension:
    """The methods that the engine calls in each of vLLM's processes. They return errors as a text `error: ...`, because exceptions
    lose their class on the way."""

    _echo2_map: WeightMap | None = None  # of the published tensors
    _echo2_base: WeightMap | None = None  # of an adapter's base model
    model_runner: Any

    def echo2_report_both_logprobs(self) -> str:
        """Makes vLLM report the sampling and the raw log-probability of each sampled token and, without drafting, draw by seeds."""
        sampler = self.model_runner.sampler
        if type(sampler) is not Sampler:
            return f"error: expected the sampler {Sampler.__name__}, got {type(sampler).__name__}"
        self.model_runner.sampler = SamplerOfBoth(logprobs_mode="processed_logprobs")
        self.model_runner.sampler.experts = getattr(self.model_runner, "echo2_experts", None)
        drafts = getattr(self.model_runner, "rejection_sampler", None)
        if drafts is None:
            self.model_runner.sampler.topk_topp_sampler = SeededDraws(self.model_runner)
            return ""
        if type(drafts) is not RejectionSampler:
            return f"error: expected the sampler {RejectionSampler.__name__}, got {type(drafts).__name__}"
        self.model_runner.rejection_sampler = RejectionSamplerOfBoth(
            self.model_runner.sampler, self.model_runner.speculative_config, self.model_runner.device
        )
        return ""

    def echo2_routing_shape(self) -> tuple[int, int, int]:
        """The routers whose choices are recorded."""
        return astuple(self.model_runner.echo2_experts.shape)

    def echo2_map(self, shapes: Shapes, is_base: bool) -> Any:
        """Builds the map for whole weights of these names and shapes; returns which of their elements are here (`covers`)."""
        try:
            model = self.model_runner.model
            config = Path(self.model_runner.model_config.model)  # the folder that the engine wrote
            # Some models' loaders ask for vLLM's config, which is set only while it makes a model.
            with without_adapters(model), set_current_vllm_config(self.model_runner.vllm_config):
                layers = rounded_layers(model)
                if not layers:
                    _refuse_detached(model)
                device = next(iter(layers[0].live.values())).device if layers else None
                with _masters_in_place(model, layers):
                    weight_map = record_map(model.load_weights, _shapes(shapes), model, device, config, layers)
        except EchoError as error:
            return f"error: {error}"
        self._echo2_base, self._echo2_map = (weight_map, self._echo2_map) if is_base else (self._echo2_base, weight_map)
        return weight_map.covers()

    def echo2_map_adapter(self, shapes: Shapes, factor: float) -> Any:
        """Builds the map for an adapter's tensors and activates the adapter; returns which elements are here (`covers`)."""
        try:
            self._echo2_map = map_adapter(self.model_runner, _shapes(shapes), factor)
        except EchoError as error:
            return f"error: {error}"
        return self._echo2_map.covers()

    def echo2_apply(self, path: str, entries: list[Entry], is_base: bool, goes_on: bool) -> str:
        """Applies the patches in the file; `echo2_settle` must follow. `goes_on`: they continue the previous call's update."""
        held = self._echo2_base if is_base else self._echo2_map
        if held is None:
            return "error: expected a keyframe first, got a change"
        try:
            held.apply(read_patches(Path(path), entries), goes_on=goes_on)
        except EchoError as error:
            return f"error: {error}"
        return ""

    def echo2_follow(self) -> str:
        """Rounds again the layers that the last update touched; `echo2_settle` must follow."""
        if self._echo2_map is None:
            return "error: expected a keyframe first, got a change"
        try:
            self._echo2_map.follow()
        except (EchoError, RuntimeError) as error:  # torch raises RuntimeError if memory is short
            return f"error: rounding anew: {error}"
        return ""

    def echo2_settle(self, is_kept: bool, is_base: bool) -> None:
        """Ends an update: puts the old values back because a process failed (not `is_kept`), or drops them."""
        held = self._echo2_base if is_base else self._echo2_map
        if held is not None:
            held.settle(is_kept=is_kept)

    def echo2_sums(self, key: int, is_base: bool) -> Any:
        """The terms that the tensors held here contribute to the keyed fingerprint."""
        held = self._echo2_base if is_base else self._echo2_map
        if held is None:
            return "error: expected a keyframe first, got a question for the fingerprint"
        return held.sums(key)


def _shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in shapes}


def _refuse_detached(model: torch.nn.Module) -> None:
    """EngineError for layers that compute with values derived from their weights at loading: experts' kernels that repack them,
    routers that vLLM splits on some AMD GPUs, and latent attention unless both halves of its `kv_b_proj` are views of it."""
    for name, module in model.named_modules():
        if getattr(module, "_bf16x3_weight", None) is not None:
            raise EngineError(
                f"{name}: expected a router that computes with its weight, got parts of it, which changes would not reach"
            )
        if isinstance(module, MLAAttention):
            whole = module.kv_b_proj.weight.untyped_storage().data_ptr()
            halves = [getattr(module, half, None) for half in ("W_UV", "W_UK_T")]
            if any(half is None or half.untyped_storage().data_ptr() != whole for half in halves):
                raise EngineError(f"{name}: expected views of kv_b_proj, got copies, which changes would not reach")
        backend = getattr(getattr(getattr(module, "quant_method", None), "unquantized_backend", None), "name", None)
        if backend is not None and backend not in _BACKENDS_AS_LOADED:
            raise EngineError(
                f"{name}: expected experts on {' or '.join(_BACKENDS_AS_LOADED)}, got {backend}, which changes weights after "
                "loading; expected a GPU, or --worker.engine embedded"
            )

"""The policy: a Hugging Face causal LM, its float32 masters and the published weights.

Guarantees: with `weights_dtype` bfloat16 the parameters always hold `master.bfloat16()`, so the learner computes with exactly
the published weights (on a CPU, where bf16 arithmetic is slow, the rounded values are stored in float32 tensors); the memory
for logits is bounded by the device's free memory.

Shapes: B rows, W positions of a row, T sampled tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echo2.base.errors import ConfigError, StateError
from echo2.base.rollout import ROUTING_KEY, RoutingShape
from echo2.learner.training.loading import (
    Skeleton,
    as_base_holds,
    config_json_of,
    digest_of,
    load_whole,
    size_of,
    skeleton_of,
    stop_tokens_of,
)
from echo2.learner.training.model_files import naming
from echo2.learner.training.optimiser import host_tensors
from echo2.learner.training.packing import (
    BLOCK,
    UNITS_NAME,
    Attention,
    PackedInputs,
    UnitTree,
    block_mask,
    dense_mask,
    parts_mask,
    register_units,
)
from echo2.learner.training.ranks import Ranks, as_sharded, own_part
from echo2.weights import fingerprint
from echo2.weights.elements import published_tensors
from echo2.weights.precision import PRECISIONS, dequantise, linear_layers, quantise, round_parameters
from echo2.weights.routers import Routers

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PROBE_TOLERANCE = 1e-3  # far above rounding in float32, far below a scale of the logits


class Policy(nn.Module):
    """The model as the trainer and the audit call it: packed tokens give the log-probabilities of the sampled tokens. Whatever
    computes with it goes through `forward`, where FSDP gathers the ranks' rows."""

    def __init__(self, hf_model: Any, temperature: float, slices_head: bool, replays_routing: bool = False) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.routers = Routers(hf_model, f"model_type {hf_model.config.model_type}") if replays_routing else None
        self.temperature = temperature if temperature > 0 else 1.0
        self.slices_head = slices_head
        self.attention = Attention.DENSE
        self._dense = hf_model.config._attn_implementation
        if self._dense == "sdpa":
            self._dense = register_units()
            hf_model.set_attn_implementation(self._dense)
        self.uses_float_mask = self._dense == "eager"
        self.windows = windows_of(hf_model.config)
        text = hf_model.config.get_text_config(decoder=True)
        # Masks keep a row's sequences apart in attention, not in layers that carry a state along.
        self.is_packed = set(getattr(text, "layer_types", None) or []) <= {_FULL, _SLIDING}
        self._scale = (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)
        self._cap: float | None = getattr(text, "final_logit_softcapping", None)

    def attend_by(self, attention: Attention) -> None:
        """Switches the attention implementation; results equal those of `DENSE` up to rounding."""
        self.hf_model.set_attn_implementation(
            {Attention.DENSE: self._dense, Attention.FLEX: "flex_attention"}[attention]
        )
        self.attention = attention
        self.uses_float_mask = self.hf_model.config._attn_implementation == "eager"

    @property
    def routing(self) -> RoutingShape | None:
        return None if self.routers is None else self.routers.shape

    def attends_by_units(self, longest: int) -> bool:
        """Whether rows of sequences up to so long need no mask: on a CPU, where torch's kernels take part after part, and within
        their window of attention."""
        if not self.is_packed or self.attention is not Attention.DENSE or self._dense != UNITS_NAME:
            return False
        is_on_cpu = self.hf_model.get_input_embeddings().weight.device.type == "cpu"
        return is_on_cpu and not any(0 < window < longest for window in self.windows.values())

    @property
    def row_multiple(self) -> int:
        return BLOCK if self.attention is Attention.FLEX else 1

    def _masks(self, inputs: PackedInputs) -> Any:
        """The mask of a packed row, or one for each kind of layer. None for rows of one sequence with padding behind it, which
        layers that read from left to right do not see."""
        if not self.is_packed:
            return None
        tree, places = inputs.tree, inputs.positions_BW
        longest = int(places.max()) + 1 if any(self.windows.values()) else 0
        if inputs.spans and self.attends_by_units(longest):
            parts = parts_mask(inputs.spans, len(places))
            return parts if "" in self.windows else dict.fromkeys(self.windows, parts)
        whole = self._mask(tree)
        masks = {
            kind: self._mask(replace(tree, places_BW=places, window=window)) if 0 < window < longest else whole
            for kind, window in self.windows.items()
        }
        return masks.get("", masks)

    def _mask(self, tree: UnitTree) -> Tensor | BlockMask:
        if self.attention is Attention.FLEX:
            return block_mask(tree)
        mask_B1WW = dense_mask(tree)[:, None]
        if self.uses_float_mask:
            return torch.zeros(mask_B1WW.shape, device=mask_B1WW.device).masked_fill(~mask_B1WW, -1e30)
        if mask_B1WW.device.type == "cpu":  # else each layer makes its own and keeps it for the backward pass
            return torch.zeros(mask_B1WW.shape, dtype=self.hf_model.dtype).masked_fill(~mask_B1WW, -torch.inf)
        return mask_B1WW

    def forward(self, inputs: PackedInputs | Callable[[Policy], Any], with_entropy: bool = False) -> Any:
        """logprobs_T with gradient and entropy_T without (None unless asked for), in nats, both at the sampling temperature. For a
        function: what it returns of this policy, called where the ranks' rows are gathered."""
        if self.routers is not None:
            self.routers.give(inputs.experts_PLK if isinstance(inputs, PackedInputs) else None)
        if not isinstance(inputs, PackedInputs):
            return inputs(self)
        arguments = {
            "input_ids": inputs.token_ids_BW,
            "attention_mask": self._masks(inputs),
            "position_ids": inputs.positions_BW,
            "use_cache": False,
        }
        if not self.slices_head:
            logits_BWV = self.hf_model(**arguments).logits
            logits_TV = logits_BWV.flatten(0, 1)[inputs.predictor_T]
            return self._read(logits_TV, inputs.target_T, with_entropy)
        hidden_BWH = backbone(self.hf_model)(**arguments)[0]
        hidden_TH = hidden_BWH.flatten(0, 1)[inputs.predictor_T]
        return self._headed(hidden_TH, inputs.target_T, with_entropy)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, scaled and capped as some families have them."""
        logits: Tensor = self.hf_model.get_output_embeddings()(hidden)
        logits = logits if self._scale == 1.0 else logits * self._scale
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    def _headed(self, hidden_TH: Tensor, target_T: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        vocabulary = self.hf_model.get_output_embeddings().weight.shape[0]
        # More rows than this are computed in pieces, and recomputed in the backward pass, so that their logits fit.
        most_bytes = min(LOGIT_BYTES_MAX, free_bytes(hidden_TH.device) // _FREE_SHARE)
        rows = max(1, max(LOGIT_BYTES_MIN, most_bytes) // (4 * vocabulary))
        if hidden_TH.shape[0] <= rows:
            return self._read(self.head(hidden_TH), target_T, with_entropy)
        pieces = [
            checkpoint(lambda h, t: self._read(self.head(h), t, with_entropy), h, t, use_reentrant=False)
            for h, t in zip(torch.split(hidden_TH, rows), torch.split(target_T, rows), strict=True)
        ]
        entropy_T = torch.cat([e for _, e in pieces]) if with_entropy else None
        return torch.cat([p for p, _ in pieces]), entropy_T

    def _read(self, logits_TV: Tensor, target_T: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        logits_TV = logits_TV.float()
        if self.temperature != 1.0:
            logits_TV = logits_TV / self.temperature
        total_T = logits_TV.logsumexp(-1)
        logprobs_T = logits_TV.gather(-1, target_T[:, None])[:, 0] - total_T
        if not with_entropy:
            return logprobs_T, None
        with torch.no_grad():
            entropy_T = total_T - (torch.softmax(logits_TV, -1) * logits_TV).sum(-1)
        return logprobs_T, entropy_T


def shard(policy: Policy, ranks: Ranks, device: torch.device, skeleton: Skeleton | None = None) -> None:
    """Shards the parameters over the ranks (FSDP2), layer by layer; gradients are summed over the ranks, not averaged. With a
    `skeleton`, the weights of each layer are read just before the layer is sharded."""
    mesh = ranks.mesh(device.type)
    if mesh is None:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # With several replicas, each sums its micro-batches before the all-reduce (`meet_copies`): in float32, whatever the dtype.
    summed = MixedPrecisionPolicy(reduce_dtype=torch.float32) if ranks.replicas > 1 else MixedPrecisionPolicy()
    layer_classes = set(getattr(policy.hf_model, "_no_split_modules", None) or ())
    for module in list(policy.modules()):
        if type(module).__name__ in layer_classes:
            if skeleton is not None:
                skeleton.fill(module)
            fully_shard(module, mesh=mesh, mp_policy=summed)
            if skeleton is not None:
                skeleton.forget()
    if skeleton is not None:
        skeleton.fill(policy)
    fully_shard(policy, mesh=mesh, mp_policy=summed)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(policy: Policy) -> None:
    """Drops gathered parameters, which a forward pass without a backward pass leaves behind: the next one would compute with them
    whatever has been written since."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_FULL, _SLIDING = "full_attention", "sliding_attention"


def windows_of(config: Any) -> dict[str, int]:
    """How many places attention reaches back, its own included (0: all), by the kind of layer; by "" if there is one kind."""
    text = config.get_text_config(decoder=True)
    window = int(getattr(text, "sliding_window", None) or 0)
    kinds = set(getattr(text, "layer_types", None) or [])
    if _SLIDING in kinds:
        return {_FULL: 0, _SLIDING: window}
    return {"": 0 if kinds or getattr(text, "use_sliding_window", True) is False else window}


def backbone(hf_model: Any) -> Any:
    base = hf_model.get_base_model() if hasattr(hf_model, "get_base_model") else hf_model
    return getattr(base, base.base_model_prefix)


class PolicyModel:
    """Loads the policy and keeps masters, parameters and published bits consistent. `parameters`: the trained weights used for
    computing. `masters`: the float32 values that the optimiser updates; the same tensors if the policy itself is float32.
    `masters_on_host`: for an optimiser that keeps its state there. None: what only computes needs no masters."""

    def __init__(
        self, path: str, weights_dtype: str, device: torch.device, temperature: float, ranks: Ranks | None = None,
        lora_rank: int = 0, *, replays_routing: bool = False, masters_on_host: bool | None = False,
    ) -> None:  # fmt: skip
        self.path = path
        self.device = device
        self.ranks = ranks or Ranks()
        self.weights_dtype = weights_dtype
        dtype = torch.bfloat16 if _computes_in_bf16(weights_dtype, device) else torch.float32
        # With an adapter, load the whole base: workers compare their base with it by a fingerprint of all weights.
        skeleton = skeleton_of(path, dtype, device) if self.ranks.count > 1 and not lora_rank else None
        self.hf_model = load_whole(path, dtype) if skeleton is None else skeleton.hf_model
        _switch_dropout_off(self.hf_model)
        is_packed = lora_rank > 0 and weights_dtype == "nf4"  # then the whole base need not fit the device
        if self.ranks.count == 1 and not is_packed:
            self.hf_model.to(device)
        self.adapter = put_on_adapter(self.hf_model, lora_rank, weights_dtype, device) if lora_rank else None
        if self.ranks.count == 1 and is_packed:
            self.hf_model.to(device)
        self.hf_model.eval()
        self._recomputed: list[nn.Module] = []
        self.config = self.hf_model.config
        self.size = size_of(self.config)
        self.context_tokens = self.size.context_tokens
        self.vocabulary_size = int(self.hf_model.get_input_embeddings().weight.shape[0])
        self.policy = Policy(self.hf_model, temperature, slices_head=True, replays_routing=replays_routing)
        shard(self.policy, self.ranks, device, skeleton)
        self.names = [name for name, p in self.hf_model.named_parameters() if p.requires_grad]
        self.published_names = [published_name(name) if lora_rank else name for name in self.names]
        published = {} if lora_rank else published_tensors(self.hf_model)
        self.kept = {name: tensor for name, tensor in published.items() if name not in self.names}
        if self.kept and self.ranks.count > 1:
            raise ConfigError(
                f"model {path}: expected one rank for a model that keeps {next(iter(self.kept))} beside its weights, got "
                f"{self.ranks.count}"
            )
        self.parameters = [p for p in self.hf_model.parameters() if p.requires_grad]
        check_dtypes(dict(zip(self.names, self.parameters, strict=True)), path, self.ranks.count)
        self.parameter_count = sum(int(p.numel()) for p in self.parameters)
        # A forward pass and gradients of inputs take 2 FLOPs per parameter at work each, gradients of weights 2 per trained one.
        base, adapter = self.size.active_parameters, self.parameter_count if lora_rank else 0
        self.flops_per_position = 4.0 * (base + adapter) + 2.0 * (adapter or base)
        self.published_dtype = PRECISIONS[weights_dtype]
        kept_bytes = sum(int(tensor.nbytes) for tensor in self.kept.values())
        self.snapshot_bytes = self.parameter_count * self.published_dtype.itemsize + kept_bytes
        self.is_rounded = self.published_dtype is torch.bfloat16
        assert self.is_rounded or not masters_on_host, "refused by refuse_optimizer"
        self.masters_on_host = bool(masters_on_host)
        self._summed: list[Tensor | None] = [None] * len(self.parameters)
        has_masters = self.is_rounded and masters_on_host is not None
        self.masters = self._masters() if has_masters else [p.data for p in self.parameters]
        self.round_to_policy()
        if self.ranks.count == 1 and any(p.dtype == torch.bfloat16 for p in self.parameters):
            # A bf16 gradient lives no longer than its layer's pass.
            for number, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(partial(_add_gradient_of, weakref.ref(self), number))
        self.policy.slices_head = self._head_can_be_sliced()  # last: the probe's forward pass gathers sharded rows

    def _masters(self) -> list[Tensor]:
        if not self.masters_on_host:
            return [p.detach().to(torch.float32).clone() for p in self.parameters]
        copies = host_tensors(self.parameters, self.device)
        for room, parameter in zip(copies, self.parameters, strict=True):
            room.copy_(own_part(parameter.detach()))
        return [as_sharded(room, p, self.ranks) for room, p in zip(copies, self.parameters, strict=True)]

    def enable_gradient_checkpointing(self, *, is_selective: bool = False) -> None:
        """Recomputes layers in the backward pass: they keep only their inputs or, if `is_selective`, expensive results as well.
        They do so in training mode, of which the modules within are kept out: some draw their experts in it or clamp weights."""
        how: dict[str, Any] = {"use_reentrant": False}
        if is_selective:
            how["context_fn"] = selective_contexts
        newer = getattr(self.hf_model, "activation_checkpointing_enable", None)
        try:
            (newer or self.hf_model.gradient_checkpointing_enable)(how)
        except ValueError as error:
            raise ConfigError(f"learner.gradient_checkpointing: expected false for {self.path}: {error}") from error
        self._recomputed = [m for m in self.hf_model.modules() if getattr(m, "gradient_checkpointing", False)]
        self.recompute(is_on=True)

    def recompute(self, *, is_on: bool) -> None:
        """Whether the layers that are recomputed are: without, they take a cache."""
        for module in self._recomputed:
            module.training = is_on

    def round_to_policy(self) -> None:
        """Sets the parameters to the masters rounded to bf16. A no-op for a float32 policy."""
        if not self.is_rounded:
            return
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master.to(torch.bfloat16))

    def meet_copies(self, *, is_due: bool) -> None:
        """Call before each backward pass. `is_due`: all-reduce the gradients over the replicas in this pass, including what each
        replica has accumulated since the last all-reduce. Once per update is enough; nothing else crosses between machines."""
        if self.ranks.replicas > 1:
            self.policy.set_requires_all_reduce(is_due)  # type: ignore[operator]

    def gather_gradients(self) -> None:
        """Call after each micro-batch: adds the gradients of bf16 parameters up in float32, where backward has not."""
        if not self.is_rounded or not self.parameters or self.parameters[0].dtype == torch.float32:
            return
        for number in range(len(self.parameters)):
            self._add_gradient(number)

    def take_gradients(self) -> list[Tensor | None]:
        """Call after the last micro-batch: the gradients of the update, in float32, one for each master."""
        if not self.is_rounded:
            return [parameter.grad for parameter in self.parameters]
        for number in range(len(self.parameters)):
            self._add_gradient(number)
        gradients, self._summed = self._summed, [None] * len(self.parameters)
        return gradients

    def _add_gradient(self, number: int) -> None:
        parameter = self.parameters[number]
        if parameter.grad is None:
            return
        gradient, before = parameter.grad.to(torch.float32), self._summed[number]
        self._summed[number] = gradient if before is None else before.add_(gradient)
        parameter.grad = None

    def forget_gradients(self) -> None:
        self._summed = [None] * len(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def masters_by_name(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.masters, strict=True))

    def load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads a checkpoint's masters; raises `StateError` unless names and shapes are this model's."""
        masters = self.masters_by_name()
        if masters.keys() != tensors.keys():
            odd = sorted(masters.keys() ^ tensors.keys())[0]
            raise StateError(f"checkpoint: expected the tensors of {self.path}, got another table, first at {odd}")
        with torch.no_grad():
            for name, master in masters.items():
                if master.shape != tensors[name].shape:
                    raise StateError(
                        f"checkpoint: expected {name} of shape {tuple(master.shape)}, got {tuple(tensors[name].shape)}"
                    )
                own_part(master).copy_(own_part(tensors[name]))
        self.round_to_policy()

    def snapshot(self) -> dict[str, Tensor]:
        """Copies the policy as it is published to host memory, each tensor under its Hugging Face name; with several ranks, each
        copies its own rows. What is kept beside the weights has its own dtype."""
        parts = (own_part(parameter.detach()) for parameter in self.parameters)
        copies = host_copies(parts, self.published_dtype, pinned=self.device.type == "cuda")
        rows = zip(self.published_names, copies, self.parameters, strict=True)
        buffers = {name: tensor.to("cpu", copy=True) for name, tensor in self.kept.items()}
        return {name: as_sharded(part, parameter, self.ranks) for name, part, parameter in rows} | buffers

    def layout_of(self, published_name: str) -> Tensor | None:
        """A tensor sharded over the ranks like the one published under this name; None if the name is unknown."""
        return (dict(zip(self.published_names, self.masters, strict=True)) | self.kept).get(published_name)

    def save(self, policy: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the snapshot `policy` in Hugging Face layout, in the base's dtype if that holds it; an adapter is merged into its
        base weights. Tied tensors are written once."""
        hf_model = self.hf_model
        if self.adapter is not None:
            hf_model = load_whole(self.path, self.published_dtype)
            merge_into(hf_model, policy, self.weights_dtype)
            policy = {name: tensor.detach() for name, tensor in published_tensors(hf_model).items()}
        policy, dtype = as_base_holds(self.path, policy, self.published_dtype)
        parameters = dict(hf_model.named_parameters(remove_duplicate=False))
        buffers = {name: tensor for name, tensor in hf_model.state_dict().items() if name not in parameters}
        trained = {name: tensor.contiguous() for name, tensor in policy.items()}
        hf_model.save_pretrained(folder, state_dict={**buffers, **trained})
        # It wrote the dtype that this process computes with, which on a CPU is not that of the tensors.
        config = copy.deepcopy(hf_model.config)
        config.dtype = dtype
        config.save_pretrained(folder)

    @property
    def routing(self) -> RoutingShape | None:
        return self.policy.routing

    def config_json(self) -> bytes:
        """The config that workers receive; it also says if an adapter is published and if workers must report expert routing."""
        more: dict[str, object] = {CONFIG_KEY: asdict(self.adapter)} if self.adapter else {}
        if self.policy.routers is not None:
            more[ROUTING_KEY] = True
        return config_json_of(self.config, self.size, more)

    def digest(self) -> str:
        """sha256 over the config and the table of published tensors: names, shapes, dtypes."""
        shapes = dict(zip(self.published_names, (p.shape for p in self.parameters), strict=True))
        shapes |= {name: tensor.shape for name, tensor in self.kept.items()}
        return digest_of(self.config_json(), shapes.items(), "bfloat16" if self.is_rounded else "float32")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_tokens_of(self.hf_model.generation_config, self.config)

    def _head_can_be_sliced(self) -> bool:
        """Whether `Policy.head` gives the model's own logits from its hidden states."""
        ids = torch.arange(4, device=self.device)[None] % max(1, self.vocabulary_size)

        def agree(policy: Policy) -> bool:
            hf_model = policy.hf_model
            whole = hf_model(input_ids=ids, use_cache=False).logits.float()
            try:
                hidden = backbone(hf_model)(input_ids=ids, use_cache=False)[0]
                sliced = policy.head(hidden).float()
            except (AttributeError, TypeError):
                return False
            return bool(torch.allclose(whole, sliced, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE))

        with torch.no_grad(), naming(self.path, "its forward pass fails"):
            can_be = bool(self.policy(agree))
        reshard(self.policy)
        return can_be


def _computes_in_bf16(weights_dtype: str, device: torch.device) -> bool:
    return PRECISIONS[weights_dtype] is torch.bfloat16 and device.type != "cpu"


def _add_gradient_of(model: weakref.ref[PolicyModel], number: int, _: Tensor) -> None:
    """A hook of the parameter itself: a strong reference to the model would keep both for ever."""
    policy_model = model()
    if policy_model is not None:
        policy_model._add_gradient(number)


def check_dtypes(parameters: Mapping[str, Tensor], path: str, rank_count: int = 1) -> None:
    """Raises `ConfigError` unless all trained tensors have one floating-point dtype; otherwise the published weights would differ
    from those the learner computes with. Without ranks, which shard one dtype, those that transformers keeps in float32, as
    routers, may hold the values of bf16."""
    first = ""
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"model {path}: expected floating-point tensors to train, got {parameter.dtype} in {name} (a quantised "
                "model? train the one that it was made from)"
            )
        first = first or name
        dtypes = {parameter.dtype, parameters[first].dtype}
        if len(dtypes) > 1 and (rank_count > 1 or dtypes != {torch.bfloat16, torch.float32}):
            raise ConfigError(
                f"model {path}: expected tensors of one dtype, got {parameters[first].dtype} in {first} and "
                f"{parameter.dtype} in {name}"
            )


def _switch_dropout_off(model: nn.Module) -> None:
    """Disables dropout, whatever modules call it: with it, the learner's log-probabilities would belong to no policy that ever
    sampled."""
    for module in model.modules():
        shares = [name for name, value in vars(module).items() if isinstance(value, float) and "drop" in name]
        for name in ["p"] if isinstance(module, nn.Dropout) else shares:
            setattr(module, name, 0.0)


LOGIT_BYTES_MIN = 64 << 20  # bytes of logits at a time on a CPU, and on a GPU that is nearly full
LOGIT_BYTES_MAX = 1 << 30  # most bytes of logits at a time; larger pieces make the matrix product no faster
_FREE_SHARE = 16
"""Logits get 1/16 of free memory: their float32 copy, softmax and gradient exist at the same time, and other tensors need the
rest."""


def free_bytes(device: torch.device) -> int:
    """Bytes that a tensor on the device could still take; 0 if unknown."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_copies(parts: Iterable[Tensor], dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Copies tensors to host memory in `dtype`. `pinned`: a GPU copies asynchronously into pinned memory, one tensor after another,
    while the next is queued; all copies are complete on return."""
    if not pinned:
        return [part.to(device="cpu", dtype=dtype, copy=True) for part in parts]
    copies, device = [], None
    for part in parts:
        device = part.device
        room = torch.empty(part.shape, dtype=dtype, pin_memory=device.type == "cuda")
        copies.append(room.copy_(part, non_blocking=True))
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


def selective_contexts() -> Any:
    """Contexts of a recomputed layer, for `torch.utils.checkpoint`: keep attention outputs and every second matrix product."""
    products = {False: 0, True: 0}  # by pass: forward, recomputation

    def choose(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        products[context.is_recompute] += 1
        is_kept = products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


# ---- LoRA: a low-rank adapter on every linear layer except the head; only the adapter is trained and published
#
# Guarantees: the base is frozen and held at the published precision (nf4: in 4 bits, in memory too), so that a worker with the same
# base computes the same policy; a start with the same seed draws the same adapter; names are those of peft's adapter files.

CONFIG_KEY = "echo2_adapter"  # key in the workers' config that describes the published adapter
_PREFIX = "base_model.model."
SCALE = 2.0  # of the product of the adapter's matrices: alpha / rank


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """As workers hear of it. `base_fingerprint`: of the base's parameters in the published dtype, with key 0, in hex."""

    rank: int
    scale: float
    dtype: str
    base_fingerprint: str


def put_on_adapter(hf_model: Any, rank: int, weights_dtype: str, device: torch.device) -> TrainedAdapter:
    """Freezes the model, rounds it to the published precision and attaches a fresh adapter, all in place. With nf4, linear
    layers are moved to `device` as codes; the rest stays where it is. Raises `ConfigError` if peft is missing or the model has
    no linear layers."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"model.lora_rank: expected the package peft, got: {error}") from None
    dtype, layers = PRECISIONS[weights_dtype], linear_layers(hf_model)
    round_parameters(hf_model, weights_dtype, device)
    digest = fingerprint({name: p.detach().to(dtype) for name, p in hf_model.named_parameters()}, 0)
    if not layers:
        raise ConfigError("model.lora_rank: expected a model with linear layers, found none")
    config = LoraConfig(r=rank, lora_alpha=round(SCALE * rank), target_modules=list(layers))
    # Wrapped: by the model's own config peft leaves out layers that have the names of former experts.
    inject_adapter_in_model(config, nn.ModuleDict({"policy": hf_model}))
    if weights_dtype == "nf4":
        for name in list(layers):
            hf_model.get_submodule(name).base_layer = Nf4Linear(layers.pop(name), device)
    return TrainedAdapter(rank, SCALE, weights_dtype, f"{digest:016x}")


@contextmanager
def without_adapter(hf_model: Any) -> Iterator[None]:
    """Within the context, the model computes as its base; without an adapter it does so anyway."""
    layers = [module for module in hf_model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:  # peft's enable_adapters would also change requires_grad, under a graph that is waiting
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight lies in memory as NF4 codes, and is made anew for each pass."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.shape, self.bias = layer.weight.shape, layer.bias
        codes, scales = quantise(layer.weight.to(device))
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _Nf4Product.apply(inputs, self.codes, self.scales, self.bias, self.shape)  # type: ignore[no-untyped-call]
        return outputs


class _Nf4Product(torch.autograd.Function):
    """Keeps the codes for the backward pass, not the weight."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        return F.linear(inputs, dequantise(codes, scales, shape).to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        codes, scales = ctx.saved_tensors
        return gradient @ dequantise(codes, scales, ctx.shape).to(gradient.dtype), None, None, None, None


def published_name(name: str) -> str:
    """Turns a name like `model.layers.0.self_attn.q_proj.lora_A.default.weight` into the name in peft's adapter files."""
    return _PREFIX + name.replace(".default.", ".")


def merge_into(base: Any, policy: Mapping[str, Tensor], weights_dtype: str) -> None:
    """Adds the adapter `policy` to `base`, a whole model in the published precision, each sum in float32."""
    round_parameters(base, weights_dtype)
    with torch.no_grad():
        for name, a in policy.items():
            module, mark, _ = name.removeprefix(_PREFIX).rpartition(".lora_A.")
            if not mark:
                continue
            b = policy[f"{_PREFIX}{module}.lora_B.weight"]
            weight = base.get_submodule(module).weight
            weight.copy_(weight.float().add_(b.float() @ a.float(), alpha=SCALE))

"""Reads a policy's weights: whole for a single process; layer by layer for several, so that no rank ever holds the whole model.

Guarantees: a `Skeleton` has the same parameters as the whole model, filled from the same files; only those of one layer, or those
outside all layers, are whole at a time, provided that each layer is sharded before the next is filled. If a checkpoint's tensor
names differ from the model's (transformers converts them while loading), or if it is not in safetensors, there is no skeleton: each
rank first loads the whole model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from echo2.base.errors import ConfigError
from echo2.cost_model.sizing import SIZE_KEY, ModelSize, exact_positions
from echo2.learner.training.model_files import INDEX, ONE_FILE, checked_path, naming, refuse_quantised, told
from echo2.weights.elements import CHECKPOINT
from echo2.weights.precision import linear_layers

_log = logging.getLogger("echo2.learner")


def load_whole(path: str, dtype: torch.dtype) -> Any:
    """Loads a causal LM into host memory; raises `ConfigError` if that fails."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with naming(path):
        model, info = AutoModelForCausalLM.from_pretrained(
            checked_path(path, has_weights=True), config=read_config(path), dtype=dtype, output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    if odd := sorted(info["mismatched_keys"]):
        raise ConfigError(
            f"model {path}: expected the shapes that config.json says, {len(odd)} tensors differ, first {odd[0][0]}: "
            f"{tuple(odd[0][1])} in its files, {tuple(odd[0][2])} in the model: another model's config.json?"
        )
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model {path}: expected all tensors of a {type(model).__name__} in its files, {len(missing)} are missing, first "
            f"{missing[0]}: an unfinished download, or another model's config.json?"
        )
    if unexpected := sorted(info["unexpected_keys"]):
        _log.warning(
            "model %s: its files hold %d tensors that a %s does not have, first %s: neither trained nor written back",
            path, len(unexpected), type(model).__name__, unexpected[0],
        )  # fmt: skip
    check_finite(dict(model.named_parameters()), f"model {path}", ": damaged files?")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = getattr(model.config, "tie_word_embeddings", False)  # not every class has it
    if head is not None and is_tied and head.weight is not embedding.weight:
        _log.warning(
            "model %s: config.json says tie_word_embeddings, but its files hold a head that differs from the embedding; "
            "both are trained, published and exported", path,
        )  # fmt: skip
        model.config.tie_word_embeddings = False
    return model


def check_finite(weights: Mapping[str, Tensor], whose: str, hint: str = "") -> None:
    """Raises `ConfigError` for weights that nobody can sample from: published, they would end every worker."""
    for name, tensor in weights.items():
        if tensor.numel() and not torch.stack(torch.aminmax(tensor.detach())).isfinite().all():  # makes no copy
            raise ConfigError(f"{whose}: expected finite weights, {name} holds NaN or infinity{hint}")


def read_config(path: str) -> Any:
    """The model's configuration; its max_position_embeddings is the length served. Raises `ConfigError` if there is none.
    Configs extended by YaRN as model cards say keep the original length there, and the factor beside it."""
    from transformers import AutoConfig

    with naming(path):
        # A model's own code is never run, nor does anything ask on the terminal whether it may be.
        config = AutoConfig.from_pretrained(checked_path(path), trust_remote_code=False)
        refuse_quantised(path, getattr(config, "quantization_config", None))  # a hub id's files are not here yet
        # What its code returns: a model that was to return attention could not be written back.
        config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "yarn":
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            factor = rope["factor"]
            if not isinstance(factor, int | float) or not factor >= 1:
                raise ValueError(f"rope_scaling: expected a number from 1 on as its factor, got {factor!r}")
            config.max_position_embeddings = max(config.max_position_embeddings, int(original * factor))
        if kind in (None, "default") and "factor" in rope:
            raise ValueError(f"rope_scaling: expected a type beside the factor {rope['factor']}, found none")
    return config


def folder_of(path: str) -> Path:
    """The folder of a model; a hub id's is fetched, but for what is in the hub's cache."""
    from huggingface_hub import snapshot_download

    local = Path(path).expanduser()
    with naming(path):
        return local if local.is_dir() else Path(snapshot_download(path, **CHECKPOINT))


def read_generation_config(path: str) -> Any:
    from transformers import GenerationConfig

    with naming(path, "its generation_config.json cannot be used"), suppress(OSError):
        return GenerationConfig.from_pretrained(checked_path(path))
    return None


def as_base_holds(path: str, policy: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], torch.dtype]:
    """A policy of this dtype in the dtype of its base, and which that is; in its own if the base's would lose values. Tensors of
    other dtypes, kept beside the weights, stay."""
    wanted = read_config(path).dtype or dtype
    most = torch.finfo(wanted).max
    large = [name for name, tensor in policy.items() if tensor.dtype == dtype and bool((tensor.abs() > most).any())]
    if large and dtype != torch.float32:
        _log.warning("model %s: %s has grown beyond %s, so it is written as %s", path, large[0], wanted, dtype)
    # A config that says 8 bits is of other files than these.
    if large or dtype == torch.float32 or wanted.itemsize < dtype.itemsize:
        return dict(policy), dtype
    return {name: t.to(wanted) if t.dtype == dtype else t for name, t in policy.items()}, wanted


def read_ends(path: str) -> tuple[int, ...]:
    """Tokens that end a completion, by the generation config and the model's config."""
    return stop_tokens_of(read_generation_config(path), read_config(path))


class Skeleton:
    """A model whose parameters are on the meta device until `fill` reads them; its buffers are in memory."""

    def __init__(self, hf_model: Any, files: dict[str, Path], dtype: torch.dtype, device: torch.device) -> None:
        self.hf_model = hf_model
        self._files, self._dtype, self._device = files, dtype, device
        self._empty = dict(hf_model.named_parameters())  # keeps them alive, so that their ids stay unique
        self._names = {id(p): name for name, p in self._empty.items()}
        self._filled: dict[int, nn.Parameter] = {}  # by id of the meta parameter, so that tied ones stay tied

    def fill(self, module: nn.Module) -> None:
        """Reads the parameters of `module` that are still on the meta device."""
        for owner in module.modules():
            for leaf, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter.is_meta:
                    owner.register_parameter(leaf, self._read(parameter))

    def _read(self, parameter: nn.Parameter) -> nn.Parameter:
        filled = self._filled.get(id(parameter))
        if filled is None:
            tensor = self._tensor(self._names[id(parameter)])
            filled = self._filled[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        return filled

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            # Copy: the tensor maps the file's pages, which are read-only and go away when the file is closed.
            return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def forget(self) -> None:
        """Drops references to filled parameters, so that they can be freed once they are sharded."""
        self._filled.clear()


def skeleton_of(path: str, dtype: torch.dtype, device: torch.device) -> Skeleton | None:
    """Makes a skeleton; None if the files do not hold the model's tensors under its own names."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    local = folder_of(checked_path(path, has_weights=True))
    with naming(path):
        config = read_config(str(local))
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    model.generation_config = read_generation_config(str(local)) or model.generation_config
    files = _files_of(local)
    buffers = (name for name, _ in model.named_buffers() if name in model.state_dict())
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    if odd := _odd(shapes, files, [*buffers]) or _untied(model, files):
        _log.warning("model %s: each rank loads all of it first, since %s", path, odd)
        return None
    return Skeleton(model.eval(), files, dtype, device)


def _files_of(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by the files that transformers reads."""
    names = [ONE_FILE] if (folder / ONE_FILE).is_file() else []
    if not names and (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    found: dict[str, Path] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), folder / name))
    return found


def _odd(wanted: Iterable[tuple[str, tuple[int, ...]]], files: dict[str, Path], buffers: list[str]) -> str:
    """Why the files cannot be read tensor by tensor; empty if they can."""
    if not files:
        return f"it has no {ONE_FILE}"
    if buffers:
        return f"it keeps the buffer {buffers[0]}"
    for name, shape in wanted:
        if name not in files:
            return f"its files have no tensor {name}"
        with safe_open(files[name], framework="pt") as file:
            actual = tuple(file.get_slice(name).get_shape())
        if actual != shape:
            return f"{name} has the shape {actual} in its files, {shape} in the model"
    return ""


def _untied(model: Any, files: dict[str, Path]) -> str:
    """Why tensors that the config calls tied are not, by the files; empty if they are."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other == name or name not in files:
            continue
        with safe_open(files[name], framework="pt") as file, safe_open(files[other], framework="pt") as others:
            if not torch.equal(file.get_tensor(name), others.get_tensor(other)):
                return f"config.json calls {name} and {other} tied, but its files hold different values"
    return ""


def size_of(config: Any) -> ModelSize:
    """The model's size, counted on its own tensors without storage; raises `ConfigError` if transformers cannot make it."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model_type {config.model_type}: transformers cannot make a causal LM of it: {told(error)}"
        ) from None
    text, embedding = config.get_text_config(decoder=True), model.get_input_embeddings().weight
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    shapes = [_heads_of(part, hidden) for part in getattr(text, "per_layer_config", None) or [text] * layers]
    heads, kv_heads, width = map(max, zip(*shapes, strict=True))
    positions = int(getattr(text, "max_position_embeddings", None) or 1 << 20)
    context = exact_positions(positions, getattr(text, "rope_parameters", None), config.model_type)
    if context < positions:
        _log.warning(
            "model_type %s: sequences have at most %d tokens of its context of %d, beyond which its rotary embeddings (longrope) "
            "depend on the sequence's length", config.model_type, context, positions,
        )  # fmt: skip
    kinds = [str(kind) for kind in getattr(text, "layer_types", None) or ["full_attention"] * layers]
    attending = [("attention" in kind and kind != "linear_attention") or kind == "hybrid" for kind in kinds]
    latent = int(getattr(text, "kv_lora_rank", None) or 0)
    nope = int(getattr(text, "qk_nope_head_dim", None) or 0)
    rotated = int(text.qk_rope_head_dim) if latent else 0
    kept = [latent + rotated if latent else 2 * keys * each for _, keys, each in shapes]
    experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
    # How many experts a token is routed to, by the names that configurations have for it.
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    chosen = next((int(value) for name in names if isinstance(value := getattr(text, name, None), int)), 1)
    count = _experts_of(experts)
    idle = sum(p.numel() for p in experts.values()) * max(0, count - chosen) // max(1, count)
    down = next((p.numel() for name, p in experts.items() if name.endswith(("down_proj", "down_proj.weight"))), 0)
    expert_width = down // (hidden * (1 if "down_proj.weight" in " ".join(experts) else max(1, count)))
    widths = getattr(text, "intermediate_size", None) or 0  # a list of them in Gemma 3n
    width_max = max(widths) if isinstance(widths, list) else int(widths)
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        kv_values_per_token=max(1, sum(each for each, attends in zip(kept, attending, strict=False) if attends)),
        context_tokens=context,
        head_count=heads,
        kv_head_count=kv_heads,
        layer_count=layers,
        hidden=hidden,
        vocabulary=int(embedding.shape[0]),
        idle_parameters=idle,
        mlp_width=chosen * expert_width if experts else width_max,
        has_head_norms=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        head_width=nope + rotated if latent else width,
        # With quantisation, vLLM workers refuse models with experts.
        linear_parameters=0 if experts else sum(each.weight.numel() for each in linear_layers(model).values()),
    )


def _heads_of(layer: Any, hidden: int) -> tuple[int, int, int]:
    """How many heads a layer has, how many for keys and values, and their width, which may differ by layer (Gemma 4)."""
    heads = int(getattr(layer, "num_attention_heads", None) or 1)
    kv_heads = int(getattr(layer, "num_key_value_heads", None) or heads)
    return heads, kv_heads, int(getattr(layer, "head_dim", None) or hidden // heads)


def _experts_of(experts: Mapping[str, Tensor]) -> int:
    """How many experts a layer has: they lie in one tensor, or in tensors of their own."""
    for name, tensor in experts.items():
        first = name.partition(".experts.")[2].partition(".")[0]
        if not first.isdigit():
            return int(tensor.shape[0])
    return len({name.partition(".experts.")[2].partition(".")[0] for name in experts})


def config_json_of(config: Any, size: ModelSize, more: Mapping[str, object] | None = None) -> bytes:
    """What workers, planner and coordinator hear of a model: its transformers config, as loaded, without path and version, and its
    size; as canonical JSON: sorted keys, no whitespace."""
    fields = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    fields |= {SIZE_KEY: asdict(size), **(more or {})}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str).encode()


def digest_of(config_json: bytes, table: Iterable[tuple[str, Sequence[int]]], dtype: str) -> str:
    """sha256 over the config and the table of published tensors: names, shapes and their common dtype."""
    rows = sorted([name, list(shape), dtype] for name, shape in table)
    return hashlib.sha256(config_json + json.dumps(rows).encode()).hexdigest()


def stop_tokens_of(generation_config: Any, config: Any) -> tuple[int, ...]:
    """Tokens that end a completion: those of the generation config and of the model's config, but those that it cannot sample, as
    the -1 that says none."""
    tokens: list[Any] = []
    for ends in (getattr(generation_config, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        tokens += ends if isinstance(ends, list) else [] if ends is None else [ends]
    if odd := [end for end in tokens if not isinstance(end, int) or isinstance(end, bool)]:
        raise ConfigError(f"eos_token_id: expected token ids in config and generation config, got {odd[0]!r}")
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return tuple(dict.fromkeys(end for end in tokens if 0 <= end < vocabulary))

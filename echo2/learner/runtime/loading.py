"""Reads a policy's weights: whole for a single process; layer by layer for several, so that no rank ever holds the whole model.

Guarantees: a `Skeleton` has the same parameters as the whole model, filled from the same files; only those of one layer, or those
outside all layers, are whole at a time, provided that each layer is sharded before the next is filled. Leaves to others: sharding
(model.shard). If a checkpoint's tensor names differ from the model's (transformers converts them while loading), or if it is not in
safetensors, there is no skeleton: each rank first loads the whole model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echo2.base.errors import ConfigError

_log = logging.getLogger("echo2.learner")
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_whole(path: str, dtype: torch.dtype) -> Any:
    """Loads a causal LM into host memory; raises `ConfigError` if that fails."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    local = _checked(path)
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(local) if local.is_dir() else path, dtype=dtype, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: cannot be loaded as a causal LM: {error}") from None


def _checked(path: str) -> Path:
    local = Path(path).expanduser()
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not (local / "config.json").is_file():
        raise ConfigError(f"model {path}: expected a Hugging Face folder with config.json, found none")
    return local


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
        found = self._filled.get(id(parameter))
        if found is None:
            tensor = self._tensor(self._names[id(parameter)])
            found = self._filled[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        return found

    def _tensor(self, name: str) -> Tensor:
        from safetensors import safe_open

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
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    local = _checked(path)
    if not local.is_dir():
        from huggingface_hub import snapshot_download

        try:
            local = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model {path}: cannot be loaded as a causal LM: {error}") from None
    try:
        config = AutoConfig.from_pretrained(str(local))
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: cannot be loaded as a causal LM: {error}") from None
    model.tie_weights()
    if (local / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(local))
    files = _files_of(local)
    buffers = (name for name, _ in model.named_buffers() if name in model.state_dict())
    odd = _odd([(name, tuple(p.shape)) for name, p in model.named_parameters()], files, [*buffers])
    if odd:
        _log.warning("model %s: each rank loads all of it first, since %s", path, odd)
        return None
    return Skeleton(model.eval(), files, dtype, device)


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by name; empty without safetensors files."""
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        listed = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {str(name): folder / str(file) for name, file in listed.items()}
    if not (folder / _ONE_FILE).is_file():
        return {}
    with safe_open(folder / _ONE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _ONE_FILE)


def _odd(wanted: Iterable[tuple[str, tuple[int, ...]]], files: dict[str, Path], buffers: list[str]) -> str:
    """Why the files cannot be read tensor by tensor; empty if they can."""
    from safetensors import safe_open

    if not files:
        return f"it has no {_ONE_FILE}"
    if buffers:
        return f"it keeps the buffer {buffers[0]}"
    for name, shape in wanted:
        if name not in files:
            return f"its files have no tensor {name}"
        with safe_open(files[name], framework="pt") as file:
            found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            return f"{name} has the shape {found} in its files, {shape} in the model"
    return ""

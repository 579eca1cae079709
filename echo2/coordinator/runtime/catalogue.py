"""The catalogues of GPUs and of model shapes that come with the package; each is read once."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files

from echo2.cost_model.catalogue import GpuType, parse_catalogue, parse_models
from echo2.cost_model.sizing import ModelSize


@functools.cache
def built_in_catalogue() -> Mapping[str, GpuType]:
    """The GPU types in `echo2/cost_model/gpus.toml`."""
    return parse_catalogue(tomllib.loads((files("echo2.cost_model") / "gpus.toml").read_text(encoding="utf-8")))


@functools.cache
def built_in_models() -> Mapping[str, ModelSize]:
    """The model sizes in `echo2/cost_model/models.toml`."""
    return parse_models(tomllib.loads((files("echo2.cost_model") / "models.toml").read_text(encoding="utf-8")))

"""The catalogue of GPUs that comes with the package, read once."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files

from echo2.cost_model.catalogue import Gpu, parse_catalogue


@functools.cache
def built_in_catalogue() -> Mapping[str, Gpu]:
    """`echo2/cost_model/gpus.toml`."""
    return parse_catalogue(tomllib.loads((files("echo2.cost_model") / "gpus.toml").read_text(encoding="utf-8")))

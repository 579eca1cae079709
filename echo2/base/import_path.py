"""Loads what a user names as `module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from echo2.base.errors import ConfigError


def imported(path: str, option: str) -> Any:
    """The function or class that `path` names. Raises a `ConfigError` of `option` that says which half was not found."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{option}: expected an importable module {module_name}, got {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(
            f"{option}: expected a function or class {name} in {module_name}, found {type(found).__name__}"
        )
    return found

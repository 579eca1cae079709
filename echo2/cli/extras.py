"""Checks that a command's extra is installed, so that the user sees what to install instead of a traceback."""

from __future__ import annotations

import importlib.util

from echo2.base.errors import ConfigError

MODULES = {
    "engine": ("torch", "transformers", "safetensors"),
    "learner": ("torch", "transformers", "safetensors", "tokenizers", "matplotlib", "reasoning_gym", "math_verify"),
}
"""The modules of each extra that its commands import."""


def require_extra(extra: str, command: str) -> None:
    """Raises ConfigError that names what to install, unless all modules of `extra` are there."""
    missing = [name for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{command}: expected the packages of echo2[{extra}], {', '.join(missing)} not found; "
            f"install them with: pip install 'echo2[{extra}]'"
        )

"""Compiles the delta codec once, so that a run's processes find it in the cache instead of all compiling it at the same time.

Runs as a module, so that only that process imports torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from echo2.weights.kernel_cache import kernel_folder

WARM_WITHIN_S = 300.0


def is_warm() -> bool:
    """Whether the codec is compiled, so that `warm_once` has nothing to do."""
    return _stamp().exists()


def warm_once() -> None:
    """Compiles the codec in a process of its own, unless the same code at the same path was compiled before."""
    if not is_warm():
        subprocess.run([sys.executable, "-m", "echo2.cli.demo.warm"], check=True, timeout=WARM_WITHIN_S)
        _stamp().parent.mkdir(parents=True, exist_ok=True)
        _stamp().touch()


def _stamp() -> Path:
    return kernel_folder() / "all-compiled"


if __name__ == "__main__":
    import torch

    from echo2.weights import warm_up

    warm_up(torch.bfloat16)

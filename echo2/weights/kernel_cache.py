"""The cache folder of the delta codec's compiled kernels; importable without loading torch and numba.

The folder's name contains a digest of everything that the compiled code depends on: the codec's sources, because numba does not
notice that a function inlined from another file has changed, and numba's version, because environments that share a home
would overwrite each other's files.
"""

from __future__ import annotations

import hashlib
import os
from importlib import metadata
from pathlib import Path

CODEC = Path(__file__).parent


def kernel_folder() -> Path:
    """The folder next to the compiled Python files, or in the user's cache if the package is read-only."""
    digest = hashlib.sha256(metadata.version("numba").encode())
    for source in sorted(CODEC.glob("*.py")):
        digest.update(source.read_bytes())
    home = CODEC / "__pycache__" if os.access(CODEC, os.W_OK) else Path.home() / ".cache" / "echo2"
    return home / f"kernels-{digest.hexdigest()[:16]}"

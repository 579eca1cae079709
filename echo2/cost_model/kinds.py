"""Maps a machine's GPU name to a kind of the catalogue.

A worker reports the driver's name (`2 x NVIDIA GeForce RTX 4090`), a provider its own (`RTX4090`). Guarantees: pure; a name
that matches no kind, or several sizes of a kind without saying which, gives the empty kind. Leaves to others: what a kind can do.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

MEMORY_TOLERANCE = 0.15
"""Largest relative difference between the memory size in a machine's name and the one in the kind's name."""
_COUNT = re.compile(r"^(\d{1,3}) x (.+)$")
_MEMORY = re.compile(r"^(\d+)gi?b?$")
_TRADE_WORDS = frozenset(("nvidia", "geforce", "tesla", "generation", "gpu", "pcie"))
_SOCKET_OR_MEMORY = re.compile(r"^(sxm|hbm)\d?e?$")


def kind_of_name(text: str, kinds: Collection[str]) -> tuple[str, int]:
    """Returns the kind and the GPU count; an empty kind if none matches or the machine has GPUs of several kinds."""
    return _kind_of_name(text, tuple(kinds))


@lru_cache(maxsize=4096)
def _kind_of_name(text: str, kinds: tuple[str, ...]) -> tuple[str, int]:
    counted = _COUNT.match(text.strip())
    count, name = (int(counted[1]), counted[2]) if counted else (1, text.strip())
    if name in kinds:
        return name, count
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _TRADE_WORDS]
    words = [word for word in words if not _SOCKET_OR_MEMORY.match(word)]
    sizes = [float(found[1]) for word in words if (found := _MEMORY.match(word))]
    plain = "".join(word for word in words if not _MEMORY.match(word))
    fit = [kind for kind in kinds if kind.partition("-")[0].lower() in (plain, plain.removeprefix("rtx"))]
    if len(fit) > 1 and sizes:
        fit = [kind for kind in fit if abs(_size_of(kind) - sizes[0]) <= MEMORY_TOLERANCE * sizes[0]]
    return (fit[0], count) if len(fit) == 1 and count > 0 else ("", 1)


def _size_of(kind: str) -> float:
    """Memory size in GB from the kind's name (`A100-80G` -> 80); 0 if the name does not give one."""
    found = _MEMORY.match(kind.partition("-")[2].lower())
    return float(found[1]) if found else 0.0

"""Which kind of the catalogue a machine is, by the name that its driver or its provider gives it.

A worker tells its driver's words (`2 x NVIDIA GeForce RTX 4090`), a provider its own (`RTX4090`). Guarantees: pure; a name
that fits no kind, or kinds of several sizes without telling which, gives the empty kind. Leaves to others: what a kind does.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

MEMORY_TOLERANCE = 0.15
"""Between the memory that a name tells and that of the kind's own name."""
_COUNT = re.compile(r"^(\d{1,3}) x (.+)$")
_MEMORY = re.compile(r"^(\d+)gi?b?$")
_TRADE_WORDS = frozenset(("nvidia", "geforce", "tesla", "generation", "gpu", "pcie"))
_SOCKET_OR_MEMORY = re.compile(r"^(sxm|hbm)\d?e?$")


def kind_of_name(text: str, kinds: Collection[str]) -> tuple[str, int]:
    """The kind and how many of it; an empty kind where none fits or the machine holds several."""
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
    """In GB, where its name tells: `A100-80G`."""
    found = _MEMORY.match(kind.partition("-")[2].lower())
    return float(found[1]) if found else 0.0

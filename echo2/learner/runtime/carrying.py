"""Checkpoints of ranks that do not see the first one's disk: their files travel to it, and back to be loaded.

Guarantees: once `to_leader` returns on rank 0, its folder holds all ranks' files; what `for_reading` gives holds every file of rank
0's folder. Where all see one disk, only names and sizes travel. Waits for: the other ranks, in the writers' group, as long as that
allows. Leaves to others: what is in the files (checkpoint), whether they are whole (sums), when (team).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from echo2.base.errors import MalformedMessage
from echo2.learner.runtime.ranks import Ranks

PIECE_BYTES = 16 << 20


def to_leader(folder: Path, ranks: Ranks) -> None:
    """After each rank wrote into its own `folder`: what rank 0's does not hold is sent there and removed here. A collective."""
    group = ranks.writers
    if group is None or ranks.count == 1:
        return
    there = _told(_sizes(folder) if ranks.is_leader else {}, group)
    missing = {} if ranks.is_leader else {name: size for name, size in _sizes(folder).items() if name not in there}
    listed: list[dict[str, int]] = _gathered(missing, group, ranks.count)
    for rank, files in enumerate(listed):
        for name, size in files.items():
            if Path(name).name != name:
                raise MalformedMessage(f"rank {rank}: expected a file's name, got {name!r}")
            if ranks.is_leader:
                _receive(folder / name, size, rank, group)
            elif ranks.rank == rank:
                _send(folder / name, [0], group)
    if missing:
        shutil.rmtree(folder)


@contextmanager
def for_reading(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """`folder`, where it holds what rank 0's does; else one beside it, filled from there and removed again. A collective."""
    group = ranks.writers
    if group is None or ranks.count == 1:
        yield folder
        return
    files = _told(_sizes(folder) if ranks.is_leader else {}, group)
    lacks = [bool(said) for said in _gathered({"lacks": 1} if _sizes(folder) != files else {}, group, ranks.count)]
    if not any(lacks):
        yield folder
        return
    own = folder.with_name(f"{folder.name}.of-rank-{ranks.rank}") if lacks[ranks.rank] else folder
    if lacks[ranks.rank]:
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
    try:
        for name, size in files.items():
            if ranks.is_leader:
                _send(folder / name, [rank for rank, lack in enumerate(lacks) if lack], group)
            elif lacks[ranks.rank]:
                _receive(own / name, size, 0, group)
        yield own
    finally:
        if lacks[ranks.rank]:
            shutil.rmtree(own, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def _send(path: Path, targets: list[int], group: dist.ProcessGroup) -> None:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            packed = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            for target in targets:
                dist.send(packed, target, group=group)


def _receive(path: Path, size: int, source: int, group: dist.ProcessGroup) -> None:
    with path.open("wb") as file:
        while size > 0:
            packed = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
            dist.recv(packed, source, group=group)
            file.write(packed.numpy().tobytes())
            size -= packed.numel()


def _told(files: dict[str, int], group: dist.ProcessGroup) -> dict[str, int]:
    """Rank 0's, on all."""
    text = _packed(files)
    size = torch.tensor([text.numel()])
    dist.broadcast(size, 0, group=group)
    text = text if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0, group=group)
    return _unpacked(text)


def _gathered(files: dict[str, int], group: dist.ProcessGroup, count: int) -> list[dict[str, int]]:
    """Of all ranks, on all."""
    text = _packed(files)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([text.numel()]), group=group)
    most = int(torch.stack(sizes).max())
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: text.numel()] = text
    found = [torch.empty(most, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(found, padded, group=group)
    return [_unpacked(one[: int(size)]) for one, size in zip(found, sizes, strict=True)]


def _packed(files: dict[str, int]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(files).encode()), dtype=torch.uint8)


def _unpacked(text: Tensor) -> dict[str, int]:
    found: dict[str, int] = json.loads(text.numpy().tobytes())
    return found

"""Moves checkpoint files between rank 0 and ranks that do not share its disk: to rank 0 when saving, back when loading.

Guarantees: once `to_leader` returns on rank 0, its folder holds all ranks' files; the folder from `for_reading` holds every file of
rank 0's folder, and ranks of one machine with one run folder share one copy. If all ranks share a disk, only names and sizes are
sent. A marker file that rank 0 creates shows if a rank shares its disk; folder listings would not do, because a network file system
may show them late. Waits for: the other ranks, in the writers' group, up to that group's timeout. Leaves to others: what is in the
files (checkpoint), whether they are undamaged (sums), when to move them (team).
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from echo2.base.errors import MalformedMessage
from echo2.learner.runtime.ranks import Ranks
from echo2.outside import here

PIECE_BYTES = 16 << 20
_T = TypeVar("_T")


def sees_leader(folder: Path, ranks: Ranks) -> bool:
    """Whether this rank's `folder` is the same folder as rank 0's, which must be writable there. A collective."""
    group = ranks.writers
    if group is None or ranks.count == 1:
        return True
    mark = f"{here().rng.getrandbits(64):016x}.mark"
    if ranks.is_leader:
        (folder / mark).touch()
    (mark,) = _told({mark: 0}, group)
    sees = (folder / mark).exists()
    gathered({}, group, ranks.count)  # barrier: all ranks have looked
    if ranks.is_leader:
        (folder / mark).unlink()
    return sees


def to_leader(folder: Path, written: Sequence[str], ranks: Ranks, *, is_shared: bool) -> None:
    """Sends the files that this rank has `written` in its `folder` to rank 0's folder and removes its own folder. If the folder
    `is_shared` with rank 0, it sends and removes nothing. A collective."""
    group = ranks.writers
    if group is None or ranks.count == 1:
        return
    missing = {} if is_shared else {name: (folder / name).stat().st_size for name in written}
    listed: list[dict[str, int]] = gathered(missing, group, ranks.count)
    for rank, files in enumerate(listed):
        for name, size in files.items():
            if Path(name).name != name:
                raise MalformedMessage(f"rank {rank}: expected a file's name, got {name!r}")
            if ranks.is_leader:
                _receive(folder / name, size, rank, group)
            elif ranks.rank == rank:
                _send(folder / name, [0], group)
    gathered({}, group, ranks.count)  # barrier: all ranks of a machine have sent their files
    if not is_shared:
        shutil.rmtree(folder, ignore_errors=True)  # several ranks may do so at once


@contextmanager
def for_reading(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """Yields `folder` if it holds rank 0's files; else a copy of rank 0's folder beside it, removed afterwards. A collective."""
    group = ranks.writers
    if group is None or ranks.count == 1:
        yield folder
        return
    files = _told(_sizes(folder) if ranks.is_leader else {}, group)
    lacks = gathered({_place(folder, ranks): 1} if _sizes(folder) != files else {}, group, ranks.count)
    if not any(lacks):
        yield folder
        return
    takers = [rank for rank, place in enumerate(lacks) if place and place not in lacks[:rank]]
    taker = lacks.index(lacks[ranks.rank])  # the first rank that shares this folder
    own = folder.with_name(f"{folder.name}.of-rank-{taker}") if lacks[ranks.rank] else folder
    if ranks.rank in takers:
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
    try:
        for name, size in files.items():
            if ranks.is_leader:
                _send(folder / name, takers, group)
            elif ranks.rank in takers:
                _receive(own / name, size, 0, group)
        gathered({}, group, ranks.count)  # barrier: the copies are complete
        yield own
        gathered({}, group, ranks.count)  # barrier: all ranks have finished reading
    finally:
        if ranks.rank in takers:
            shutil.rmtree(own, ignore_errors=True)


def _place(folder: Path, ranks: Ranks) -> str:
    """A key that is equal for ranks that use the same folder on the same machine. A machine's ranks share a torchrun agent, whose
    number is GROUP_RANK."""
    machine = os.environ.get("GROUP_RANK") or f"rank {ranks.rank}"
    return f"{machine}: {zlib.crc32(str(folder.absolute()).encode())}"


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
    """Broadcasts rank 0's `files` to all ranks."""
    text = _packed(files)
    size = torch.tensor([text.numel()])
    dist.broadcast(size, 0, group=group)
    text = text if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0, group=group)
    return _unpacked(text)


def gathered(said: dict[str, _T], group: dist.ProcessGroup, count: int) -> list[dict[str, _T]]:
    """All-gathers `said`; returns the dictionaries in order of rank. A collective."""
    text = _packed(said)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([text.numel()]), group=group)
    most = int(torch.stack(sizes).max())
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: text.numel()] = text
    found = [torch.empty(most, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(found, padded, group=group)
    return [_unpacked(one[: int(size)]) for one, size in zip(found, sizes, strict=True)]


def _packed(said: Mapping[str, object]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def _unpacked(text: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.numpy().tobytes())
    return found

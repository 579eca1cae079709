"""Brings the sections of a sharded learner's version together: each rank encodes its rows, the first one yields all.

Guarantees: only encoded bytes cross between ranks, and nothing is pickled. Every rank of the group calls the same
function with the same header. Waits for: the ranks in turn, as any collective operation. Leaves to others: the coding
(broadcast/delta/shards.py), the time limit (the process group's), signing and sending.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import torch
import torch.distributed as dist

from echo2.base.errors import LimitExceeded
from echo2.broadcast.delta.container import (
    HEADER_BYTES_MAX,
    DeltaHeader,
    FrameReader,
    TensorTable,
    encode_header,
    parse_table,
)  # fmt: skip
from echo2.broadcast.delta.elements import WeightSet
from echo2.broadcast.delta.fingerprint import MODULUS
from echo2.broadcast.delta.shards import (
    encode_section,
    section_fingerprint,
    sections_end,
    sharded_table,
    whole_fingerprint,
)  # fmt: skip

SECTION_BYTES_MAX = 1 << 36


class ShardGroup:
    """The ranks that hold the shards of one set of weights, in order of their shards."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.shard = dist.get_rank(group)
        self.shard_count = dist.get_world_size(group)
        # NCCL moves only what lies on its device.
        on_device = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")

    def table(self, weights: WeightSet) -> TensorTable:
        """The tensor table, the same on all ranks: the first one makes it."""
        data = sharded_table(weights).encode() if self.shard == 0 else b""
        size = torch.tensor([len(data)], device=self._device)
        dist.broadcast(size, group=self._group, group_src=0)
        if not 0 < int(size) <= HEADER_BYTES_MAX:
            raise LimitExceeded(f"tensor table: expected at most {HEADER_BYTES_MAX} bytes, got {int(size)}")
        packed = self._packed(data) if self.shard == 0 else self._room(int(size))
        dist.broadcast(packed, group=self._group, group_src=0)
        return parse_table(self._unpacked(packed), "tensor table of the first shard")

    def fingerprint(self, weights: WeightSet, table: TensorTable, key: int) -> int:
        """The fingerprint of the whole set, on every rank; each sums its own rows."""
        part = section_fingerprint(weights, table, self.shard, self.shard_count, key)
        return whole_fingerprint(table, key, self._all(part))

    def encode(
        self,
        parent: WeightSet | None,
        target: WeightSet,
        header: DeltaHeader,
        table: TensorTable,
        executor: Executor | None = None,
    ) -> Iterator[bytes]:
        """All frames on the first rank, its own as they are coded; nothing on the others. Draw it on every rank."""
        section = encode_section(parent, target, header, table, self.shard, executor)
        if self.shard == 0:
            yield encode_header(header, table)
            yield from section
        mine = b"" if self.shard == 0 else b"".join(section)
        sizes = self._all(len(mine))
        steps = self._all(section.fingerprint_step)
        if max(sizes) > SECTION_BYTES_MAX:
            raise LimitExceeded(
                f"{header.describe()}: expected sections of {SECTION_BYTES_MAX} bytes, got {max(sizes)}"
            )
        if self.shard != 0:
            if mine:
                dist.send(self._packed(mine), group=self._group, group_dst=0)
            return
        for shard in range(1, self.shard_count):
            if sizes[shard]:
                packed = self._room(sizes[shard])
                dist.recv(packed, group=self._group, group_src=shard)
                yield from FrameReader().feed(self._unpacked(packed))
        yield sections_end(header, table, steps)

    def _all(self, number: int) -> list[int]:
        """A number modulo 2^64 of every rank."""
        signed = number - MODULUS if number >= MODULUS >> 1 else number
        mine = torch.tensor([signed], dtype=torch.int64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self.shard_count)]
        dist.all_gather(found, mine, group=self._group)
        return [int(each) % MODULUS for each in found]

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _packed(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)

    def _unpacked(self, packed: torch.Tensor) -> bytes:
        return packed.cpu().numpy().tobytes()

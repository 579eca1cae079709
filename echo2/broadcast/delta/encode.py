"""Encoding: two weight sets, or one, to a stream of frames.

Guarantees: frames come in order, each as soon as its block is coded; the end frame carries the target's fingerprint,
computed from the changed elements alone and, if the caller knew it, checked against what the caller said. The sets
handed in must not change while frames are drawn: hand over a snapshot. Leaves to others: chunks, signatures, sending.

With an executor, blocks are coded on its threads, at most `ahead` of them in front of the consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

import torch

from echo2.base.errors import DeltaFormatError, FingerprintMismatch
from echo2.broadcast.delta.block import EncodedBlock, ScratchPool, encode_block, encode_whole
from echo2.broadcast.delta.container import (
    DeltaHeader,
    Setting,
    TensorTable,
    container_id_of,
    encode_block_frame,
    encode_end,
    encode_header,
)  # fmt: skip
from echo2.broadcast.delta.device import encode_block_on_device
from echo2.broadcast.delta.elements import Bits, WeightSet, bits_of, flat_bits
from echo2.broadcast.delta.fingerprint import MODULUS, header_term, sum_bits
from echo2.broadcast.delta.host import HostWeights, table_of
from echo2.broadcast.delta.layout import Block, blocks_of


@dataclass(frozen=True, slots=True)
class EncodingStats:
    """What was encoded so far."""

    fingerprint: int
    changed_elements: int
    encoded_bytes: int
    whole_blocks: int


class Encoding(Iterator[bytes]):
    """The frames of one container, drawn one by one. After the last, `fingerprint` is the target's."""

    def __init__(self, header: DeltaHeader, table: TensorTable, blocks: tuple[Block, ...], start: int) -> None:
        self.header = header
        self.block_count = len(blocks)
        self._first = encode_header(header, table)
        self._container_id = container_id_of(self._first)
        self.stats = EncodingStats(start, 0, 0, 0)
        self._frames: Iterator[bytes] = iter(())

    def run(self, blocks: Iterator[tuple[Block, EncodedBlock]]) -> Encoding:
        """Takes its blocks, coded elsewhere."""
        self._frames = self._all_frames(blocks)
        return self

    @property
    def fingerprint(self) -> int:
        """The target's fingerprint, once all frames are drawn."""
        return self.stats.fingerprint

    def __iter__(self) -> Encoding:
        return self

    def __next__(self) -> bytes:
        frame = next(self._frames)
        self.stats = replace(self.stats, encoded_bytes=self.stats.encoded_bytes + len(frame))
        return frame

    def _all_frames(self, blocks: Iterator[tuple[Block, EncodedBlock]]) -> Iterator[bytes]:
        yield self._first
        for block, coded in blocks:
            self.stats = replace(
                self.stats,
                fingerprint=(self.stats.fingerprint + coded.fingerprint_step) % MODULUS,
                changed_elements=self.stats.changed_elements + coded.change_count,
                whole_blocks=self.stats.whole_blocks + coded.is_whole,
            )
            yield encode_block_frame(
                self._container_id, block.index, block.element_count, block.element.code, coded.method, coded.payload
            )
        claimed = self.header.target_fingerprint
        if claimed is not None and claimed != self.fingerprint:
            raise FingerprintMismatch(
                f"{self.header.describe()}: expected the target's fingerprint {claimed:016x}, the changes lead to "
                f"{self.fingerprint:016x}: the parent handed in is not the version it claims, or it changed meanwhile"
            )
        yield encode_end(self._container_id, self.block_count, self.fingerprint)


def _in_order(
    blocks: tuple[Block, ...], code: Callable[[Block], EncodedBlock], executor: Executor | None, ahead: int
) -> Iterator[tuple[Block, EncodedBlock]]:
    """Codes blocks, on the executor's threads if there is one, and yields them in order."""
    if executor is None:
        for block in blocks:
            yield block, code(block)
        return
    running: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    try:
        for block in blocks:
            running.append((block, executor.submit(code, block)))
            if len(running) > ahead:
                first, future = running.popleft()
                yield first, future.result()
        while running:
            first, future = running.popleft()
            yield first, future.result()
    finally:
        for _, future in running:
            future.cancel()


class _Source:
    """Segments of a weight set, as raw bits. Contiguous tensors are not copied, and tensors on a device stay there."""

    def __init__(self, weights: WeightSet | HostWeights) -> None:
        self._on_device: dict[str, torch.Tensor] = {}
        if isinstance(weights, HostWeights):
            self.table = weights.table
            self._bits = {spec.name: weights.bits(spec.name) for spec in self.table.specs}
        else:
            self.table = table_of(weights)
            self._bits = {}
            for spec in self.table.specs:
                tensor = weights[spec.name]
                if tensor.device.type == "cpu":
                    self._bits[spec.name] = bits_of(tensor)
                else:
                    self._on_device[spec.name] = flat_bits(tensor)

    def is_on_device(self, block: Block) -> bool:
        """Whether all of a block lies on a device."""
        return all(s.spec.name in self._on_device for s in block.segments)

    def device_segments(self, block: Block) -> list[torch.Tensor]:
        return [self._on_device[s.spec.name][s.start : s.start + s.count] for s in block.segments]

    def segments(self, block: Block) -> list[Bits]:
        """Bits on the host; what lies on a device is copied, a segment at a time."""
        out: list[Bits] = []
        for s in block.segments:
            part = slice(s.start, s.start + s.count)
            on_device = self._on_device.get(s.spec.name)
            out.append(self._bits[s.spec.name][part] if on_device is None else bits_of(on_device[part].cpu()))
        return out


def _check_same_tensors(parent: TensorTable, target: TensorTable, header: DeltaHeader) -> None:
    if parent == target:
        return
    changed = {spec.name for spec in set(parent.specs) ^ set(target.specs)}
    changed |= {alias for alias, _ in set(parent.aliases) ^ set(target.aliases)}
    names = ", ".join(sorted(changed)[:4])
    raise DeltaFormatError(
        f"{header.describe()}: tensors were added, removed, reshaped or retied ({names}): send a keyframe"
    )


def encode_delta(
    parent: WeightSet | HostWeights,
    target: WeightSet | HostWeights,
    header: DeltaHeader,
    setting: Setting | None = None,
    executor: Executor | None = None,
    ahead: int = 2,
) -> Encoding:
    """The frames that turn `parent` into `target`.

    `header.parent_version` and `parent_fingerprint` must be given: the fingerprint follows from the changes, so a full
    pass over the weights is needed once in a run, not once a version. `setting` overrides the header's.
    """
    start = header.parent_fingerprint
    if header.parent_version is None or start is None:
        raise DeltaFormatError(f"{header.describe()}: expected the parent's version and fingerprint")
    header = header if setting is None else replace(header, setting=setting)
    old, new = _Source(parent), _Source(target)
    _check_same_tensors(old.table, new.table, header)
    blocks = blocks_of(new.table.specs, header.block_elements, header.shard_count)
    pool = ScratchPool()

    def code(block: Block) -> EncodedBlock:
        scratch = pool.take(block)
        how = (header.setting, header.fingerprint_key, scratch)
        if old.is_on_device(block) and new.is_on_device(block):
            coded = encode_block_on_device(block, old.device_segments(block), new.device_segments(block), *how)
        else:
            coded = encode_block(block, old.segments(block), new.segments(block), *how)
        pool.give(scratch)
        return coded

    encoding = Encoding(header, new.table, blocks, start)
    return encoding.run(_in_order(blocks, code, executor, ahead))


def encode_keyframe(
    target: WeightSet | HostWeights, header: DeltaHeader, executor: Executor | None = None, ahead: int = 2
) -> Encoding:
    """The frames of a whole snapshot; the header must name no parent."""
    if header.parent_version is not None:
        raise DeltaFormatError(f"{header.describe()}: expected no parent for a keyframe")
    source = _Source(target)
    key = header.fingerprint_key
    blocks = blocks_of(source.table.specs, header.block_elements, header.shard_count)

    def code(block: Block) -> EncodedBlock:
        segments = source.segments(block)
        step = sum(sum_bits(s.spec.name, bits, key, s.start) for s, bits in zip(block.segments, segments, strict=True))
        return EncodedBlock(*encode_whole(segments, block.element), step % MODULUS, block.element_count)

    start = sum(header_term(key, spec) for spec in source.table.specs) % MODULUS
    return Encoding(header, source.table, blocks, start).run(_in_order(blocks, code, executor, ahead))

"""Encoding: turns two weight sets (delta), or one (keyframe), into a stream of frames.

Guarantees: frames come in order, each as soon as its block is coded; the end frame carries the target's fingerprint,
computed from the changed elements alone and compared with the header's, if the caller set one. The sets
passed in must not change while frames are drawn: pass a snapshot. Leaves to others: chunks, signatures, sending.

With an executor, blocks are coded on its threads, at most `ahead` of them ahead of the consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

import torch

from echo2.base.errors import DeltaFormatError, FingerprintMismatch
from echo2.weights.block import EncodedBlock, FindsPool, encode_block, encode_whole
from echo2.weights.container import (
    CodecSetting,
    DeltaHeader,
    TensorTable,
    container_id_of,
    encode_block_frame,
    encode_end,
    encode_header,
)  # fmt: skip
from echo2.weights.device import encode_block_on_device
from echo2.weights.elements import Bits, WeightSet, bits_of, flat_bits
from echo2.weights.fingerprint import MODULUS, header_term, sum_bits
from echo2.weights.host import HostWeights, table_of
from echo2.weights.layout import Block, Segment, blocks_of


@dataclass(frozen=True, slots=True)
class EncodingStats:
    """Totals of what has been encoded so far."""

    fingerprint: int
    changed_elements: int
    encoded_bytes: int
    whole_blocks: int


def _check_claim(header: DeltaHeader, found: int) -> None:
    """FingerprintMismatch if the header claims a target fingerprint that the changes do not lead to."""
    claimed = header.target_fingerprint
    if claimed is not None and claimed != found:
        raise FingerprintMismatch(
            f"{header.describe()}: expected the target's fingerprint {claimed:016x}, the changes lead to {found:016x}: "
            "the parent handed in is not the version it claims, or it changed meanwhile"
        )


class Encoding(Iterator[bytes]):
    """An iterator over the frames of one container. After the last one, `fingerprint` is the target's."""

    def __init__(self, header: DeltaHeader, table: TensorTable, blocks: tuple[Block, ...], start: int) -> None:
        self.header = header
        self.block_count = len(blocks)
        self._first = encode_header(header, table)
        self._container_id = container_id_of(self._first)
        self.stats = EncodingStats(start, 0, 0, 0)
        self._frames: Iterator[bytes] = iter(())

    def run(self, blocks: Iterator[tuple[Block, EncodedBlock]]) -> Encoding:
        """Sets the coded blocks that the frames are made of."""
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
        _check_claim(self.header, self.fingerprint)
        yield encode_end(self._container_id, self.block_count, self.fingerprint)


def in_order(
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


class WeightSource:
    """Segments of a weight set as raw bits. Contiguous tensors are not copied, and tensors on a device stay there.

    `parts` maps names to flat runs of elements, each with the index of its first element in the tensor: 0 for whole
    tensors, more for a rank's rows of a sharded one.
    """

    def __init__(self, parts: Mapping[str, tuple[torch.Tensor | Bits, int]]) -> None:
        self._on_device: dict[str, torch.Tensor] = {}
        self._bits: dict[str, Bits] = {}
        self._origins = {name: origin for name, (_, origin) in parts.items()}
        for name, (part, _) in parts.items():
            if not isinstance(part, torch.Tensor):
                self._bits[name] = part
            elif part.device.type == "cpu":
                self._bits[name] = bits_of(part)
            else:
                self._on_device[name] = flat_bits(part)

    @classmethod
    def of(cls, weights: WeightSet | HostWeights, table: TensorTable) -> WeightSource:
        """A source of all tensors of a set."""
        if isinstance(weights, HostWeights):
            return cls({spec.name: (weights.bits(spec.name), 0) for spec in table.specs})
        return cls({spec.name: (weights[spec.name], 0) for spec in table.specs})

    def is_on_device(self, block: Block) -> bool:
        """Whether all of a block is on a device."""
        return all(s.spec.name in self._on_device for s in block.segments)

    def _place(self, segment: Segment) -> slice:
        begin = segment.start - self._origins[segment.spec.name]
        return slice(begin, begin + segment.count)

    def device_segments(self, block: Block) -> list[torch.Tensor]:
        return [self._on_device[s.spec.name][self._place(s)] for s in block.segments]

    def segments(self, block: Block) -> list[Bits]:
        """A block's bits on the host; bits on a device are copied, one segment at a time."""
        out: list[Bits] = []
        for s in block.segments:
            on_device = self._on_device.get(s.spec.name)
            part = self._place(s)
            out.append(self._bits[s.spec.name][part] if on_device is None else bits_of(on_device[part].cpu()))
        return out


def delta_coder(old: WeightSource, new: WeightSource, header: DeltaHeader) -> Callable[[Block], EncodedBlock]:
    """Returns a function that codes a block's changes; thread-safe."""
    pool = FindsPool()

    def code(block: Block) -> EncodedBlock:
        finds = pool.take(block)
        how = (header.setting, header.fingerprint_key)
        if old.is_on_device(block) and new.is_on_device(block):
            coded = encode_block_on_device(block, old.device_segments(block), new.device_segments(block), *how)
        else:
            coded = encode_block(block, old.segments(block), new.segments(block), *how, finds)
        pool.give(finds)
        return coded

    return code


def keyframe_coder(source: WeightSource, key: int) -> Callable[[Block], EncodedBlock]:
    """Returns a function that codes a block as whole elements."""

    def code(block: Block) -> EncodedBlock:
        segments = source.segments(block)
        step = sum(sum_bits(s.spec.name, bits, key, s.start) for s, bits in zip(block.segments, segments, strict=True))
        return EncodedBlock(*encode_whole(segments, block.element), step % MODULUS, block.element_count)

    return code


def _table_of(weights: WeightSet | HostWeights) -> TensorTable:
    return weights.table if isinstance(weights, HostWeights) else table_of(weights)


def _check_set(weights: WeightSet | HostWeights, header: DeltaHeader) -> None:
    if isinstance(weights, HostWeights) and weights.set_name != header.set_name:
        raise DeltaFormatError(f"{header.describe()}: got weights of set {weights.set_name or 'base'!r}")


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
    setting: CodecSetting | None = None,
    executor: Executor | None = None,
    ahead: int = 2,
) -> Encoding:
    """The frames that turn `parent` into `target`.

    `header.parent_version` and `parent_fingerprint` must be given: the target's fingerprint follows from the changes, so a full
    pass over the weights is needed once per run instead of once per version. `setting` overrides the header's.
    """
    start = header.parent_fingerprint
    if header.parent_version is None or start is None:
        raise DeltaFormatError(f"{header.describe()}: expected the parent's version and fingerprint")
    header = header if setting is None else replace(header, setting=setting)
    _check_set(parent, header)
    _check_set(target, header)
    table = _table_of(target)
    _check_same_tensors(_table_of(parent), table, header)
    blocks = blocks_of(table.specs, header.block_elements, header.shard_count)
    code = delta_coder(WeightSource.of(parent, table), WeightSource.of(target, table), header)
    return Encoding(header, table, blocks, start).run(in_order(blocks, code, executor, ahead))


def encode_keyframe(
    target: WeightSet | HostWeights, header: DeltaHeader, executor: Executor | None = None, ahead: int = 2
) -> Encoding:
    """The frames of a whole snapshot; the header must name no parent."""
    if header.parent_version is not None:
        raise DeltaFormatError(f"{header.describe()}: expected no parent for a keyframe")
    _check_set(target, header)
    table, key = _table_of(target), header.fingerprint_key
    blocks = blocks_of(table.specs, header.block_elements, header.shard_count)
    start = sum(header_term(key, spec) for spec in table.specs) % MODULUS
    code = keyframe_coder(WeightSource.of(target, table), key)
    return Encoding(header, table, blocks, start).run(in_order(blocks, code, executor, ahead))

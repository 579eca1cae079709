"""Encoding: turns two weight sets (delta), or one (keyframe), into a stream of frames.

Guarantees: frames come in order, each as soon as its block is coded; the end frame carries the target's fingerprint, computed
from the changed elements alone. The sets passed in must not change while frames are drawn: pass a snapshot.

With an executor, blocks are coded on its threads, at most `ahead` of them ahead of the consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from echo2.base.errors import DeltaFormatError
from echo2.weights.bits import I64, U32
from echo2.weights.block import (
    Changes,
    EncodedBlock,
    are_most,
    decode_steps,
    decode_whole,
    encode_block,
    encode_whole,
    read_plain,
    steps_payload,
)  # fmt: skip
from echo2.weights.container import (
    BlockFrame,
    CodecSetting,
    DeltaHeader,
    EndFrame,
    HeaderFrame,
    Method,
    TensorTable,
    container_id_of,
    encode_block_frame,
    encode_end,
    encode_header,
    encode_header_of,
    parse_frame,
)  # fmt: skip
from echo2.weights.elements import (
    TYPE_BY_CODE,
    Bits,
    Block,
    ElementType,
    TensorSpec,
    WeightSet,
    bits_of,
    blocks_of,
    flat_bits,
    shard_range,
)  # fmt: skip
from echo2.weights.fingerprint import MODULUS, fingerprint_part, sum_bits, whole_fingerprint
from echo2.weights.host import encode_block_on_device, local_of, table_of
from echo2.weights.marks import Finds

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


CodedBlock: TypeAlias = tuple[Block, EncodedBlock]


class Encoding(Iterator[bytes]):
    """An iterator over the frames of one container, made of all its coded blocks in order. After the last one, `fingerprint` is
    the target's. `start`: the fingerprint that the blocks' steps are added to."""

    def __init__(
        self, header: DeltaHeader, table: TensorTable, coded: Iterator[CodedBlock], block_count: int, start: int
    ) -> None:
        self.header, self.block_count, self.fingerprint = header, block_count, start
        self.encoded_bytes = 0
        self._frames = self._all_frames(encode_header(header, table), coded)

    def __next__(self) -> bytes:
        frame = next(self._frames)
        self.encoded_bytes += len(frame)
        return frame

    def _all_frames(self, first: bytes, blocks: Iterator[CodedBlock]) -> Iterator[bytes]:
        yield first
        container_id = container_id_of(first)
        for block, coded in blocks:
            self.fingerprint = (self.fingerprint + coded.fingerprint_step) % MODULUS
            yield encode_block_frame(
                container_id, block.index, block.element_count, block.element.code, coded.method, coded.payload
            )
        yield encode_end(container_id, self.block_count, self.fingerprint)


def in_order(
    blocks: tuple[Block, ...], code: Callable[[Block], EncodedBlock], executor: Executor | None, ahead: int
) -> Iterator[CodedBlock]:
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
    """A shard's rows of a weight set as raw bits. Contiguous tensors are not copied, and tensors on a device stay there."""

    def __init__(self, weights: WeightSet, table: TensorTable, shard: int, shard_count: int) -> None:
        self._rows = {spec.name: rows_of(spec, weights, shard, shard_count) for spec in table.specs}

    def is_on_device(self, block: Block) -> bool:
        return all(self._rows[s.spec.name][0].device.type != "cpu" for s in block.segments)

    def device_segments(self, block: Block) -> list[torch.Tensor]:
        parts = ((s, *self._rows[s.spec.name]) for s in block.segments)
        return [rows[s.start - origin : s.start - origin + s.count] for s, rows, origin in parts]

    def segments(self, block: Block) -> list[Bits]:
        """A block's bits on the host; bits on a device are copied, one segment at a time."""
        return [bits_of(part.cpu()) for part in self.device_segments(block)]


def delta_coder(old: WeightSource, new: WeightSource, header: DeltaHeader) -> Callable[[Block], EncodedBlock]:
    """Returns a function that codes a block's changes; thread-safe."""
    unused: list[Finds] = []  # working memory, of at most as many blocks as are coded at a time

    def code(block: Block) -> EncodedBlock:
        how = (header.setting, header.fingerprint_key)
        if old.is_on_device(block) and new.is_on_device(block):
            return encode_block_on_device(block, old.device_segments(block), new.device_segments(block), *how)
        try:
            finds = unused.pop()  # atomic, unlike asking for the length first
        except IndexError:
            finds = Finds(block)
        finds = finds if finds.fits(block) else Finds(block)
        coded = encode_block(block, old.segments(block), new.segments(block), *how, finds)
        unused.append(finds)
        return coded

    return code


def keyframe_coder(source: WeightSource, key: int) -> Callable[[Block], EncodedBlock]:

    def code(block: Block) -> EncodedBlock:
        segments = source.segments(block)
        step = sum(sum_bits(s.spec.name, bits, key, s.start) for s, bits in zip(block.segments, segments, strict=True))
        return EncodedBlock(*encode_whole(segments, block.element), step % MODULUS)

    return code


def encode_delta(
    parent: WeightSet,
    target: WeightSet,
    header: DeltaHeader,
    setting: CodecSetting | None = None,
    executor: Executor | None = None,
    ahead: int = 2,
) -> Encoding:
    """The frames that turn `parent` into `target`. `header.parent_version` and `parent_fingerprint` must be given: the target's
    fingerprint follows from the changes, so a full pass over the weights is needed once per run instead of once per version.
    `setting` overrides the header's."""
    header = header if setting is None else replace(header, setting=setting)
    table, before = table_of(target), table_of(parent)
    if before != table:
        changed = {spec.name for spec in set(before.specs) ^ set(table.specs)}
        changed |= {alias for alias, _ in set(before.aliases) ^ set(table.aliases)}
        names = ", ".join(sorted(changed)[:4])
        raise DeltaFormatError(
            f"{header.describe()}: tensors were added, removed, reshaped or retied ({names}): send a keyframe"
        )
    sections = [section_blocks(parent, target, header, table, n, executor, ahead) for n in range(header.shard_count)]
    return encode_sections(header, table, chain.from_iterable(sections))


def encode_keyframe(target: WeightSet, header: DeltaHeader, executor: Executor | None = None) -> Encoding:
    """The frames of a whole snapshot; the header must name no parent."""
    table = table_of(target)
    sections = [section_blocks(None, target, header, table, n, executor) for n in range(header.shard_count)]
    return encode_sections(header, table, chain.from_iterable(sections))


def rows_of(spec: TensorSpec, weights: WeightSet, shard: int, shard_count: int) -> tuple[torch.Tensor, int]:
    """A shard's rows of a tensor as flat bits, and the index of the first element in the whole tensor."""
    tensor = weights.get(spec.name)
    if tensor is None or (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.element.torch_dtype):
        got = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
        raise DeltaFormatError(
            f"tensor {spec.name}: expected {spec.element.name} {spec.shape}, got {got}: send a keyframe"
        )
    start, stop = shard_range(spec, shard, shard_count)
    local = flat_bits(local_of(tensor))
    placed = _split(tensor)
    if not placed and local.numel() == spec.element_count:
        return local[start:stop], start
    is_by_rows = len(placed) == 1 and placed[0][0].is_shard(0) and placed[0][1:] == (shard, shard_count)
    if not is_by_rows or local.numel() != stop - start:
        raise DeltaFormatError(
            f"tensor {spec.name}: expected elements {start} to {stop} of it, part {shard} of {shard_count} of dimension 0; "
            f"got {local.numel()} elements, split as {placed}"
        )
    return local, start


def _split(tensor: Any) -> list[tuple[Placement, int, int]]:
    """How a tensor is split over its mesh: (placement, this rank's part, number of parts); empty if it is whole."""
    if local_of(tensor) is tensor:
        return []
    mesh = tensor.device_mesh
    here = mesh.get_coordinate() or ()
    parts_of_mesh = zip(tensor.placements, here, mesh.shape, strict=True)
    return [(placement, part, parts) for placement, part, parts in parts_of_mesh if not placement.is_replicate()]


def section_fingerprint(weights: WeightSet, table: TensorTable, shard: int, shard_count: int, key: int) -> int:
    """A shard's contribution to the fingerprint; `whole_fingerprint` adds up those of all shards."""
    total = 0
    for spec in table.specs:
        rows, start = rows_of(spec, weights, shard, shard_count)
        total += fingerprint_part(spec.name, rows, spec.element, key, start)
    return total % MODULUS


def section_blocks(
    parent: WeightSet | None,
    target: WeightSet,
    header: DeltaHeader,
    table: TensorTable,
    shard: int,
    executor: Executor | None = None,
    ahead: int = 2,
) -> Iterator[CodedBlock]:
    """Encodes one shard's blocks: of a delta from `parent`, or of a keyframe if there is no parent."""
    if (parent is None) != (header.parent_version is None):
        raise DeltaFormatError(f"{header.describe()}: expected weights of the parent in a delta, and only there")
    count = header.shard_count
    if not 0 <= shard < count:
        raise DeltaFormatError(f"{header.describe()}: expected a shard below {count}, got {shard}")
    new = WeightSource(target, table, shard, count)
    if parent is None:
        code = keyframe_coder(new, header.fingerprint_key)
    else:
        code = delta_coder(WeightSource(parent, table, shard, count), new, header)
    blocks = tuple(b for b in blocks_of(table.specs, header.block_elements, count) if b.shard == shard)
    return in_order(blocks, code, executor, ahead)


def encode_sections(header: DeltaHeader, table: TensorTable, coded: Iterator[CodedBlock]) -> Encoding:
    """The frames of a container from its coded blocks: `coded` yields those of all shards, in order."""
    start = header.parent_fingerprint
    if header.parent_version is None:
        start = whole_fingerprint(table.specs, header.fingerprint_key)
    if start is None:
        raise DeltaFormatError(f"{header.describe()}: expected the parent's fingerprint")
    count = len(blocks_of(table.specs, header.block_elements, header.shard_count))
    return Encoding(header, table, coded, count, start)


# ---- merging consecutive deltas into one, without the weights
#
# Steps of consecutive versions add up modulo 2^width, so positions and steps suffice; the deltas must have setting `FAST`, whose
# code does not depend on the weights. The merged container is byte for byte the one that direct encoding would have made, except
# for blocks most of which changed.

COMPOSED_MAX = 1 << 12  # deltas between two keyframes are far fewer


class _Container:
    def __init__(self, frames: Iterable[bytes]) -> None:
        self._frames = (parse_frame(frame) for frame in frames)
        head = next(self._frames, None)
        if not isinstance(head, HeaderFrame):
            raise DeltaFormatError("expected a container that begins with its header")
        self.head = head
        self.whose = head.header.describe()
        if head.header.parent_version is None or head.header.setting is not CodecSetting.FAST:
            raise DeltaFormatError(f"{self.whose}: expected a delta of setting FAST, only these merge without weights")

    def next_frame(self) -> BlockFrame | EndFrame:
        frame = next(self._frames, None)
        if frame is None or isinstance(frame, HeaderFrame) or frame.container_id != self.head.container_id:
            raise DeltaFormatError(f"{self.whose}: expected its blocks in order and an end frame")
        return frame


def _check_neighbours(first: _Container, second: _Container) -> None:
    a, b = first.head, second.head
    same = a.table_digest == b.table_digest and replace(
        a.header, target_version=b.header.target_version, parent_version=b.header.parent_version,
        parent_fingerprint=b.header.parent_fingerprint,
    ) == b.header  # fmt: skip
    if not same or a.header.target_version != b.header.parent_version:
        raise DeltaFormatError(f"{first.whose} and {second.whose}: expected consecutive deltas, cut in the same way")


Listed = tuple[U32, I64]


def _merged(first: Listed, second: Listed) -> Listed:
    positions = np.concatenate((first[0], second[0]))
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    moves = np.concatenate((first[1], second[1]))[order]
    twice = positions[1:] == positions[:-1]
    moves[:-1][twice] += moves[1:][twice]
    keep = moves != 0
    keep[1:] &= ~twice
    return positions[keep], moves[keep]


def _composed_block(frames: Sequence[BlockFrame]) -> tuple[Method, bytes]:
    """Merges one block of all deltas. A whole block replaces everything before it; `base` is what the changes are added to: these
    whole elements, or the sum of all steps so far."""
    element, count = TYPE_BY_CODE[frames[0].element_code], frames[0].element_count
    base, is_whole = None, False
    changes: Listed = np.empty(0, np.uint32), np.empty(0, np.int64)
    moved = [frame for frame in frames if frame.method is not Method.UNCHANGED]
    if len(moved) == 1:
        return moved[0].method, bytes(moved[0].payload)
    for frame in moved:
        if frame.method in (Method.RAW, Method.PLANES):
            base, is_whole = np.empty(count, element.bits_dtype), True
            decode_whole(frame.method, frame.payload, element, base)
            continue
        if frame.method is Method.STEPS:
            base = _summed(changes, count, element) if base is None else base
            decode_steps(frame.payload, element, [base], base)
            continue
        these = read_plain(frame.payload, element, count)
        if base is None:
            changes = _merged(changes, (these.positions(), these.steps()))
        else:
            _add((these.positions(), these.steps()), base)
    if is_whole and base is not None:
        return encode_whole([base], element)
    if base is None and not are_most(count, changes[0].size, int(np.count_nonzero(np.abs(changes[1]) != 1))):
        sparse = Changes.of_steps(*changes, count, element)
        return (Method.SPARSE, sparse.payload()) if sparse.count else (Method.UNCHANGED, b"")
    base = _summed(changes, count, element) if base is None else base
    return Method.STEPS, steps_payload(element, [np.zeros_like(base)], [base], None)


def _summed(changes: Listed, count: int, element: ElementType) -> Bits:
    steps = np.zeros(count, element.bits_dtype)
    _add(changes, steps)
    return steps


def _add(changes: Listed, to: Bits) -> None:
    to[changes[0]] += changes[1].view(np.uint64).astype(to.dtype)


def compose(*deltas: Iterable[bytes]) -> Iterator[bytes]:
    """The frames of one delta from the first one's parent to the last one's target, block by block. `compose(a, b)` with a: u
    -> v and b: v -> w gives u -> w. Each argument is a container's frames in order."""
    if not 1 <= len(deltas) <= COMPOSED_MAX:
        raise DeltaFormatError(f"expected 1 to {COMPOSED_MAX} deltas to merge, got {len(deltas)}")
    containers = [_Container(frames) for frames in deltas]
    for a, b in pairwise(containers):
        _check_neighbours(a, b)
    first, last = containers[0].head.header, containers[-1].head.header
    header = replace(last, parent_version=first.parent_version, parent_fingerprint=first.parent_fingerprint)
    head = encode_header_of(header, containers[-1].head.table_digest)
    yield head
    index = 0
    while True:
        frames = [container.next_frame() for container in containers]
        blocks = [frame for frame in frames if isinstance(frame, BlockFrame)]
        if len(blocks) != len(frames):
            break
        if any((b.index, b.element_count, b.element_code) != (index, blocks[0].element_count, blocks[0].element_code)
               for b in blocks):  # fmt: skip
            raise DeltaFormatError(f"{header.describe()}: expected block {index} of every delta, alike")
        method, payload = _composed_block(blocks)
        yield encode_block_frame(
            container_id_of(head), index, blocks[0].element_count, blocks[0].element_code, method, payload
        )
        index += 1
    ends = [frame for frame in frames if isinstance(frame, EndFrame)]
    if len(ends) != len(frames) or any(end.block_count != index for end in ends):
        raise DeltaFormatError(f"{header.describe()}: expected all deltas to end after {index} blocks")
    for end, after in zip(ends, containers[1:], strict=False):
        if end.target_fingerprint != after.head.header.parent_fingerprint:
            raise DeltaFormatError(f"{after.whose}: expected its parent to be where the delta before it ends")
    yield encode_end(container_id_of(head), index, ends[-1].target_fingerprint)

"""Decoding: turns frames, in any order, into a staged version that is verified and ready to commit.

Guarantees: a frame is decoded as soon as it and the header have arrived; every error names the version, the block and
its tensor; the base does not change before `HostWeights.commit`; `finish` returns nothing whose fingerprint
differs. Feeding a frame twice is harmless. Memory: a staged block is kept in the code without classes, about a byte per
change, or as all steps, and decoded again when it is applied or taken back: never more than a keyframe, for which there is room.

`feed` may be called from several threads, for different frames, once the header has been fed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from echo2.base.errors import DeltaFormatError, FingerprintMismatch, LimitExceeded, StateError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.weights.bits import I64
from echo2.weights.block import Changes, decode_sparse, decode_steps, decode_whole, is_plain, read_plain, whole_step
from echo2.weights.container import (
    BlockFrame,
    CodecSetting,
    DeltaHeader,
    EndFrame,
    HeaderFrame,
    Method,
    TensorTable,
    parse_frame,
)
from echo2.weights.elements import Bits, Block, Segment, TensorSpec, blocks_of, flat_bits
from echo2.weights.encode import encode_delta, encode_keyframe
from echo2.weights.fingerprint import MODULUS, sum_bits, whole_fingerprint
from echo2.weights.host import HostWeights

WEIGHTS_BYTES_MAX = 1 << 42  # two trillion parameters in bf16; each tensor takes memory with its first block
PENDING_BYTES_MAX = 1 << 26  # of blocks before their header: several


@dataclass(slots=True)
class _StagedBlock:
    """A block ready to be applied: its payload holds changes without classes, or the steps of all elements, to be added."""

    block: Block
    is_sparse: bool
    payload: bytes
    is_in_place: bool = False

    def changes(self) -> Changes:
        return read_plain(memoryview(self.payload), self.block.element, self.block.element_count)

    def steps(self) -> list[Bits]:
        return _cut(np.frombuffer(self.payload, self.block.element.bits_dtype), self.block)


def _cut(bits: Bits, block: Block) -> list[Bits]:
    return [bits[segment.base : segment.base + segment.count] for segment in block.segments]


def _whole_bits(block: Block, method: Method, payload: memoryview, old: list[Bits]) -> Bits:
    bits = np.empty(block.element_count, block.element.bits_dtype)
    if method is Method.STEPS:
        decode_steps(payload, block.element, old, bits)
    else:
        decode_whole(method, payload, block.element, bits)
    return bits


class StagedDelta:
    """A verified version in host memory; implements `StagedVersion`."""

    def __init__(
        self, header: DeltaHeader, table: TensorTable, fingerprint: int, base: HostWeights,
        blocks: Mapping[int, _StagedBlock], whole: dict[str, Bits] | None,
    ) -> None:  # fmt: skip
        self.header, self.table, self.fingerprint, self.whole = header, table, fingerprint, whole
        self._host, self._blocks = base, dict(sorted(blocks.items()))

    @property
    def version(self) -> Version:
        return self.header.target_version

    @property
    def parent(self) -> Version | None:
        return self.header.parent_version

    def updates(self) -> Iterator[TensorUpdate]:
        """Yields new raw bits by tensor; for a delta in parts, one per block and segment, only where something changed. Not after
        the commit."""
        if self.whole is not None:
            for spec in self.table.specs:
                yield TensorUpdate(spec.name, spec.element.name, spec.shape, None, self.whole[spec.name])
        for staged in self._blocks.values():
            yield from self._block_updates(staged)

    def _block_updates(self, staged: _StagedBlock) -> Iterator[TensorUpdate]:
        block = staged.block
        assert self._host.version == self.parent, "it is not committed yet"
        live = self._host.segments(block)
        if not staged.is_sparse:
            for segment, held, steps_here in zip(block.segments, live, staged.steps(), strict=True):
                yield _update(segment, np.arange(segment.start, segment.start + segment.count), held + steps_here)
            return
        changes = staged.changes()
        positions, steps = changes.positions(), changes.steps()
        bases = np.array([segment.base for segment in block.segments], np.uint32)
        borders = [*np.searchsorted(positions, bases).tolist(), positions.size]
        parts = (slice(begin, end) for begin, end in pairwise(borders))
        for segment, held, part in zip(block.segments, live, parts, strict=True):
            places = positions[part].astype(np.int64) - segment.base
            if not places.size:
                continue
            after = held[places].astype(np.uint64).view(np.int64) + steps[part]
            if held.itemsize < 8 and not 0 <= int(after.min()) <= int(after.max()) < 1 << (8 * held.itemsize):
                raise self._wrapped(block)
            yield _update(segment, places + segment.start, after.view(np.uint64).astype(held.dtype))

    def _wrapped(self, block: Block) -> FingerprintMismatch:
        return FingerprintMismatch(
            f"{self.header.describe()}: {block.describe()}: expected changes within the range of its elements, one "
            "leaves it: the host's bits are not those of the parent"
        )

    def exchange_parts(self) -> list[int]:
        return list(self._blocks)

    def exchange(self, part: int, live: HostWeights) -> None:
        """Applies a block's changes; a second call takes them back, even after an error."""
        staged = self._blocks[part]
        block, held = staged.block, live.segments(staged.block)
        if not staged.is_sparse:
            move = np.subtract if staged.is_in_place else np.add
            for target, steps in zip(held, staged.steps(), strict=True):
                move(target, steps, out=target)
            staged.is_in_place = not staged.is_in_place
            return
        changes = staged.changes()
        wrapped = changes.move(block, held, staged.is_in_place)
        # Undone before raising: a host whose bits are not the parent's must not be changed further by the check.
        if wrapped and not staged.is_in_place:
            changes.move(block, held, True)
            raise self._wrapped(block)
        staged.is_in_place = not staged.is_in_place


def _update(segment: Segment, indices: I64, bits: Bits) -> TensorUpdate:
    return TensorUpdate(segment.spec.name, segment.spec.element.name, segment.spec.shape, indices, bits)


class ContainerDecoder:
    """Decodes the frames of one container and stages their version on top of `base`."""

    def __init__(self, base: HostWeights) -> None:
        self._base = base
        self._head: HeaderFrame | None = None
        self._end: EndFrame | None = None
        self._table = base.table
        self._plan: tuple[Block, ...] = ()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._digests: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._staged: dict[int, _StagedBlock] = {}
        self._whole: dict[str, Bits] | None = None

    def feed(self, frame: bytes) -> None:
        """Decodes one frame. Frames that arrive before the header are buffered, up to a limit."""
        try:
            parsed = parse_frame(frame)
        except DeltaFormatError as error:
            index = int.from_bytes(frame[16:20], "little")  # of the block that it claims to be
            hint = f" ({self._plan[index].describe()})" if len(frame) >= 36 and index < len(self._plan) else ""
            raise DeltaFormatError(f"{self._whose()}: {error}{hint}") from None
        if isinstance(parsed, HeaderFrame):
            self._begin(parsed)
            return
        if self._head is None:
            self._pending_bytes += len(frame)
            if self._pending_bytes > PENDING_BYTES_MAX:
                raise LimitExceeded(f"delta container: expected its header within {PENDING_BYTES_MAX} bytes of blocks")
            self._pending.append(frame)
            return
        if parsed.container_id != self._head.container_id:
            raise DeltaFormatError(f"{self._whose()}: got a frame of another container ({parsed.container_id:016x})")
        if isinstance(parsed, EndFrame):
            if parsed.block_count != len(self._plan) or (self._end is not None and self._end != parsed):
                raise DeltaFormatError(
                    f"{self._whose()}: expected an end frame for {len(self._plan)} blocks, got {parsed.block_count}"
                )
            self._end = parsed
            return
        self._take_block(parsed)

    def _whose(self) -> str:
        return "delta container" if self._head is None else self._head.header.describe()

    def _begin(self, head: HeaderFrame) -> None:
        if self._head is not None:
            if head.container_id != self._head.container_id:
                raise DeltaFormatError(f"{self._whose()}: got a second header ({head.header.describe()})")
            return
        self._check_base(head)
        if head.table is not None:
            self._table = head.table
            claimed = sum(spec.element_count * spec.element.bytes for spec in head.table.specs)
            if claimed > WEIGHTS_BYTES_MAX:
                raise DeltaFormatError(
                    f"{head.header.describe()}: expected at most {WEIGHTS_BYTES_MAX} bytes of weights, "
                    f"its table claims {claimed}"
                )
            self._whole = {}
        self._plan = blocks_of(self._table.specs, head.header.block_elements, head.header.shard_count)
        self._head = head
        waiting, self._pending, self._pending_bytes = self._pending, [], 0
        for frame in waiting:
            self.feed(frame)

    def _check_base(self, head: HeaderFrame) -> None:
        header = head.header
        if header.parent_version is None:
            return
        if header.parent_version != self._base.version:
            raise StateError(f"{header.describe()}: expected a host at that version, it is at {self._base.version}")
        if head.table_digest != self._base.table_digest:
            raise DeltaFormatError(f"{header.describe()}: the tensors of the learner are not those of the host")
        # The fingerprint is linear in the bits, so the parent's plus the steps is the target's: a delta is verified without
        # reading the weights that it does not change.
        fingerprint = self._base.fingerprint(header.fingerprint_key)
        if fingerprint != header.parent_fingerprint:
            raise FingerprintMismatch(
                f"{header.describe()}: expected the parent's fingerprint {header.parent_fingerprint:016x}, "
                f"the host has {fingerprint:016x}"
            )

    def _take_block(self, frame: BlockFrame) -> None:
        assert self._head is not None, "blocks wait for the header"
        if frame.index >= len(self._plan):
            raise DeltaFormatError(f"{self._whose()}: expected {len(self._plan)} blocks, got number {frame.index}")
        block = self._plan[frame.index]
        where = f"{self._whose()}: {block.describe()}"
        if (frame.element_count, frame.element_code) != (block.element_count, block.element.code):
            raise DeltaFormatError(
                f"{where}: expected {block.element_count} elements of type {block.element.code}, it claims "
                f"{frame.element_count} of type {frame.element_code}"
            )
        if block.index in self._digests:
            if self._digests[block.index] != frame.digest:
                raise DeltaFormatError(f"{where}: came twice with different bytes")
            return
        try:
            if self._whole is None:
                self._stage(block, frame)
            else:
                self._place(block, frame, self._whole)
        except DeltaFormatError as error:
            raise DeltaFormatError(f"{where}: {error}") from None
        self._digests[block.index] = frame.digest

    def _stage(self, block: Block, frame: BlockFrame) -> None:
        assert self._head is not None, "blocks wait for the header"
        if frame.method is Method.UNCHANGED:
            if len(frame.payload):
                raise DeltaFormatError(f"expected no payload for an unchanged block, got {len(frame.payload)} bytes")
            return
        old, key = self._base.segments(block), self._head.header.fingerprint_key
        if frame.method is Method.SPARSE:
            plain: list[bytes | memoryview] = []
            changes = decode_sparse(frame.payload, block, old, plain)
            self._steps[block.index] = changes.settle(block, key)
            # Not the sender's code if that is coded by exponent class: it can be read only beside the old weights, which are gone
            # once the block has been applied and must be taken back.
            code = b"".join(plain) if is_plain(frame.payload) else changes.payload(is_coded=False)
        else:
            bits = _whole_bits(block, frame.method, frame.payload, old)
            new = _cut(bits, block)
            self._steps[block.index] = whole_step(block, new, old, key)
            for after, before in zip(new, old, strict=True):
                np.subtract(after, before, out=after)
            code = bits.tobytes()
        self._staged[block.index] = _StagedBlock(block, frame.method is Method.SPARSE, code)

    def _place(self, block: Block, frame: BlockFrame, whole: dict[str, Bits]) -> None:
        assert self._head is not None, "blocks wait for the header"
        if frame.method not in (Method.RAW, Method.PLANES):
            raise DeltaFormatError(f"expected whole elements in a keyframe, got method {frame.method.name}")
        bits, step = _whole_bits(block, frame.method, frame.payload, []), 0
        for segment in block.segments:
            part = bits[segment.base : segment.base + segment.count]
            _tensor_bits(whole, segment.spec)[segment.start : segment.start + segment.count] = part
            step += sum_bits(segment.spec.name, part, self._head.header.fingerprint_key, segment.start)
        # Summed per block and not in one total: frames come in any order and from several threads, and a repeated one
        # must not count again.
        self._steps[block.index] = step % MODULUS

    def finish(self) -> StagedDelta:
        """Returns the staged version. Raises if anything is missing or the fingerprint differs from the learner's."""
        head = self._head
        if head is None or self._end is None:
            raise DeltaFormatError(f"{self._whose()}: expected a header and an end frame, one has not come")
        if missing := [block for block in self._plan if block.index not in self._digests]:
            raise DeltaFormatError(f"{self._whose()}: {missing[0].describe()} has not come")
        header, start = head.header, head.header.parent_fingerprint or 0
        if self._whole is not None:
            start = whole_fingerprint(self._table.specs, header.fingerprint_key)
            for spec in self._table.specs:  # those without elements have no block
                _tensor_bits(self._whole, spec)
        fingerprint = (start + sum(self._steps.values())) % MODULUS
        if (claimed := self._end.target_fingerprint) != fingerprint:
            raise FingerprintMismatch(
                f"{header.describe()}: expected fingerprint {claimed:016x} after applying it, got {fingerprint:016x}"
            )
        return StagedDelta(header, self._table, fingerprint, self._base, self._staged, self._whole)


def _tensor_bits(whole: dict[str, Bits], spec: TensorSpec) -> Bits:
    """The tensor's array, allocated with its first block (its size was checked with the table)."""
    held = whole.get(spec.name)  # of several threads that allocate it, the first keeps its own
    return whole.setdefault(spec.name, np.empty(spec.element_count, spec.element.bits_dtype)) if held is None else held


_BLOCK = 1000  # elements: enough for every kernel to run once


def warm_up(*types: torch.dtype) -> None:
    """Runs a toy version through every code path, for each given element type (default: bf16 and float32), so that no version waits
    for a compiler. The first call on a machine compiles the kernels (tens of CPU seconds) into the package's cache folder; later
    ones, in any process, load them."""
    place = torch.arange(_BLOCK)
    # Blocks that change everywhere, at some places by much, at some by little, and rarely.
    steps = torch.cat(
        [
            place % 3 + 1,
            *(step * (place % apart == 0) + (place % (10 * apart) == 0) for step, apart in ((300, 3), (1, 3), (1, 90))),
        ]
    )
    values = torch.arange(len(steps)) / len(steps)
    old = {str(dtype): values.to(dtype) for dtype in types or (torch.bfloat16, torch.float32)}
    new = {name: (flat_bits(t) + steps.to(flat_bits(t).dtype)).view(t.dtype) for name, t in old.items()}
    host = HostWeights.empty()
    _pass_on(host, list(encode_keyframe(old, DeltaHeader(target_version=Version(0)))))
    for number, setting in enumerate(CodecSetting):
        header = DeltaHeader(
            target_version=Version(number + 1),
            parent_version=host.version,
            parent_fingerprint=host.fingerprint(),
            setting=setting,
            block_elements=_BLOCK,
        )
        source, target = (old, new) if number % 2 == 0 else (new, old)
        _pass_on(host, list(encode_delta(source, target, header)))


def _pass_on(host: HostWeights, frames: list[bytes]) -> None:
    decoder = ContainerDecoder(host)
    for frame in frames:
        decoder.feed(frame)
    host.commit(decoder.finish())

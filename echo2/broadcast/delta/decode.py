"""Decoding: frames, in any order, to a staged version that is verified and ready to commit.

Guarantees: a frame is decoded as soon as it is here and the header is; every error names the version, the block and
its tensor; nothing of the base changes before `HostWeights.commit`; `finish` hands out nothing whose fingerprint
differs. Feeding a frame twice does no harm. Memory: staged changes take 4 bytes and an element's width each; beyond
`DecodeLimits.staging_share` of the weights, blocks are kept encoded and decoded once more when needed. Leaves to
others: fetching, signatures, when to swap.

`feed` may be called from several threads, for different frames, once the header was fed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from echo2.base.errors import DeltaFormatError, FingerprintMismatch, LimitExceeded, StateError
from echo2.base.ids import Version
from echo2.broadcast.delta.bitstream import U32
from echo2.broadcast.delta.block import decode_sparse, decode_whole
from echo2.broadcast.delta.container import (
    BlockFrame,
    DeltaHeader,
    EndFrame,
    HeaderFrame,
    Method,
    TensorTable,
    parse_frame,
)  # fmt: skip
from echo2.broadcast.delta.elements import Bits, TensorSpec
from echo2.broadcast.delta.fingerprint import MODULUS, header_term, sum_bits, sum_changes
from echo2.broadcast.delta.host import HostWeights
from echo2.broadcast.delta.layout import Block, Segment, blocks_of
from echo2.broadcast.delta.scan import add_steps, exchange
from echo2.broadcast.staged import TensorUpdate


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What a decoder accepts. `weights_bytes_max` bounds what a keyframe may claim to be."""

    weights_bytes_max: int = 1 << 36
    pending_bytes_max: int = 1 << 26
    staging_share: float = 0.045
    staging_bytes_min: int = 1 << 24


@dataclass(slots=True)
class _StagedBlock:
    """Changes of a block: `positions` None means all of its elements. `bits` are new before a commit, old after it.

    Kept encoded (`payload`) instead when staging has reached its share; then both are None.
    """

    block: Block
    positions: U32 | None
    bits: Bits | None
    method: Method
    payload: bytes | None
    digest: int


def _segment_slice(positions: U32, segment: Segment) -> slice:
    begin, end = np.searchsorted(positions, np.array([segment.base, segment.base + segment.count], np.int64))
    return slice(int(begin), int(end))


def _new_bits(block: Block, frame: tuple[Method, memoryview], old: list[Bits]) -> tuple[U32 | None, Bits]:
    """Positions and new bits of a block's changes, from its payload and the old bits."""
    method, payload = frame
    if method is not Method.SPARSE:
        bits = np.empty(block.element_count, block.element.bits_dtype)
        decode_whole(method, payload, block.element, bits)
        return None, bits
    positions, moves = decode_sparse(payload, block, old)
    for segment, before in zip(block.segments, old, strict=True):
        part = _segment_slice(positions, segment)
        add_steps(before, segment.base, positions[part], moves[part])
    return positions, moves


def _fingerprint_step(block: Block, positions: U32 | None, bits: Bits, old: list[Bits], key: int) -> int:
    total = 0
    for segment, before in zip(block.segments, old, strict=True):
        name = segment.spec.name
        if positions is None:
            after = bits[segment.base : segment.base + segment.count]
            total += sum_bits(name, after, key, segment.start) - sum_bits(name, before, key, segment.start)
        else:
            part = _segment_slice(positions, segment)
            total += sum_changes(name, key, segment.start, segment.base, positions[part], before, bits[part])
    return total % MODULUS


class StagedDelta:
    """A verified version in host memory; fits `StagedVersion`. `updates` works before and after it is committed."""

    def __init__(self, header: DeltaHeader, table: TensorTable, fingerprint: int, base: HostWeights) -> None:
        self._header = header
        self._table = table
        self._fingerprint = fingerprint
        self._host = base
        self._blocks: dict[int, _StagedBlock] = {}
        self._whole: dict[str, Bits] | None = None
        self._is_committed = False

    def fill(self, blocks: dict[int, _StagedBlock], whole: dict[str, Bits] | None) -> StagedDelta:
        """Takes what the decoder staged."""
        self._blocks, self._whole = dict(sorted(blocks.items())), whole
        return self

    @property
    def version(self) -> Version:
        return self._header.target_version

    @property
    def parent(self) -> Version | None:
        return self._header.parent_version

    @property
    def fingerprint(self) -> int:
        return self._fingerprint

    @property
    def base_fingerprint(self) -> int | None:
        return self._header.parent_fingerprint

    @property
    def key(self) -> int:
        return self._header.fingerprint_key

    @property
    def table(self) -> TensorTable:
        return self._table

    @property
    def changed_elements(self) -> int | None:
        """How many elements change; None while some blocks are kept encoded."""
        if self._whole is not None or any(staged.bits is None for staged in self._blocks.values()):
            return None
        return sum(staged.bits.size for staged in self._blocks.values() if staged.bits is not None)

    def whole(self) -> dict[str, Bits] | None:
        return self._whole

    def updates(self) -> Iterator[TensorUpdate]:
        """New raw bits by tensor: of a delta in parts, a block each, and only where something changed."""
        if self._whole is not None:
            for spec in self._table.specs:
                yield TensorUpdate(spec.name, spec.element.name, spec.shape, None, self._whole[spec.name])
            return
        for staged in self._blocks.values():
            yield from self._block_updates(staged)

    def _block_updates(self, staged: _StagedBlock) -> Iterator[TensorUpdate]:
        live = self._live(staged.block)
        positions, bits = staged.positions, staged.bits
        if not self._is_committed and bits is None:
            positions, bits = self._decoded_again(staged, live)
        for segment, held in zip(staged.block.segments, live, strict=True):
            if positions is None:
                indices = np.arange(segment.start, segment.start + segment.count)
                part = slice(segment.base, segment.base + segment.count)
            else:
                part = _segment_slice(positions, segment)
                indices = positions[part].astype(np.int64) + (segment.start - segment.base)
            if not indices.size:
                continue
            # After the commit the new bits are the host's.
            values = held[indices - segment.start] if self._is_committed or bits is None else bits[part]
            yield TensorUpdate(segment.spec.name, segment.spec.element.name, segment.spec.shape, indices, values)

    def _live(self, block: Block) -> list[Bits]:
        expected = self.version if self._is_committed else self.parent
        if self._host.version != expected:
            raise StateError(
                f"staged version {self.version}: expected its host at version {expected}, it went on to "
                f"{self._host.version}: stage it again"
            )
        return self._host.segments(block)

    def _decoded_again(self, staged: _StagedBlock, live: list[Bits]) -> tuple[U32 | None, Bits]:
        assert staged.payload is not None, "a block is staged decoded or encoded"
        return _new_bits(staged.block, (staged.method, memoryview(staged.payload)), live)

    def exchange_parts(self) -> Iterable[int]:
        return list(self._blocks)

    def exchange(self, part: int, live: HostWeights) -> None:
        """Swaps a block's bits with the host's. A block kept encoded is decoded here, and its old bits then kept."""
        staged = self._blocks[part]
        held = live.segments(staged.block)
        positions, bits = staged.positions, staged.bits
        if bits is None:
            positions, bits = self._decoded_again(staged, held)
        for segment, target in zip(staged.block.segments, held, strict=True):
            if positions is None:
                mine = bits[segment.base : segment.base + segment.count]
                before = target.copy()
                target[:] = mine
                mine[:] = before
            else:
                inside = _segment_slice(positions, segment)
                exchange(target, segment.base, positions[inside], bits[inside])
        staged.positions, staged.bits = positions, bits

    def committed(self, host: HostWeights) -> None:
        self._host = host
        self._is_committed = True
        for staged in self._blocks.values():
            staged.bits = None
            if staged.payload is not None:  # over its share of memory: the whole block is read from the host instead
                staged.positions, staged.payload = None, None


class Decoder:
    """Takes the frames of one container and stages the version that they carry upon `base`."""

    def __init__(self, base: HostWeights, limits: DecodeLimits | None = None) -> None:
        self._base = base
        self._limits = limits or DecodeLimits()
        self._head: HeaderFrame | None = None
        self._end: EndFrame | None = None
        self._table = base.table
        self._plan: tuple[Block, ...] = ()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._digests: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._staged: dict[int, _StagedBlock] = {}
        self._staged_bytes = 0
        self._whole: dict[str, Bits] | None = None

    @property
    def header(self) -> DeltaHeader | None:
        """What the container is; None before its header came."""
        return None if self._head is None else self._head.header

    @property
    def staged_block_count(self) -> int:
        return len(self._digests)

    def feed(self, frame: bytes) -> None:
        """Decodes one frame. Frames that come before the header wait, up to a limit."""
        try:
            parsed = parse_frame(frame)
        except DeltaFormatError as error:
            raise DeltaFormatError(f"{self._whose()}: {error}{self._tensor_hint(frame)}") from None
        if isinstance(parsed, HeaderFrame):
            self._begin(parsed)
            return
        if self._head is None:
            self._wait(frame)
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

    def _tensor_hint(self, frame: bytes) -> str:
        """Which tensor a damaged block claims to be of, as far as can be told."""
        index = int.from_bytes(frame[16:20], "little")
        return f" ({self._plan[index].describe()})" if len(frame) >= 36 and index < len(self._plan) else ""

    def _wait(self, frame: bytes) -> None:
        if self._pending_bytes + len(frame) > self._limits.pending_bytes_max:
            raise LimitExceeded(
                f"delta container: expected its header within {self._limits.pending_bytes_max} bytes of blocks"
            )
        self._pending.append(frame)
        self._pending_bytes += len(frame)

    def _begin(self, head: HeaderFrame) -> None:
        if self._head is not None:
            if head.container_id != self._head.container_id:
                raise DeltaFormatError(f"{self._whose()}: got a second header ({head.header.describe()})")
            return
        self._check_base(head)
        if head.table is not None:
            self._table = head.table
            claimed = sum(spec.element_count * spec.element.bytes for spec in head.table.specs)
            if claimed > self._limits.weights_bytes_max:
                raise DeltaFormatError(
                    f"{head.header.describe()}: expected at most {self._limits.weights_bytes_max} bytes of weights, "
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
        found = self._base.fingerprint(header.fingerprint_key)
        if found != header.parent_fingerprint:
            raise FingerprintMismatch(
                f"{header.describe()}: expected the parent's fingerprint {header.parent_fingerprint:016x}, "
                f"the host has {found:016x}"
            )

    def _take_block(self, frame: BlockFrame) -> None:
        assert self._head is not None, "blocks wait for the header"
        if frame.index >= len(self._plan):
            raise DeltaFormatError(f"{self._whose()}: expected {len(self._plan)} blocks, got number {frame.index}")
        block = self._plan[frame.index]
        whose = f"{self._whose()}: {block.describe()}"
        if (frame.element_count, frame.element_code) != (block.element_count, block.element.code):
            raise DeltaFormatError(
                f"{whose}: expected {block.element_count} elements of type {block.element.code}, it claims "
                f"{frame.element_count} of type {frame.element_code}"
            )
        if block.index in self._digests:
            if self._digests[block.index] != frame.digest:
                raise DeltaFormatError(f"{whose}: came twice with different bytes")
            return
        try:
            if self._whole is None:
                self._stage(block, frame)
            else:
                self._place(block, frame, self._whole)
        except DeltaFormatError as error:
            raise DeltaFormatError(f"{whose}: {error}") from None
        self._digests[block.index] = frame.digest

    def _stage(self, block: Block, frame: BlockFrame) -> None:
        assert self._head is not None, "blocks wait for the header"
        if frame.method is Method.UNCHANGED:
            if len(frame.payload):
                raise DeltaFormatError(f"expected no payload for an unchanged block, got {len(frame.payload)} bytes")
            return
        old = self._base.segments(block)
        positions, bits = _new_bits(block, (frame.method, frame.payload), old)
        self._steps[block.index] = _fingerprint_step(block, positions, bits, old, self._head.header.fingerprint_key)
        size = bits.nbytes + (0 if positions is None else positions.nbytes)
        limit = max(self._limits.staging_bytes_min, int(self._base.total_bytes * self._limits.staging_share))
        if self._staged_bytes + size <= limit:
            self._staged_bytes += size
            staged = _StagedBlock(block, positions, bits, frame.method, None, frame.digest)
        else:
            staged = _StagedBlock(block, None, None, frame.method, bytes(frame.payload), frame.digest)
        self._staged[block.index] = staged

    def _place(self, block: Block, frame: BlockFrame, whole: dict[str, Bits]) -> None:
        assert self._head is not None, "blocks wait for the header"
        if frame.method not in (Method.RAW, Method.PLANES):
            raise DeltaFormatError(f"expected whole elements in a keyframe, got method {frame.method.name}")
        bits = np.empty(block.element_count, block.element.bits_dtype)
        decode_whole(frame.method, frame.payload, block.element, bits)
        step = 0
        for segment in block.segments:
            part = bits[segment.base : segment.base + segment.count]
            _tensor_bits(whole, segment.spec)[segment.start : segment.start + segment.count] = part
            step += sum_bits(segment.spec.name, part, self._head.header.fingerprint_key, segment.start)
        self._steps[block.index] = step % MODULUS

    def missing_blocks(self) -> list[int]:
        """Blocks that have not come yet, at most the first hundred."""
        missing = (block.index for block in self._plan if block.index not in self._digests)
        return [index for index, _ in zip(missing, range(100), strict=False)]

    def finish(self) -> StagedDelta:
        """The staged version. Raises if anything is missing or its fingerprint is not the learner's."""
        head = self._head
        if head is None or self._end is None:
            raise DeltaFormatError(f"{self._whose()}: expected a header and an end frame, one has not come")
        if missing := self.missing_blocks():
            raise DeltaFormatError(f"{self._whose()}: {self._plan[missing[0]].describe()} has not come")
        header = head.header
        if header.parent_fingerprint is None:
            start = sum(header_term(header.fingerprint_key, spec) for spec in self._table.specs)
            for spec in self._table.specs:
                _tensor_bits(self._whole if self._whole is not None else {}, spec)
        else:
            start = header.parent_fingerprint
        found = (start + sum(self._steps.values())) % MODULUS
        for claimed in (self._end.target_fingerprint, header.target_fingerprint):
            if claimed is not None and claimed != found:
                raise FingerprintMismatch(
                    f"{header.describe()}: expected fingerprint {claimed:016x} after applying it, got {found:016x}"
                )
        return StagedDelta(header, self._table, found, self._base).fill(self._staged, self._whole)


def _tensor_bits(whole: dict[str, Bits], spec: TensorSpec) -> Bits:
    """The tensor's array, made when its first block came (its size was checked with the table)."""
    return (
        whole.setdefault(spec.name, np.empty(0, spec.element.bits_dtype))
        if spec.element_count == 0
        else (
            whole[spec.name]
            if spec.name in whole
            else whole.setdefault(spec.name, np.empty(spec.element_count, spec.element.bits_dtype))
        )
    )

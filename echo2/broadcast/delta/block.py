"""One block: from old and new bits to a payload, and from a payload (and old bits) to positions and steps.

Guarantees: decoding gives back exactly what was encoded, or raises `DeltaFormatError`; sizes are checked before they
are allocated. A step is (new - old) modulo 2^width of the raw bit patterns: exact for every value, and steps of
consecutive versions add up. Leaves to others: frames and versions (container.py), staging (decode.py).
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from echo2.base.errors import DeltaFormatError
from echo2.broadcast.delta import bitstream, scan
from echo2.broadcast.delta.bitstream import I64, U8, U32, U64, Int
from echo2.broadcast.delta.container import Method, Setting
from echo2.broadcast.delta.elements import Bits, ElementType
from echo2.broadcast.delta.fingerprint import MODULUS, sum_changes
from echo2.broadcast.delta.layout import Block
from echo2.broadcast.delta.planes import decode_planes, encode_planes

_SPARSE = struct.Struct("<BBH")
_CLASS = struct.Struct("<IIII")
_SPARE_WORDS = 4  # a reader looks up to three words past a stream's end
_ARENA_SHARE = 0.6  # changes that need more of a block than this are sent as planes

Changes: TypeAlias = "tuple[U32, U32, U8, U64]"
"""Positions in the block, gaps within the class, classes, steps: what a scan finds in one piece."""


class Scratch:
    """Working memory of one thread for blocks up to a size: less than one block."""

    def __init__(self, block: Block) -> None:
        self.block_elements = block.element_count
        self.width_bytes = block.element.bytes
        self.piece = max(256, min(scan.PIECE, block.element_count // 32))
        share = int(block.raw_bytes * _ARENA_SHARE) // (8 * bitstream.PAGE_WORDS)
        self.pages = np.zeros(max(share, 2 * scan.CLASS_COUNT + 2), np.uint8)
        self.arena = np.empty(self.pages.size * bitstream.PAGE_WORDS, np.uint64)
        self.changes: Changes = (
            np.empty(self.piece, np.uint32), np.empty(self.piece, np.uint32),
            np.zeros(self.piece, np.uint8), np.empty(self.piece, np.uint64),
        )  # fmt: skip

    def fits(self, block: Block) -> bool:
        return block.element_count <= self.block_elements and block.element.bytes == self.width_bytes


class ScratchPool:
    """Lends scratch memory to as many threads as ask at the same time, and keeps it for the next block."""

    def __init__(self) -> None:
        self._free: deque[Scratch] = deque()

    def take(self, block: Block) -> Scratch:
        try:
            scratch = self._free.pop()
        except IndexError:
            return Scratch(block)
        return scratch if scratch.fits(block) else Scratch(block)

    def give(self, scratch: Scratch) -> None:
        self._free.append(scratch)


class Packer:
    """Codes the changes of one block as they are found, piece by piece."""

    def __init__(self, element: ElementType, class_count: int, class_base: int, scratch: Scratch) -> None:
        self._width = np.uint64(8 * element.bytes)
        self._class_count = class_count
        self._class_base = class_base
        self._scratch = scratch
        self._counts = np.zeros((class_count, 3), np.uint64)
        self._writers = np.zeros((2 * class_count, 4), np.uint64)
        self._used = np.zeros(1, np.int64)
        self._tables = (
            self._writers, bitstream.new_rice_states(class_count), scratch.pages, self._used, self._counts,
        )  # fmt: skip

    def add(self, changes: Changes, count: int) -> bool:
        """Appends changes, in order of position. False: they take more space than whole elements would."""
        _, gaps, classes, steps = changes
        return bitstream.pack(gaps, classes, steps, count, self._width, self._scratch.arena, self._tables)

    @property
    def change_count(self) -> int:
        return int(self._counts[:, 0].sum())

    def payload(self) -> bytes:
        """The payload of method SPARSE."""
        words = int(self._used[0]) * bitstream.PAGE_WORDS + 2 * self._class_count
        out = np.zeros(words, np.uint64)
        lengths = np.zeros(2 * self._class_count, np.int64)
        size = bitstream.collect(
            self._scratch.arena, self._writers, self._scratch.pages, int(self._used[0]), out, lengths
        )
        assert size >= 0, "the output was sized for all pages"
        present = [c for c in range(self._class_count) if self._counts[c, 0]]
        head = [_SPARSE.pack(self._class_count, self._class_base, sum(1 << c for c in present))]
        for c in present:
            head.append(
                _CLASS.pack(int(self._counts[c, 0]), int(self._counts[c, 1]), lengths[2 * c], lengths[2 * c + 1])
            )
        return b"".join((*head, out.view(np.uint8)[:size].tobytes()))


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A payload with its method, and what the block adds to the fingerprint."""

    method: Method
    payload: bytes
    fingerprint_step: int
    change_count: int

    @property
    def is_whole(self) -> bool:
        return self.method in (Method.RAW, Method.PLANES)


def uses_classes(element: ElementType, setting: Setting) -> bool:
    """Whether changes of this type are coded by exponent class."""
    return setting is Setting.DENSE and element.exponent_bits > 0


def _scan_segment(
    old: Bits, new: Bits, at: int, base: int, since: I64, table: U8 | None, shift: int, scratch: Scratch
) -> int:
    piece = slice(at, at + scratch.piece)
    if table is None:
        return scan.scan_plain(old[piece], new[piece], base + at, since, scratch.changes)
    return scan.scan_classes(old[piece], new[piece], base + at, since, table, np.uint64(shift), scratch.changes)


def encode_block(
    block: Block, old: list[Bits], new: list[Bits], setting: Setting, key: int, scratch: Scratch
) -> EncodedBlock:
    """Codes a block of a delta; `old` and `new` hold the bits of its segments."""
    element = block.element
    table: U8 | None = None
    class_base = 0
    if uses_classes(element, setting):
        longest = max(range(len(old)), key=lambda i: old[i].size)
        class_base = scan.choose_class_base(old[longest], element.exponent_shift, element.exponent_bits)
        table = scan.class_table(element.exponent_bits, class_base)
    else:
        scratch.changes[2][:] = 0
    class_count = 1 if table is None else scan.CLASS_COUNT
    packer = Packer(element, class_count, class_base, scratch)
    since = np.zeros(class_count, np.int64)
    step = 0
    fits = True
    for segment, before, after in zip(block.segments, old, new, strict=True):
        for at in range(0, segment.count, scratch.piece):
            count = _scan_segment(before, after, at, segment.base, since, table, element.exponent_shift, scratch)
            if not count:
                continue
            positions = scratch.changes[0][:count]
            changed = after[positions - np.uint32(segment.base)]
            step += sum_changes(segment.spec.name, key, segment.start, segment.base, positions, before, changed)
            fits = fits and packer.add(scratch.changes, count)
    if not fits:
        return EncodedBlock(*encode_whole(new, element), step % MODULUS, block.element_count)
    if packer.change_count == 0:
        return EncodedBlock(Method.UNCHANGED, b"", 0, 0)
    return EncodedBlock(Method.SPARSE, packer.payload(), step % MODULUS, packer.change_count)


def encode_whole(new: list[Bits], element: ElementType) -> tuple[Method, bytes]:
    """Codes whole elements, as planes or raw, whichever is shorter."""
    whole = new[0] if len(new) == 1 else np.concatenate(new)
    payload = encode_planes(whole, element)
    return (Method.PLANES, payload) if len(payload) < whole.nbytes else (Method.RAW, whole.tobytes())


def decode_whole(method: Method, payload: memoryview, element: ElementType, out: Bits) -> None:
    """Fills `out` from a payload of method RAW or PLANES."""
    if method is Method.PLANES:
        decode_planes(payload, element, out)
        return
    if len(payload) != out.nbytes:
        raise DeltaFormatError(f"expected {out.nbytes} raw bytes, got {len(payload)}")
    out.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


class _Streams:
    """A parsed SPARSE payload: its class table, and readers at the beginning of every stream."""

    def __init__(self, payload: memoryview, element: ElementType, element_count: int, words: U64) -> None:
        if len(payload) < _SPARSE.size:
            raise DeltaFormatError(f"expected a table of classes, got {len(payload)} bytes")
        self.class_count, self.class_base, present = _SPARSE.unpack_from(payload)
        if self.class_count not in (1, scan.CLASS_COUNT) or present >> self.class_count or not present:
            raise DeltaFormatError(f"expected 1 or {scan.CLASS_COUNT} classes, got {self.class_count}, {present:#x}")
        if self.class_count > 1 and not element.exponent_bits:
            raise DeltaFormatError(f"expected one class for {element.name}, got {self.class_count}")
        self.words = words
        self.width = np.uint64(8 * element.bytes)
        self.counts = np.zeros(self.class_count, np.uint64)
        self.readers = np.zeros((self.class_count, 6), np.uint64)
        self.rice = bitstream.new_rice_states(self.class_count)
        classes = [c for c in range(self.class_count) if present >> c & 1]
        at = _SPARSE.size + _CLASS.size * len(classes)
        if at > len(payload):
            raise DeltaFormatError(f"expected {at} bytes of class table, got {len(payload)}")
        for i, c in enumerate(classes):
            changes, escapes, gap_bytes, escape_bytes = _CLASS.unpack_from(payload, _SPARSE.size + i * _CLASS.size)
            # A change takes at least two bits, an escape at least two more: no claim exceeds what the bytes can hold.
            if not 1 <= changes <= min(element_count, gap_bytes * 4) or escapes > min(changes, escape_bytes * 4):
                raise DeltaFormatError(f"class {c}: {changes} changes, {escapes} escapes do not fit their streams")
            self.counts[c] = changes
            ends = at * 8, (at + gap_bytes) * 8, (at + gap_bytes) * 8, (at + gap_bytes + escape_bytes) * 8
            self.readers[c] = (*ends, 0, escapes)
            at += gap_bytes + escape_bytes
        if at != len(payload):
            raise DeltaFormatError(f"expected {at} bytes of streams, got {len(payload)}")
        self.change_count = int(self.counts.sum())
        if self.change_count > element_count:
            raise DeltaFormatError(f"expected at most {element_count} changes, it claims {self.change_count}")
        for c in classes:
            bitstream.start_class(words, self.readers, self.rice, c, self.width)


def _to_words(payload: memoryview) -> U64:
    words = np.zeros(-(-len(payload) // 8) + _SPARE_WORDS, np.uint64)
    words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    return words


def _decode_plain(streams: _Streams, element_count: int, positions: U32, moves: Bits) -> None:
    gaps = np.empty(scan.RING, np.uint32)
    steps = np.empty(scan.RING, np.uint64)
    at: Int = 0
    done = 0
    while done < streams.change_count:
        count = min(scan.RING, streams.change_count - done)
        if not bitstream.unpack(streams.words, streams.readers, streams.rice, 0, streams.width, gaps, steps, count):
            raise DeltaFormatError(f"expected {streams.change_count} changes, the streams end after {done}")
        part = slice(done, done + count)
        at = scan.place_plain(gaps, steps, count, at, element_count, positions[part], moves[part])
        if at < 0:
            raise DeltaFormatError(f"expected changes within {element_count} elements, one lies behind them")
        done += count


def _decode_classes(streams: _Streams, block: Block, old: list[Bits], positions: U32, moves: Bits) -> None:
    element = block.element
    table = scan.class_table(element.exponent_bits, streams.class_base)
    state = (
        np.zeros(1, np.uint64), np.zeros(scan.CLASS_COUNT, np.uint64), streams.counts.copy(),
        np.zeros((scan.CLASS_COUNT, 2), np.int64), np.empty((scan.CLASS_COUNT, scan.RING), np.uint32),
        np.empty((scan.CLASS_COUNT, scan.RING), np.uint64),
    )  # fmt: skip
    coder = (streams.readers, streams.rice)
    done = np.zeros(1, np.int64)
    ok = scan.begin_walk(streams.words, coder, streams.width, state)
    shift_width = (np.uint64(element.exponent_shift), streams.width)
    for segment, before in zip(block.segments, old, strict=True):
        ok = ok and scan.walk_classes(
            before, segment.base, table, shift_width, streams.words, coder, state, (positions, moves, done)
        )
    if not ok or int(done[0]) != streams.change_count:
        raise DeltaFormatError(f"expected {streams.change_count} changes among these old weights, found {int(done[0])}")


def decode_sparse(payload: memoryview, block: Block, old: list[Bits] | None) -> tuple[U32, Bits]:
    """Positions in the block, strictly rising, and steps. `old` may be None unless exponent classes are used."""
    words = _to_words(payload)
    streams = _Streams(payload, block.element, block.element_count, words)
    positions = np.empty(streams.change_count, np.uint32)
    moves = np.empty(streams.change_count, block.element.bits_dtype)
    if streams.class_count == 1:
        _decode_plain(streams, block.element_count, positions, moves)
    elif old is None:
        raise DeltaFormatError("expected changes coded without exponent classes: these need the old weights")
    else:
        _decode_classes(streams, block, old, positions, moves)
    return positions, moves

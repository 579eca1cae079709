"""One block: from old and new bits to a payload, and from a payload (and old bits) to positions and steps.

Guarantees: decoding gives back exactly what was encoded, or raises `DeltaFormatError`; sizes are checked before they
are allocated. A step is (new - old) modulo 2^width of the raw bit patterns: exact for every value, and steps of
consecutive versions add up. Leaves to others: frames and versions (container.py), staging (decode.py).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from echo2.base.errors import DeltaFormatError
from echo2.broadcast.delta import bitstream, ranges, scan, walk
from echo2.broadcast.delta.bitstream import U8, U16, U32, U64
from echo2.broadcast.delta.container import Method, Setting
from echo2.broadcast.delta.elements import Bits, ElementType, TensorSpec
from echo2.broadcast.delta.fingerprint import MODULUS, coefficients
from echo2.broadcast.delta.layout import Block, Segment
from echo2.broadcast.delta.planes import decode_planes, encode_planes

_SPARSE = struct.Struct("<BBHI")
_COUNT = struct.Struct("<I")
_CLASS = struct.Struct("<II")
_SPARE_WORDS = 4  # a reader looks up to three words past a stream's end
_SMALL_BYTES = 64
WHOLE_SHARE = 0.6  # changes that need more of a block than this are sent as whole elements

Changes: TypeAlias = "tuple[U32, U32, U16, U64]"
"""Positions in the block, gaps within the class, contexts, steps: what a scan finds in one piece."""


class Scratch:
    """Working memory of one thread for blocks up to a size: less than one block, unless a larger share is asked for."""

    def __init__(self, block: Block, share: float = WHOLE_SHARE) -> None:
        self.block_elements = block.element_count
        self.width_bytes = block.element.bytes
        self.piece = max(256, min(scan.PIECE, block.element_count // 32))
        page_count = int(block.raw_bytes * share) // (8 * bitstream.PAGE_WORDS)
        self.pages = np.zeros(max(page_count, 2 * scan.CLASS_COUNT + 2), np.uint8)
        self.arena = np.empty(self.pages.size * bitstream.PAGE_WORDS, np.uint64)
        self.changes: Changes = (
            np.empty(self.piece, np.uint32), np.empty(self.piece, np.uint32),
            np.zeros(self.piece, np.uint16), np.empty(self.piece, np.uint64),
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

    def __init__(self, element: ElementType, table: U8, class_base: int, scratch: Scratch) -> None:
        width = 8 * element.bytes
        self._width = np.uint64(width)
        self._class_base = class_base
        self._class_count = scan.PLAIN_CLASS_COUNT if table.size == 1 else scan.CLASS_COUNT
        self._scratch = scratch
        self._counts = np.zeros(self._class_count, np.uint64)
        self._writers = np.zeros((self._class_count, 4), np.uint64)
        self._used = np.zeros(1, np.int64)
        self._coder = ranges.new_encoder()
        self._ones = np.zeros(1, np.uint64)
        shared = (self._writers, bitstream.new_rice_states(self._class_count), scratch.pages, self._used)
        self.plain_tables = (*shared, self._ones, self._counts)
        self.class_tables = (*shared, self._coder, ranges.new_odds(table.size, width), self._counts)

    def add(self, changes: Changes, count: int) -> bool:
        """Appends what a scan reported, in order of position. False: it takes more space than whole elements would."""
        arena = self._scratch.arena
        if self.is_plain:
            return scan.pack_plain(changes, count, self._width, arena, self.plain_tables)
        lowest = np.uint64(self._class_base)
        return scan.pack_classes(changes, count, lowest, self._width, arena, self.class_tables)

    @property
    def is_plain(self) -> bool:
        """Whether there are no exponent classes."""
        return self._class_count == scan.PLAIN_CLASS_COUNT

    @property
    def change_count(self) -> int:
        return int(self._counts[1]) if self.is_plain else int(self._counts.sum())

    def payload(self) -> bytes | None:
        """The payload of method SPARSE; None if it takes too much space after all."""
        arena, pages = self._scratch.arena, self._scratch.pages
        if not self.is_plain and not ranges.finish_encoder(arena, self._writers, pages, self._used, self._coder):
            return None
        out = np.zeros(int(self._used[0]) * bitstream.PAGE_WORDS + 2 * self._class_count, np.uint64)
        lengths = np.zeros(self._class_count, np.int64)
        size = bitstream.collect(arena, self._writers, pages, int(self._used[0]), out, lengths)
        assert size >= 0, "the output was sized for all pages"
        present = [c for c in range(1, self._class_count) if self._counts[c]]
        head = [_SPARSE.pack(self._class_count, self._class_base, sum(1 << c for c in present), lengths[0])]
        head.append(_COUNT.pack(int(self._counts[0])))
        head += [_CLASS.pack(int(self._counts[c]), lengths[c]) for c in present]
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


def encode_block(
    block: Block, old: list[Bits], new: list[Bits], setting: Setting, key: int, scratch: Scratch
) -> EncodedBlock:
    """Codes a block of a delta; `old` and `new` hold the bits of its segments."""
    element = block.element
    table, class_base = scan.plain_table(), 0
    if uses_classes(element, setting):
        i = max(range(len(old)), key=lambda i: old[i].size)
        class_base = scan.choose_class_base(old[i], new[i], element.exponent_shift, element.exponent_bits)
        table = scan.class_table(element.exponent_bits, class_base)
    packer = Packer(element, table, class_base, scratch)
    octave = octaves_of(element, class_base)
    is_full = np.zeros(1, np.uint8)
    work = (np.zeros(scan.CLASS_COUNT, np.int64), scratch.changes, scratch.arena, is_full)
    step = 0
    for segment, before, after in zip(block.segments, old, new, strict=True):
        print_at = (segment.start, *coefficients(segment.spec.name, key))
        if packer.is_plain:
            found = scan.code_plain(before, after, segment.base, work, packer.plain_tables, print_at)
        else:
            found = scan.code_classes(before, after, segment.base, octave, work, packer.class_tables, print_at)
        step += int(found)
    return coded_block(block, packer, not is_full[0], step, lambda: new)


def octaves_of(element: ElementType, class_base: int) -> tuple[np.uint64, np.uint64, np.uint64, U64]:
    """Shift and mask of the exponent, the class base, and working memory: what kernels need to tell classes."""
    mask = (1 << element.exponent_bits) - 1
    work = np.zeros(scan.CLASS_COUNT + 2, np.uint64)
    return np.uint64(element.exponent_shift), np.uint64(mask), np.uint64(class_base), work


def coded_block(
    block: Block, packer: Packer, fits: bool, step: int, whole: Callable[[], list[Bits]]
) -> EncodedBlock:  # fmt: skip
    """The block after all of its changes went to `packer`; as whole elements where these are shorter."""
    if fits and packer.change_count == 0:
        return EncodedBlock(Method.UNCHANGED, b"", 0, 0)
    payload = packer.payload() if fits else None
    if payload is None or len(payload) > WHOLE_SHARE * block.raw_bytes + _SMALL_BYTES:
        return EncodedBlock(*encode_whole(whole(), block.element), step % MODULUS, block.element_count)
    return EncodedBlock(Method.SPARSE, payload, step % MODULUS, packer.change_count)


def encode_changes(
    positions: U32, moves: Bits, element: ElementType, element_count: int, share: float = WHOLE_SHARE
) -> bytes | None:
    """A SPARSE payload without classes, of changes that are known; None if it takes more than a share of a block."""
    spec = TensorSpec("", element, (element_count,))
    scratch = Scratch(Block(0, 0, element, (Segment(spec, 0, element_count, 0),)), share)
    packer = Packer(element, scan.plain_table(), 0, scratch)
    for start in range(0, positions.size, scratch.piece):
        part = positions[start : start + scratch.piece]
        before = int(positions[start - 1]) if start else -1
        scratch.changes[1][: part.size] = np.diff(part.astype(np.int64), prepend=before) - 1
        scratch.changes[3][: part.size] = moves[start : start + scratch.piece]
        if not packer.add(scratch.changes, part.size):
            return None
    return packer.payload()


def compact(payload: memoryview, positions: U32, moves: Bits, block: Block) -> bytes | None:
    """The payload in the code without classes, of which nothing depends on the old weights."""
    if payload[0] == scan.PLAIN_CLASS_COUNT:
        return bytes(payload)
    return encode_changes(positions, moves, block.element, block.element_count)


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

    def __init__(self, payload: memoryview, element: ElementType, element_count: int) -> None:
        if len(payload) < _SPARSE.size + _COUNT.size:
            raise DeltaFormatError(f"expected a table of classes, got {len(payload)} bytes")
        self.class_count, base, present, range_bytes = _SPARSE.unpack_from(payload)
        if (
            self.class_count not in (scan.PLAIN_CLASS_COUNT, scan.CLASS_COUNT)
            or present >> self.class_count
            or present & 1
        ):
            raise DeltaFormatError(
                f"expected {scan.PLAIN_CLASS_COUNT} or {scan.CLASS_COUNT} classes, got {self.class_count}, {present:#x}"
            )
        self.is_plain = self.class_count == scan.PLAIN_CLASS_COUNT
        if base >> element.exponent_bits and not (self.is_plain and base == 0):
            raise DeltaFormatError(f"expected a class base of {element.exponent_bits} bits, got {base}")
        if not self.is_plain and not element.exponent_bits:
            raise DeltaFormatError(f"expected no exponent classes for {element.name}")
        self.octave = octaves_of(element, base)
        self.width = np.uint64(8 * element.bytes)
        self.counts = np.zeros(self.class_count, np.uint64)
        self.readers = np.zeros((self.class_count, 2), np.uint64)
        self.rice = bitstream.new_rice_states(self.class_count)
        self._read_table(payload, [c for c in range(1, self.class_count) if present >> c & 1], range_bytes)
        self.change_count = int(self.counts[1] if self.is_plain else self.counts.sum())
        if not 1 <= self.change_count <= element_count:
            raise DeltaFormatError(f"expected 1 to {element_count} changes, it claims {self.change_count}")
        if self.is_plain and self.counts[0] > min(4 * range_bytes, self.change_count):
            raise DeltaFormatError(f"{self.change_count} changes: it claims {self.counts[0]} larger ones")
        self.words = _to_words(payload)
        if not self.is_plain:
            self.odds = ranges.new_odds(1 << element.exponent_bits, 8 * element.bytes)
            ranges.start_decoder(self.words.view(np.uint8), self.coder)

    def _read_table(self, payload: memoryview, classes: list[int], range_bytes: int) -> None:
        at = _SPARSE.size + _COUNT.size + _CLASS.size * len(classes)
        if at > len(payload):
            raise DeltaFormatError(f"expected {at} bytes of class table, got {len(payload)}")
        (self.counts[0],) = _COUNT.unpack_from(payload, _SPARSE.size)
        self.coder = np.array([0, 0, at, at + range_bytes], np.uint64)
        self.readers[0] = at * 8, (at + range_bytes) * 8
        at += range_bytes
        for i, c in enumerate(classes):
            changes, gap_bytes = _CLASS.unpack_from(payload, _SPARSE.size + _COUNT.size + i * _CLASS.size)
            # A change takes at least two bits of its class: no claim exceeds what the bytes can hold.
            if not 1 <= changes <= gap_bytes * 4:
                raise DeltaFormatError(f"class {c}: expected 1 to {gap_bytes * 4} changes, it claims {changes}")
            self.counts[c] = changes
            self.readers[c] = at * 8, (at + gap_bytes) * 8
            at += gap_bytes
        if at != len(payload):
            raise DeltaFormatError(f"expected {at} bytes of streams, got {len(payload)}")


def _to_words(payload: memoryview) -> U64:
    words = np.zeros(-(-len(payload) // 8) + _SPARE_WORDS, np.uint64)
    words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    return words


def _walk(streams: _Streams, block: Block, old: list[Bits], out: tuple[U32, Bits]) -> int:
    state = (np.zeros(scan.CLASS_COUNT, np.uint64), np.zeros(scan.CLASS_COUNT, np.uint64), streams.counts.copy())
    done = np.zeros(1, np.int64)
    if not walk.begin_walk(streams.words, streams.readers, streams.rice, state):
        return 0
    coders = (streams.readers, streams.rice, streams.coder, streams.odds)
    for segment, before in zip(block.segments, old, strict=True):
        if not walk.walk_classes(
            before, segment.base, streams.octave, streams.width, streams.words, coders, state, (*out, done)
        ):
            return int(done[0])
    return int(done[0])


def _expect_all(streams: _Streams, element_count: int, found: int) -> None:
    if found != streams.change_count:
        raise DeltaFormatError(
            f"expected {streams.change_count} changes within {element_count} elements, {found} were found before "
            "the streams went wrong"
        )


def decode_plain(payload: memoryview, element: ElementType, element_count: int) -> tuple[U32, Bits]:
    """Positions in the block, strictly rising, and steps, of changes coded without exponent classes."""
    streams = _Streams(payload, element, element_count)
    if not streams.is_plain:
        raise DeltaFormatError("expected changes coded without exponent classes: these need the old weights")
    return _read_plain(streams, element, element_count)


def _read_plain(streams: _Streams, element: ElementType, element_count: int) -> tuple[U32, Bits]:
    out = np.empty(streams.change_count, np.uint32), np.empty(streams.change_count, element.bits_dtype)
    coders = (streams.readers, streams.rice, streams.counts)
    found = walk.read_plain(streams.words, coders, streams.width, element_count, out)
    _expect_all(streams, element_count, int(found))
    return out


def decode_sparse(payload: memoryview, block: Block, old: list[Bits]) -> tuple[U32, Bits]:
    """Positions in the block, strictly rising, and steps; `old` holds the old bits of its segments."""
    streams = _Streams(payload, block.element, block.element_count)
    if streams.is_plain:
        return _read_plain(streams, block.element, block.element_count)
    out = np.empty(streams.change_count, np.uint32), np.empty(streams.change_count, block.element.bits_dtype)
    _expect_all(streams, block.element_count, _walk(streams, block, old, out))
    return out

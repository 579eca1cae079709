"""The changes of one block, whether found, decoded, merged or selected on a device.

Guarantees: a change outside the block is refused when it is read. Leaves to others: coding by exponent class
(block.py), frames (container.py), staging (decode.py).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo2.base.errors import DeltaFormatError
from echo2.weights import bits, marks, walk
from echo2.weights.bits import I64, U32, U64, Int
from echo2.weights.bitset import BitSet, Coder, Reader, read_bit_set, read_values, value_parts
from echo2.weights.elements import Bits, ElementType
from echo2.weights.fingerprint import MODULUS, coefficients
from echo2.weights.lanes import LISTED
from echo2.weights.layout import Block

PLAIN_CLASS_COUNT = 1
HEAD = struct.Struct("<BBI")
_RARE = 60  # elements per change: if changes are rarer, only the cache lines of changed elements are fetched


@dataclass(frozen=True, slots=True)
class Changes:
    """Which elements of a block changed, and by how much: `larger` marks changes by more than one, `excess` is their magnitude
    minus one; `listed_larger`: their ranks and places, if already known."""

    changed: BitSet
    signs: U64
    larger: BitSet
    excess: Bits
    listed_larger: tuple[U32, U32] | None = None

    @property
    def count(self) -> int:
        return self.changed.marked

    @classmethod
    def found(cls, old: Sequence[Bits], new: Sequence[Bits], finds: marks.Finds) -> Changes:
        """Finds the changes of a block's segments, using the memory of `finds`."""
        at, memory = np.zeros(3, np.int64), finds.restart()
        for before, after in zip(old, new, strict=True):
            marks.survey(before, after, at, memory)
        size, count, found = (int(n) for n in at)
        room = finds.larger[:found], finds.places[:found], finds.excess[:found]
        if found > finds.larger.size:
            room = np.empty(found, np.uint32), np.empty(found, np.uint32), np.empty(found, finds.excess.dtype)
            at, memory = np.zeros(3, np.int64), finds.restart(room)
            for before, after in zip(old, new, strict=True):
                marks.survey(before, after, at, memory)
        larger, places, excess = room
        return cls(
            BitSet.of_marks(finds.changed, size, count), finds.signs, BitSet.of_places(larger, count), excess,
            (larger, places),
        )  # fmt: skip

    @classmethod
    def of_steps(cls, positions: U32, steps: I64, size: int, element: ElementType) -> Changes:
        """Changes from strictly ascending positions and nonzero steps."""
        signs, flags = (np.zeros(bits.word_count(steps.size), np.uint64) for _ in range(2))
        larger = BitSet.of_marks(flags, steps.size, int(marks.mark_steps(steps, signs, flags)))
        magnitudes = np.abs(steps[larger.listed()]).view(np.uint64)
        excess: Bits = (magnitudes - np.uint64(1)).astype(element.bits_dtype)
        return cls(BitSet.of_places(positions, size), signs, larger, excess)

    def settle(self, block: Block, key: int) -> int:
        """The changes' contribution to the fingerprint."""
        step, larger = 0, self._larger()
        rank: Int = 0
        found: Int = 0
        places, signs = self.changed.places, self.signs
        words = self.changed.marks() if places is None else None
        for segment in block.segments:
            print_at = (segment.start, *coefficients(segment.spec.name, key))
            where = segment.base, segment.count
            if words is not None:
                part, rank = marks.settle_marks(*where, (words, signs), rank, print_at)
            else:
                assert places is not None, "marks are kept as words or as places"
                part, rank = walk.settle_places(*where, (places, signs), rank, print_at)
            rest, found = marks.settle_larger(*where, larger, found, print_at)
            step += int(part) + int(rest)
        assert rank == self.count, "a set's marks are within its size, and a block's segments cover it"
        return step % MODULUS

    def move(self, block: Block, live: Sequence[Bits], is_back: bool) -> int:
        """Adds the changes to the live bits of a block's segments, or subtracts them (`is_back`). Returns how many left their
        element's range, which cannot happen with the weights that the changes were made from."""
        wrapped, cursor, larger = 0, np.zeros(2, np.int64), self._larger()
        places, signs = self.changed.places, self.signs
        if places is not None and places.size * _RARE < self.changed.size:
            for segment, target in zip(block.segments, live, strict=True):
                wrapped += int(walk.move_places(target, segment.base, (places, signs), larger, cursor, is_back))
        else:
            words = self.changed.marks()
            for segment, target in zip(block.segments, live, strict=True):
                wrapped += int(marks.move_marks(target, segment.base, (words, signs), larger, cursor, is_back))
        return wrapped if block.element.bytes < 8 else 0

    def _larger(self) -> tuple[U32, U32, Bits, U64]:
        """The larger changes, as the kernels take them: places, ranks, excess, all signs."""
        if self.listed_larger is not None:
            ranks, places = self.listed_larger
            return places, ranks, self.excess, self.signs
        ranks = self.larger.listed()
        room = np.empty(ranks.size + LISTED, np.uint32)
        if self.changed.places is not None:
            marks.pick(self.changed.places, ranks, room)
        elif ranks.size:
            marks.places_of_larger(self.changed.marks(), self.changed.size, self.larger.marks(), room)
        return room[: ranks.size], ranks, self.excess, self.signs

    def positions(self) -> U32:
        """The positions of the changes, strictly ascending."""
        return self.changed.listed()

    def steps(self) -> I64:
        """New minus old bits, in 64-bit arithmetic."""
        out = np.empty(self.count, np.int64)
        marks.list_steps((self.signs, self.larger.listed(), self.excess), out)
        return out

    def signs_bytes(self) -> bytes:
        """The signs, one bit per change."""
        return self.signs.view(np.uint8)[: -(-self.count // 8)].tobytes()

    def payload(self, is_coded: bool = True) -> bytes:
        """The payload without exponent classes; `is_coded` False: also without entropy coding."""
        coder = Coder() if is_coded else None
        parts = [HEAD.pack(PLAIN_CLASS_COUNT, 0, self.count), self.signs_bytes()]
        parts += run_parts(self.changed, self.larger, self.excess, coder)
        return b"".join(parts)


def run_parts(changed: BitSet, larger: BitSet, excess: Bits, coder: Coder | None) -> list[bytes]:
    """Encodes one run of marks: the changed elements, the larger changes among these, and their magnitudes."""
    if not changed.marked:
        return changed.parts(coder)
    parts = [*changed.parts(coder), *larger.parts(coder)]
    return parts + value_parts(excess, coder) if larger.marked else parts


def read_run(reader: Reader, size: int, element: ElementType) -> tuple[BitSet, BitSet, Bits]:
    """The inverse of `run_parts`, for a run over `size` elements."""
    changed = read_bit_set(reader, size, "changes")
    if not changed.marked:
        return changed, BitSet(0, 0), np.empty(0, element.bits_dtype)
    larger = read_bit_set(reader, changed.marked, "larger changes")
    if not larger.marked:
        return changed, larger, np.empty(0, element.bits_dtype)
    return changed, larger, read_values(reader, larger.marked, element.bits_dtype)


def read_head(reader: Reader, element_count: int) -> tuple[int, int, int, U64]:
    """A payload's class count, class base, number of changes, and signs."""
    class_count, base, count = reader.fields(HEAD, "a block's head")
    if not 1 <= count <= element_count:
        raise DeltaFormatError(f"expected 1 to {element_count} changes, it claims {count}")
    return class_count, base, count, reader.words(-(-count // 8), "signs")


def read_plain(
    payload: memoryview, element: ElementType, element_count: int, plain: list[bytes | memoryview] | None = None
) -> Changes:
    """Decodes changes coded without exponent classes. `plain` gets the payload without its entropy coding."""
    reader = Reader(payload, plain)
    class_count, base, count, signs = read_head(reader, element_count)
    if (class_count, base) != (PLAIN_CLASS_COUNT, 0):
        raise DeltaFormatError("expected changes coded without exponent classes: these need the old weights")
    changed, larger, excess = read_run(reader, element_count, element)
    reader.end()
    if changed.marked != count:
        raise DeltaFormatError(f"expected {count} changes, its marks claim {changed.marked}")
    return Changes(changed, signs, larger, excess)

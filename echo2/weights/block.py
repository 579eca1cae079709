"""One block: its changes, and their payload: encoded from old and new bits, decoded into changes again.

Guarantees: decoding returns exactly what was encoded, or raises `DeltaFormatError`; a change outside the block is refused; sizes
are checked before anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from echo2.base.errors import DeltaFormatError
from echo2.weights.bits import (
    COUNT,
    I64,
    U8,
    U32,
    U64,
    BitSet,
    Coder,
    Int,
    Reader,
    as_words,
    count_marks,
    is_even,
    pair_parts,
    plane_parts,
    read_bit_set,
    read_values,
    value_parts,
    word_count,
)  # fmt: skip
from echo2.weights.container import CodecSetting, Method
from echo2.weights.elements import Bits, Block, ElementType
from echo2.weights.fingerprint import MODULUS, ROW_SHIFT, coefficients, sum_bits
from echo2.weights.jit import LANES, compiled
from echo2.weights.marks import (
    CLASS_COUNT,
    NO_OCTAVE,
    Finds,
    Octave,
    add_steps,
    choose_class_base,
    count_classes,
    gather_steps,
    join_marks,
    larger_max,
    list_steps,
    mark_steps,
    move_marks,
    move_places,
    pick,
    places_of_larger,
    sample_of,
    settle_larger,
    settle_marks,
    settle_places,
    sort_marks,
    sort_steps,
    split_larger,
    spread_steps,
    survey,
)  # fmt: skip

PLAIN_CLASS_COUNT = 1  # `fast`: positions do not depend on the weights
HEAD = struct.Struct("<BBI")  # class count, class base, number of changes
_SPARSE = 24  # elements per change: of denser changes, 64 elements at once move faster


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
    def found(cls, block: Block, old: Sequence[Bits], new: Sequence[Bits], finds: Finds) -> Changes | None:
        """Finds the changes of a block's segments, using the memory of `finds`; None if `are_most`."""
        at, size = np.zeros(3, np.int64), block.element_count
        memory = finds.restart(size)
        for before, after in zip(old, new, strict=True):
            survey(before, after, at, memory)
        _, count, larger_count = (int(n) for n in at)
        if are_most(size, count, larger_count):
            return None
        larger, places, excess = finds.larger[:larger_count], finds.places[:larger_count], finds.excess[:larger_count]
        return cls(
            BitSet.of_marks(finds.changed, size, count), finds.signs, BitSet.of_places(larger, count), excess,
            (larger, places),
        )  # fmt: skip

    @classmethod
    def of_steps(cls, positions: U32, steps: I64, size: int, element: ElementType) -> Changes:
        """Changes from strictly ascending positions and nonzero steps."""
        signs, flags = (np.zeros(word_count(steps.size), np.uint64) for _ in range(2))
        larger = BitSet.of_marks(flags, steps.size, int(mark_steps(steps, signs, flags)))
        magnitudes = np.abs(steps[larger.listed()]).view(np.uint64)
        excess: Bits = (magnitudes - np.uint64(1)).astype(element.bits_dtype)
        return cls(BitSet.of_places(positions, size), signs, larger, excess)

    def settle(self, block: Block, key: int) -> int:
        """The changes' contribution to the fingerprint."""
        step, larger = 0, self._larger()
        rank: Int = 0
        index: Int = 0
        places, signs = self.changed.places, self.signs
        words = self.changed.marks() if places is None else None
        rows = np.empty((block.element_count >> ROW_SHIFT) + 2, np.uint64)
        for segment in block.segments:
            print_at = (segment.start, *coefficients(segment.spec.name, key))
            where = segment.base, segment.count
            if words is not None:
                part, rank = settle_marks(*where, (words, signs), rank, print_at)
            else:
                assert places is not None, "marks are kept as words or as places"
                part, rank = settle_places(*where, (places, signs), rank, print_at, rows)
            rest, index = settle_larger(*where, larger, index, print_at)
            step += int(part) + int(rest)
        assert rank == self.count, "a set's marks are within its size, and a block's segments cover it"
        return step % MODULUS

    def move(self, block: Block, live: Sequence[Bits], is_back: bool) -> int:
        """Adds the changes to the live bits of a block's segments, or subtracts them (`is_back`). Returns 0 unless one left its
        element's range, which cannot happen with the weights that the changes were made from."""
        wrapped, cursor, larger = 0, np.zeros(2, np.int64), self._larger()
        places, signs = self.changed.places, self.signs
        if places is not None and places.size * _SPARSE < self.changed.size:
            for segment, target in zip(block.segments, live, strict=True):
                wrapped += int(move_places(target, segment.base, (places, signs), larger, cursor, is_back))
        else:
            words = self.changed.marks()
            for segment, target in zip(block.segments, live, strict=True):
                wrapped += int(move_marks(target, segment.base, (words, signs), larger, cursor, is_back))
        return wrapped if block.element.bytes < 8 else 0

    def _larger(self) -> tuple[U32, U32, Bits, U64]:
        """The larger changes, as the kernels take them: places, ranks, excess, all signs."""
        if self.listed_larger is not None:
            ranks, places = self.listed_larger
            return places, ranks, self.excess, self.signs
        ranks = self.larger.listed()
        room = np.empty(ranks.size + LANES, np.uint32)
        if self.changed.places is not None:
            pick(self.changed.places, ranks, room)
        elif ranks.size:
            places_of_larger(self.changed.marks(), self.changed.size, self.larger.marks(), room)
        return room[: ranks.size], ranks, self.excess, self.signs

    def positions(self) -> U32:
        return self.changed.listed()

    def steps(self) -> I64:
        out = np.empty(self.count, np.int64)
        list_steps((self.signs, self.larger.listed(), self.excess), out)
        return out

    def head(self, class_count: int, class_base: int, coder: Coder | None) -> list[bytes]:
        signs = self.signs.view(np.uint8)[: -(-self.count // 8)]
        is_noise = is_even(int(count_marks(self.signs, self.count)), self.count)
        return [HEAD.pack(class_count, class_base, self.count), *plane_parts(signs, None if is_noise else coder)]

    def payload(self, is_coded: bool = True) -> bytes:
        """The payload without exponent classes; `is_coded` False: also without entropy coding."""
        coder = Coder() if is_coded else None
        parts = self.head(PLAIN_CLASS_COUNT, 0, coder)
        return b"".join(parts + run_parts(self.changed, self.larger, self.excess, coder))


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
    return class_count, base, count, as_words(reader.plane(-(-count // 8), "signs"))


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


MOST = 0.4
"""Share of a block's elements that changed from which on every step is sent: a Huffman code of steps is then as short as marks,
signs and magnitudes apart, and several times as fast."""
_STEPS_HEAD = struct.Struct("<BB")  # class count, class base
_CLASSES_GAIN = 0.97  # sorting by class takes half as long as the rest, and must gain more than this
_WHOLE_MORE = 1.02  # whole elements may take so much more, because they are decoded without the old ones

Run = tuple[BitSet, BitSet, Bits]
"""One class: which of its elements changed, which of these by more than one, and the latter's magnitudes minus one."""


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A payload with its method, and what the block adds to the fingerprint."""

    method: Method
    payload: bytes
    fingerprint_step: int


def uses_classes(element: ElementType, setting: CodecSetting) -> bool:
    """Whether changes of this type are coded by exponent class in this setting."""
    return setting is CodecSetting.DENSE and element.exponent_bits > 0


def are_most(block_elements: int, count: int, larger: int) -> bool:
    """Whether so many elements of a block changed, or so many by more than one, that every step is sent."""
    return count > MOST * block_elements or larger > larger_max(block_elements)


def encode_block(
    block: Block, old: list[Bits], new: list[Bits], setting: CodecSetting, key: int, finds: Finds
) -> EncodedBlock:
    """Encodes a block of a delta; `old` and `new` hold the bits of its segments."""
    changes = Changes.found(block, old, new, finds)
    if changes is None:
        return encode_most(block, old, new, setting, key)
    if not changes.count:
        return EncodedBlock(Method.UNCHANGED, b"", 0)
    is_dense = uses_classes(block.element, setting)
    payload = _dense_payload(block, old, changes, finds.changed) if is_dense else changes.payload()
    return EncodedBlock(Method.SPARSE, payload, changes.settle(block, key))


def encode_most(block: Block, old: list[Bits], new: list[Bits], setting: CodecSetting, key: int) -> EncodedBlock:
    """Encodes a block most of which changed: every element's step, or the new elements if a sample of these takes fewer bits."""
    element, step = block.element, whole_step(block, new, old, key)
    largest = max(range(len(old)), key=lambda i: old[i].size)
    before, after = [sample_of(old[largest])], [sample_of(new[largest])]
    sorted_steps = [_steps_between(before, after)]
    base = _class_base(before, element) if uses_classes(element, setting) else None
    bits = _sample_bits(sorted_steps, False)
    if base is not None:
        by_class = _sample_bits(_steps_by_class(element, before, after, base), False)
        base, bits = (base, by_class) if by_class < _CLASSES_GAIN * bits else (None, bits)
    if _sample_bits(after, _is_rotated(element)) < _WHOLE_MORE * bits:
        return EncodedBlock(*encode_whole(new, element), step)
    return EncodedBlock(Method.STEPS, steps_payload(element, old, new, base), step)


def whole_step(block: Block, new: list[Bits], old: list[Bits], key: int) -> int:
    """What a block adds to the fingerprint if its segments' bits go from `old` to `new`."""
    step = 0
    for segment, before, after in zip(block.segments, old, new, strict=True):
        name = segment.spec.name
        step += sum_bits(name, after, key, segment.start) - sum_bits(name, before, key, segment.start)
    return step % MODULUS


def _sample_bits(samples: Sequence[Bits], is_rotated: bool) -> float:
    bits = 0.0
    for sample in samples:
        planes = np.empty((sample.itemsize, sample.size), np.uint8)
        _split(sample, is_rotated, planes)
        bits += sample.size * sum(_entropy_bits(plane) for plane in planes)
    return bits


def _steps_between(old: list[Bits], new: list[Bits], octave: Octave = NO_OCTAVE, at: I64 | None = None) -> Bits:
    """All steps, from the places `at` of each class on."""
    steps: Bits = np.empty(sum(part.size for part in old), old[0].dtype)
    places = np.zeros(1, np.int64) if at is None else at
    for before, after in zip(old, new, strict=True):
        sort_steps(before, after, octave, places, steps)
    return steps


def _steps_by_class(element: ElementType, old: list[Bits], new: list[Bits], base: int) -> list[Bits]:
    octave = octave_of(element, base)
    ends = _class_sizes(old, octave).cumsum()
    return np.split(_steps_between(old, new, octave, np.concatenate([[0], ends[:-1]])), ends[:-1])


def steps_payload(element: ElementType, old: list[Bits], new: list[Bits], base: int | None) -> bytes:
    """Encodes the steps of all elements, by exponent class if there is a class base."""
    runs = [_steps_between(old, new)] if base is None else _steps_by_class(element, old, new, base)
    parts, coder = [_STEPS_HEAD.pack(len(runs), base or 0)], Coder()
    for run in runs:
        parts += _step_parts(run, coder)
    return b"".join(parts)


def _step_parts(steps: Bits, coder: Coder) -> list[bytes]:
    """Encodes the steps of one class; if few of its elements moved, which ones did, and only these steps."""
    count = int(np.count_nonzero(steps))
    parts = [COUNT.pack(count)]
    if 2 * count < steps.size:
        moved, values = np.empty(-(-steps.size // 8), np.uint8), np.empty(count + 1, steps.dtype)
        gather_steps(steps, moved, values)
        parts += plane_parts(moved, coder)
        steps = values[:count]
    return parts + _value_planes(steps, False, coder)


def decode_steps(payload: memoryview, element: ElementType, old: list[Bits], new: Bits) -> None:
    """Fills `new` from a payload of method STEPS and the old bits."""
    reader = Reader(payload)
    class_count, base = reader.fields(_STEPS_HEAD, "a block's head")
    octave = _octave_claimed(class_count, base, element)
    sizes = np.array([new.size]) if octave is None else _class_sizes(old, octave)
    steps = np.empty(new.size, new.dtype)
    starts = np.concatenate([[0], sizes.cumsum()])
    for begin, end in pairwise(starts.tolist()):
        _read_steps(reader, element, steps[begin:end])
    reader.end()
    at, places = 0, starts[:-1].copy()
    for part in old:
        add_steps(part, octave or NO_OCTAVE, places, steps, new[at : at + part.size])
        at += part.size


def _read_steps(reader: Reader, element: ElementType, steps: Bits) -> None:
    (count,) = reader.fields(COUNT, "steps")
    if count > steps.size:
        raise DeltaFormatError(f"expected at most {steps.size} steps, it claims {count}")
    if 2 * count >= steps.size:
        _read_planes(reader, element, False, steps)
        return
    moved = as_words(reader.plane(-(-steps.size // 8), "steps"))
    if int(count_marks(moved, steps.size)) != count:
        raise DeltaFormatError(f"expected {count} steps of {steps.size}, its marks are others")
    values = np.zeros(count + 1, steps.dtype)
    _read_planes(reader, element, False, values[:count])
    spread_steps(moved, values, steps)


def octave_of(element: ElementType, class_base: int) -> Octave:
    mask = (1 << element.exponent_bits) - 1
    work = np.zeros(CLASS_COUNT, np.uint64)
    return np.uint64(element.exponent_shift), np.uint64(mask), np.uint64(class_base), work


def _dense_payload(block: Block, old: list[Bits], changes: Changes, changed: U64) -> bytes:
    """Encodes the changes by exponent class; `changed` holds their marks."""
    element = block.element
    class_base = _class_base(old, element)
    octave = octave_of(element, class_base)
    sizes = _class_sizes(old, octave)
    starts = _word_starts(sizes)
    words = np.zeros(int(starts[-1]), np.uint64)
    larger_ranks = changes.larger.listed()
    classed = np.empty(larger_ranks.size, np.uint8), np.empty_like(larger_ranks)
    cursor, at, ranks = np.zeros(2, np.int64), 64 * starts[:-1], np.zeros(CLASS_COUNT, np.int64)
    for segment, part in zip(block.segments, old, strict=True):
        marked = (changed, larger_ranks)
        sort_marks(part, segment.base, octave, marked, cursor, at, ranks, (words, *classed))
    borders = np.concatenate([[0], np.bincount(classed[0], minlength=CLASS_COUNT).cumsum()])
    larger, excess = np.empty_like(larger_ranks), np.empty_like(changes.excess)
    split_larger((*classed, changes.excess), borders[:-1].copy(), (larger, excess))

    def run(c: int) -> Run:
        size, marked = int(sizes[c]), int(ranks[c])
        part = slice(int(borders[c]), int(borders[c + 1]))
        changed = BitSet.of_marks(words[int(starts[c]) : int(starts[c + 1])], size, marked)
        return changed, BitSet.of_places(larger[part], marked), excess[part]

    return dense_payload(changes, class_base, map(run, range(CLASS_COUNT)))


def _class_base(old: list[Bits], element: ElementType) -> int:
    # Sample one tensor: in a block of several small ones, the largest gains most.
    sample = sample_of(max(old, key=lambda part: part.size))
    return choose_class_base(sample, element.exponent_shift, element.exponent_bits)


def _class_sizes(old: list[Bits], octave: Octave) -> I64:
    sizes = np.zeros(CLASS_COUNT, np.int64)
    for part in old:
        count_classes(part, octave, sizes)
    return sizes


def _word_starts(sizes: I64) -> I64:
    """The word at which each class's run starts, if all are stored one after another, and where the last one ends."""
    return np.concatenate([[0], np.cumsum([word_count(int(size)) for size in sizes])]).astype(np.int64)


def dense_payload(changes: Changes, class_base: int, runs: Iterable[Run]) -> bytes:
    """Builds a payload by exponent class from every class's run."""
    coder = Coder()
    parts = changes.head(CLASS_COUNT, class_base, coder)
    for run in runs:
        parts += run_parts(*run, coder)
    return b"".join(parts)


def encode_whole(new: list[Bits], element: ElementType) -> tuple[Method, bytes]:
    """Encodes whole elements, as planes or raw, whichever is shorter."""
    whole = new[0] if len(new) == 1 else np.concatenate(new)
    payload = b"".join(_value_planes(whole, _is_rotated(element), Coder()))
    return (Method.PLANES, payload) if len(payload) < whole.nbytes else (Method.RAW, whole.tobytes())


def decode_whole(method: Method, payload: memoryview, element: ElementType, out: Bits) -> None:
    if method is Method.PLANES:
        reader = Reader(payload)
        _read_planes(reader, element, _is_rotated(element), out)
        reader.end()
        return
    if len(payload) != out.nbytes:
        raise DeltaFormatError(f"expected {out.nbytes} raw bytes, got {len(payload)}")
    out.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


def is_plain(payload: memoryview) -> bool:
    """Whether a SPARSE payload is coded without exponent classes."""
    return len(payload) > 0 and payload[0] == PLAIN_CLASS_COUNT


def decode_sparse(
    payload: memoryview, block: Block, old: list[Bits], plain: list[bytes | memoryview] | None = None
) -> Changes:
    """Decodes a SPARSE payload into changes; `old` holds the old bits of the block's segments. If it is coded without
    classes, `plain` gets the payload without its entropy coding."""
    if is_plain(payload):
        return read_plain(payload, block.element, block.element_count, plain)
    element = block.element
    reader = Reader(payload)
    class_count, base, count, signs = read_head(reader, block.element_count)
    octave = _octave_claimed(class_count, base, element)
    assert octave is not None, "a payload without classes is plain"
    sizes = _class_sizes(old, octave)
    runs = [read_run(reader, int(size), element) for size in sizes]
    reader.end()
    if sum(changed.marked for changed, _, _ in runs) != count:
        raise DeltaFormatError(f"expected {count} changes, its classes' marks are others")
    return _joined(runs, block, old, octave, signs)


def _octave_claimed(class_count: int, base: int, element: ElementType) -> Octave | None:
    """A payload's classes; None if it has none."""
    if (class_count, base) == (PLAIN_CLASS_COUNT, 0):
        return None
    if class_count != CLASS_COUNT or not element.exponent_bits or base >> element.exponent_bits:
        raise DeltaFormatError(f"expected 1 or {CLASS_COUNT} classes of {element.name}, got {class_count} from {base}")
    return octave_of(element, base)


def _joined(runs: list[Run], block: Block, old: list[Bits], octave: Octave, signs: U64) -> Changes:
    """Merges the changes of all classes, in order of position."""
    words, starts = _spread([changed for changed, _, _ in runs])
    larger_words, larger_starts = _spread([larger for _, larger, _ in runs])
    listed = np.cumsum([0, *(larger.marked for _, larger, _ in runs)])
    lists = np.empty(int(listed[-1]), np.uint32), np.empty(int(listed[-1]), block.element.bits_dtype)
    places = (64 * starts, 64 * larger_starts, listed[:-1].copy())
    coded = (words, larger_words, np.concatenate([excess for _, _, excess in runs]))
    out, so_far = np.zeros(word_count(block.element_count), np.uint64), np.zeros(3, np.int64)
    for part in old:
        join_marks(part, octave, places, coded, so_far, (out, *lists))
    count = int(so_far[1])
    return Changes(BitSet.of_marks(out, block.element_count, count), signs, BitSet.of_places(lists[0], count), lists[1])


def _spread(sets: list[BitSet]) -> tuple[U64, I64]:
    """The marks of several sets one after another, and the word at which each starts."""
    starts = _word_starts(np.array([marks.size for marks in sets]))
    words = np.zeros(int(starts[-1]), np.uint64)
    for marks, begin, end in zip(sets, starts, starts[1:], strict=False):
        marks.copy_to(words[begin:end])
    return words, starts[:-1]


PART_ELEMENTS = 1 << 18  # a part's planes stay in a core's cache
_SAMPLE_BYTES = 1 << 12  # its entropy is near that of a whole plane
_ENTROPY_WORTH_CODING = 7.7  # of 8 bits a byte: a Huffman code saves under 4 % beyond it
_ENTROPY_WORTH_PAIRING = (0.5, 3.5)  # long matches are shorter below it, and beyond it there are more than 16 values


@compiled
def _split(bits: Bits, rotate: bool, planes: U8) -> None:
    """`planes[j]` = byte j (from the lowest) of every element, rotated left by one if asked."""
    top = np.uint64(8 * bits.itemsize - 1)
    for j in range(bits.itemsize):
        plane, shift = planes[j], np.uint64(8 * j)
        for i in range(bits.size):
            word = np.uint64(bits[i])
            if rotate:
                word = (word << np.uint64(1)) | (word >> top)
            plane[i] = word >> shift


@compiled
def _join(planes: U8, rotate: bool, bits: Bits) -> None:
    top = np.uint64(8 * bits.itemsize - 1)
    for i in range(bits.size):
        bits[i] = planes[0, i]
    for j in range(1, bits.itemsize):
        for i in range(bits.size):
            bits[i] |= np.uint64(planes[j, i]) << np.uint64(8 * j)
    if rotate:
        for i in range(bits.size):
            word = np.uint64(bits[i])
            bits[i] = (word >> np.uint64(1)) | ((word & np.uint64(1)) << top)


def _is_rotated(element: ElementType) -> bool:
    return element.exponent_bits >= 8


def _entropy_bits(sample: U8) -> float:
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / sample.size
    return float(-(shares * np.log2(shares)).sum())


def _value_planes(bits: Bits, is_rotated: bool, coder: Coder) -> list[bytes]:
    out: list[bytes] = []
    for start in range(0, bits.size, PART_ELEMENTS):
        part = bits[start : start + PART_ELEMENTS]
        planes = np.empty((bits.itemsize, part.size), np.uint8)
        _split(part, is_rotated, planes)
        for plane in planes:
            entropy = _entropy_bits(plane[:_SAMPLE_BYTES])
            if _ENTROPY_WORTH_PAIRING[0] < entropy < _ENTROPY_WORTH_PAIRING[1]:
                out += pair_parts(plane, coder)
            else:
                out += plane_parts(plane, None if entropy >= _ENTROPY_WORTH_CODING else coder)
    return out


def _read_planes(reader: Reader, element: ElementType, is_rotated: bool, bits: Bits) -> None:
    for start in range(0, bits.size, PART_ELEMENTS):
        part = bits[start : start + PART_ELEMENTS]
        planes = np.stack([reader.plane(part.size, "a plane") for _ in range(element.bytes)])
        _join(planes, is_rotated, part)

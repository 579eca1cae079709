"""One block: encodes old and new bits into a payload, and decodes a payload (and old bits) into its changes.

Guarantees: decoding returns exactly what was encoded, or raises `DeltaFormatError`; sizes are checked before anything
is allocated. Leaves to others: frames and versions (container.py), staging (decode.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from echo2.base.errors import DeltaFormatError
from echo2.weights import classes
from echo2.weights.bits import I64, U64, word_count
from echo2.weights.bitset import BitSet, Coder, Reader
from echo2.weights.changes import (
    HEAD,
    PLAIN_CLASS_COUNT,
    Changes,
    read_head,
    read_plain,
    read_run,
    run_parts,
)  # fmt: skip
from echo2.weights.classes import CLASS_COUNT
from echo2.weights.container import CodecSetting, Method
from echo2.weights.elements import Bits, ElementType
from echo2.weights.layout import Block
from echo2.weights.marks import Finds
from echo2.weights.planes import decode_planes, encode_planes

_SMALL_BYTES = 96
WHOLE_SHARE = 0.6  # if changes take more than this share of a block, whole elements are sent

Run = tuple[BitSet, BitSet, Bits]
"""One class: which of its elements changed, which of these by more than one, and the latter's magnitudes minus one."""


def finds_for(block: Block) -> Finds:
    """Allocates working memory for a block."""
    return Finds(block.element_count, block.element.bits_dtype)


class FindsPool:
    """Lends working memory to concurrent threads, and reuses it for later blocks."""

    def __init__(self) -> None:
        self._free: deque[Finds] = deque()

    def take(self, block: Block) -> Finds:
        # Called by several threads: a deque's `pop` is atomic; checking its length first would not be.
        try:
            finds = self._free.pop()
        except IndexError:
            return finds_for(block)
        fits = finds.size >= block.element_count and finds.excess.dtype == block.element.bits_dtype
        return finds if fits else finds_for(block)

    def give(self, finds: Finds) -> None:
        self._free.append(finds)


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


def uses_classes(element: ElementType, setting: CodecSetting) -> bool:
    """Whether changes of this type are coded by exponent class in this setting."""
    return setting is CodecSetting.DENSE and element.exponent_bits > 0


def encode_block(
    block: Block, old: list[Bits], new: list[Bits], setting: CodecSetting, key: int, finds: Finds
) -> EncodedBlock:
    """Encodes a block of a delta; `old` and `new` hold the bits of its segments."""
    changes = Changes.found(old, new, finds)
    step = changes.settle(block, key)
    if not uses_classes(block.element, setting) or not changes.count:
        return coded_block(block, changes.count, changes.payload, step, lambda: new)
    return coded_block(
        block, changes.count, lambda: _dense_payload(block, old, changes, finds.changed), step, lambda: new
    )


def coded_block(
    block: Block, count: int, sparse: Callable[[], bytes], step: int, whole: Callable[[], list[Bits]]
) -> EncodedBlock:  # fmt: skip
    """The encoded block: the sparse payload for `count` changes, or whole elements if that is shorter."""
    if not count:
        return EncodedBlock(Method.UNCHANGED, b"", 0, 0)
    payload = sparse()
    # Whole elements decode without the old ones; a hardly shorter sparse payload is not worth reading those.
    if len(payload) > WHOLE_SHARE * block.raw_bytes + _SMALL_BYTES:
        return EncodedBlock(*encode_whole(whole(), block.element), step, block.element_count)
    return EncodedBlock(Method.SPARSE, payload, step, count)


def octave_of(element: ElementType, class_base: int) -> classes.Octave:
    """The parameters by which kernels compute classes."""
    mask = (1 << element.exponent_bits) - 1
    work = np.zeros(CLASS_COUNT, np.uint64)
    return np.uint64(element.exponent_shift), np.uint64(mask), np.uint64(class_base), work


def _dense_payload(block: Block, old: list[Bits], changes: Changes, changed: U64) -> bytes:
    """Encodes the changes by exponent class; `changed` holds their marks."""
    element = block.element
    # Sample one tensor: in a block of several small ones, the largest gains most.
    sample = max(old, key=lambda part: part.size)
    class_base = classes.choose_class_base(sample, element.exponent_shift, element.exponent_bits)
    octave = octave_of(element, class_base)
    sizes = _class_sizes(old, octave)
    starts = _word_starts(sizes)
    words = np.zeros(int(starts[-1]), np.uint64)
    larger_ranks = changes.larger.listed()
    classed = np.empty(larger_ranks.size, np.uint8), np.empty_like(larger_ranks)
    cursor, at, ranks = np.zeros(2, np.int64), 64 * starts[:-1], np.zeros(CLASS_COUNT, np.int64)
    for segment, part in zip(block.segments, old, strict=True):
        marked = (changed, larger_ranks)
        classes.sort_marks(part, segment.base, octave, marked, cursor, at, ranks, (words, *classed))
    borders = np.concatenate([[0], np.bincount(classed[0], minlength=CLASS_COUNT).cumsum()])
    larger, excess = np.empty_like(larger_ranks), np.empty_like(changes.excess)
    classes.split_larger((*classed, changes.excess), borders[:-1].copy(), (larger, excess))

    def run(c: int) -> Run:
        size, marked = int(sizes[c]), int(ranks[c])
        mine = slice(int(borders[c]), int(borders[c + 1]))
        own = BitSet.of_marks(words[int(starts[c]) : int(starts[c + 1])], size, marked)
        return own, BitSet.of_places(larger[mine], marked), excess[mine]

    return dense_payload(changes, class_base, map(run, range(CLASS_COUNT)))


def _class_sizes(old: list[Bits], octave: classes.Octave) -> I64:
    """The number of elements in each class."""
    sizes = np.zeros(CLASS_COUNT, np.int64)
    for part in old:
        classes.count_classes(part, octave, sizes)
    return sizes


def _word_starts(sizes: I64) -> I64:
    """The word at which each class's run starts, if all are stored one after another, and where the last one ends."""
    return np.concatenate([[0], np.cumsum([word_count(int(size)) for size in sizes])]).astype(np.int64)


def dense_payload(changes: Changes, class_base: int, runs: Iterable[Run]) -> bytes:
    """Builds a payload by exponent class from every class's run."""
    parts = [HEAD.pack(CLASS_COUNT, class_base, changes.count), changes.signs_bytes()]
    coder = Coder()
    for run in runs:
        parts += run_parts(*run, coder)
    return b"".join(parts)


def encode_whole(new: list[Bits], element: ElementType) -> tuple[Method, bytes]:
    """Encodes whole elements, as planes or raw, whichever is shorter."""
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
    if class_count != CLASS_COUNT or not element.exponent_bits or base >> element.exponent_bits:
        raise DeltaFormatError(f"expected 1 or {CLASS_COUNT} classes of {element.name}, got {class_count} from {base}")
    octave = octave_of(element, base)
    sizes = _class_sizes(old, octave)
    runs = [read_run(reader, int(size), element) for size in sizes]
    reader.end()
    if sum(changed.marked for changed, _, _ in runs) != count:
        raise DeltaFormatError(f"expected {count} changes, its classes' marks are others")
    return _joined(runs, block, old, octave, signs)


def _joined(runs: list[Run], block: Block, old: list[Bits], octave: classes.Octave, signs: U64) -> Changes:
    """Merges the changes of all classes, in order of position."""
    words, starts = _spread([changed for changed, _, _ in runs])
    larger_words, larger_starts = _spread([larger for _, larger, _ in runs])
    listed = np.cumsum([0, *(larger.marked for _, larger, _ in runs)])
    found = np.empty(int(listed[-1]), np.uint32), np.empty(int(listed[-1]), block.element.bits_dtype)
    places = (64 * starts, 64 * larger_starts, listed[:-1].copy())
    coded = (words, larger_words, np.concatenate([excess for _, _, excess in runs]))
    out, so_far = np.zeros(word_count(block.element_count), np.uint64), np.zeros(3, np.int64)
    for part in old:
        classes.join_marks(part, octave, places, coded, so_far, (out, *found))
    count = int(so_far[1])
    return Changes(BitSet.of_marks(out, block.element_count, count), signs, BitSet.of_places(found[0], count), found[1])


def _spread(sets: list[BitSet]) -> tuple[U64, I64]:
    """The marks of several sets one after another, and the word at which each starts."""
    starts = _word_starts(np.array([marks.size for marks in sets]))
    words = np.zeros(int(starts[-1]), np.uint64)
    for marks, begin, end in zip(sets, starts, starts[1:], strict=False):
        marks.copy_to(words[begin:end])
    return words, starts[:-1]

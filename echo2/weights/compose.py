"""Merging consecutive deltas into one, without the weights.

Steps of consecutive versions add up modulo 2^width, so positions and steps suffice; the deltas must have setting `FAST`,
whose code does not depend on the weights. The merged container is byte for byte the one that direct encoding would have
made, except for blocks most of which changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from echo2.base.errors import DeltaFormatError
from echo2.weights.bits import I64, U32
from echo2.weights.block import (
    Changes,
    are_most,
    decode_steps,
    decode_whole,
    encode_whole,
    read_plain,
    steps_payload,
)  # fmt: skip
from echo2.weights.container import (
    BlockFrame,
    CodecSetting,
    EndFrame,
    HeaderFrame,
    Method,
    container_id_of,
    encode_block_frame,
    encode_end,
    encode_header_of,
    parse_frame,
)  # fmt: skip
from echo2.weights.elements import TYPE_BY_CODE, Bits, ElementType

COMPOSED_MAX = 1 << 12  # deltas between two keyframes are far fewer


class _Container:
    """Parses the frames of one container, in order, one at a time."""

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
    """The frames of one delta from the first one's parent to the last one's target, block by block.

    `compose(a, b)` with a: u -> v and b: v -> w gives u -> w. Each argument is a container's frames in order.
    """
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

"""The device path: compare, select and gather where the weights lie, so that only changed elements cross to the host.

Guarantees: the same bytes as the CPU path (scan.py), because only the finding of changes differs; the coding is shared.
Plain torch operations, so any device will do, the CPU included (which is how it is tested without one). Leaves to
others: which device (the tensors'), pinned buffers, streams.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from echo2.base.errors import DeltaFormatError
from echo2.broadcast.delta import scan
from echo2.broadcast.delta.bitstream import I64, U8, U64
from echo2.broadcast.delta.block import Changes, EncodedBlock, Packer, Scratch, coded_block, uses_classes
from echo2.broadcast.delta.container import Setting
from echo2.broadcast.delta.elements import Bits, ElementType, flat_bits
from echo2.broadcast.delta.fingerprint import ROW_ELEMENTS, column_coefficients, row_coefficients
from echo2.broadcast.delta.layout import Block, Segment
from echo2.broadcast.staged import TensorUpdate


def _wide(bits: torch.Tensor) -> torch.Tensor:
    """Bit patterns as int64, not sign-extended (64-bit ones wrap)."""
    width = 8 * bits.element_size()
    return bits.to(torch.int64) if width == 64 else bits.to(torch.int64) & ((1 << width) - 1)


def _host_bits(bits: torch.Tensor, element: ElementType) -> Bits:
    array: Bits = bits.cpu().numpy().view(element.bits_dtype)
    return array


def _class_base(old: list[torch.Tensor], new: list[torch.Tensor], element: ElementType) -> int:
    """As the CPU path chooses it: only the sample crosses."""
    i = max(range(len(old)), key=lambda i: old[i].numel())
    stride = max(1, old[i].numel() // scan.SAMPLE)
    before, after = _host_bits(old[i][::stride], element), _host_bits(new[i][::stride], element)
    return scan.choose_class_base_of_sample(before, after, element.exponent_shift, element.exponent_bits)


class _Scan:
    """Finds the changes of a block's segments one after another; remembers where each class's last change was."""

    def __init__(self, element: ElementType, table: U8) -> None:
        self._element = element
        self._table = table
        self._passed: I64 = np.zeros(scan.CLASS_COUNT, np.int64)
        self._last: I64 = np.full(scan.CLASS_COUNT, -1, np.int64)

    def segment(self, old: torch.Tensor, new: torch.Tensor, base: int) -> Changes:
        """Positions, gaps, contexts and steps, on the host."""
        if self._table.size == 1:
            index = (old != new).nonzero()[:, 0]
            contexts = torch.zeros_like(index)
            classes, ranks = torch.ones_like(index), index
            totals = np.array([0, old.numel()])
        else:
            element = self._element
            exponents = (_wide(old) >> element.exponent_shift) & ((1 << element.exponent_bits) - 1)
            by_element = torch.from_numpy(self._table).to(old.device)[exponents]
            index = ((old != new) | (by_element == 0)).nonzero()[:, 0]
            contexts, classes = exponents[index], by_element[index].to(torch.int64)
            ranks = torch.zeros_like(index)
            for c in range(1, scan.CLASS_COUNT):
                before = (by_element == c).cumsum(0)[index] - 1
                ranks = torch.where(classes == c, before, ranks)
            totals = np.bincount(by_element.cpu().numpy(), minlength=scan.CLASS_COUNT)
        steps: U64 = (_wide(new[index]) - _wide(old[index])).cpu().numpy().view(np.uint64)
        gaps = self._gaps(classes.cpu().numpy(), ranks.cpu().numpy(), totals)
        positions = index.cpu().numpy() + base
        return positions.astype(np.uint32), gaps.astype(np.uint32), contexts.cpu().numpy().astype(np.uint16), steps

    def _gaps(self, classes: I64, ranks: I64, totals: I64) -> I64:
        gaps: I64 = np.zeros(classes.size, np.int64)
        for c in range(1, totals.size):
            mine = classes == c
            places = ranks[mine] + self._passed[c]
            gaps[mine] = np.diff(places, prepend=self._last[c]) - 1
            if places.size:
                self._last[c] = places[-1]
            self._passed[c] += totals[c]
        return gaps


def _fingerprint_step(segment: Segment, key: int, positions: U64, steps: U64) -> int:
    index = positions - np.uint64(segment.base) + np.uint64(segment.start)
    rows = row_coefficients(key, segment.spec.name, index // np.uint64(ROW_ELEMENTS))
    columns = column_coefficients(key)[index % np.uint64(ROW_ELEMENTS)]
    with np.errstate(over="ignore"):
        return int((rows * columns * steps).sum(dtype=np.uint64))


def encode_block_on_device(
    block: Block, old: list[torch.Tensor], new: list[torch.Tensor], setting: Setting, key: int, scratch: Scratch
) -> EncodedBlock:
    """As `block.encode_block`, for segments of flat integer bit patterns (`flat_bits`) on one device."""
    element = block.element
    table, class_base = scan.plain_table(), 0
    if uses_classes(element, setting):
        class_base = _class_base(old, new, element)
        table = scan.class_table(element.exponent_bits, class_base)
    packer = Packer(element, table, class_base, scratch)
    finder = _Scan(element, table)
    step, fits = 0, True
    for segment, before, after in zip(block.segments, old, new, strict=True):
        changes = finder.segment(before, after, segment.base)
        step += _fingerprint_step(segment, key, changes[0].astype(np.uint64), changes[3])
        fits = fits and packer.add(changes, changes[0].size)
    return coded_block(block, packer, fits, step, lambda: [_host_bits(part, element) for part in new])


def apply_updates(weights: dict[str, torch.Tensor], updates: Iterable[TensorUpdate]) -> None:
    """Scatters staged bits into live tensors of the same names, types and shapes, in place, on their devices.

    Every index is checked before the first write: one out of range would take a device down.
    """
    for update in updates:
        flat = flat_bits(weights[update.name])
        same = tuple(weights[update.name].shape) == update.shape and flat.element_size() == update.bits.itemsize
        if not same or not weights[update.name].is_contiguous():
            raise DeltaFormatError(f"tensor {update.name}: expected contiguous {update.dtype} of shape {update.shape}")
        signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[update.bits.itemsize]
        values = torch.from_numpy(np.ascontiguousarray(update.bits).view(signed)).to(flat.device)
        if update.indices is None:
            flat.copy_(values)
            continue
        if update.indices.size and not 0 <= int(update.indices.min()) <= int(update.indices.max()) < flat.numel():
            raise DeltaFormatError(f"tensor {update.name}: expected indices below {flat.numel()}")
        flat[torch.from_numpy(update.indices).to(flat.device)] = values

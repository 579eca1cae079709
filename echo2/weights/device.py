"""The device path: compares, selects and gathers on the device, so that only changed elements are copied to the host.

Guarantees: the same bytes as the CPU path (marks.py, classes.py), because only finding the changes differs; the coding
is shared. Plain torch operations, so it works on any device, including the CPU (which is how it is tested). Leaves
to others: which device (the tensors'), pinned buffers, streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from echo2.base.errors import DeltaFormatError
from echo2.base.staged import TensorUpdate
from echo2.weights import classes
from echo2.weights.bits import I64, U32
from echo2.weights.block import Changes, EncodedBlock, Run, are_most, dense_payload, encode_most, uses_classes
from echo2.weights.classes import CLASS_COUNT
from echo2.weights.container import CodecSetting, Method
from echo2.weights.elements import Bits, Block, ElementType, Segment, flat_bits, flat_tensor
from echo2.weights.fingerprint import MODULUS, sum_steps


def _wide(bits: torch.Tensor) -> torch.Tensor:
    """Bit patterns as int64, not sign-extended (64-bit ones wrap)."""
    width = 8 * bits.element_size()
    return bits.to(torch.int64) if width == 64 else bits.to(torch.int64) & ((1 << width) - 1)


def _host_bits(bits: torch.Tensor, element: ElementType) -> Bits:
    array: Bits = bits.cpu().numpy().view(element.bits_dtype)
    return array


def _class_base(old: list[torch.Tensor], element: ElementType) -> int:
    """The class base that the CPU path would choose; only the sample is copied."""
    part = max(old, key=lambda part: part.numel())
    sample = _host_bits(classes.sample_of(part), element)
    return classes.choose_class_base(sample, element.exponent_shift, element.exponent_bits)


@dataclass(frozen=True, slots=True)
class _Found:
    """A segment's changes, on the host: positions in the block, and steps. With classes: each change's class, its index among
    the segment's elements of that class, and the number of elements in each class."""

    positions: U32
    steps: I64
    classes: I64
    places: I64
    sizes: I64


def _find(segment: Segment, old: torch.Tensor, new: torch.Tensor, class_base: int | None) -> _Found:
    index = (old != new).nonzero()[:, 0]
    steps: I64 = (_wide(new[index]) - _wide(old[index])).cpu().numpy()
    positions = (index.cpu().numpy() + segment.base).astype(np.uint32)
    none: I64 = np.zeros(0, np.int64)
    if class_base is None:
        return _Found(positions, steps, none, none, none)
    element = segment.spec.element
    exponents = (_wide(old) >> element.exponent_shift) & ((1 << element.exponent_bits) - 1)
    by_element = (exponents - class_base).clamp(0, CLASS_COUNT - 1)
    mine = by_element[index]
    places = torch.zeros_like(index)
    sizes = []
    for c in range(CLASS_COUNT):
        counted = (by_element == c).cumsum(0)
        places = torch.where(mine == c, counted[index] - 1, places)
        sizes.append(counted[-1] if counted.numel() else torch.zeros((), dtype=torch.int64, device=old.device))
    totals: I64 = torch.stack(sizes).cpu().numpy()
    return _Found(positions, steps, mine.cpu().numpy(), places.cpu().numpy(), totals)


def _runs(found: list[_Found], steps: I64, element: ElementType) -> Iterator[Run]:
    """Yields every class's run over a block's segments."""
    sizes = np.stack([part.sizes for part in found])
    before = np.cumsum(sizes, axis=0) - sizes
    mine = np.concatenate([part.classes for part in found])
    places = np.concatenate([part.places + start[part.classes] for part, start in zip(found, before, strict=True)])
    for c in range(CLASS_COUNT):
        chosen = places[mine == c].astype(np.uint32)
        own = Changes.of_steps(chosen, steps[mine == c], int(sizes[:, c].sum()), element)
        yield own.changed, own.larger, own.excess


def encode_block_on_device(
    block: Block, old: list[torch.Tensor], new: list[torch.Tensor], setting: CodecSetting, key: int
) -> EncodedBlock:
    """Like `block.encode_block`, for segments of flat integer bit patterns (`flat_bits`) on one device."""
    element = block.element
    class_base = _class_base(old, element) if uses_classes(element, setting) else None
    found = [_find(s, before, after, class_base) for s, before, after in zip(block.segments, old, new, strict=True)]
    step = 0
    for segment, part in zip(block.segments, found, strict=True):
        indices = part.positions.astype(np.uint64) + np.uint64(segment.start) - np.uint64(segment.base)
        step += sum_steps(segment.spec.name, indices, part.steps.view(np.uint64), key)
    steps = np.concatenate([part.steps for part in found])
    changes = Changes.of_steps(np.concatenate([p.positions for p in found]), steps, block.element_count, element)

    if not changes.count:
        return EncodedBlock(Method.UNCHANGED, b"", 0)
    if are_most(block.element_count, changes.count, changes.larger.marked):
        before, after = ([_host_bits(part, element) for part in parts] for parts in (old, new))
        return encode_most(block, before, after, setting, key)
    if class_base is None:
        payload = changes.payload()
    else:
        payload = dense_payload(changes, class_base, _runs(found, steps, element))
    return EncodedBlock(Method.SPARSE, payload, step % MODULUS)


def apply_updates(weights: dict[str, torch.Tensor], updates: Iterable[TensorUpdate]) -> None:
    """Scatters staged bits into live tensors of the same names, types and shapes, in place, on their devices.

    Every index is checked before the first write: an index out of range would crash a device.
    """
    for update in updates:
        flat = flat_bits(weights[update.name])
        same = tuple(weights[update.name].shape) == update.shape and flat.element_size() == update.bits.itemsize
        if not same or not weights[update.name].is_contiguous():
            raise DeltaFormatError(f"tensor {update.name}: expected contiguous {update.dtype} of shape {update.shape}")
        values = flat_tensor(np.ascontiguousarray(update.bits)).to(flat.device)
        if update.indices is None:
            flat.copy_(values)
            continue
        if update.indices.size and not 0 <= int(update.indices.min()) <= int(update.indices.max()) < flat.numel():
            raise DeltaFormatError(f"tensor {update.name}: expected indices below {flat.numel()}")
        flat[torch.from_numpy(update.indices).to(flat.device)] = values

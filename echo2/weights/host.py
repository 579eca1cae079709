"""The worker's host copy of the weights: the exact bits of its current version, changed only by complete, verified versions.

Guarantees: `commit` moves from one version to the next or leaves every bit unchanged. Not for several writers: one thread
commits; others may read only between commits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from echo2.base.errors import DeltaFormatError
from echo2.base.ids import Version
from echo2.base.staged import TensorUpdate
from echo2.weights.bits import I64, U32
from echo2.weights.block import Changes, EncodedBlock, Run, are_most, dense_payload, encode_most, uses_classes
from echo2.weights.container import CodecSetting, Method, TensorTable
from echo2.weights.elements import (
    Bits,
    Block,
    ElementType,
    Segment,
    TensorSpec,
    WeightSet,
    bits_of,
    element_type_of,
    flat_bits,
    flat_tensor,
    sorted_specs,
    tensor_of,
    untied,
)  # fmt: skip
from echo2.weights.fingerprint import MODULUS, sum_bits, sum_steps, whole_fingerprint
from echo2.weights.marks import CLASS_COUNT, choose_class_base, sample_of

if TYPE_CHECKING:
    from echo2.weights.decode import StagedDelta


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's rows of a sharded tensor. Does not load the module of DTensor (45 MiB): a process that never did has none."""
    module = sys.modules.get("torch.distributed.tensor")
    is_split = module is not None and isinstance(tensor, module.DTensor)
    rows: torch.Tensor = tensor.to_local() if is_split else tensor
    return rows


def table_of(weights: WeightSet) -> TensorTable:
    """The tensor table of a set; tied tensors appear once, their other names as aliases. Of a sharded set it holds whole shapes,
    and only the first shard's rank has rows of every nonempty tensor and so sees all ties: let that rank make the table."""
    distinct, aliases = untied({name: local_of(tensor) for name, tensor in weights.items()})
    whole = {name: weights[name] for name in distinct}
    specs = (TensorSpec(name, element_type_of(name, t), tuple(t.shape)) for name, t in whole.items())
    return TensorTable(sorted_specs(specs), tuple(sorted(aliases.items())))


class HostWeights:
    """Exact bits by name, with their version and fingerprint."""

    def __init__(self, table: TensorTable, bits: dict[str, Bits], version: Version | None, key: int) -> None:
        self.table, self.table_digest, self._bits = table, table.digest(), bits
        self._specs = {spec.name: spec for spec in table.specs}
        self.version, self.key = version, key
        self._fingerprint: int | None = None

    @classmethod
    def empty(cls, key: int = 0) -> HostWeights:
        """A host without weights: its first version must be a keyframe."""
        return cls(TensorTable((), ()), {}, None, key)

    @classmethod
    def from_tensors(cls, weights: WeightSet, version: Version, key: int = 0, *, copy: bool = True) -> HostWeights:
        """A host with the bits of CPU tensors. `copy=False` shares their memory: nothing else may write to them then."""
        table = table_of(weights)
        bits = {spec.name: bits_of(weights[spec.name]) for spec in table.specs}
        return cls(table, {name: b.copy() for name, b in bits.items()} if copy else bits, version, key)

    def bits(self, name: str) -> Bits:
        """The live bits of a tensor; do not write to them."""
        return self._bits[name]

    def segments(self, block: Block) -> list[Bits]:
        return [self._bits[s.spec.name][s.start : s.start + s.count] for s in block.segments]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by name, aliases included, sharing the host's memory: read them before the next commit."""
        out = {name: tensor_of(b, self._specs[name].element, self._specs[name].shape) for name, b in self._bits.items()}
        return {**out, **{alias: out[name] for alias, name in self.table.aliases}}

    def fingerprint(self, key: int | None = None) -> int:
        """The fingerprint of the held version; for another key than the host's it is computed from all bits."""
        is_own = key is None or key == self.key
        if is_own and self._fingerprint is not None:
            return self._fingerprint
        asked = self.key if key is None else key
        parts = (sum_bits(spec.name, self._bits[spec.name], asked) for spec in self.table.specs)
        total = whole_fingerprint(self.table.specs, asked, parts)
        self._fingerprint = total if is_own else self._fingerprint
        return total

    def commit(self, staged: StagedDelta) -> None:
        """Moves to a staged version, entirely or not at all."""
        if staged.whole is not None:
            self.table, self.table_digest, self._bits = staged.table, staged.table.digest(), staged.whole
            self._specs = {spec.name: spec for spec in staged.table.specs}
        else:
            assert staged.parent == self.version, "the decoder staged it on this host, at this version"
            done: list[int] = []
            try:
                for part in staged.exchange_parts():
                    staged.exchange(part, self)
                    done.append(part)
            except BaseException:
                for part in reversed(done):
                    staged.exchange(part, self)
                raise
        self.version, self.key, self._fingerprint = staged.version, staged.header.fingerprint_key, staged.fingerprint


# The device path: compares, selects and gathers on the device, so that only changed elements are copied to the host.
#
# Guarantees: the same bytes as the CPU path (marks.py, classes.py), because only finding the changes differs; the coding
# is shared. Plain torch operations, so it works on any device, including the CPU (which is how it is tested).


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
    sample = _host_bits(sample_of(part), element)
    return choose_class_base(sample, element.exponent_shift, element.exponent_bits)


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
    changed_classes = by_element[index]
    places = torch.zeros_like(index)
    sizes = []
    for c in range(CLASS_COUNT):
        counted = (by_element == c).cumsum(0)
        places = torch.where(changed_classes == c, counted[index] - 1, places)
        sizes.append(counted[-1] if counted.numel() else torch.zeros((), dtype=torch.int64, device=old.device))
    totals: I64 = torch.stack(sizes).cpu().numpy()
    return _Found(positions, steps, changed_classes.cpu().numpy(), places.cpu().numpy(), totals)


def _runs(parts: list[_Found], steps: I64, element: ElementType) -> Iterator[Run]:
    sizes = np.stack([part.sizes for part in parts])
    before = np.cumsum(sizes, axis=0) - sizes
    classes = np.concatenate([part.classes for part in parts])
    places = np.concatenate([part.places + start[part.classes] for part, start in zip(parts, before, strict=True)])
    for c in range(CLASS_COUNT):
        chosen = places[classes == c].astype(np.uint32)
        run = Changes.of_steps(chosen, steps[classes == c], int(sizes[:, c].sum()), element)
        yield run.changed, run.larger, run.excess


def encode_block_on_device(
    block: Block, old: list[torch.Tensor], new: list[torch.Tensor], setting: CodecSetting, key: int
) -> EncodedBlock:
    """Like `block.encode_block`, for segments of flat integer bit patterns (`flat_bits`) on one device."""
    element = block.element
    class_base = _class_base(old, element) if uses_classes(element, setting) else None
    finds = [_find(s, before, after, class_base) for s, before, after in zip(block.segments, old, new, strict=True)]
    step = 0
    for segment, part in zip(block.segments, finds, strict=True):
        indices = part.positions.astype(np.uint64) + np.uint64(segment.start) - np.uint64(segment.base)
        step += sum_steps(segment.spec.name, indices, part.steps.view(np.uint64), key)
    steps = np.concatenate([part.steps for part in finds])
    changes = Changes.of_steps(np.concatenate([p.positions for p in finds]), steps, block.element_count, element)

    if not changes.count:
        return EncodedBlock(Method.UNCHANGED, b"", 0)
    if are_most(block.element_count, changes.count, changes.larger.marked):
        before, after = ([_host_bits(part, element) for part in parts] for parts in (old, new))
        return encode_most(block, before, after, setting, key)
    if class_base is None:
        payload = changes.payload()
    else:
        payload = dense_payload(changes, class_base, _runs(finds, steps, element))
    return EncodedBlock(Method.SPARSE, payload, step % MODULUS)


def apply_updates(weights: dict[str, torch.Tensor], updates: Iterable[TensorUpdate]) -> None:
    """Scatters staged bits into live tensors of the same names, types and shapes, in place, on their devices. Every index is
    checked before the first write: an index out of range would crash a device."""
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

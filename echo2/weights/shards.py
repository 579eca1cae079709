"""A sharded learner's weights, encoded on the ranks that hold them: each rank encodes its rows into a section of one container.

Guarantees: the sections in the order of their shards give the same bytes as `encode_delta` (or `encode_keyframe`) for
the whole weights with as many shards; no rank needs another's weights, and fingerprints of sections add up. Leaves to
others: merging the sections (broadcast/runtime/sharded.py).

Shards are those of FSDP2: rows of dimension 0 in equal parts, the last ones shorter or empty. Plain and replicated
tensors are whole on every rank; each rank encodes its rows of them. Weights that are sharded in another way
(tensor parallelism) are refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

from echo2.base.errors import DeltaFormatError
from echo2.weights.block import EncodedBlock
from echo2.weights.container import DeltaHeader, TensorTable
from echo2.weights.elements import TensorSpec, WeightSet, element_type_of, flat_bits, untied
from echo2.weights.encode import Encoding, WeightSource, delta_coder, in_order, keyframe_coder
from echo2.weights.fingerprint import MODULUS, fingerprint_part, header_term
from echo2.weights.layout import Block, blocks_of, shard_range, sorted_specs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

CodedBlock: TypeAlias = tuple[Block, EncodedBlock]


def _is_split(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. Does not load the module (45 MiB): a process that never did has no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if _is_split(tensor) else tensor


def rows_of(name: str, tensor: torch.Tensor, shard: int, shard_count: int) -> tuple[torch.Tensor, int]:
    """A shard's rows of a tensor as flat bits, and the index of the first element in the whole tensor."""
    spec = TensorSpec(name, element_type_of(name, tensor), tuple(tensor.shape))
    start, stop = shard_range(spec, shard, shard_count)
    local = flat_bits(_local(tensor))
    placed = _split(tensor)
    if not placed and local.numel() == spec.element_count:
        return local[start:stop], start
    is_by_rows = len(placed) == 1 and placed[0][0].is_shard(0) and placed[0][1:] == (shard, shard_count)
    if not is_by_rows or local.numel() != stop - start:
        raise DeltaFormatError(
            f"tensor {name}: expected elements {start} to {stop} of it, part {shard} of {shard_count} of dimension 0; "
            f"got {local.numel()} elements, split as {placed}"
        )
    return local, start


def _split(tensor: torch.Tensor) -> list[tuple[Placement, int, int]]:
    """How a tensor is split over its mesh: (placement, this rank's part, number of parts); empty if it is whole."""
    if not _is_split(tensor):
        return []
    mesh = tensor.device_mesh
    here = mesh.get_coordinate() or ()
    parts_of_mesh = zip(tensor.placements, here, mesh.shape, strict=True)
    return [(placement, part, parts) for placement, part, parts in parts_of_mesh if not placement.is_replicate()]


def sharded_table(weights: WeightSet) -> TensorTable:
    """The tensor table of a sharded set, with whole shapes. Only the first shard's rank has rows of every nonempty tensor and
    so sees all ties: let that rank make the table and send it to the others."""
    distinct, aliases = untied({name: _local(tensor) for name, tensor in weights.items()})
    whole = {name: weights[name] for name in distinct}
    specs = (TensorSpec(name, element_type_of(name, t), tuple(t.shape)) for name, t in whole.items())
    return TensorTable(sorted_specs(specs), tuple(sorted(aliases.items())))


def _source(weights: WeightSet, table: TensorTable, shard: int, shard_count: int) -> WeightSource:
    for spec in table.specs:
        tensor = weights.get(spec.name)
        if tensor is None or (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.element.torch_dtype):
            got = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise DeltaFormatError(
                f"tensor {spec.name}: expected {spec.element.name} {spec.shape}, got {got}: send a keyframe"
            )
    return WeightSource({spec.name: rows_of(spec.name, weights[spec.name], shard, shard_count) for spec in table.specs})


def section_fingerprint(weights: WeightSet, table: TensorTable, shard: int, shard_count: int, key: int) -> int:
    """A shard's contribution to the fingerprint; `whole_fingerprint` adds up those of all shards."""
    total = 0
    for spec in table.specs:
        rows, start = rows_of(spec.name, weights[spec.name], shard, shard_count)
        total += fingerprint_part(spec.name, rows, spec.element, key, start)
    return total % MODULUS


def whole_fingerprint(table: TensorTable, key: int, sections: Iterable[int]) -> int:
    """The fingerprint of a set from those of its sections."""
    return (sum(header_term(key, spec) for spec in table.specs) + sum(sections)) % MODULUS


def section_blocks(
    parent: WeightSet | None,
    target: WeightSet,
    header: DeltaHeader,
    table: TensorTable,
    shard: int,
    executor: Executor | None = None,
    ahead: int = 2,
) -> Iterator[CodedBlock]:
    """Encodes one shard's blocks: of a delta from `parent`, or of a keyframe if there is no parent."""
    if (parent is None) != (header.parent_version is None):
        raise DeltaFormatError(f"{header.describe()}: expected weights of the parent in a delta, and only there")
    count = header.shard_count
    if not 0 <= shard < count:
        raise DeltaFormatError(f"{header.describe()}: expected a shard below {count}, got {shard}")
    new = _source(target, table, shard, count)
    if parent is None:
        code = keyframe_coder(new, header.fingerprint_key)
    else:
        code = delta_coder(_source(parent, table, shard, count), new, header)
    blocks = tuple(b for b in blocks_of(table.specs, header.block_elements, count) if b.shard == shard)
    return in_order(blocks, code, executor, ahead)


def encode_sections(header: DeltaHeader, table: TensorTable, coded: Iterator[CodedBlock]) -> Encoding:
    """The frames of a container from blocks coded elsewhere: `coded` yields those of all shards, in order."""
    start = header.parent_fingerprint
    if header.parent_version is None:
        start = whole_fingerprint(table, header.fingerprint_key, ())
    if start is None:
        raise DeltaFormatError(f"{header.describe()}: expected the parent's fingerprint")
    return Encoding(header, table, blocks_of(table.specs, header.block_elements, header.shard_count), start).run(coded)

"""The worker's host copy of the weights: the exact bits of its current version, changed only by complete, verified versions.

Guarantees: `commit` moves from one version to the next or leaves every bit unchanged; committing the same version
again does nothing. Not for several writers: one thread commits; others may read only between commits.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from echo2.base.errors import DeltaFormatError, FingerprintMismatch, StateError
from echo2.base.ids import Version
from echo2.weights.container import TensorTable
from echo2.weights.elements import (
    Bits,
    Block,
    TensorSpec,
    WeightSet,
    bits_of,
    element_type_of,
    sorted_specs,
    tensor_of,
    untied,
)
from echo2.weights.fingerprint import sum_bits, whole_fingerprint

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
    """Exact bits by name, with their version and fingerprint.

    `set_name`: the base weights (empty) or the name of an adapter; versions of another set are refused.
    """

    def __init__(
        self, table: TensorTable, bits: dict[str, Bits], version: Version | None, key: int, set_name: str = ""
    ) -> None:
        self.table, self.table_digest, self._bits = table, table.digest(), bits
        self._specs = {spec.name: spec for spec in table.specs}
        self.set_name = set_name
        self.version = version
        self.key = key
        self._fingerprint: int | None = None

    @classmethod
    def empty(cls, key: int = 0, set_name: str = "") -> HostWeights:
        """A host without weights: its first version must be a keyframe."""
        return cls(TensorTable((), ()), {}, None, key, set_name)

    @classmethod
    def from_tensors(
        cls, weights: WeightSet, version: Version, key: int = 0, set_name: str = "", *, copy: bool = True
    ) -> HostWeights:
        """A host with the bits of CPU tensors. `copy=False` shares their memory: nothing else may write to them then."""
        table = table_of(weights)
        bits = {spec.name: bits_of(weights[spec.name]) for spec in table.specs}
        return cls(table, {name: b.copy() for name, b in bits.items()} if copy else bits, version, key, set_name)

    @property
    def total_bytes(self) -> int:
        return sum(bits.nbytes for bits in self._bits.values())

    def bits(self, name: str) -> Bits:
        """The live bits of a tensor; do not write to them."""
        return self._bits[name]

    def segments(self, block: Block) -> list[Bits]:
        """The live bits of a block's segments, without copying."""
        return [self._bits[s.spec.name][s.start : s.start + s.count] for s in block.segments]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by name, aliases included, sharing the host's memory: read them before the next commit."""
        out = {name: tensor_of(b, self._specs[name].element, self._specs[name].shape) for name, b in self._bits.items()}
        return {**out, **{alias: out[name] for alias, name in self.table.aliases}}

    def fingerprint(self, key: int | None = None) -> int:
        """The fingerprint of the held version; for another key than the host's it is computed from all bits."""
        if key is not None and key != self.key:
            return self._computed(key)
        if self._fingerprint is None:
            self._fingerprint = self._computed(self.key)
        return self._fingerprint

    def _computed(self, key: int) -> int:
        parts = (sum_bits(spec.name, self._bits[spec.name], key) for spec in self.table.specs)
        return whole_fingerprint(self.table.specs, key, parts)

    def commit(self, staged: StagedDelta) -> None:
        """Moves to a staged version, entirely or not at all. Committing the held version again does nothing."""
        has_same_tensors = staged.table is self.table or staged.table.digest() == self.table_digest
        key = staged.header.fingerprint_key
        if self.version == staged.version and has_same_tensors and self.fingerprint(key) == staged.fingerprint:
            return
        if staged.whole is not None:
            self.table, self.table_digest, self._bits = staged.table, staged.table.digest(), staged.whole
            self._specs = {spec.name: spec for spec in staged.table.specs}
        else:
            self._check_parent(staged, has_same_tensors)
            self._exchange_all(staged)
        self.version, self.key, self._fingerprint = staged.version, key, staged.fingerprint

    def _check_parent(self, staged: StagedDelta, has_same_tensors: bool) -> None:
        if staged.parent != self.version:
            raise StateError(
                f"staged version {staged.version}: expected the host at its parent {staged.parent}, "
                f"it is at {self.version}"
            )
        if not has_same_tensors:
            raise DeltaFormatError(f"staged version {staged.version}: its tensors are not those of the host")
        if staged.header.parent_fingerprint != self.fingerprint(staged.header.fingerprint_key):
            raise FingerprintMismatch(
                f"staged version {staged.version}: its parent {staged.parent} has another fingerprint than the host's"
            )

    def _exchange_all(self, staged: StagedDelta) -> None:
        done: list[int] = []
        try:
            for part in staged.exchange_parts():
                staged.exchange(part, self)
                done.append(part)
        except BaseException:
            for part in reversed(done):
                staged.exchange(part, self)
            raise

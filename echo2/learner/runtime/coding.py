"""Encodes a version's weights: all in this process, or each rank its own rows.

Guarantees: `LocalCoder` and the sharded learner's `ShardLeader` (broadcast/runtime/sharded.py) produce the same weights and
fingerprints. Leaves to others: when to encode and from which parent (publisher).
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Protocol

from echo2.base.ids import Version
from echo2.weights import DeltaHeader, Encoding, WeightSet, encode_delta, encode_keyframe, fingerprint


class VersionCoder(Protocol):
    """Encodes deltas and keyframes. Weight sets are snapshots from `TrainingSide`, never changed in place."""

    def fingerprint(self, version: Version, weights: WeightSet, key: int) -> int: ...

    def delta(
        self, parent: WeightSet, target: WeightSet, header: DeltaHeader, executor: Executor | None = None
    ) -> Encoding:
        """As `encode_delta`; the header names the versions of `parent` and `target`."""
        ...

    def keyframe(self, target: WeightSet, header: DeltaHeader, executor: Executor | None = None) -> Encoding: ...

    def forget_before(self, version: Version) -> None:
        """Releases earlier versions, except for the one named by `keep`."""
        ...

    def keep(self, version: Version | None) -> None:
        """Exempts `version` from `forget_before`; None ends the exemption."""
        ...


class LocalCoder:
    """Encodes weights that are all in this process."""

    def fingerprint(self, version: Version, weights: WeightSet, key: int) -> int:
        return fingerprint(weights, key)

    def delta(
        self, parent: WeightSet, target: WeightSet, header: DeltaHeader, executor: Executor | None = None
    ) -> Encoding:
        return encode_delta(parent, target, header, None, executor)

    def keyframe(self, target: WeightSet, header: DeltaHeader, executor: Executor | None = None) -> Encoding:
        return encode_keyframe(target, header, executor)

    def forget_before(self, version: Version) -> None:
        pass

    def keep(self, version: Version | None) -> None:
        pass

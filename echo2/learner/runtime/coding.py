"""Who codes a version's weights: this process all of them, or each rank its own rows.

Guarantees: `LocalCoder` and the sharded learner's `ShardLeader` (broadcast/runtime/sharded.py) give the same weights
and fingerprints. Leaves to others: when and from which parent (publisher).
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Protocol

from echo2.base.ids import Version
from echo2.weights import DeltaHeader, Encoding, WeightSet, encode_delta, encode_keyframe, fingerprint


class VersionCoder(Protocol):
    """Sets of weights are snapshots as `TrainingSide` gives them: nothing changes them in place."""

    def fingerprint(self, version: Version, weights: WeightSet, key: int) -> int: ...

    def delta(
        self, parent: WeightSet, target: WeightSet, header: DeltaHeader, executor: Executor | None = None
    ) -> Encoding:
        """As `encode_delta`; the header names the versions that the sets hold."""
        ...

    def keyframe(self, target: WeightSet, header: DeltaHeader, executor: Executor | None = None) -> Encoding: ...

    def forget_before(self, version: Version) -> None:
        """Earlier versions will not be asked for any more, except for the one that `keep` named."""
        ...

    def keep(self, version: Version | None) -> None:
        """`forget_before` leaves this version where it is; None: no version any more."""
        ...


class LocalCoder:
    """All weights lie in this process."""

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

"""Bytes that a newcomer with the base checkpoint fetches at version 200, against a keyframe.

    python -m benchmarks.scale_newcomer      prints what it found as one JSON line

A small language model is trained with a GRPO-like gradient at a learning rate of 1e-6 (delta_snapshots), a version a step; what a
newcomer fetches follows from the learner's rules: the newest delta from version 0 (publication.BASE_REACH), and the merged
ones behind it.
"""

from __future__ import annotations

import json

import torch

from benchmarks.delta_snapshots import (
    SMALL,
    Model,
    Snapshot,
    _language_loss,
    _optimizer,
    _policy_loss,
    _step,
    published,
)
from echo2.base.ids import Version
from echo2.learner.publishing.schedule import BASE_REACH
from echo2.weights import DeltaHeader, encode_delta, encode_keyframe, fingerprint

VERSIONS, RATE, WARM_UP, SETTLE = 200, 1e-6, 40, 30


def versions_of(seed: int, wanted: set[int]) -> dict[int, Snapshot]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Model(SMALL)
    optimizer = _optimizer(model, 1e-3)
    for _ in range(WARM_UP):
        _step(optimizer, _language_loss(model, generator), model)
    optimizer = _optimizer(model, RATE)
    kept = {0: published(model)}  # as a run begins: with no moments
    for step in range(1, VERSIONS + 1):
        _step(optimizer, _policy_loss(model, generator), model)
        if step in wanted:
            kept[step] = published(model)
    return kept


def delta_bytes(old: Snapshot, new: Snapshot, parent: int, version: int) -> int:
    header = DeltaHeader(Version(version), Version(parent), fingerprint(old, 1), fingerprint_key=1)
    return len(b"".join(encode_delta(old, new, header)))


def pieces(version: int) -> list[tuple[int, int]]:
    """What the learner's rules leave: a delta from 0 to a multiple of BASE_REACH, then spans of powers of two."""
    found, at = [], version // BASE_REACH * BASE_REACH
    if at:
        found.append((0, at))
    while at < version:
        reach = 1
        while at % (2 * reach) == 0 and at + 2 * reach <= version:
            reach *= 2
        found.append((at, at + reach))
        at += reach
    return found


def main() -> None:
    way = pieces(VERSIONS)
    kept = versions_of(0, {version for piece in way for version in piece})
    fetched = [delta_bytes(kept[parent], kept[version], parent, version) for parent, version in way]
    whole = len(b"".join(encode_keyframe(kept[VERSIONS], DeltaHeader(Version(VERSIONS), fingerprint_key=1))))
    pairs = [(kept[0][name], kept[VERSIONS][name]) for name in kept[0]]
    changed = sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
    print(json.dumps({"way": way, "bytes": fetched, "keyframe_bytes": whole, "changed": changed}))


if __name__ == "__main__":
    main()

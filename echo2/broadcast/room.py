"""How many bytes of disk a node's chunks need: a function of the weights that are published.

Guarantees: a store of `store_bytes_min` holds any keyframe whole (a keyframe is never larger than the weights), so that a newer
one can replace an older one; one of `store_bytes_for` keeps the older one while the newer comes, and the deltas between.
"""

from __future__ import annotations

from echo2.broadcast.manifest import ArtifactId

FRAME_SHARE = 1 / 64  # signatures, hashes and lengths beside the chunks of 16 KiB and more
KEYFRAMES_KEPT = 2.0
"""Of the size of the weights. Keyframes take 0.6 to 0.7 of it: two of them, and as many deltas as their chain has."""
STORE_BYTES_FLOOR = 64 << 20
UNSEALED_DELTA_SHARE = 0.05  # of a snapshot


def expected_bytes(artifact: ArtifactId, weights_bytes: int) -> float:
    """The guess at the size of an artifact that is not sealed yet."""
    return weights_bytes * (1.0 if artifact.is_keyframe else UNSEALED_DELTA_SHARE)


def store_bytes_min(weights_bytes: int) -> int:
    """Less, and a keyframe could be fetched again and again without ever being whole."""
    return int(weights_bytes * (1 + FRAME_SHARE))


def store_bytes_for(weights_bytes: int) -> int:
    """What is kept where nothing else was asked for."""
    return max(STORE_BYTES_FLOOR, int(KEYFRAMES_KEPT * store_bytes_min(weights_bytes)))

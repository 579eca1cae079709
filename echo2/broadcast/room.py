"""How much disk a node's chunk store needs, as a function of the size of the weights.

Guarantees: a store of `store_bytes_min` holds any one keyframe (never larger than the weights), so that a newer
one can replace an older one; `store_bytes_for` also keeps the older one while the newer arrives, and the deltas between.
"""

from __future__ import annotations

from echo2.broadcast.manifest import ArtifactId

FRAME_SHARE = 1 / 64  # signatures, hashes and lengths, for chunks of at least 16 KiB
KEYFRAMES_KEPT = 2.0
"""In sizes of the weights. Keyframes take 0.6 to 0.7 of it, so this holds two, and the deltas of their chain."""
STORE_BYTES_FLOOR = 64 << 20
UNSEALED_DELTA_SHARE = 0.05  # of a snapshot


def expected_bytes(artifact: ArtifactId, weights_bytes: int) -> float:
    """Estimated size of an artifact that is not sealed yet."""
    return weights_bytes * (1.0 if artifact.is_keyframe else UNSEALED_DELTA_SHARE)


def store_bytes_min(weights_bytes: int) -> int:
    """The smallest useful store: with less, a keyframe could be refetched forever without ever being complete."""
    return int(weights_bytes * (1 + FRAME_SHARE))


def store_bytes_for(weights_bytes: int) -> int:
    """The default size of the store."""
    return max(STORE_BYTES_FLOOR, int(KEYFRAMES_KEPT * store_bytes_min(weights_bytes)))

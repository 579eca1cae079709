"""Which deltas to publish, and in which setting. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo2.weights.container import CodecSetting

BASE_SHARE_MAX = 0.5
"""Deltas from the base that exceed this share of a keyframe's bytes save a newcomer too little to be kept."""


def parents_to_publish(ordinal: int, lag_max: int) -> tuple[int, ...]:
    """The earlier publications from which the `ordinal`-th one gets an edge: one back, and 2^j back if 2^j divides it.

    So any lag of k is caught up with at most 2 log2(k) + 1 pieces, while on average two edges are kept per version. No edge
    reaches back farther than `lag_max`.
    """
    parents = []
    reach = 1
    while reach <= min(ordinal, lag_max) and ordinal % reach == 0:
        parents.append(ordinal - reach)
        reach *= 2
    return tuple(parents)


@dataclass(frozen=True, slots=True)
class SettingCost:
    """The cost of a setting: encoded bytes, and coding speeds in bytes of full weights per second and core."""

    encoded_bytes: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


STAY_SHARE = 0.9  # predictions are off by some percent; a setting must not flap with them


def choose_setting(
    costs: Mapping[CodecSetting, SettingCost],
    weights_bytes: int,
    uplink_bytes_per_s: float,
    cores: int,
    worker_cores: int,
    current: CodecSetting | None = None,
) -> tuple[CodecSetting, str]:
    """The setting whose slowest stage (encoding, sending, decoding; they overlap) finishes first, and why.

    The current setting stays unless another one takes less than `STAY_SHARE` of its time.
    """
    by_setting: dict[CodecSetting, tuple[float, str]] = {}
    for setting in CodecSetting:
        cost = costs[setting]
        stages = {
            "encoding": weights_bytes / (cost.encode_bytes_per_s * cores),
            "sending": cost.encoded_bytes / uplink_bytes_per_s,
            "decoding": weights_bytes / (cost.decode_bytes_per_s * worker_cores),
        }
        slowest = max(stages, key=lambda name: stages[name])
        why = f"{setting.name.lower()}: {slowest} takes {stages[slowest]:.3g} s, the other stages less"
        by_setting[setting] = (stages[slowest], why)
    best = min(by_setting, key=lambda setting: by_setting[setting][0])
    if current is not None and by_setting[best][0] > STAY_SHARE * by_setting[current][0]:
        best = current
    return best, by_setting[best][1]

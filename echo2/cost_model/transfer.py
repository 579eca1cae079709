"""Time until every worker of a pool holds a version: the fluid bound, the share of it that is reached, and latencies.

    T* = max( F/u_s,  F/min d_i,  N*F/(u_s + sum u_i) )          F bytes, seed uplink u_s, N workers' links u_i, d_i

A real broadcast reaches a given share of that rate (`efficiency`) and adds round trips on its two hops, seed to relay and
relay to the rest. Guarantees: never below the fluid bound. Leaves to others: the trees (broadcast/), which may replace the
prediction through `BroadcastPredictor`; encoding and applying (the planner adds them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2.cost_model.snapshot import BROADCAST_EFFICIENCY, LinkEstimate

HOPS = 2


class BroadcastPredictor(Protocol):
    """Predicts a broadcast: seconds from the first byte sent until the last worker holds the last byte."""

    def predict(self, artifact_bytes: float, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float: ...


def fluid_bound_s(artifact_bytes: float, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float:
    """Lower bound in seconds for any schedule, ignoring latencies; 0 without receivers."""
    if not receivers:
        return 0.0
    uplinks = seed.uplink_bytes_per_s + sum(link.uplink_bytes_per_s for link in receivers)
    return artifact_bytes * max(
        1.0 / seed.uplink_bytes_per_s,
        1.0 / min(link.downlink_bytes_per_s for link in receivers),
        len(receivers) / uplinks,
    )


@dataclass(frozen=True, slots=True)
class FluidBroadcast:
    """The fluid bound over an efficiency, plus the round trips of two hops. Weighted multi-trees reached 0.8."""

    efficiency: float = BROADCAST_EFFICIENCY

    def predict(self, artifact_bytes: float, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float:
        if not receivers:
            return 0.0
        return fluid_bound_s(artifact_bytes, seed, receivers) / self.efficiency + self.latency_s(seed, receivers)

    def latency_s(self, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float:
        """Round trips of the seed's hop and the relays' hop, in seconds."""
        return seed.rtt_s + (HOPS - 1) * max((link.rtt_s for link in receivers), default=0.0)

"""How long until every worker of a pool holds a version: the fluid bound, what is reached of it, and latencies.

    T* = max( F/u_s,  F/min d_i,  N*F/(u_s + sum u_i) )          F bytes, seed uplink u_s, N workers' links u_i, d_i

A real broadcast reaches a stated share of it (`efficiency`) and pays round trips on its two hops, seed to relay to
the rest. Guarantees: never below the fluid bound. Leaves to others: the trees (broadcast/), which may replace the
prediction through `BroadcastPredictor`; encoding and applying (the planner adds them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2.cost_model.snapshot import BROADCAST_EFFICIENCY, LinkEstimate

HOPS = 2


class BroadcastPredictor(Protocol):
    """Seconds from the first byte sent to the last worker's last byte held."""

    def predict(self, artifact_bytes: float, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float: ...


def fluid_bound_s(artifact_bytes: float, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float:
    """The least time in which any schedule can do it, latencies aside; 0 without receivers."""
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
    """The fluid bound over an efficiency, plus two hops of round trip. 0.8 is what weighted multi-trees reached."""

    efficiency: float = BROADCAST_EFFICIENCY

    def predict(self, artifact_bytes: float, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float:
        if not receivers:
            return 0.0
        return fluid_bound_s(artifact_bytes, seed, receivers) / self.efficiency + self.latency_s(seed, receivers)

    def latency_s(self, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float:
        """Round trips: the seed's hop and the relays'."""
        return seed.rtt_s + (HOPS - 1) * max((link.rtt_s for link in receivers), default=0.0)

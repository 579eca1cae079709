"""The broadcast planner's word on how long a version takes, for the planner of the pool.

Guarantees: pure; never faster than the fluid bound over `efficiency`, because trees are not. Beyond `NODES_MAX` receivers,
where building trees for every pool that is considered would take longer than planning, it is the fluid estimate. Leaves
to others: which nodes cannot be dialled (the broadcast plan itself knows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.broadcast.topology import NodeLink, predict
from echo2.broadcast.trees import PLAN_CHUNK_BYTES, plan
from echo2.cost_model.snapshot import LinkEstimate
from echo2.cost_model.transfer import FluidBroadcast

NODES_MAX = 64
POOLS_KEPT = 64


@dataclass(slots=True)
class TreeBroadcast:
    """`efficiency`: what share of the rate that the trees promise is reached."""

    efficiency: float
    _known: dict[tuple[float, LinkEstimate, tuple[LinkEstimate, ...]], float] = field(default_factory=dict)

    def predict(self, artifact_bytes: float, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float:
        """Seconds from the first byte sent to the last worker's last byte held."""
        fluid = FluidBroadcast(self.efficiency)
        if not 0 < len(receivers) <= NODES_MAX:
            return fluid.predict(artifact_bytes, seed, receivers)
        key = (artifact_bytes, seed, tuple(receivers))
        if key not in self._known:
            while len(self._known) >= POOLS_KEPT:
                del self._known[next(iter(self._known))]
            rate = rate_of_trees(seed, receivers, artifact_bytes)
            self._known[key] = artifact_bytes / rate / self.efficiency + fluid.latency_s(seed, receivers)
        return self._known[key]


def rate_of_trees(seed: LinkEstimate, receivers: Sequence[LinkEstimate], artifact_bytes: float) -> float:
    """Bytes/s at which all receivers take in a version, by the plan that the broadcast planner makes for them."""
    size = max(1, int(artifact_bytes))
    nodes = [_node(number, link) for number, link in enumerate((seed, *receivers))]
    made = plan(nodes, 1, size)
    return predict(made.nodes, made.trees, size, PLAN_CHUNK_BYTES).rate_bytes_per_s


def _node(number: int, link: LinkEstimate) -> NodeLink:
    name = PeerId(f"n{number}")
    return NodeLink(name, name, (name,), link.uplink_bytes_per_s, link.downlink_bytes_per_s, link.rtt_s)

"""Predicts for the planner of the pool how long a broadcast takes, using the trees that the broadcast planner would build.

Guarantees: pure; never faster than the fluid bound divided by `efficiency`, because trees cannot beat that bound. Beyond
`NODES_MAX` receivers it uses the fluid estimate, because building trees for every pool under consideration would take longer than
planning itself. Leaves to others: which nodes cannot be dialled (the broadcast plan itself takes care of that).
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
    """`efficiency`: the share of the trees' predicted rate that broadcasts reach."""

    efficiency: float
    _known: dict[tuple[float, LinkEstimate, tuple[LinkEstimate, ...]], float] = field(default_factory=dict)

    def predict(self, artifact_bytes: float, seed: LinkEstimate, receivers: Sequence[LinkEstimate]) -> float:
        """Seconds from the first byte sent until the last worker holds its last byte."""
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
    """Bytes/s at which all receivers get a version, according to the plan that the broadcast planner makes for them."""
    size = max(1, int(artifact_bytes))
    nodes = [_node(number, link) for number, link in enumerate((seed, *receivers))]
    made = plan(nodes, 1, size)
    return predict(made.nodes, made.trees, size, PLAN_CHUNK_BYTES).rate_bytes_per_s


def _node(number: int, link: LinkEstimate) -> NodeLink:
    name = PeerId(f"n{number}")
    return NodeLink(name, name, (name,), link.uplink_bytes_per_s, link.downlink_bytes_per_s, link.rtt_s)

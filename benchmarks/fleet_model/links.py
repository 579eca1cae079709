"""Dissemination in the fleet simulation: versions cross the links along the trees of the real broadcast planner.

Guarantees: sends one version at a time, then the newest; every worker that is in the pool at that time receives it when the
trees predict, for the true links and `broadcast_efficiency`. Leaves to others: chunks, repair and message loss (the
broadcast simulation), what a worker does with a version (fleet).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.fleet_model.clock import VirtualClock
from benchmarks.fleet_model.scenario import FleetScenario
from benchmarks.fleet_model.worker import SimWorker
from echo2.base.ids import PeerId, Version
from echo2.broadcast.plan import BroadcastPlan, NodeLink, Prediction, predict
from echo2.broadcast.trees import PLAN_CHUNK_BYTES, plan
from echo2.cost_model.snapshot import LinkEstimate

Arrival = Callable[[SimWorker, int, Version], None]  # worker, its `life` when the version was sent, version


class Dissemination:
    """Sends versions to the pool. `sent`: the version last put on the links."""

    def __init__(self, scenario: FleetScenario, clock: VirtualClock, arrived: Arrival) -> None:
        self.scenario, self.clock, self._arrived = scenario, clock, arrived
        self.sent = Version(0)
        self.is_busy = False
        self.broadcasts_s: list[float] = []
        self.plans = 0
        self._newest = Version(0)
        self._receivers: Callable[[], Sequence[SimWorker]] = tuple
        self._trees: tuple[tuple[int, ...], BroadcastPlan] | None = None

    def publish(self, version: Version, kappa: int, receivers: Callable[[], Sequence[SimWorker]]) -> None:
        """Sends `version` once it is encoded and the links are free, to the workers that `receivers` returns then."""
        self._newest, self._receivers = version, receivers
        self.clock.after(self.scenario.learner.encode_s, lambda: self._try_send(kappa))

    def _try_send(self, kappa: int) -> None:
        if self.is_busy or self._newest <= self.sent:
            return
        self.sent = self._newest
        receivers = self._receivers()
        if receivers:
            self.is_busy = True
            self._send(self.sent, kappa, receivers)

    def _send(self, version: Version, kappa: int, receivers: Sequence[SimWorker]) -> None:
        size = self.scenario.learner.artifact_bytes(kappa)
        prediction = self._predicted(receivers, size)
        flow_s = size / prediction.rate_bytes_per_s
        transfer_s = flow_s / self.scenario.config.broadcast_efficiency
        live_s = 0.0
        for worker, worker_s in zip(receivers, prediction.worker_s, strict=True):
            live_after_s = transfer_s + (worker_s - flow_s) + worker.truth.apply_s
            live_s = max(live_s, live_after_s)
            self._send_one(worker, version, transfer_s, live_after_s)
        self.broadcasts_s.append(live_s + self.scenario.learner.encode_s)
        self.clock.after(transfer_s, lambda: self._through(kappa))

    def _send_one(self, worker: SimWorker, version: Version, transfer_s: float, live_after_s: float) -> None:
        life = worker.life
        if self.scenario.is_stalled:
            worker.stand_still(self.clock.now(), transfer_s)
        self.clock.after(live_after_s, lambda: self._arrived(worker, life, version))

    def _through(self, kappa: int) -> None:
        self.is_busy = False
        self._try_send(kappa)

    def _predicted(self, receivers: Sequence[SimWorker], size: float) -> Prediction:
        """Predicted arrival times along the trees for these receivers; plans new trees if the receivers have changed."""
        who = tuple(worker.index for worker in receivers)
        if self._trees is None or self._trees[0] != who:
            self.plans += 1
            nodes = [_node("learner", self.scenario.learner.link)]
            nodes += [_node(worker.truth.name, worker.truth.link) for worker in receivers]
            self._trees = who, plan(nodes, self.plans, max(1, int(size)))
        made = self._trees[1]
        return predict(made.nodes, made.trees, max(1, int(size)), PLAN_CHUNK_BYTES)


def _node(name: str, link: LinkEstimate) -> NodeLink:
    return NodeLink(PeerId(name), name, (name,), link.uplink_bytes_per_s, link.downlink_bytes_per_s, link.rtt_s)

"""Carries out the coordinator's orders, and handles accused workers.

Guarantees: nothing is accepted from a worker that the coordinator bars or this learner accuses, until the coordinator takes it
back; then it starts with a clean slate. Leaves to others: the stream (session), verdicts (auditor, intake), bans (coordinator).
"""

from __future__ import annotations

import logging

from echo2.base.ids import PeerId
from echo2.learner import batcher_events as batcher
from echo2.learner.runtime.broadcaster import FleetBroadcaster
from echo2.learner.runtime.ingest import IngestService
from echo2.learner.runtime.loop import TrainingLoop
from echo2.learner.runtime.session import LearnerSession
from echo2.learner.runtime.showing import answer
from echo2.wire.gen.echo2.v1 import coordinator_pb2

_log = logging.getLogger("echo2.learner")


class LearnerOrders:
    """Carries out orders for one learner."""

    def __init__(
        self, loop: TrainingLoop, ingest: IngestService, broadcaster: FleetBroadcaster, session: LearnerSession
    ) -> None:
        self._loop, self._ingest, self._broadcaster, self._session = loop, ingest, broadcaster, session

    def ordered(self, order: coordinator_pb2.LearnerOrder) -> None:
        match order.WhichOneof("kind"):
            case "plan":
                plan = order.plan
                self._loop.p.schedule.planned_kappa = plan.kappa or None
                self._loop.facts.predicted_utilisation = plan.predicted_utilisation
                self._loop.intake.tell(batcher.CapPlanned(plan.in_flight_cap_rollouts or None))
            case "broadcast_plan":
                self._broadcaster.apply_plan(order.broadcast_plan)
            case "banned":
                self._broadcaster.bar(PeerId(order.banned.peer_id), is_lifted=not order.banned.is_banned)
                self._bar(order.banned)
            case "wanted":
                tokenizer = self._loop.p.prompts.tokenizer
                self._session.show(answer(self._loop.recent, tokenizer, order.wanted))
            case _:
                pass  # from a newer release

    def _bar(self, order: coordinator_pb2.WorkerBanned) -> None:
        peer_id = PeerId(order.peer_id)
        if not order.is_lifted:
            self._ingest.barred[peer_id] = order.reason
            _log.warning("nothing is taken from worker %s: %s", peer_id, order.reason)
            return
        self._ingest.barred.pop(peer_id, None)
        self._loop.auditor.release(peer_id)
        self._loop.intake.tell(batcher.WorkerReleased(peer_id))
        self._loop.intake.holding.forget(peer_id)
        _log.info("worker %s is taken back", peer_id)

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None:
        """Bars the worker, drops what it sent and was not trained on, and reports the accusation to the coordinator."""
        self._ingest.barred[peer_id] = reason
        self._loop.intake.tell(batcher.WorkerBarred(peer_id))
        self._session.accuse(peer_id, reason, is_certain=is_certain)

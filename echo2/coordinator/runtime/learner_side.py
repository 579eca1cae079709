"""The coordinator's side of the learner's stream: passes its messages to the book and the board, and sends it orders.

    away --came--> here --leaving("finished")--> the run ends (ending)
      ^             |  '-- came again: the newer stream takes the older one's place
      '----cut------'      meanwhile workers go on with the leases that they hold

Guarantees: a learner of another run, staleness bound or model is refused before anything has changed; one that connects is always
sent the plan, the broadcast plan and all barred workers. Leaves to others: gRPC and messages (services), decisions (lease_book,
board), saving (hub).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from echo2.base.errors import VersionMismatch
from echo2.base.ids import PeerId
from echo2.coordinator import lease_events as le
from echo2.coordinator.runtime.barring import barrings_of
from echo2.coordinator.runtime.granting import whereabouts_of
from echo2.coordinator.runtime.session import StreamSession, check_hello
from echo2.coordinator.saved import CurvePoint
from echo2.coordinator.telemetry import LearnerHello, LearnerReport, PublishedVersion, WorkerHello
from echo2.wire.broadcast import plan_to_message
from echo2.wire.coordinator import FINISHED, learner_hello_to_message, learner_report_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from echo2.coordinator.runtime.hub import Hub

LearnerStream = StreamSession[pb.LearnerOrder]


class LearnerSide:
    """The learner's session and its messages. `session`: None while the learner is away."""

    def __init__(self, hub: Hub, meta: Mapping[str, str]) -> None:
        self._hub = hub
        self.session: LearnerStream | None = None
        self.has_come = asyncio.Event()
        self._model_digest = meta.get("model_digest", "")

    def check_model(self, peer_id: PeerId, hello: WorkerHello) -> None:
        """VersionMismatch for a worker that holds weights of another model."""
        if hello.model_digest and self._model_digest and hello.model_digest != self._model_digest:
            raise VersionMismatch(
                f"worker {hello.name or peer_id}: expected weights of model {self._model_digest[:16]}…, it holds "
                f"{hello.model_digest[:16]}…: empty its folder"
            )

    def tell(self, order: pb.LearnerOrder) -> bool:
        """Sends an order at once. Returns False while the learner is away: on connect it is sent all that it must know."""
        if self.session is None:
            return False
        self.session.send(order)
        return True

    def close(self) -> None:
        if self.session is not None:
            self.session.end()

    def came(self, peer_id: PeerId, hello: LearnerHello, session: LearnerStream) -> None:
        """Starts the learner's session. Raises VersionMismatch or NotAllowed, before anything has changed, if it is refused."""
        hub = self._hub
        check_hello(hub.options.run_id, f"learner {peer_id}", hello.protocol_version, hello.run_id)
        if hello.staleness_bound != hub.options.staleness_bound:
            raise VersionMismatch(
                f"learner {peer_id}: expected staleness bound S = {hub.options.staleness_bound} as the coordinator "
                f"was told, got {hello.staleness_bound}: start both with the same config"
            )
        is_news = hub.board.came(peer_id, replace(hello, open_groups=()), self._model_digest, hub.clock.now())
        hub.ending.learner_came(hello)
        if self.session is not None:
            self.session.end()
        self.session = session
        self._model_digest = hello.model_digest
        hub.keeper.meta("model_digest", hello.model_digest)
        hub.keeper.meta("learner_peer_id", peer_id)
        hub.keeper.meta("learner_hello", learner_hello_to_message(hub.board.hello or hello).SerializeToString().hex())
        hub.note("learner", f"{hello.model_name} at step {hello.step}, version {hello.newest_version}, "
                  f"{len(hello.open_groups)} groups open, at {hello.address}")  # fmt: skip
        interval_s = hub.options.heartbeat_interval_s
        welcome = pb.LearnerWelcome(
            run_id=hub.options.run_id, heartbeat_interval_s=interval_s, relay_address=hub.relay_address
        )
        session.send(pb.LearnerOrder(welcome=welcome))
        if hub.plan_update is not None:
            session.send(pb.LearnerOrder(plan=hub.plan_update))
        if hub.broadcast_plan is not None:
            session.send(pb.LearnerOrder(broadcast_plan=plan_to_message(hub.broadcast_plan)))
        for barring in barrings_of(hub.membership.members.values()):
            session.send(barring)
        if is_news:
            hub.board.pipe_address = ""
            self.moved()
        self.has_come.set()
        hub.handle(le.GroupsSynced(hello.open_groups))
        hub.broadcast_needed.set()
        hub.plan_needed.set()

    def moved(self) -> None:
        """Tells all workers that the learner's address or model has changed."""
        order = pb.WorkerOrder(learner=whereabouts_of(self._hub.board))
        for worker_id in self._hub.workers:
            self._hub.send(worker_id, order)
        self._hub.broadcast_needed.set()

    def reported(self, report: LearnerReport) -> None:
        hub = self._hub
        now = hub.clock.now()
        if not hub.board.heard(report, now):
            return
        money = hub.money.sums()
        hub.reckoning.step_made(report, money.usd_useful, now)
        hub.keeper.meta("learner_report", learner_report_to_message(report).SerializeToString().hex())
        hub.keeper.sample(
            CurvePoint(
                now, report.step, report.reward_mean if report.train_s > 0 else None, report.eval_reward, report.utilisation,
                hub.reckoning.expected(hub.plan), money.usd_spent, money.usd_per_hour,
            )
        )  # fmt: skip
        hub.flush_soon()

    def said(self, event: le.Event) -> None:
        """Takes an offer or a closure of groups."""
        self._hub.board.heard_at = self._hub.clock.now()
        self._hub.handle(event)

    def published(self, version: PublishedVersion) -> None:
        hub = self._hub
        late = hub.broadcast_plan.late if hub.broadcast_plan is not None else frozenset()
        pool = [member.peer_id for member in hub.membership.pool() if member.peer_id not in late]
        hub.board.published(version, self.predicted_broadcast_s(version.artifact_bytes), pool, hub.clock.now())
        hub.keeper.meta("totals", json.dumps(asdict(hub.board.totals)))
        hub.flush_soon()

    def predicted_broadcast_s(self, artifact_bytes: int) -> float:
        """Predicted seconds until all workers that are not late have the artifact, by the broadcast plan, plus the slowest apply in
        the pool; 0 without a plan."""
        hub = self._hub
        plan = hub.broadcast_plan
        if plan is None or not plan.predicted_bytes:
            return 0.0
        apply_s = max((member.heartbeat.apply_s for member in hub.membership.pool()), default=0.0)
        return plan.predicted_needed_s * artifact_bytes / plan.predicted_bytes + apply_s

    def leaving(self, reason: str) -> None:
        self._hub.note("learner", f"leaves: {reason or 'no reason given'}")
        if reason == FINISHED:
            self._hub.ending.learner_finished()

    def cut(self, session: LearnerStream) -> None:
        if self.session is not session:
            return  # a newer session has replaced it
        self.session = None
        self._hub.board.cut(self._hub.clock.now())
        self._hub.note("learner", "its stream is over; workers go on with the leases they hold")

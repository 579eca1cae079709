"""The coordinator's side of the learner's stream: passes its messages to the book and the board, and sends it orders.

    away --hello--> here --leaving("finished")--> the run ends (ending)
      ^              |  '-- hello again: the newer stream takes the older one's place
      '-- broken ----'      meanwhile workers go on with the leases that they hold

Guarantees: a learner of another run, staleness bound or model is refused before anything has changed; one that connects is
always sent the plan, the broadcast plan, all barred workers, and whom it holds barred that no longer are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from echo2.base.errors import LimitExceeded, MalformedMessage, Unreachable, VersionMismatch
from echo2.base.ids import GroupId, PeerId
from echo2.broadcast.nat.pipes import pipe_address
from echo2.broadcast.nat.reach import shows_certificate
from echo2.coordinator.fleet.members import Activation, Member
from echo2.coordinator.leases import lease as le
from echo2.coordinator.planning.telemetry import LearnerBoard, Totals
from echo2.coordinator.store import CurvePoint
from echo2.outside import monotonic
from echo2.trust.identity import Role
from echo2.wire import rollout as wire
from echo2.wire.broadcast import plan_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import group_from_message, group_id_from_wire

if TYPE_CHECKING:
    from echo2.coordinator.hub import Hub
    from echo2.coordinator.streams import StreamSession

ASKED_MAX = 8  # each answer may carry a whole rollout
ANSWER_S = 10.0  # a busy learner answers between two messages
LIST_FRESH_S = 2.0  # one question serves all open pages
HEARD_BEATS = 3.0  # of a learner's heartbeats: a garbage collection or a lost packet takes one
APPLY_FACTOR = 4.0  # the slowest machine of a fleet beside its usual one; what one tells beyond it may be a lie


class RolloutQuestions:
    """Asks the learner for rollouts to show, a few questions at a time. `send`: sends it an order; returns False if none is
    connected."""

    def __init__(self, send: Callable[[pb.LearnerOrder], bool]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[pb.RolloutsShown]] = {}
        self._asked = 0
        self._list: asyncio.Task[pb.RolloutsShown] | None = None
        self._list_at = float("-inf")

    async def newest(self) -> pb.RolloutsShown:
        has_failed = self._list is not None and self._list.done() and self._list.exception() is not None
        if self._list is None or has_failed or monotonic() - self._list_at > LIST_FRESH_S:
            self._list_at = monotonic()
            self._list = asyncio.get_running_loop().create_task(self.ask("", 0))
            # Its error is told where somebody waits; the pages that asked may all have been closed.
            self._list.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return await asyncio.shield(self._list)

    def on_answer(self, answer: pb.RolloutsShown) -> None:
        waiting = self._open.get(answer.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def ask(self, rollout_id: str, offset: int) -> pb.RolloutsShown:
        """Waits for a rollout's tokens from `offset` on. LimitExceeded if too many are asked for, Unreachable without an answer."""
        if len(self._open) >= ASKED_MAX:
            raise LimitExceeded(f"rollouts: expected at most {ASKED_MAX} questions at a time; try again")
        self._asked += 1
        request = self._asked
        waiting: asyncio.Future[pb.RolloutsShown] = asyncio.get_running_loop().create_future()
        self._open[request] = waiting
        try:
            wanted = pb.RolloutsWanted(request=request, rollout_id=rollout_id, offset=offset)
            if not self._send(pb.LearnerOrder(wanted=wanted)):
                raise Unreachable("rollouts: the learner keeps them, and it is not connected")
            async with asyncio.timeout(ANSWER_S):
                return await waiting
        except TimeoutError:
            raise Unreachable(f"rollouts: expected the learner's answer within {ANSWER_S:.0f} s, got none") from None
        finally:
            del self._open[request]


class LearnerStream:
    """The learner's session and its messages. `session`: None while the learner is away."""

    role = Role.LEARNER

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.session: StreamSession[pb.LearnerOrder] | None = None
        self.is_back = asyncio.Event()
        self.rollouts = RolloutQuestions(self.send)
        self.left_because = ""  # the error that made it leave

    def check_model(self, peer_id: PeerId, hello: pb.WorkerHello) -> None:
        """VersionMismatch for a worker that holds weights of another model."""
        digest = self._hub.board.model_digest
        if hello.model_digest and digest and hello.model_digest != digest:
            raise VersionMismatch(
                f"worker {hello.name or peer_id}: expected weights of model {digest[:16]}…, it holds "
                f"{hello.model_digest[:16]}…: empty its folder"
            )

    def send(self, order: pb.LearnerOrder) -> bool:
        """Sends an order at once. Returns False while the learner is away: on connect it is sent all that it must know."""
        if self.session is None:
            return False
        self.session.send(order)
        return True

    async def on_hello(self, peer_id: PeerId, full: pb.LearnerHello, session: StreamSession[pb.LearnerOrder]) -> None:
        """Starts the learner's session. Raises VersionMismatch or NotAllowed, before anything has changed, if it is refused."""
        hub, sender = self._hub, f"learner {peer_id}"
        groups = tuple(map(group_from_message, full.open_groups))
        later = frozenset(map(GroupId, full.later_group_ids))
        full.ClearField("open_groups")
        full.ClearField("later_group_ids")
        barred = frozenset(full.barred_peer_ids)
        full.ClearField("barred_peer_ids")
        hello = pb.LearnerHello()
        hello.CopyFrom(full)  # a part of a message keeps the whole of it in memory
        if not 1 <= hello.rollouts_per_group <= hello.rollouts_per_step:
            raise MalformedMessage(
                f"batch of {sender}: expected 1 <= rollouts_per_group <= rollouts_per_step, got "
                f"{hello.rollouts_per_group} and {hello.rollouts_per_step}"
            )
        if hello.staleness_bound != hub.learner_bound:
            raise VersionMismatch(
                f"{sender}: expected staleness bound S = {hub.learner_bound} as the coordinator "
                f"was told, got {hello.staleness_bound}: start both with the same config"
            )
        hub.ending.check_learner()
        self._check_alone(peer_id, hello)
        is_news = hub.board.on_hello(peer_id, hello, hub.clock.now())
        hub.ending.reopen_for(hello)
        self.left_because = ""
        if self.session is not None:
            self.session.replace()
        self.session = session
        hub.state.meta("learner_peer_id", peer_id)
        hub.state.meta("learner_hello", hello.SerializeToString().hex())
        hub.note("learner", f"{hello.model_name} at step {hello.step}, version {hello.newest_version}, "
                  f"{len(groups)} groups open, at {hello.address}")  # fmt: skip
        interval_s = hub.config.coordinator.heartbeat_interval
        welcome = pb.LearnerWelcome(
            run_id=hub.options.run_id, heartbeat_interval_s=interval_s, relay_address=hub.relay_address
        )
        session.send(pb.LearnerOrder(welcome=welcome))
        if hub.plan.message is not None:
            session.send(pb.LearnerOrder(plan=hub.plan.message))
        if hub.broadcast_plan is not None:
            session.send(pb.LearnerOrder(broadcast_plan=plan_to_message(hub.broadcast_plan)))
        for member in hub.membership.members.values():
            if member.activation.is_barred or member.peer_id in barred:
                session.orders_max += 1
                self.send_barring(member)
        if is_news:
            hub.board.pipe_address = ""
            self.send_whereabouts()
        self.is_back.set()
        hub.handle(hub.book.sync, groups, later)
        hub.broadcast_needed.set()
        hub.plan_needed.set()

    def _check_alone(self, peer_id: PeerId, hello: pb.LearnerHello) -> None:
        """LimitExceeded, after which it tries again, for a process at another address while the learner is heard: a copy of its
        folder, as of a backup that is tried out, would take the run from it."""
        board, beat_s = self._hub.board, self._hub.config.coordinator.heartbeat_interval
        is_heard = self.session is not None and self._hub.clock.now() - board.heard_at <= HEARD_BEATS * beat_s
        if is_heard and board.hello is not None and board.peer_id == peer_id and board.hello.address != hello.address:
            raise LimitExceeded(
                f"learner {peer_id} at {hello.address}: expected one process of it, another is at work at {board.hello.address}: "
                "one of their folders is a copy; stop one"
            )

    def on_message(self, peer_id: PeerId, message: pb.LearnerMessage) -> None:
        hub, sender = self._hub, f"learner {peer_id}"
        match message.WhichOneof("kind"):
            case "report":
                self._on_report(message.report, sender)
            case "offer":
                self._on_lease_message(hub.book.offer, *wire.offer_from_message(message.offer, sender))
            case "close":
                ids = tuple(group_id_from_wire(group_id) for group_id in message.close.group_ids)
                self._on_lease_message(hub.book.close, ids, message.close.reason)
            case "delivered":
                self._on_lease_message(hub.book.on_delivered, message.delivered.workers)
            case "published":
                self.on_publish(message.published)
            case "accused":
                hub.accuse(PeerId(message.accused.peer_id), message.accused.reason, message.accused.is_certain)
            case "shown":
                self.rollouts.on_answer(message.shown)
            case "leaving":
                self._on_leave(message.leaving.reason)
            case other:
                raise MalformedMessage(f"{sender}: expected a message of a known kind after its hello, got {other}")

    def on_end(self, peer_id: PeerId, session: StreamSession[pb.LearnerOrder]) -> None:
        """The learner's stream ended; ignored if a newer one has replaced it."""
        if self.session is not session:
            return
        self.session = None
        self._hub.board.on_disconnect(self._hub.clock.now())
        self._hub.note("learner", "its stream is over; workers go on with the leases they hold")

    def _on_lease_message(self, method: le.BookMethod[le.P], *args: le.P.args, **kwargs: le.P.kwargs) -> None:
        self._hub.board.heard_at = self._hub.clock.now()
        self._hub.handle(method, *args, **kwargs)

    def _on_report(self, report: pb.LearnerReport, sender: str) -> None:
        if list(report.lengths) != sorted(report.lengths):
            raise MalformedMessage(f"{sender}: lengths: expected ascending token counts, got {list(report.lengths)}")
        hub = self._hub
        now = hub.clock.now()
        is_step, money = hub.board.on_report(report, now), hub.money.sums()
        if is_step:
            hub.plan.on_step(report, money.usd_useful, now)
        point = CurvePoint(
            now, report.step, hub.board.reward_mean, hub.board.eval_reward, report.utilisation,
            hub.plan.predicted_utilisation, money.usd_spent, money.usd_per_hour,
        )  # fmt: skip
        last = hub.state.samples[-1] if hub.state.samples else None
        if is_step or last is None or last.measures != point.measures:
            # A report on the way from one step to the next has the new step and the last one's measures; an evaluation follows
            # its step. Both are told again.
            hub.state.sample(point)
            hub.state.meta("learner_report", report.SerializeToString().hex())
            hub.flush_soon()

    def on_publish(self, version: pb.VersionPublished) -> None:
        hub = self._hub
        late = hub.broadcast_plan.late if hub.broadcast_plan is not None else frozenset()
        pool = [member.peer_id for member in hub.membership.pool() if member.peer_id not in late]
        hub.board.on_publish(version, self.predicted_broadcast_s(version.artifact_bytes), pool, hub.clock.now())
        hub.pace_by_bound()
        hub.state.meta("totals", json.dumps(asdict(hub.board.totals)))
        hub.flush_soon()

    def _on_leave(self, reason: str) -> None:
        self._hub.note("learner", f"leaves: {reason or 'no reason given'}")
        self.left_because = "" if reason == wire.STOPPED else reason
        if (cause := wire.cause_of_end(reason)) is not None:
            self._hub.ending.finish_run(cause)

    def predicted_broadcast_s(self, artifact_bytes: int) -> float:
        """Predicted seconds until all workers that are not late have the artifact, by the broadcast plan, plus the slowest apply in
        the pool, believed up to APPLY_FACTOR times the median; 0 without a plan."""
        hub = self._hub
        plan = hub.broadcast_plan
        if plan is None or not plan.predicted_bytes:
            return 0.0
        told = [member.heartbeat.apply_s for member in hub.membership.pool() if member.heartbeat.apply_s] or [0.0]
        apply_s = min(max(told), APPLY_FACTOR * statistics.median_low(told))
        return plan.predicted_needed_s * artifact_bytes / plan.predicted_bytes + apply_s

    def send_barring(self, member: Member) -> None:
        is_lifted = not member.activation.is_barred
        is_banned = member.activation is Activation.BANNED
        self.send(
            pb.LearnerOrder(
                banned=pb.WorkerBanned(
                    peer_id=member.peer_id, reason=member.setting_reason, is_lifted=is_lifted, is_banned=is_banned
                )
            )
        )

    def whereabouts(self) -> pb.LearnerWhereabouts | None:
        """The learner's address and model; None before the first learner has connected."""
        board, hello = self._hub.board, self._hub.board.hello
        if hello is None:
            return None
        return pb.LearnerWhereabouts(
            peer_id=board.peer_id, address=board.address, chunk_address=board.chunk_address, model_name=hello.model_name,
            model_config_json=hello.model_config_json, model_digest=hello.model_digest,
            newest_version=board.newest_version, relay_address=hello.relay_address,
            longest_sequence_tokens=hello.longest_sequence_tokens, full_snapshot_bytes=hello.full_snapshot_bytes,
        )  # fmt: skip

    def send_whereabouts(self) -> None:
        """Tells all workers that the learner's address or model has changed."""
        order = pb.WorkerOrder(learner=self.whereabouts())
        for worker_id in self._hub.workers:
            self._hub.send(worker_id, order)
        self._hub.broadcast_needed.set()


LOOK_S, LOOK_HIDDEN_S = 300.0, 30.0  # a firewall may change; one that hides it is being mended
MISSED_S = 2.0  # a lost packet is sent again within this
LOOKS = 3  # misses in a row of a learner that has answered
PLACE_S, PLACE_LOOK_S = 5.0, 0.1  # a learner takes its place within a round trip or two


class LearnerReachability:
    """Checks whether the learner answers at its own addresses; if it does not, workers are sent to it through the relay's byte
    pipes. A run without a relay crosses no NAT, so nothing is checked."""

    def __init__(self, hub: Hub, authority_pem: bytes) -> None:
        self._hub, self._authority_pem = hub, authority_pem
        self._told = ""
        self._has_answered = False

    async def run(self) -> None:
        learner, board = self._hub.learner, self._hub.board
        while True:
            with contextlib.suppress(TimeoutError):
                pause_s = LOOK_HIDDEN_S if board.pipe_address or self._told else LOOK_S
                async with asyncio.timeout(pause_s):
                    await learner.is_back.wait()
            learner.is_back.clear()
            if learner.session is not None and self._hub.relay_address:
                await self._look()

    async def _look(self) -> None:
        board = self._hub.board
        assert board.hello is not None and board.peer_id is not None, "it has come"
        address, chunks_at, peer_id = board.hello.address, board.hello.chunk_address, board.peer_id
        is_there = await self._answers(address, peer_id) and await self._answers(chunks_at, peer_id)
        if board.hello.address != address or board.peer_id != peer_id:
            return  # it has reconnected meanwhile, which triggers another check
        pipes = pipe_address(self._hub.relay_address) if not is_there and await self._is_piped(peer_id) else ""
        if is_there:
            self._tell("")
        elif pipes:
            self._tell(
                f"does not answer at {address} and {chunks_at}: workers reach it through the byte pipes of this coordinator, "
                f"at {pipes}"
            )
        else:
            self._tell(
                f"does not answer at {address} and {chunks_at}, and holds no place at the byte pipes of this coordinator: expected "
                "workers to reach it; open learner.port and the next one in its firewall, or map ports to them and name the first "
                "by learner.advertise"
            )
        if pipes != board.pipe_address:
            board.pipe_address = pipes
            self._hub.learner.send_whereabouts()

    async def _is_piped(self, peer_id: PeerId) -> bool:
        """Whether the learner holds a place at the relay, or takes one within `PLACE_S`: it is told of the relay on connect."""
        for _ in range(round(PLACE_S / PLACE_LOOK_S)):
            if self._hub.relay is not None and self._hub.relay.is_piped(peer_id):
                return True
            await asyncio.sleep(PLACE_LOOK_S)
        return False

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._hub.note("learner", text or "answers at its own address again")
            self._told = text

    async def _answers(self, address: str, peer_id: PeerId) -> bool:
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            return False
        for turn in range(LOOKS if self._has_answered else 1):
            if turn:
                await asyncio.sleep(MISSED_S)
            if await asyncio.to_thread(shows_certificate, host.strip("[]"), int(port), peer_id, self._authority_pem):
                self._has_answered = True
                return True
        return False


def restore_board(board: LearnerBoard, meta: Mapping[str, str], now: float) -> None:
    """Fills the board from the saved `meta`; fields that were not saved stay as they are."""
    board.totals = Totals(**json.loads(meta.get("totals", "{}")))
    if "learner_hello" in meta:
        board.hello = pb.LearnerHello.FromString(bytes.fromhex(meta["learner_hello"]))
        board.peer_id, board.changed_at = PeerId(meta["learner_peer_id"]), now
    if "learner_report" in meta:
        board.report = pb.LearnerReport.FromString(bytes.fromhex(meta["learner_report"]))

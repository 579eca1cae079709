"""The learner's control session with the coordinator, and the messages that it sends there.

Guarantees: the learner never waits for the coordinator; messages sent while no stream is open are dropped, and the next hello,
which carries every open group, makes up for them. Leaves to others: the stream (control/session), orders (learner).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from echo2.base.ids import GroupId, PeerId
from echo2.base.rollout import GroupSpec
from echo2.control.session import ControlSession, Party
from echo2.learner.loop import TrainingLoop
from echo2.learner.metrics import number_in
from echo2.learner.options import LearnerOptions
from echo2.learner.publishing.publisher import PublishedArtifact
from echo2.learner.rollouts.workers import DeliveryTally
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.wire.by_name import message_of
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc
from echo2.wire.rollout import group_to_message

LEAVE_S = 1.0  # a farewell is one message; without it the coordinator waits out its own limit


class SessionPort(Protocol):
    """What the session needs of the learner while it lasts. `find_coordinator`: updates its address in the credentials."""

    def hello(self) -> coordinator_pb2.LearnerHello: ...
    def report(self) -> coordinator_pb2.LearnerReport: ...
    def on_welcome(self, welcome: coordinator_pb2.LearnerWelcome) -> None: ...
    def on_order(self, order: coordinator_pb2.LearnerOrder) -> None: ...
    async def find_coordinator(self) -> None: ...


class LearnerSession:
    """The learner's session. `run` is its loop; it ends only if the coordinator refuses the learner."""

    def __init__(self, control: ControlSession[coordinator_pb2.LearnerMessage]) -> None:
        self._control = control

    @property
    def is_connected(self) -> bool:
        return self._control.is_connected

    async def run(self, learner: SessionPort) -> None:
        """Keeps the stream open until it is refused or cancelled."""
        await self._control.run(
            Party(
                dial=lambda channel: coordinator_pb2_grpc.CoordinatorStub(channel).LearnerSession(),
                hello=lambda: coordinator_pb2.LearnerMessage(hello=learner.hello()),
                beat=lambda: coordinator_pb2.LearnerMessage(report=learner.report()),
                on_welcome=learner.on_welcome,
                on_order=learner.on_order,
                find=learner.find_coordinator,
            )
        )

    def tell(self, **message: Any) -> None:
        """Sends a message by its name among those of `LearnerMessage`."""
        self._control.send(coordinator_pb2.LearnerMessage(**message))

    def offer(self, specs: Sequence[GroupSpec], held_tokens: Sequence[int] = ()) -> None:
        """Offers groups. `held_tokens`: in a reminder, the tokens of each group received so far."""
        groups = [group_to_message(spec) for spec in specs]
        self.tell(offer=coordinator_pb2.OfferGroups(groups=groups, held_tokens=held_tokens))

    def close(self, group_ids: Sequence[GroupId], reason: str) -> None:
        self.tell(close=coordinator_pb2.CloseGroups(group_ids=group_ids, reason=reason))

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None:
        self.tell(accused=coordinator_pb2.WorkerAccused(peer_id=peer_id, reason=reason, is_certain=is_certain))

    def published(self, artifact: PublishedArtifact) -> None:
        parent, has_parent = artifact.parent or 0, artifact.parent is not None
        message = message_of(artifact, coordinator_pb2.VersionPublished, parent=parent, has_parent=has_parent)
        self.tell(published=message)

    def delivered(self, tallies: Iterable[DeliveryTally]) -> None:
        workers = [message_of(tally, coordinator_pb2.WorkerDelivered, peer_id=tally.worker_id) for tally in tallies]
        self.tell(delivered=coordinator_pb2.WorkersDelivered(workers=workers))

    async def leave(self, reason: str) -> None:
        """Disconnects cleanly after all queued messages."""
        leaving = coordinator_pb2.LearnerLeaving(reason=reason)
        await self._control.leave(coordinator_pb2.LearnerMessage(leaving=leaving), LEAVE_S)


def hello_of(
    options: LearnerOptions, loop: TrainingLoop, address: str, chunk_address: str, relay_address: str
) -> coordinator_pb2.LearnerHello:
    """The first message of a stream: the learner's identity, its progress, and every group that still needs a worker."""
    model, pool, config = loop.p.model, loop.pool, options.config
    return coordinator_pb2.LearnerHello(
        protocol_version=PROTOCOL_VERSION,
        run_id=config.run.name,
        address=address,
        chunk_address=chunk_address,
        relay_address=relay_address,
        model_name=options.trainer.model_path.rstrip("/").rpartition("/")[2],
        model_config_json=model.config_json(),
        model_digest=model.digest(),
        staleness_bound=config.staleness.bound,
        rollouts_per_step=config.learner.rollouts_per_step,
        rollouts_per_group=config.learner.rollouts_per_prompt,
        step=pool.groups.next_step,
        newest_version=loop.publisher.newest_version,
        open_groups=[group_to_message(spec) for spec, _ in pool.lacking()],
        full_snapshot_bytes=model.snapshot_bytes,
        link=coordinator_pb2.Link(
            uplink_bytes_per_s=config.learner.emulated_link.uplink_bytes_per_s or config.learner.uplink_limit,
            downlink_bytes_per_s=config.learner.emulated_link.downlink_bytes_per_s,
            rtt_s=config.learner.emulated_link.rtt_s,
        ),
        step_limit=config.learner.steps,
        kappa_is_fixed=config.staleness.kappa > 0,
        kappa=config.staleness.kappa,
        longest_sequence_tokens=loop.p.prompts.context_tokens,
    )


def report_of(loop: TrainingLoop, waits_for: tuple[str, float]) -> coordinator_pb2.LearnerReport:
    """The state of the run after its last step."""
    pool, publisher, row = loop.pool, loop.publisher, loop.last_row
    groups, rewards = pool.groups, pool.evaluations.rewards
    counts, ledger = groups.counts, groups.ledger
    histogram = ledger.histogram()
    return coordinator_pb2.LearnerReport(
        step=loop.step,
        newest_version=publisher.newest_version,
        train_s=number_in(row, "step_s"),
        wait_s=number_in(row, "phase/wait_s"),
        reward_mean=number_in(row, "reward/mean"),
        buffered_rollouts=groups.buffered_rollouts,
        open_rollouts=groups.open_rollouts,
        trained_rollouts=counts.trained,
        trained_tokens=counts.trained_tokens,
        dropped_stale_rollouts=counts.dropped_stale,
        duplicate_rollouts=counts.duplicate,
        refused_rollouts=counts.refused,
        over_stale_tokens_trained=ledger.over_stale_tokens(),
        lag_histogram=[histogram.get(lag, 0) for lag in range(max(histogram, default=-1) + 1)],
        utilisation=loop.utilisation.window,
        sent_chunk_bytes=publisher.broadcaster.sent_bytes,
        waits_for=waits_for[0],
        waits_since_s=waits_for[1],
        is_finished=loop.is_exported,  # a local run ends its learner then
        eval_reward=rewards[max(rewards)] if rewards else -1.0,
        evaluation_rollouts=pool.evaluations.rollouts_per_step,
        idle_s=loop.idle_s,
        fingerprint=f"{publisher.newest_fingerprint:016x}",
        rewards_due=pool.rewards_due,
        prompts_exhausted=pool.exhausted is not None,
        audit_s=loop.auditor.counts.s_per_step,
        reward_s=pool.rewards.seconds_each,
        reward_processes=pool.prompts.world.reward_processes,
        lengths=loop.recent.lengths(),
        discarded_rollouts=counts.dropped_equal_rewards + counts.dropped_reward_failed,
        equal_reward_steps=loop.equal_reward_steps,
    )

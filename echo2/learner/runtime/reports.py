"""Builds the learner's messages to the coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from echo2.learner.deliveries import DeliveryTally
from echo2.learner.runtime.loop import TrainingLoop
from echo2.learner.runtime.options import LearnerOptions
from echo2.learner.runtime.publisher import PublishedArtifact
from echo2.trust.runtime.tls import PROTOCOL_VERSION
from echo2.wire.gen.echo2.v1 import coordinator_pb2
from echo2.wire.rollout import group_to_message


def hello_of(
    options: LearnerOptions, loop: TrainingLoop, address: str, relay_address: str
) -> coordinator_pb2.LearnerHello:
    """The first message of a stream: the learner's identity, its progress, and every group that still needs a worker."""
    model, held = loop.p.model, loop.intake.held
    return coordinator_pb2.LearnerHello(
        protocol_version=PROTOCOL_VERSION,
        run_id=options.run_id,
        address=address,
        relay_address=relay_address,
        model_name=options.trainer.model_path.rstrip("/").rpartition("/")[2],
        model_config_json=model.config_json(),
        model_digest=model.digest(),
        staleness_bound=options.staleness_bound,
        rollouts_per_step=options.rollouts_per_step,
        rollouts_per_group=options.rollouts_per_group,
        step=held.next_step,
        newest_version=loop.publisher.newest_version,
        open_groups=[group_to_message(spec) for spec, _ in loop.intake.lacking()],
        full_snapshot_bytes=model.snapshot_bytes,
        link=coordinator_pb2.Link(
            uplink_bytes_per_s=options.link.uplink_bytes_per_s or options.uplink_limit_bytes_per_s,
            downlink_bytes_per_s=options.link.downlink_bytes_per_s,
            rtt_s=options.link.rtt_s,
        ),
        step_limit=options.steps,
        kappa_is_fixed=options.kappa is not None,
        kappa=options.kappa or 0,
        longest_sequence_tokens=loop.p.prompts.context_tokens,
        audits_nothing=not loop.auditor.is_on,
    )


def report_of(loop: TrainingLoop, waits_for: tuple[str, float]) -> coordinator_pb2.LearnerReport:
    """The state of the run after its last step."""
    held, publisher, row = loop.intake.held, loop.publisher, loop.last_row
    counts, ledger = held.counts, held.ledger
    histogram, audited = ledger.histogram(), loop.auditor.costs
    return coordinator_pb2.LearnerReport(
        step=loop.step,
        newest_version=publisher.newest_version,
        train_s=_number(row, "step_s"),
        wait_s=_number(row, "phase/wait_s"),
        reward_mean=_number(row, "reward/mean"),
        buffered_rollouts=held.buffered_rollouts,
        open_rollouts=held.open_rollouts,
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
        is_finished=loop.is_finished and not loop.intake.exam_waits_for,
        eval_reward=loop.exams.rewards[max(loop.exams.rewards)] if loop.exams.rewards else -1.0,
        evaluation_rollouts=loop.exams.rollouts_per_step,
        idle_s=loop.idle_s,
        fingerprint=f"{publisher.newest_fingerprint:016x}",
        audit_fleet_share=audited.fleet_share,
        audit_s=audited.own_s_per_step,
    )


def published_message(artifact: PublishedArtifact) -> coordinator_pb2.VersionPublished:
    return coordinator_pb2.VersionPublished(
        version=artifact.version,
        parent=artifact.parent or 0,
        has_parent=artifact.parent is not None,
        artifact_bytes=artifact.artifact_bytes,
        full_snapshot_bytes=artifact.full_snapshot_bytes,
        encode_s=artifact.encode_s,
        fingerprint=artifact.fingerprint,
    )


def delivered_message(told: Iterable[DeliveryTally]) -> coordinator_pb2.WorkersDelivered:
    return coordinator_pb2.WorkersDelivered(
        workers=[
            coordinator_pb2.WorkerDelivered(
                peer_id=one.worker_id, heard_rollouts=one.heard_rollouts, admitted_rollouts=one.admitted_rollouts
            )
            for one in told
        ]
    )


def _number(row: Mapping[str, object], name: str) -> float:
    value = row.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0

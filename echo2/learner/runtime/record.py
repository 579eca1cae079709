"""Builds the row of one step for metrics.jsonl, the report to the coordinator and the sinks.

docs/learner.md lists names and meanings.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.ids import PeerId
from echo2.learner.batch import Batch
from echo2.learner.batcher import Held
from echo2.learner.loss import LossMetrics
from echo2.learner.publication import PublicationSchedule
from echo2.learner.runtime.auditor import Auditor
from echo2.learner.runtime.publisher import VersionPublisher
from echo2.learner.runtime.trainer import StepResult
from echo2.learner.timing import Utilisation
from echo2.outside import unix_now
from echo2.staleness.rule import lag_of

PEAK_FLOPS_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bf16 peak FLOP/s by a part of the device name, from the manufacturers' data sheets."""


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step outside the trainer's own phases."""

    wait_s: float = 0.0
    diff_s: float = 0.0
    publish_wait_s: float = 0.0
    checkpoint_s: float = 0.0
    audit_wait_s: float = 0.0

    def busy_s(self, result: StepResult) -> float:
        return sum(result.phases_s.values()) + self.diff_s + self.audit_wait_s


@dataclass(slots=True)
class RunFacts:
    """Facts in a row that do not come from the step."""

    predicted_utilisation: float = 0.0
    flops_per_position: float = 0.0
    peak_flops: float = 0.0


def reward_fields(batch: Batch) -> dict[str, float]:
    rewards = [reward for group in batch.groups for reward in group.rewards]
    equal = sum(max(group.rewards) - min(group.rewards) < 1e-12 for group in batch.groups)
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/equal_group_fraction": equal / len(batch.groups),
    }


def lag_fields(batch: Batch) -> dict[str, object]:
    """`lag/histogram`[k]: tokens of this step with a lag of k. `lag/mean` and `lag/max` are over rollouts."""
    tokens: Counter[int] = Counter()
    oldest: list[int] = []
    mixed = 0
    for group in batch.groups:
        for rollout in group.rollouts:
            for span in rollout.version_spans:
                tokens[lag_of(batch.step, span.version)] += span.count
            if rollout.oldest_version is not None:
                oldest.append(lag_of(batch.step, rollout.oldest_version))
            mixed += len(rollout.version_spans) > 1
    return {
        "lag/mean": statistics.fmean(oldest) if oldest else 0.0,
        "lag/max": max(oldest, default=0),
        "lag/histogram": [tokens.get(lag, 0) for lag in range(max(tokens, default=0) + 1)],
        "rollouts/mixed_versions": mixed,
    }


def loss_fields(metrics: LossMetrics | None) -> dict[str, float]:
    if metrics is None:
        return {}
    return {
        "loss": metrics.loss,
        "policy/entropy": metrics.entropy,
        "ratio/mean": metrics.ratio_mean,
        "ratio/max": metrics.ratio_max,
        "ratio/ess": metrics.ratio_ess,
        "ratio/rollout_ess": metrics.rollout_ratio_ess,
        "clip_fraction": metrics.clip_low_fraction + metrics.clip_high_fraction,
        "clip_fraction/low": metrics.clip_low_fraction,
        "clip_fraction/high": metrics.clip_high_fraction,
        "correction/weight_mean": metrics.correction_weight_mean,
        "correction/altered_fraction": metrics.correction_altered_fraction,
        "kl": metrics.kl_behaviour,
        "kl/reference": metrics.kl_reference,
    }


def time_fields(result: StepResult, times: StepTimes, facts: RunFacts) -> dict[str, float]:
    busy_s = times.busy_s(result)
    fields = {f"phase/{name}_s": seconds for name, seconds in result.phases_s.items()}
    fields |= {
        "phase/wait_s": times.wait_s,
        "phase/diff_s": times.diff_s,
        "phase/publish_wait_s": times.publish_wait_s,
        "phase/checkpoint_s": times.checkpoint_s,
        "phase/audit_wait_s": times.audit_wait_s,
        "step_s": busy_s,
        "tokens_per_s": result.sampled_tokens / busy_s if busy_s > 0 else 0.0,
        "positions_per_s": result.positions / busy_s if busy_s > 0 else 0.0,
    }
    if facts.peak_flops > 0 and busy_s > 0:
        fields["mfu"] = facts.flops_per_position * result.positions / busy_s / facts.peak_flops
    return fields


def state_fields(
    held: Held, publisher: VersionPublisher, schedule: PublicationSchedule, utilisation: Utilisation
) -> dict[str, object]:
    counts, sent = held.counts, publisher.bytes
    return {
        "utilisation": utilisation.window,
        "utilisation/overall": utilisation.overall,
        "version": schedule.newest,
        "kappa": schedule.kappa,
        "delta/setting": publisher.choice.setting.name.lower(),
        "delta/setting_reason": publisher.choice.reason,
        "encode_s": publisher.last.encode_s if publisher.last else 0.0,
        "bytes/deltas": sent.deltas,
        "bytes/keyframes": sent.keyframes,
        "bytes/merged": sent.merged,
        "bytes/full_snapshots": sent.full_snapshots,
        "rollouts/buffered": held.buffered_rollouts,
        "rollouts/open": held.open_rollouts,
        "rollouts/trained": counts.trained,
        "rollouts/admitted": counts.admitted,
        "rollouts/dropped_stale": counts.dropped_stale,
        "rollouts/dropped_quarantined": counts.dropped_quarantined,
        "rollouts/duplicate": counts.duplicate,
        "rollouts/refused": counts.refused,
        "rollouts/dropped_equal_rewards": counts.dropped_equal_rewards,
        "rollouts/dropped_reward_failed": counts.dropped_reward_failed,
        "rollouts/pruned": counts.pruned,
        "tokens/trained": counts.trained_tokens,
        "tokens/over_stale": held.ledger.over_stale_tokens(),
    }


def left_out_by_worker(batch: Batch, result: StepResult) -> Counter[PeerId]:
    """Tokens left out of the step, by worker, because their reported log-probabilities are too far from the learner's own."""
    found: Counter[PeerId] = Counter()
    rollouts = [senders for group in batch.groups for senders in group.senders or [()] * len(group.rollouts)]
    for senders, tokens in zip(rollouts, result.left_out, strict=False):
        for peer_id in {sent.peer_id for sent in senders} if tokens else ():
            found[peer_id] += tokens
    return found


def audit_fields(auditor: Auditor) -> dict[str, object]:
    counts, draw, scored = auditor.counts, auditor.draw, auditor.scorings.counts
    return {
        "audit/tokens": counts.tokens,
        "audit/rollouts": counts.rollouts,
        "audit/own_rollouts": counts.own_rollouts,
        "audit/own_tokens": counts.own_tokens,
        "audit/own_s": counts.own_s,
        "audit/fleet_tokens": scored.read_tokens,
        "audit/fleet_share": auditor.costs.fleet_share,
        "audit/known_answers": scored.verified,
        "audit/unanswered": scored.unanswered,
        "audit/disputes": auditor.disputes.counts.disputes,
        "audit/false_scorers": auditor.disputes.counts.false_scorers,
        "audit/waiting_rollouts": len(draw.waiting) + auditor.scorings.waiting,
        "audit/given_up_rollouts": draw.given_up,
        "audit/unaudited_share_max": max(draw.unaudited.values(), default=0.0),
        "audit/accused_workers": counts.accused,
    }


def optimiser_fields(result: StepResult) -> dict[str, float]:
    """Empty if the user's own trainer has the optimiser."""
    known = {"grad_norm": result.grad_norm, "lr": result.lr}
    return {name: value for name, value in known.items() if value is not None}


def task_fields(batch: Batch, task_of: Callable[[int], str]) -> dict[str, float]:
    """Groups and mean reward of each task of a mixture in the batch. `task_of`: task name by cursor; empty without a mixture."""
    rewards: dict[str, list[float]] = {}
    groups: Counter[str] = Counter()
    for group in batch.groups:
        if name := task_of(group.cursor):
            groups[name] += 1
            rewards.setdefault(name, []).extend(group.rewards)
    fields: dict[str, float] = {}
    for name in sorted(groups):
        fields |= {f"task/{name}/groups": groups[name], f"task/{name}/reward": statistics.fmean(rewards[name])}
    return fields


def step_row(batch: Batch, result: StepResult, times: StepTimes, facts: RunFacts) -> dict[str, object]:
    """All fields about the step itself; `state_fields` adds the state of the run."""
    completions = [len(rollout.token_ids) for group in batch.groups for rollout in group.rollouts]
    return {
        "step": result.step,
        "unix_s": unix_now(),
        **reward_fields(batch),
        **loss_fields(result.metrics),
        **optimiser_fields(result),
        "is_skipped": result.is_skipped,
        "rollouts": batch.rollout_count,
        "groups": len(batch.groups),
        "tokens": result.sampled_tokens,
        "reports/left_out_tokens": sum(result.left_out),
        "reports/left_out_workers": len(left_out_by_worker(batch, result)),
        "positions": result.positions,
        "completion_tokens/mean": statistics.fmean(completions),
        "completion_tokens/max": max(completions),
        **lag_fields(batch),
        **time_fields(result, times, facts),
        "utilisation/predicted": facts.predicted_utilisation,
    }


def peak_flops_of(device_name: str) -> float:
    """Peak FLOP/s of a device; 0 if unknown."""
    return next((peak for part, peak in PEAK_FLOPS_BF16.items() if part in device_name), 0.0)

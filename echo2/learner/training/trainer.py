"""Trains on one batch per step: one optimiser update, or several on parts of the batch, each phase timed.

Guarantees: the gradients of the micro-batches add up to the gradient of the batch (loss); after a step the parameters equal the
rounded masters; an update whose loss or gradient is not finite changes nothing and is counted, and more than
`nonfinite_steps_max` in a row raise `TrainingError`. From the same state, the same batches give the same bits on a CPU with the
same number of threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo2.base.errors import ConfigError, TrainingError
from echo2.base.rollout import LOSS_COLUMNS, AdamStep, ClientLoss, Example, FinishReason
from echo2.config.run import RunConfig
from echo2.cost_model.sizing import ROW_WIDTHS
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.learner.training.loss import (
    SUM_NAMES,
    Advantages,
    BatchTotals,
    LossConfig,
    PackedTokens,
    PolicyLoss,
    Segments,
    believed,
    group_advantages,
    learning_rate_scale,
    loss_metrics,
    masked_log_ratio,
    minimum_variance_weights,
    policy_loss,
    score_norm_sq_proxy,
)
from echo2.learner.training.model import Policy, PolicyModel, reshard, without_adapter
from echo2.learner.training.optimiser import HostAdamW, adamw_of, clip
from echo2.learner.training.packing import (
    Attention,
    AttentionCosts,
    GroupLengths,
    MicroBatch,
    PackedBatch,
    PackedInputs,
    PackingLimits,
    cheapest,
    client_losses,
    collate_examples,
    collated,
    lengths_of,
    plan_microbatches,
)
from echo2.learner.training.ranks import Ranks


def learning_rate(step: int, base: float, warmup_steps: int, total_steps: int, schedule: str) -> float:
    """Rises linearly over the warm-up, then stays at `base` (`constant`) or falls to 0 at `total_steps` (`linear`, `cosine`).
    `step` is counted from 0."""
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if schedule == "constant" or total_steps <= warmup_steps:
        return base
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return base * (1.0 - done) if schedule == "linear" else base * 0.5 * (1.0 + math.cos(math.pi * done))


SUPERVISED = LossConfig("echo2.learner.training.loss:cross_entropy")
"""The loss of the supervised steps; none of `LOSSES`, since it learns whatever tokens it is given."""
ATTENTION_SLOWER, PART_FLOPS = 1.5, 2e7
"""Operations of attention take so many times as long as those of matrix products on a CPU (50 against 74 a nanosecond, one core),
and beginning a part of a unit, forward and backward, as long as so many of these (0.26 ms)."""
BETAS, EPSILON = (0.9, 0.99), 1e-8  # AdamW's
GRAD_CLIP, NONFINITE_STEPS_MAX = 1.0, 5
LR_SCALE_MIN = 0.1  # vcpo: a step of few effective rollouts still learns a little


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one step. `phases_s`: seconds for load, forward, backward, optimiser and, if the option asks for it, emulated.
    With several updates, `metrics` covers all of them, `grad_norm` is the largest, and `is_skipped` is true if any update
    changed nothing."""

    step: int  # steps completed, this one included
    phases_s: dict[str, float]
    metrics: Mapping[str, float] | None  # of this project's own loss, by their names in the row
    grad_norm: float | None
    lr: float | None
    is_skipped: bool
    positions: int  # computed positions, including padding and prompts
    sampled_tokens: int
    # By rollout of the batch: tokens not trained on because their reported numbers are too far off.
    left_out: tuple[int, ...] = ()


@dataclass(slots=True)
class _Stopwatch:
    """Seconds per phase; on a GPU a phase ends when its kernels have finished."""

    device: torch.device
    spent_s: dict[str, float] = field(default_factory=dict)
    since: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.spent_s[phase] = self.spent_s.get(phase, 0.0) + now - self.since
        self.since = now


@dataclass(frozen=True, slots=True)
class _Part:
    """The groups of one update and their micro-batches. Of this rank's micro-batches `share`, the first `counted` contribute to
    the loss. `rollouts`: the slice of the batch's flat list of rollouts. `before`: per micro-batch, the policy's
    log-probabilities before the batch's first update; empty if they are not needed."""

    groups: Sequence[TrainGroup]
    layout: list[MicroBatch]
    share: list[MicroBatch]
    counted: int
    rollouts: slice
    before: list[Tensor] = field(default_factory=list)


class LentTensors:
    """Lent tensors by name. The writer takes each once, in any order; the trainer calls `keep` from another thread."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, name: str) -> Iterator[Tensor | None]:
        """Yields the tensor with its value at the time of lending; `keep` waits meanwhile. None if `name` was not lent."""
        with self._lock:
            yield self._tensors.pop(name, None)

    def keep(self) -> None:
        """Copies the tensors that are not written yet. Call it before they change, once."""
        with self._lock:
            self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}


class Trainer:
    """Holds the model and the optimiser. `config`: of the run, "auto" resolved. `row_tokens`: length of rows with a mask; 0: from
    the model's width. `step_count`: completed steps of the run."""

    def __init__(self, model: PolicyModel, config: RunConfig, threads: int = 1, row_tokens: int = 0) -> None:
        self.model = model
        self.ranks: Ranks = model.ranks
        self.learner, self.sft, self.loss = config.learner, config.sft, LossConfig.of(config.learner)
        self.threads, self.row_tokens = threads, row_tokens
        self.grad_clip, self.nonfinite_steps_max = GRAD_CLIP, NONFINITE_STEPS_MAX
        self.step_count = 0
        self._temperature = model.policy.temperature
        self.nonfinite_steps = 0
        self.nonfinite_in_a_row = 0
        self.optimiser = adamw_of(
            self.learner.optimizer_state, model.masters, model.device, lr=self.learner.lr, betas=BETAS, eps=EPSILON,
            weight_decay=self.learner.weight_decay,
        )  # fmt: skip
        self.lent: LentTensors | None = None
        self.reference = self._reference_model()
        if (how := config.learner.gradient_checkpointing) in (True, "selective"):
            model.enable_gradient_checkpointing(is_selective=how == "selective")

    @property
    def lends_state(self) -> bool:
        """Whether a checkpoint borrows the masters and moments instead of copying them. They must lie in host memory on a single
        rank and be separate from the parameters: an audit changes the parameters between two steps."""
        is_on_host = self.model.device.type == "cpu" or self.model.masters_on_host
        return is_on_host and self.ranks.count == 1 and self.model.is_rounded

    @property
    def is_supervised(self) -> bool:
        """Whether the next step learns the batch's tokens as they are, whatever their rewards."""
        return self.step_count < self.sft.step_count

    def step(self, batch: Batch) -> StepResult:
        """Trains on one batch; raises `TrainingError` after too many non-finite updates in a row."""
        torch.set_num_threads(self.threads)
        self.model.policy.temperature = 1.0 if self.is_supervised else self._temperature
        if self.step_count == self.sft.step_count > 0:
            self.optimiser.state.clear()  # moments of another loss's gradients
        watch = _Stopwatch(self.model.device)
        parts = self._parts(batch)
        watch.lap("load")
        # Both need the log-probabilities from before the first update.
        if len(parts) > 1 or (self.learner.advantage == "vcpo" and not self.is_supervised):
            with torch.no_grad():
                for part in parts:
                    inputs = (micro.inputs.to(self.model.device) for micro in self._packed(part))
                    part.before.extend(self.model.policy(each)[0] for each in inputs)
        advantages = self._advantages(batch.groups, parts)
        watch.lap("forward")
        left_out_N = torch.zeros(batch.rollout_count)
        sums_M = torch.zeros(len(SUM_NAMES), dtype=torch.float64)
        ratio_max, grad_norm, lr, tokens, is_skipped = 0.0, 0.0, 0.0, 0, False
        for part in parts:
            totals = self._totals(batch, advantages, part)
            # With a single update the proximal policy is the current one, which the loss uses by default.
            proximal = part.before if len(parts) > 1 else []
            part_sums_M, part_max = self._accumulate(part, proximal, advantages, totals, left_out_N, watch)
            norm, lr = self._update(loss_metrics(part_sums_M, part_max))
            watch.lap("optimiser")
            sums_M += part_sums_M
            ratio_max, grad_norm = max(ratio_max, part_max), norm if math.isnan(norm) else max(grad_norm, norm)
            tokens, is_skipped = tokens + totals.token_count, is_skipped or lr == 0.0
        self.step_count += 1
        sums_M[SUM_NAMES.index("loss")] /= len(parts)
        missing_s = self.learner.emulated_step - sum(watch.spent_s.values())
        if missing_s > 0.0:
            time.sleep(missing_s)
            watch.lap("emulated")
        return StepResult(
            self.step_count, watch.spent_s, loss_metrics(sums_M, ratio_max), grad_norm, lr, is_skipped,
            sum(micro.positions for part in parts for micro in part.layout), tokens,
            tuple(round(count) for count in self.ranks.sum(left_out_N).tolist()),
        )  # fmt: skip

    @property
    def packing_limits(self) -> PackingLimits:
        """Limits for packing; by default a row with a mask has `ROW_WIDTHS` times as many tokens as the model's hidden size."""
        row_tokens = self.row_tokens or ROW_WIDTHS * int(self.model.config.get_text_config(decoder=True).hidden_size)
        return PackingLimits(self.learner.token_budget, row_tokens, self.model.policy.is_packed)

    def _parts(self, batch: Batch) -> list[_Part]:
        """Splits the batch into one part per update: whole groups, in order, as evenly as possible, at least one group each."""
        count = 1 if self.is_supervised else min(self.learner.updates_per_batch, len(batch.groups))
        bounds = [index * len(batch.groups) // count for index in range(count + 1)]
        parts: list[_Part] = []
        first = 0
        for groups in (batch.groups[begin:end] for begin, end in pairwise(bounds)):
            layout = self._layout(groups, self._limits_of(groups))
            counted = len(layout[self.ranks.rank :: self.ranks.count])
            last = first + sum(len(group.rollouts) for group in groups)
            parts.append(_Part(groups, layout, self._own_share(layout), counted, slice(first, last)))
            first = last
        return parts

    def _layout(self, groups: Sequence[TrainGroup], limits: PackingLimits) -> list[MicroBatch]:
        lengths, model = lengths_of(groups), self.model
        longest = max((each.prompt + count for each in lengths for count in each.completions), default=0)
        # What a mask would hide.
        skips = model.policy.attends_by_units(longest) or model.policy.attention is Attention.FLEX
        if self.row_tokens or not skips:
            return plan_microbatches(lengths, limits)
        size = model.size
        costs = AttentionCosts(
            model.flops_per_position, ATTENTION_SLOWER * 12.0 * size.query_width * size.layer_count,
            PART_FLOPS * size.layer_count,
        )  # fmt: skip
        return cheapest(lengths, limits, costs)

    def _packed(self, part: _Part) -> Iterator[PackedBatch]:
        """This rank's micro-batches, prepared one ahead of the device."""
        policy = self.model.policy
        return collated(part.groups, part.share, policy.row_multiple, policy.routing, part.rollouts.start)

    def _limits_of(self, groups: Sequence[TrainGroup]) -> PackingLimits:
        """With several ranks, makes micro-batches small enough that each rank has one to compute."""
        limits = self.packing_limits
        if self.ranks.count == 1:
            return limits
        positions = sum(g.prompt + sum(g.completions) for g in lengths_of(groups))
        budget = max(1, min(limits.token_budget, -(-positions // self.ranks.count)))
        return replace(limits, token_budget=budget, row_tokens=min(limits.row_tokens, budget))

    def _own_share(self, layout: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This rank's micro-batches. All ranks must join the same collectives, so a rank that has one micro-batch too few adds
        a dummy that does not count."""
        share = list(layout[self.ranks.rank :: self.ranks.count])
        rounds = -(-len(layout) // self.ranks.count)
        return share + [layout[0]] * (rounds - len(share))

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[Tensor]:
        """Returns the current policy's log-probabilities of each rollout's tokens, for audits and tests."""
        layout = self._layout(groups, self.packing_limits)
        by_rollout: dict[int, Tensor] = {}
        with torch.no_grad():
            for micro in collated(groups, layout, self.model.policy.row_multiple, self.model.policy.routing):
                logprobs_T, _ = self.model.policy(micro.inputs.to(self.model.device))
                for index, rollout in enumerate(micro.rollout_R.tolist()):
                    by_rollout[rollout] = logprobs_T[micro.sequence_T == index].cpu()
        return [by_rollout[index] for index in range(len(by_rollout))]

    def cross_entropy(self, batch: Batch) -> float:
        """Mean negative log-probability of the batch's tokens, nats, at temperature 1."""
        self.model.policy.temperature = 1.0
        logprobs_T = torch.cat(self.logprobs(batch.groups))
        reshard(self.model.policy)
        self.model.policy.temperature = self._temperature
        return -float(logprobs_T.double().mean())

    # ---- steps that a client drives

    def forward_backward(
        self, examples: Sequence[Example], loss: ClientLoss, *, is_trained: bool = True, policy: Policy | None = None
    ) -> tuple[list[Tensor], float]:
        """Adds the gradient of the summed loss to that of earlier calls since the last `optim_step`; a forward pass alone unless
        `is_trained`. `policy`: another than the one that trains. Returns each example's log-probabilities, float32 (N, K) in nats,
        and the loss."""
        assert self.ranks.count == 1, "clients drive a single rank"
        torch.set_num_threads(self.threads)
        flat = {name: np.concatenate([e.columns[name].ravel() for e in examples]) for name in LOSS_COLUMNS[loss.name]}
        logprobs, total = torch.empty(sum(example.targets_NK.size for example in examples)), 0.0
        device, policy = self.model.device, policy or self.model.policy
        with torch.set_grad_enabled(is_trained):
            lengths = [GroupLengths(0, (len(example.token_ids_N),)) for example in examples]
            for micro in plan_microbatches(lengths, self.packing_limits):
                inputs, places = collate_examples(examples, micro, policy.row_multiple)
                logprobs_T, _ = policy(inputs.to(device))
                columns = {name: torch.from_numpy(values[places]).to(device) for name, values in flat.items()}
                summed = client_losses(loss, logprobs_T, columns).sum()
                if is_trained:
                    torch.autograd.backward(summed)
                    self.model.gather_gradients()
                logprobs[torch.from_numpy(places)] = logprobs_T.detach().float().cpu()
                total += float(summed.detach())
        parts = torch.split(logprobs, [example.targets_NK.size for example in examples])
        return [part.view(e.targets_NK.shape) for part, e in zip(parts, examples, strict=True)], total

    def optim_step(self, step: AdamStep) -> tuple[float, bool]:
        """Makes one update with what `forward_backward` has added up. Returns the gradient's norm before clipping, and whether the
        update was made: one that is not finite changes nothing."""
        return self._applied(
            step.grad_clip or math.inf, True, lr=step.lr, betas=(step.beta1, step.beta2), eps=step.epsilon,
            weight_decay=step.weight_decay,
        )  # fmt: skip

    # ---- parts of a step

    def _accumulate(
        self, part: _Part, proximal: Sequence[Tensor], advantages: Advantages, totals: BatchTotals, left_out_N: Tensor,
        watch: _Stopwatch,
    ) -> tuple[Tensor, float]:  # fmt: skip
        """Accumulates the gradients of all micro-batches; returns the metric sums and the largest ratio, over all ranks."""
        sums_M = torch.zeros(len(SUM_NAMES), dtype=torch.float64)
        ratio_max = 0.0
        for number, micro in enumerate(self._packed(part)):
            watch.lap("load")
            proximal_T = proximal[number] if proximal else None
            loss, left_out_R = self._loss(micro, advantages, totals, number < part.counted, proximal_T)
            left_out_N[micro.rollout_R] += left_out_R
            watch.lap("forward")
            self.model.meet_copies(is_due=number + 1 == len(part.share))
            torch.autograd.backward(loss.loss)
            self.model.gather_gradients()
            watch.lap("backward")
            sums_M += loss.sums_M.cpu()
            ratio_max = max(ratio_max, float(loss.ratio_max))
        return self.ranks.sum(sums_M), self.ranks.largest(ratio_max)

    def _advantages(self, groups: Sequence[TrainGroup], parts: Sequence[_Part]) -> Advantages:
        if self.is_supervised:
            one_R = torch.ones(sum(len(group.rollouts) for group in groups))
            return Advantages(one_R, one_R > 0)
        rewards_R = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float32)
        group_R = torch.tensor([index for index, group in enumerate(groups) for _ in group.rewards])
        weight_R = None
        if self.learner.advantage == "vcpo":
            weight_R = self._variance_weights(parts, rewards_R.numel())
        advantages = group_advantages(rewards_R, group_R, self.learner.advantage, weight_R)
        if self.learner.train_on_truncated:
            return advantages
        ended_R = torch.tensor([r.finish_reason is not FinishReason.LENGTH for group in groups for r in group.rollouts])
        return replace(advantages, trained_R=advantages.trained_R & ended_R)

    def _variance_weights(self, parts: Sequence[_Part], count: int) -> Tensor:
        """Weights of the minimum-variance baseline, from the ratios of the whole batch; needed before the loss."""
        log_ratio_R, norm_sq_R = torch.zeros(count), torch.zeros(count)
        for part in parts:
            for micro, logprobs_T in islice(zip(self._packed(part), part.before, strict=True), part.counted):
                every_T = torch.ones_like(micro.sequence_T, dtype=torch.bool)
                segments = Segments(micro.sequence_T, every_T, micro.rollout_R.numel())
                believed_T = believed(logprobs_T.cpu(), micro.behaviour_T, segments)
                segments = Segments(micro.sequence_T, believed_T, micro.rollout_R.numel())
                log_ratio_R[micro.rollout_R] = segments.sum_R(logprobs_T.cpu() - micro.behaviour_T)
                norm_sq_R[micro.rollout_R] = score_norm_sq_proxy(logprobs_T.cpu(), segments)
        return minimum_variance_weights(self.ranks.sum(log_ratio_R), self.ranks.sum(norm_sq_R))

    def _totals(self, batch: Batch, advantages: Advantages, part: _Part) -> BatchTotals:
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts][part.rollouts]
        is_trained_R = advantages.trained_R[part.rollouts].tolist()
        trained = [r for r, is_trained in zip(rollouts, is_trained_R, strict=True) if is_trained]
        tokens = sum(len(rollout.token_ids) for rollout in trained)
        longest = max(group.spec.sampling.max_new_tokens for group in batch.groups)
        return BatchTotals(max(1, tokens), max(1, len(trained)), longest)

    def _loss(
        self, micro: PackedBatch, advantages: Advantages, totals: BatchTotals, is_counted: bool,
        proximal_T: Tensor | None,
    ) -> tuple[PolicyLoss, Tensor]:  # fmt: skip
        """Loss of a micro-batch, and per rollout the number of tokens left out because their reported numbers are too far off."""
        device = self.model.device
        inputs = micro.inputs.to(device)
        # First: it may be this policy without its adapter, whose routers are then told of no experts.
        reference_T = None if self.is_supervised else self._reference_logprobs(inputs)
        logprobs_T, entropy_T = self.model.policy(inputs, with_entropy=True)
        sequence_T = micro.sequence_T.to(device)
        # What nobody sampled counts as sampled by this policy.
        behaviour_T = logprobs_T.detach() if self.is_supervised else micro.behaviour_T.to(device)
        asked_T = advantages.trained_R[micro.rollout_R].to(device)[sequence_T] & is_counted
        segments = Segments(sequence_T, asked_T, micro.rollout_R.numel())
        believed_T = believed(logprobs_T, behaviour_T, segments)
        advantages_T = None
        if reference_T is not None and self.learner.teacher:
            # Minus the reverse KL at each token, of the policy whose update this is.
            proximal = logprobs_T.detach() if proximal_T is None else proximal_T
            advantages_T = masked_log_ratio(reference_T, proximal, asked_T)
        tokens = PackedTokens(
            logprobs_T, behaviour_T, advantages.values_R[micro.rollout_R].to(device), sequence_T, believed_T,
            proximal_logprobs_T=proximal_T, reference_logprobs_T=reference_T, entropy_T=entropy_T,
            advantages_T=advantages_T,
        )  # fmt: skip
        left_out_R = segments.sum_R((asked_T & ~believed_T).to(torch.float32))
        how = SUPERVISED if self.is_supervised else self.loss
        return policy_loss(tokens, how, totals), left_out_R.cpu()

    def _update(self, metrics: Mapping[str, float]) -> tuple[float, float]:
        """Makes the update of this gradient. Returns the gradient norm and the learning rate used, 0 if it was skipped."""
        lr = self._lr(metrics)
        grad_norm, is_made = self._applied(self.grad_clip, math.isfinite(metrics["loss"]), lr=lr)
        if is_made:
            self.nonfinite_in_a_row = 0
            return grad_norm, lr
        self._count_nonfinite(metrics["loss"], grad_norm)
        return grad_norm, 0.0

    def _applied(self, grad_clip: float, is_finite: bool, **settings: Any) -> tuple[float, bool]:
        """Clips the gradient, updates the masters with AdamW's `settings`, rounds them into the parameters, and begins a new
        gradient. Returns the gradient norm, and whether the update was made: nothing changes if the gradient is not finite."""
        gradients = self.model.take_gradients()
        grad_norm = clip(gradients, grad_clip)
        is_made = is_finite and math.isfinite(grad_norm)
        if is_made:
            for group in self.optimiser.param_groups:
                group.update(settings)
            if self.lent is not None:
                self.lent.keep()
                self.lent = None
            self._update_masters(gradients)
        self.model.forget_gradients()
        return grad_norm, is_made

    def _update_masters(self, gradients: Sequence[Tensor | None]) -> None:
        if isinstance(self.optimiser, HostAdamW):
            self.optimiser.update(gradients, self.model.parameters)
            return
        for master, gradient in zip(self.model.masters, gradients, strict=True):
            master.grad = gradient
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.model.round_to_policy()

    def _lr(self, metrics: Mapping[str, float]) -> float:
        section, supervised = self.learner, self.sft.step_count
        if self.is_supervised:
            base = self.sft.lr or section.lr
            return learning_rate(self.step_count, base, section.warmup_steps, supervised, section.schedule)
        steps = section.steps - supervised
        lr = learning_rate(self.step_count - supervised, section.lr, section.warmup_steps, steps, section.schedule)
        if section.advantage == "vcpo":
            lr *= learning_rate_scale(metrics["ratio/rollout_ess"], LR_SCALE_MIN)
        return lr

    def _count_nonfinite(self, loss: float, grad_norm: float) -> None:
        self.nonfinite_steps += 1
        self.nonfinite_in_a_row += 1
        if self.nonfinite_in_a_row > self.nonfinite_steps_max:
            raise TrainingError(
                f"step {self.step_count}: expected a finite loss and gradient, got loss {loss} and gradient norm "
                f"{grad_norm}, for {self.nonfinite_in_a_row} steps in a row; their batches are in not_finite/ of the run "
                "folder"
            )

    # ---- the reference: the teacher, or the base model of the KL penalty

    def _reference_model(self) -> PolicyModel | None:
        teacher, model = self.learner.teacher, self.model
        if not teacher and self.loss.kl_coefficient <= 0:
            return None
        if not teacher and model.adapter is not None:
            return model  # without its adapter it is the base
        path = teacher or model.path
        reference = PolicyModel(
            path, model.weights_dtype, model.device, model.policy.temperature, model.ranks, masters_on_host=None
        )
        if reference.vocabulary_size < model.vocabulary_size or reference.policy.is_packed < model.policy.is_packed:
            raise ConfigError(
                f"learner.teacher {path}: expected at least the model's {model.vocabulary_size} embeddings, and attention alone "
                f"if the model has nothing else, got {reference.vocabulary_size} of a {reference.config.model_type}"
            )
        if model.policy.attention is not reference.policy.attention:
            reference.policy.attend_by(model.policy.attention)
        return reference

    def _reference_logprobs(self, inputs: PackedInputs) -> Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad(), without_adapter(self.reference.hf_model):
            logprobs_T: Tensor = self.reference.policy(replace(inputs, experts_PLK=None))[0]
        return logprobs_T

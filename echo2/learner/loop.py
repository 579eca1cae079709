"""The training loop: batch, step, publication, checkpoint, row; repeat.

Guarantees: a batch is on disk before it is trained on; the event loop keeps serving while a step runs, because the trainer has its
own thread; publications and checkpoints are written while the next steps run; each second counts once, under the phase that spent
it. Waits for: enough complete groups (pool), the trainer's thread, the previous version or checkpoint if another is due;
`waiting` names the wait for rollouts or evaluation and its start.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from echo2.base.errors import TrainingError
from echo2.base.ids import Step, Version
from echo2.base.units import format_seconds
from echo2.cost_model.sizing import CHECKPOINT_BYTES_PER_S, STEPS_MAX, steps_between
from echo2.learner.audit import Auditor
from echo2.learner.metrics import (
    RunFacts,
    Sink,
    StepTimes,
    Utilisation,
    left_out_by_worker,
    number_in,
    peak_flops_of,
    state_fields,
    step_row,
    supervised_row,
    task_fields,
)
from echo2.learner.options import LearnerOptions
from echo2.learner.publishing.checkpoint import Checkpoint, groups_state
from echo2.learner.publishing.publisher import VersionPublisher
from echo2.learner.recent import RecentRollouts
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.learner.rollouts.pool import RolloutPool
from echo2.learner.startup import Prepared
from echo2.learner.training.ranks import world_size
from echo2.learner.training.trainer import StepResult
from echo2.outside import monotonic, unix_now
from echo2.outside.guard import no_stop_iteration

_log = logging.getLogger("echo2.learner")
T = TypeVar("T")
EVALUATION = "evaluation"  # what the loop waits for after its last step


class TrainingLoop:
    """Runs the steps on the trainer's thread. `facts`: fields of rows that do not come from the step; the coordinator's plan
    updates them. `waiting`: what the loop waits for (empty if nothing) and since when."""

    def __init__(
        self, options: LearnerOptions, prepared: Prepared, pool: RolloutPool, publisher: VersionPublisher,
        auditor: Auditor, sinks: Sequence[Sink], executor: ThreadPoolExecutor,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.options, self.p, self.pool, self.publisher, self.auditor = options, prepared, pool, publisher, auditor
        self.sinks, self.executor, self.on_step = sinks, executor, on_step
        device = prepared.model.device
        card_flops = peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else 0.0  # 0: unknown
        self.facts = RunFacts(0.0, prepared.model.flops_per_position, card_flops * world_size())
        self.steps = options.config.learner.steps
        self.checkpoint_every = options.config.learner.checkpoint_every_steps  # 0: by what a checkpoint and a step cost
        self.utilisation = Utilisation()
        self.last_row: Mapping[str, object] = {}
        self.equal_reward_steps = 0  # newest in a row; a teacher's advantages do not come from rewards
        self.waiting: tuple[str, float] = ("", 0.0)
        self.warm_start = ""  # how far it is, while it runs
        self.checkpoint_s = 0.0  # how long the newest checkpoint blocked the loop
        self.publish_waits: deque[float] = deque(maxlen=32)  # of the newest steps, for their mean
        self._checkpoint_task: asyncio.Task[None] | None = None
        self._checkpointed = prepared.checkpoint_step
        self._told_every = 0
        self.is_exported = False  # after the last step, its evaluations and the finished model
        self.is_stopped = False
        self._is_warm = False
        self.recent = RecentRollouts()

    @property
    def step(self) -> int:
        return self.p.team.step_count

    @property
    def is_supervised(self) -> bool:
        return self.p.conversations is not None and self.step < self.p.conversations.steps

    @property
    def is_finished(self) -> bool:
        return self.step >= self.steps

    @property
    def idle_s(self) -> float:
        """Average seconds per step spent waiting for checkpoints and publications."""
        waited_s = sum(self.publish_waits) / max(1, len(self.publish_waits))
        return waited_s + self.checkpoint_s / self.checkpoint_every_steps

    @property
    def checkpoint_every_steps(self) -> int:
        """Steps between checkpoints: from the options, or from the current cost of a checkpoint and a step."""
        if self.checkpoint_every or not self.utilisation.recent:
            return self.checkpoint_every or STEPS_MAX
        cost_s = self.checkpoint_s or self.p.team.checkpoint_bytes / (CHECKPOINT_BYTES_PER_S * world_size())
        return steps_between(cost_s, *self.utilisation.means_s)

    def stop(self) -> None:
        self.is_stopped = True
        self.pool.stop()

    async def run(self, next_step: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Trains until the last step or `stop`, then writes a checkpoint. If the prompts run out before the last step, raises
        that error after the checkpoint. `next_step`: makes a step in place of training; False: there is none any more."""
        next_step = next_step or self._train_batch
        if self.auditor.is_on:
            newest = self.p.schedule.newest
            scorer = await self.in_trainer(lambda: self.p.team.scorer(self.auditor.versions_max, newest))
            self.auditor.begin(scorer, self.executor, lambda: bool(self.waiting[0]))
            self.auditor.keep(newest, self.p.published)
        self.p.published = {}  # drop the reference: the publisher holds them while they are the newest
        if self.is_supervised:
            await self._warm_start()
        if not self.is_supervised:
            await self._make_up()
        while not self.is_finished and not self.is_stopped and await next_step():
            pass
        await self.publisher.settled()
        if self.is_finished or self.p.team.starts_from_base:  # a user's trainer has kept no other step
            await self._checkpoint(StepTimes())
        await self._checkpoint_written()
        if self.is_finished and not self.is_stopped:
            self.waiting = (EVALUATION, monotonic())
            await self.pool.evaluations_ended()
            self.waiting = ("", 0.0)
        if self.pool.exhausted is not None and not self.is_finished and not self.is_stopped:
            raise self.pool.exhausted

    async def _warm_start(self) -> None:
        """Trains on conversations until the last supervised step or `stop`. Until it is on disk, no prompt is drawn, so no worker
        has anything to do; `_make_up` then publishes what came out."""
        data = self.p.conversations
        assert data is not None, "the supervised steps have conversations"
        held_out = await asyncio.to_thread(data.held_out)
        before = await self._held_out_loss(held_out)
        if not self.step:
            self.write({"step": 0, "unix_s": unix_now(), "supervised/held_out_loss": before})
        self.warm_start = f"the supervised warm start: step {self.step} of {data.steps}, held-out loss {before:.3f}"
        self.on_step()
        while self.step < data.steps and not self.is_stopped:
            began = monotonic()
            batch = await asyncio.to_thread(data.batch, self.step)
            result = await self.in_trainer(lambda batch=batch: self.p.team.step(batch))  # type: ignore[misc]
            self.pool.groups.next_step = Step(self.step)
            if result.is_skipped:
                await asyncio.to_thread(keep_for_inspection, batch, self.p.folder.path)
            row, is_last = supervised_row(batch, result, monotonic() - began), self.step == data.steps
            if is_last:
                row["supervised/held_out_loss"] = await self._held_out_loss(held_out)
            if is_last or self._is_checkpoint_due():
                await self._checkpoint(StepTimes())
            self.warm_start = (
                f"the supervised warm start: step {self.step} of {data.steps}, loss {row['loss']:.3f}; held out "
                f"{row.get('supervised/held_out_loss', before):.3f}"
            )
            _log.info("%s  %.3g s a step", self.warm_start, row["supervised/step_s"])
            self.write(row)
            self.on_step()
        await self._checkpoint_written()
        self.warm_start = ""
        if not self.is_supervised:
            self.pool.resume()

    async def _held_out_loss(self, batch: Batch) -> float:
        return await self.in_trainer(lambda: self.p.team.cross_entropy(batch))

    async def _make_up(self) -> None:
        """At a start, writes the rows of replayed steps, then starts the publication and evaluation that a kill prevented."""
        for row in self.p.rows_again:
            self.write(row)  # metrics.jsonl ignores a second row of the same step
        is_last = self.is_finished and self.p.schedule.newest < self.step
        data = self.p.conversations
        is_warm = data is not None and self.p.schedule.newest < data.steps
        if is_last or is_warm or self.p.schedule.is_due(Step(self.step)):
            await self.publish(await self.in_trainer(self.p.team.snapshot), StepTimes())
        if is_last or not self.step:
            self.write({"step": self.step, "unix_s": unix_now()})
        self.pool.evaluate(self.p.schedule.newest, self.is_finished)

    async def _train_batch(self) -> bool:
        """Returns False if there is no batch any more."""
        times = StepTimes()
        began = monotonic()
        self.waiting = ("rollouts", monotonic())
        batch = await self.pool.next_batch()
        self.waiting = ("", 0.0)
        times.wait_s = monotonic() - began
        if batch is None:
            return False
        due_at = monotonic()
        try:
            result, snapshot = await self.in_trainer(lambda: self._train(batch, times, due_at))
        except TrainingError:
            await asyncio.to_thread(keep_for_inspection, batch, self.p.folder.path)
            raise
        self.auditor.consider(batch.groups)
        self.auditor.counts.steps += 1
        if snapshot is not None:
            await self.publish(snapshot, times)
        waited_s = (times.wait_s if self._is_warm else 0.0) + times.publish_wait_s
        self.utilisation.add(times.busy_s(result), waited_s)
        self.publish_waits.append(times.publish_wait_s)
        self._is_warm = True
        if self._is_checkpoint_due():
            await self._checkpoint(times)
        if result.is_skipped:
            await asyncio.to_thread(keep_for_inspection, batch, self.p.folder.path)
        self._record(batch, result, times)
        return True

    def _train(self, batch: Batch, times: StepTimes, due_at: float) -> tuple[StepResult, Mapping[str, Tensor] | None]:
        """Trains one step on the trainer's thread, which may first have to finish an audit. Returns the result, and the snapshot if
        one is due."""
        times.audit_wait_s = monotonic() - due_at
        next_step = Step(self.step + 1)
        is_due = self.p.schedule.is_due(next_step) or next_step >= self.steps
        result = self.p.team.step(batch, is_due, self._is_fixed_checkpoint(next_step))
        began = monotonic()
        snapshot = self.p.team.snapshot() if is_due else None
        times.diff_s = monotonic() - began
        return result, snapshot

    async def in_trainer(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, no_stop_iteration, call)

    async def publish(self, snapshot: Mapping[str, Tensor], times: StepTimes) -> None:
        self.auditor.keep(Version(self.step), snapshot)
        times.publish_wait_s += await self.publisher.publish_soon(Version(self.step), snapshot)
        self.pool.evaluate(Version(self.step), self.is_finished)

    # ---- checkpoints

    def _is_fixed_checkpoint(self, step: Step) -> bool:
        """Whether `step` is a multiple of the fixed number of steps; or, where a user's trainer does not count on multiples, the
        first after one that has none, as steps leave none that are trained again."""
        every = self.checkpoint_every
        is_missed = every > 0 and step // every > (self._checkpointed or 0) // every
        return is_missed and (self.p.team.starts_from_base or step % every == 0)

    def _is_checkpoint_due(self) -> bool:
        if self.checkpoint_every:
            return self._is_fixed_checkpoint(Step(self.step))
        if self._checkpoint_task is not None and not self._checkpoint_task.done():
            return False  # the disk is slow; do not make the loop wait for it
        every, train_s = self.checkpoint_every_steps, self.utilisation.means_s[0]
        if every != self._told_every:
            self._told_every = every
            _log.info(
                "a checkpoint every %d steps: a step trains for %.3g s, so a restart trains again for %.3g s at most",
                every, train_s, every * train_s,
            )  # fmt: skip
        return self.step - (self._checkpointed or 0) >= every

    async def _checkpoint(self, times: StepTimes) -> None:
        """Takes the state between two steps and writes it while the next steps run."""
        if self._checkpointed == self.step:
            return
        began = monotonic()
        await self._checkpoint_written()
        await self.publisher.settled()
        checkpoint = await self.take_checkpoint(self.publisher.newest_tensors, self.publisher.newest_version)
        self._checkpoint_task = asyncio.get_running_loop().create_task(self.write_checkpoint(checkpoint))
        times.checkpoint_s = self.checkpoint_s = monotonic() - began

    async def take_checkpoint(self, published: Mapping[str, Tensor], version: Version) -> Checkpoint:
        """Takes the state with these weights of `version`, which is published or about to be."""
        assert self.pool.groups.next_step == self.step, "checkpoints are taken between two steps"
        journal_from = self.pool.begin_segment(self.options.config.run.name)
        state = {"journal_from": journal_from, "groups": groups_state(self.pool.groups, version)}
        checkpoint = await self.in_trainer(lambda: self.p.team.take(self.p.store, published, version, state))
        self._checkpointed = Step(self.step)
        return checkpoint

    async def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.p.journal.forget_before(await asyncio.to_thread(self.p.store.save, checkpoint))

    async def _checkpoint_written(self) -> None:
        """Waits for the running checkpoint. If it failed, raises its error, which ends the run: the next kill would lose work."""
        if self._checkpoint_task is not None:
            task, self._checkpoint_task = self._checkpoint_task, None
            await task

    # ---- rows

    def _record(self, batch: Batch, result: StepResult, times: StepTimes) -> None:
        row = step_row(batch, result, times, self.facts)
        for peer_id, tokens in left_out_by_worker(batch, result).most_common(8):  # the metrics count all of them
            _log.warning(
                "step %d: %d tokens of worker %s are left out: their log-probabilities are too far from the learner's own",
                result.step, tokens, peer_id,
            )  # fmt: skip
        row |= state_fields(self.pool, self.publisher, self.p.schedule, self.utilisation)
        row |= self.auditor.numbers()
        row |= task_fields(batch, self.p.prompts.task_of)
        if self.pool.agents is not None:
            row |= self.pool.agents.numbers()
        self.recent.add(batch)
        is_equal = row["reward/equal_group_fraction"] == 1 and not self.options.config.learner.teacher
        self.equal_reward_steps = self.equal_reward_steps + 1 if is_equal else 0
        self.write(row)
        self._log_step(row)
        self.on_step()

    def _log_step(self, row: Mapping[str, object]) -> None:
        """`step 12/200  reward 0.413  8,200 tokens/s  2.1 s a step (10 % waiting)  6.6 min left`."""
        step, steps = self.step, self.steps
        busy, wait = number_in(row, "step_s"), number_in(row, "phase/wait_s")
        step_s = self.utilisation.means_s[1]
        parts = [
            f"step {step}/{steps}",
            f"reward {number_in(row, 'reward/mean'):.3f}",
            f"{number_in(row, 'tokens') / step_s if step_s > 0 else 0.0:,.0f} tokens/s",
            f"{format_seconds(step_s)} a step ({wait / (busy + wait) if busy + wait > 0 else 0.0:.0%} waiting)",
        ]
        if step < steps:
            parts.append(f"{format_seconds((steps - step) * step_s)} left")
        _log.info("%s", "  ".join(parts))

    def write(self, row: Mapping[str, object]) -> None:
        self.last_row = row
        for sink in self.sinks:
            sink.write(row)


# ---- batches whose loss or gradient was not finite, as JSON for manual inspection

INSPECTED_MAX = 16  # batches kept per run; later ones are only counted


def keep_for_inspection(batch: Batch, folder: Path) -> None:
    """Writes `batch` to not_finite/ in the run folder `folder`, unless `INSPECTED_MAX` batches are already there. Not for the
    event loop's thread: a batch of 6 million tokens is 300 MB of text and takes a while. It is written piece by piece, so that
    other threads get the GIL."""
    inspected = folder / "not_finite"
    inspected.mkdir(exist_ok=True)
    if len(list(inspected.glob("*.json"))) >= INSPECTED_MAX:
        return
    target = inspected / f"step-{batch.step:08d}.json"
    partial = target.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump({"step": batch.step, "groups": list(map(_readable, batch.groups))}, file)
    partial.rename(target)


def _readable(group: TrainGroup) -> dict[str, object]:
    rollouts = [
        {name: getattr(rollout, name) for name in ("index", "token_ids", "logprobs", "raw_logprobs")}
        for rollout in group.rollouts
    ]
    return {
        "group_id": group.spec.group_id, "prompt_token_ids": group.spec.prompt_token_ids, "rewards": group.rewards,
        "rollouts": rollouts,
    }  # fmt: skip

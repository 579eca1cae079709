"""Runs the audit: scores some rollouts of each batch again under the versions that they name, while training continues.

Guarantees: training waits for it at most `TRAINER_SHARE` of the time, a second or one rollout at a time; the rollouts to audit are
drawn after they have arrived, with randomness that no worker can know; a worker is accused once, on the event loop, and on numbers
that the learner computed itself; an audit that fails ends the run. Waits for: batches (`consider`), its threads.
Leaves to others: the bets (learner/audit), banning and dropping (pool).

Costs host memory for each version's changes (training/scoring), and time on the training device.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from echo2.base.ids import PeerId, Version
from echo2.cost_model.sizing import audit_versions
from echo2.learner.audit import (
    Accusation,
    AuditDraw,
    Bets,
    Evidence,
    Habits,
    KindNoise,
    Passage,
    Scorer,
    bounded_entry,
    examine,
    passage_of,
)
from echo2.learner.options import LearnerOptions
from echo2.learner.rollouts.groups import NOBODY, TrainGroup
from echo2.outside import monotonic, unix_now
from echo2.outside.guard import Tasks

TURN_TOKENS = 16_384
"""Tokens scored in one turn of the thread, prompts included; at least one rollout."""
TRAINER_TURN_S = 1.0
"""Longest turn on the trainer's thread, estimated from the speed of earlier turns; at least one rollout."""
TRAINER_SHARE = 0.1
"""Share of the trainer's thread while there is something to train on. Scoring all that is drawn by default takes half as much: a
forward pass over 12 % of the tokens, while a step takes one and a backward pass of twice its work."""
IDLE_LOOK_S = 0.05  # short beside a step
_log = logging.getLogger("echo2.learner")


@dataclass(slots=True)
class AuditCounts:
    """Counts since the process began. `tokens`: scored; `read_tokens`: prompts included; `s`: seconds of scoring."""

    steps: int = 0
    tokens: int = 0
    read_tokens: int = 0
    rollouts: int = 0
    accused: int = 0
    s: float = 0.0

    @property
    def s_per_step(self) -> float:
        return self.s / max(1, self.steps)


class Workers(Protocol):
    """What is known of the workers, and who is told of a verdict. `habits_of`: what a worker reports about its engine."""

    def habits_of(self, peer_id: PeerId, /) -> Habits: ...
    def accuse(self, peer_id: PeerId, reason: str, /, *, is_certain: bool) -> None: ...


class Auditor:
    """Audits `share` of the rollouts by the scorer given to `begin`, which keeps `versions_max` versions. Call all methods on the
    event loop's thread; times are unix seconds."""

    def __init__(
        self,
        share: float,
        rng: random.Random,
        workers: Workers,
        fail: Callable[[BaseException], None],
        versions_max: int = 1,
    ) -> None:
        self.counts = AuditCounts()
        self.draw = AuditDraw(share, rng)
        self.accused: dict[PeerId, Accusation] = {}
        self.versions_max = versions_max
        self._workers = workers
        self._is_trainer_idle: Callable[[], bool] = lambda: False
        self._trainer_thread: Executor | None = None
        self._bets: dict[PeerId, Bets] = {}
        self._noise = KindNoise()
        self._excused: set[PeerId] = set()
        self._scorer: Scorer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._tasks = Tasks(fail)
        self._is_scoring = False

    @property
    def is_on(self) -> bool:
        return self.draw.share > 0

    def numbers(self) -> Mapping[str, float]:
        return {
            "audit/tokens": self.counts.tokens,
            "audit/rollouts": self.counts.rollouts,
            "audit/s": self.counts.s,
            "audit/waiting_rollouts": len(self.draw.waiting),
            "audit/given_up_rollouts": self.draw.given_up,
            "audit/unaudited_share_max": max(self.draw.unaudited.values(), default=0.0),
            "audit/accused_workers": self.counts.accused,
        }

    def begin(self, scorer: Scorer, trainer_thread: Executor, is_trainer_idle: Callable[[], bool]) -> None:
        """Starts scoring. `trainer_thread`: runs a scorer that uses the trainer's model. `is_trainer_idle`: whether there is
        nothing to train on."""
        self._scorer, self._trainer_thread, self._is_trainer_idle = scorer, trainer_thread, is_trainer_idle

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a published version for scoring; its `tensors` must never change in place. Returns at once."""
        if self._scorer is not None:
            self._tasks.start(self._keep(self._scorer, version, tensors))

    async def _keep(self, scorer: Scorer, version: Version, tensors: Mapping[str, Tensor]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, scorer.keep, version, tensors)

    def consider(self, groups: Sequence[TrainGroup]) -> None:
        """Draws rollouts to audit from groups that were trained on or used in an evaluation. Returns at once."""
        if not self.is_on:
            return
        for group in groups:
            for member, senders in enumerate(group.senders):
                workers = [sent.peer_id for sent in senders if sent.peer_id != NOBODY]
                if not workers or self.accused.keys() & set(workers):
                    continue
                by_seed = all(self._workers.habits_of(worker).draws_by_seed for worker in workers)
                if self.draw.falls_on(workers[-1], draws_by_seed=by_seed):  # first: building a passage is expensive
                    self.draw.add(workers[-1], passage_of(group, member, self._workers.habits_of))
        if self.draw.waiting and self._scorer is not None and not self._is_scoring:
            self._is_scoring = True
            self._tasks.start(self._score_waiting(self._scorer))

    async def _score_waiting(self, scorer: Scorer) -> None:
        """Scores until nothing that was drawn is left."""
        assert self._trainer_thread is not None, "begin comes first"
        thread = self._trainer_thread if scorer.is_of_trainer else self._thread
        try:
            while drawn := self.draw.take(self._turn_tokens(scorer)):
                passages = [passage for _, passage in drawn]
                found, took_s = await asyncio.get_running_loop().run_in_executor(thread, _score, scorer, passages)
                self.counts.s += took_s
                self.counts.read_tokens += sum(len(passage.token_ids) for passage in passages)
                for (worker, _), evidence in zip(drawn, found, strict=True):
                    self._weigh(worker, evidence, unix_now())
                if scorer.is_of_trainer:
                    await self._leave_to_training(took_s)
        finally:
            self._is_scoring = False

    def _turn_tokens(self, scorer: Scorer) -> int:
        if not scorer.is_of_trainer:
            return TURN_TOKENS
        return min(TURN_TOKENS, round(TRAINER_TURN_S * self.counts.read_tokens / max(1e-6, self.counts.s)))

    async def _leave_to_training(self, took_s: float) -> None:
        """Leaves the trainer's thread to training until a turn of `took_s` is no more than its share of the time, or there is
        nothing to train on."""
        until = monotonic() + took_s * (1.0 / TRAINER_SHARE - 1.0)
        while not self._is_trainer_idle() and monotonic() < until:
            await asyncio.sleep(min(IDLE_LOOK_S, max(0.0, until - monotonic())))

    def _weigh(self, last: PeerId, found: Sequence[Evidence], now: float) -> None:
        """Judges the workers of a rollout, which `last` ended."""
        tokens = sum(len(evidence.claimed) for evidence in found)
        self.draw.on_audit(last, tokens)
        self.counts.rollouts += tokens > 0
        self.counts.tokens += tokens
        for evidence in found:
            worker = evidence.piece.worker
            kind = self._workers.habits_of(worker).kind
            self._of(worker, now).observe(evidence, kind, self._noise)
            self._noise.observe(worker, kind, evidence.claimed - evidence.exact.logprobs)
        for worker in {evidence.piece.worker for evidence in found}:
            accusation = self._of(worker, now).accusation
            if accusation is not None and worker not in self.accused:
                self.accused[worker] = accusation
                self.counts.accused += 1
                _log.warning("audit of %s: %s", worker, accusation.text)
                self._workers.accuse(worker, f"audit: {accusation.text}", is_certain=accusation.is_certain)

    # ---- verdicts

    def _of(self, worker: PeerId, now: float) -> Bets:
        bets = bounded_entry(self._bets, worker, lambda: Bets(now, worker in self._excused))
        bets.expire(now)
        return bets

    def release(self, worker: PeerId) -> None:
        """Takes a worker back on the operator's order and watches it afresh; an accusation of noise alone is not repeated."""
        accusation = self.accused.pop(worker, None)
        self._bets.pop(worker, None)
        self._noise.forget(worker)
        self.draw.forget(worker)
        if accusation is not None and not accusation.is_certain:
            self._excused.add(worker)

    async def close(self) -> None:
        await self._tasks.end()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _score(scorer: Scorer, passages: Sequence[Passage]) -> tuple[list[list[Evidence]], float]:
    """Returns the evidence of each rollout, and the seconds that took."""
    begun = monotonic()
    with scorer.turn():
        return examine(passages, scorer), monotonic() - begun


def auditor_of(
    options: LearnerOptions, rng: random.Random, workers: Workers, fail: Callable[[BaseException], None]
) -> Auditor:
    """Makes the auditor from the run's options; if an adapter is published, it audits nothing."""
    share = 0.0 if options.config.model.lora_rank else options.config.learner.audit_share
    return Auditor(share, rng, workers, fail, audit_versions(options.config.staleness.bound))

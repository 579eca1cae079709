"""The audit at work: some rollouts of each batch are scored again under the versions that they name, beside the training.

Guarantees: training never waits for it; which rollouts is decided after they are in, by dice that no worker can know
(learner/audit_draw); a worker is accused once, on the event loop; an audit that fails is told (`on_failure`). Waits for: batches
(`consider`), in a thread of its own. Leaves to others: the verdict (learner/suspicion), banning and dropping (`on_accused`).

Costs host memory for the versions that rollouts may name (learner/runtime/snapshots) and the thread's time: one forward pass
over a rollout under its version, one under an older one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from echo2.base.ids import PeerId, Version
from echo2.learner.audit import Evidence, Habits, Passage, copies, examined, passage_of
from echo2.learner.audit_draw import AuditDraw, DrawnPassage, kind_of
from echo2.learner.batch import TrainGroup
from echo2.learner.episodes import NOBODY
from echo2.learner.runtime.training_side import Scorer
from echo2.learner.suspicion import Accusation, Suspicion, SuspicionConfig

TURN_TOKENS = 16_384
"""Looked at in one turn of the thread, prompts included; one rollout at least."""
WORKERS_MAX = 16_384
STEPS_BACK = 4
_log = logging.getLogger("echo2.learner")


@dataclass(slots=True)
class AuditCounts:
    """Since the process began."""

    tokens: int = 0
    rollouts: int = 0
    accused: int = 0


class Auditor:
    """`share` of the rollouts are looked at, by a scorer that is made and used in the audit's thread. All methods belong to the
    event loop's thread."""

    def __init__(self, make_scorer: Callable[[], Scorer], share: float, rng: random.Random) -> None:
        self.counts = AuditCounts()
        self.draw = AuditDraw(share, rng)
        self.accused: dict[PeerId, Accusation] = {}
        self.on_accused: Callable[[PeerId, Accusation], None] = lambda peer_id, accusation: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.habits_of: Callable[[PeerId], Habits] = lambda peer_id: Habits()
        self._make_scorer = make_scorer
        self._config = SuspicionConfig()
        self._suspicions: dict[PeerId, Suspicion] = {}
        self._excused: set[PeerId] = set()
        self._made: Scorer | None = None  # of the thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._tasks: set[asyncio.Future[Any]] = set()
        self._is_looking = False

    @property
    def is_on(self) -> bool:
        return self.draw.share > 0

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` of a version that was published; never changed in place. Returns at once."""
        if self.is_on:
            self._begin(self._in_thread(self._keep, version, tensors))

    def consider(self, groups: Sequence[TrainGroup], now: float) -> None:
        """Draws of groups that were trained on, or that a version is evaluated by. Returns at once."""
        if not self.is_on:
            return
        for group in groups:
            for member, senders in enumerate(group.senders):
                workers = [sent.peer_id for sent in senders if sent.peer_id != NOBODY]
                if not workers or self.accused.keys() & set(workers):
                    continue
                passage = passage_of(group, member, self.habits_of)
                drawn = DrawnPassage(workers[-1], kind_of(passage), passage, now)
                self.draw.consider(drawn, all(self.habits_of(worker).draws_by_seed for worker in workers))
        if self.draw.waiting and not self._is_looking:
            self._is_looking = True
            self._begin(self._look(now))

    async def _look(self, now: float) -> None:
        """Until nothing waits."""
        try:
            while taken := self.draw.take(TURN_TOKENS):
                found = await self._in_thread(self._score, [drawn.passage for drawn in taken])
                for drawn, evidence in zip(taken, found, strict=True):
                    self._weigh(drawn, evidence, now)
        finally:
            self._is_looking = False

    def _weigh(self, drawn: DrawnPassage, found: Sequence[Evidence], now: float) -> None:
        tokens = sum(len(evidence.claimed) for evidence in found)
        self.draw.looked_at(drawn, tokens)
        self.counts.rollouts += tokens > 0
        self.counts.tokens += tokens
        for evidence in found:
            self._of(evidence.piece.worker, now).observe(evidence)
        likelihood = copies(drawn.passage, found)
        if likelihood is not None:
            self._of(drawn.worker, now).observe_copies(likelihood)
        for worker in {evidence.piece.worker for evidence in found}:
            self._judge(worker)

    # ---- in the audit's thread

    def _keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        self._scorer().keep(version, tensors)

    def _score(self, passages: Sequence[Passage]) -> list[list[Evidence]]:
        scorer = self._scorer()
        return examined(passages, scorer.versions, scorer, self._steps_back)

    def _steps_back(self) -> int:
        """One in half of all cases, two in a quarter, four in an eighth, and so on."""
        return next((1 << step for step in range(STEPS_BACK) if self.draw.rng.random() < 0.5), 1 << STEPS_BACK)

    def _scorer(self) -> Scorer:
        if self._made is None:
            self._made = self._make_scorer()
        return self._made

    def _in_thread(self, call: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.on_failure(error)

    # ---- verdicts

    def _of(self, peer_id: PeerId, now: float) -> Suspicion:
        if peer_id not in self._suspicions and len(self._suspicions) >= WORKERS_MAX:
            del self._suspicions[next(iter(self._suspicions))]
        suspicion = self._suspicions.setdefault(peer_id, Suspicion(self._config, now, peer_id in self._excused))
        suspicion.expire(now)
        return suspicion

    def _judge(self, worker: PeerId) -> None:
        suspicion = self._suspicions.get(worker)
        accusation = suspicion.accusation if suspicion is not None else None
        if accusation is not None and worker not in self.accused:
            self.accused[worker] = accusation
            self.counts.accused += 1
            _log.warning("audit of %s: %s", worker, accusation.text)
            self.on_accused(worker, accusation)

    def release(self, worker: PeerId) -> None:
        """The operator takes it back: it is watched from the start. A finding of noise alone is not made again."""
        accusation = self.accused.pop(worker, None)
        self._suspicions.pop(worker, None)
        self.draw.forget(worker)
        if accusation is not None and not accusation.is_certain:
            self._excused.add(worker)

    def close(self) -> None:
        """What is still looked at is given up."""
        for task in list(self._tasks):
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

"""Runs the audit: scores some rollouts of each batch again under the versions that they name, while training continues.

Guarantees: training waits for it at most `TRAINER_SHARE` of the time, a second or one rollout at a time; the rollouts to audit are
drawn after they have arrived, with randomness that no worker can know (learner/audit_draw), and so are their scorers
(learner/scorings): workers, if enough of them can score; the learner scores what they dispute, some known answers, and what no
worker can score; a worker is accused once, on the event loop, and on the learner's own numbers; an audit that fails is reported
(`AuditCalls`). Waits for: batches (`consider`), scorers (`tell`), its threads. Leaves to others: the verdict (learner/suspicion,
learner/disputes), banning and dropping (`AuditCalls.accused`).

Costs host memory for each version's changes (learner/runtime/snapshots). What the learner scores itself costs time on the training
device: one forward pass over a rollout under its version, one under an older one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from echo2.base.ids import PeerId, Version
from echo2.cost_model.memory import audit_versions
from echo2.learner import scorings
from echo2.learner.audit import Evidence, Habits, copies, examined, passage_of, pieces_of
from echo2.learner.audit_draw import AuditDraw, DrawnPassage, kind_of
from echo2.learner.batch import TrainGroup
from echo2.learner.disputes import LOOKS_MAX, Disputes
from echo2.learner.episodes import NOBODY
from echo2.learner.runtime.options import LearnerOptions
from echo2.learner.runtime.training_side import Scorer
from echo2.learner.scorings import Look, Scorings
from echo2.learner.suspicion import Accusation, Suspicion, SuspicionConfig
from echo2.outside import monotonic, unix_now
from echo2.scoring.request import ScoreRequest

TURN_TOKENS = 16_384
"""Tokens scored in one turn of the thread, prompts included; at least one rollout."""
TRAINER_TURN_S = 1.0
"""Longest turn on the trainer's thread, estimated from the speed of earlier turns; at least one rollout."""
TRAINER_SHARE = 0.1
"""Share of the trainer's thread while there is something to train on. Scoring all that is drawn by default takes about as much:
two forward passes over 12 % of the tokens, while a step takes one and a backward pass of twice its work."""
IDLE_LOOK_S = 0.05
WORKERS_MAX = 16_384
STEPS_BACK = 4
_log = logging.getLogger("echo2.learner")


@dataclass(slots=True)
class AuditCounts:
    """Counts since the process began. `own_`: what the learner scored itself, and the seconds that took."""

    steps: int = 0
    tokens: int = 0
    rollouts: int = 0
    accused: int = 0
    own_tokens: int = 0
    own_read_tokens: int = 0
    own_rollouts: int = 0
    own_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditCosts:
    """`fleet_share`: tokens that workers read to score, per delivered token. `own_s_per_step`: seconds of the trainer's device per
    step that the learner spends on its own scoring."""

    fleet_share: float
    own_s_per_step: float


@dataclass(frozen=True, slots=True)
class AuditCalls:
    """Callbacks. `accused`: a verdict against a worker. `lease`: send a scoring lease to a worker. `failed`: an audit raised an
    error. `habits_of`: what a worker reports about its engine."""

    accused: Callable[[PeerId, Accusation], None] = lambda peer_id, accusation: None
    lease: Callable[[PeerId, ScoreRequest, float], None] = lambda worker, request, within_s: None
    failed: Callable[[BaseException], None] = lambda error: None
    habits_of: Callable[[PeerId], Habits] = lambda peer_id: Habits()


class Auditor:
    """Audits `share` of the rollouts. Workers score them, reading at most `fleet_share` of the sampled tokens, and so does the
    scorer given to `begin`, which keeps `versions_max` versions; before `begin` the learner scores nothing itself. Call all methods
    on the event loop's thread; times are unix seconds."""

    def __init__(
        self, share: float, rng: random.Random, fleet_share: float, calls: AuditCalls, versions_max: int = 1
    ) -> None:
        self.counts = AuditCounts()
        self.draw = AuditDraw(share, rng)
        self.accused: dict[PeerId, Accusation] = {}
        self.versions_max = versions_max
        self._calls = calls
        self._is_trainer_idle: Callable[[], bool] = lambda: False
        self._trainer_thread: Executor | None = None
        self._config = SuspicionConfig()
        self.scorings = Scorings(rng, fleet_share)
        self.disputes = Disputes(self._config)
        self._own: list[Look] = []
        self._counted: dict[int, None] = {}
        self._suspicions: dict[PeerId, Suspicion] = {}
        self._excused: set[PeerId] = set()
        self._scorer: Scorer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._tasks: set[asyncio.Future[Any]] = set()
        self._is_looking = False

    @property
    def is_on(self) -> bool:
        return self.draw.share > 0

    @property
    def costs(self) -> AuditCosts:
        counts, scored = self.counts, self.scorings.counts
        return AuditCosts(scored.read_tokens / max(1, scored.delivered_tokens), counts.own_s / max(1, counts.steps))

    def begin(self, scorer: Scorer, trainer_thread: Executor, is_trainer_idle: Callable[[], bool]) -> None:
        """Starts the learner's own scoring. `trainer_thread`: runs a scorer that uses the trainer's model. `is_trainer_idle`:
        whether there is nothing to train on."""
        self._scorer, self._trainer_thread, self._is_trainer_idle = scorer, trainer_thread, is_trainer_idle

    def keep(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a published version for scoring; its `tensors` must never change in place. Returns at once."""
        if self._scorer is not None:
            self._begin(self._in_thread(self._thread, self._scorer.keep, version, tensors))
            self.tell(scorings.VersionKept(version))

    def tell(self, event: scorings.Event) -> None:
        """Takes an event from or about a scoring worker; ignores what an accused worker sends."""
        match event:
            case scorings.ScorerCame(worker) | scorings.ScoresCame(worker) if worker in self.accused:
                return
        now = unix_now()
        self._carry_out(self.scorings.handle(event, now), now)
        self._place(now)

    def consider(self, groups: Sequence[TrainGroup], now: float) -> None:
        """Draws rollouts to audit from groups that were trained on or used in an evaluation. Returns at once."""
        if not self.is_on:
            return
        for group in groups:
            for member, senders in enumerate(group.senders):
                workers = [sent.peer_id for sent in senders if sent.peer_id != NOBODY]
                if not workers or self.accused.keys() & set(workers):
                    continue
                for sent in senders:
                    if sent.peer_id != NOBODY:
                        self.scorings.handle(scorings.TokensDelivered(sent.peer_id, sent.token_count), now)
                kind = kind_of(group.rollouts[member], len(pieces_of(group, member, self._calls.habits_of)))
                by_seed = all(self._calls.habits_of(worker).draws_by_seed for worker in workers)
                if self.draw.falls_on(workers[-1], kind, by_seed):  # draw first: building a passage is expensive
                    passage = passage_of(group, member, self._calls.habits_of)
                    self.draw.add(DrawnPassage(workers[-1], kind, passage, now))
        self._place(now)

    def _place(self, now: float) -> None:
        """Hands drawn rollouts to scorers, as far as they have room."""
        while self.draw.waiting and self.scorings.has_room and self._own_tokens() < TURN_TOKENS:
            for drawn in self.draw.take(0):
                is_own = self.disputes.is_watched(piece.worker for piece in drawn.passage.pieces)
                look = scorings.LookAt(drawn, is_own, self._steps_back())
                self._carry_out(self.scorings.handle(look, now), now)

    def _carry_out(self, actions: Sequence[scorings.Action], now: float) -> None:
        for action in actions:
            match action:
                case scorings.LeaseScoring(worker, request, within_s):
                    self._calls.lease(worker, request, within_s)
                case scorings.LookSelf(look, _):
                    self.disputes.asked(look)
                    self._own.append(look)
                case scorings.Told(look, scorer, evidence):
                    self._count(look, sum(len(one.claimed) for one in evidence))
                    self._carry_out(self.disputes.told(look, scorer, evidence, now), now)
                case scorings.AccuseScorer(worker, accusation):
                    self._accuse(worker, accusation)
        if self._own and self._scorer is not None and not self._is_looking:
            self._is_looking = True
            self._begin(self._look(self._scorer, now))

    async def _look(self, scorer: Scorer, now: float) -> None:
        """Scores until the learner has nothing left to score itself."""
        assert self._trainer_thread is not None, "begin comes first"
        thread = self._trainer_thread if scorer.is_of_trainer else self._thread
        try:
            while self._own:
                taken = [self._own.pop(0)]
                most = self._turn_tokens(scorer)
                while self._own and sum(len(look.drawn.passage.token_ids) for look in taken) < most:
                    taken.append(self._own.pop(0))
                found, took_s = await self._in_thread(thread, self._score, scorer, taken)
                self.counts.own_s += took_s
                self.counts.own_read_tokens += sum(len(look.drawn.passage.token_ids) for look in taken)
                for look, evidence in zip(taken, found, strict=True):
                    self._weigh(look, evidence, now)
                self._place(now)
                if scorer.is_of_trainer:
                    await self._leave_to_training(took_s)
        finally:
            self._is_looking = False

    def _turn_tokens(self, scorer: Scorer) -> int:
        if not scorer.is_of_trainer:
            return TURN_TOKENS
        return min(TURN_TOKENS, round(TRAINER_TURN_S * self.counts.own_read_tokens / max(1e-6, self.counts.own_s)))

    async def _leave_to_training(self, took_s: float) -> None:
        """Leaves the trainer's thread to training until a turn of `took_s` is no more than its share of the time, or there is
        nothing to train on."""
        until = monotonic() + took_s * (1.0 / TRAINER_SHARE - 1.0)
        while not self._is_trainer_idle() and monotonic() < until:
            await asyncio.sleep(min(IDLE_LOOK_S, max(0.0, until - monotonic())))

    def _own_tokens(self) -> int:
        return sum(len(look.drawn.passage.token_ids) for look in self._own)

    def _count(self, look: Look, tokens: int) -> None:
        """Counts each rollout once, even if several score it."""
        if look.number in self._counted:
            return
        self._counted[look.number] = None
        if len(self._counted) > LOOKS_MAX:
            del self._counted[next(iter(self._counted))]
        self.draw.looked_at(look.drawn, tokens)
        self.counts.rollouts += tokens > 0
        self.counts.tokens += tokens

    def _weigh(self, look: Look, found: Sequence[Evidence], now: float) -> None:
        """Judges the workers of a rollout on the learner's own numbers."""
        drawn, tokens = look.drawn, sum(len(evidence.claimed) for evidence in found)
        self._count(look, tokens)
        self.counts.own_rollouts += tokens > 0
        self.counts.own_tokens += tokens
        for evidence in found:
            self._of(evidence.piece.worker, now).observe(evidence)
        likelihood = copies(drawn.passage, found)
        if likelihood is not None:
            self._of(drawn.worker, now).observe_copies(likelihood)
        for worker in {evidence.piece.worker for evidence in found}:
            self._judge(worker)
        self._carry_out(self.disputes.proven(look, tuple(found), now), now)

    # ---- in the thread that scores

    def _score(self, scorer: Scorer, looks: Sequence[Look]) -> tuple[list[list[Evidence]], float]:
        """Returns the evidence of each rollout, and the seconds that took."""
        begun = monotonic()
        passages, olders = [look.drawn.passage for look in looks], [look.older for look in looks]
        with scorer.turn():
            found = examined(passages, scorer.versions, scorer, self._steps_back, olders, scorer.together)
        return found, monotonic() - begun

    def _steps_back(self) -> int:
        """How many versions older the second scoring is: 1 with probability 1/2, 2 with 1/4, 4 with 1/8, and so on."""
        return next((1 << step for step in range(STEPS_BACK) if self.draw.rng.random() < 0.5), 1 << STEPS_BACK)

    def _in_thread(self, thread: Executor, call: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(thread, call, *arguments)

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._calls.failed(error)

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
        if accusation is not None:
            self._accuse(worker, accusation)

    def _accuse(self, worker: PeerId, accusation: Accusation) -> None:
        if worker in self.accused:
            return
        self.accused[worker] = accusation
        self.counts.accused += 1
        _log.warning("audit of %s: %s", worker, accusation.text)
        self._calls.accused(worker, accusation)
        now = unix_now()
        self._carry_out(self.scorings.handle(scorings.ScorerGone(worker), now), now)

    def release(self, worker: PeerId) -> None:
        """Takes a worker back on the operator's order and watches it afresh; an accusation of noise alone is not repeated."""
        accusation = self.accused.pop(worker, None)
        self._suspicions.pop(worker, None)
        self.draw.forget(worker)
        is_excused = accusation is not None and not accusation.is_certain
        self.disputes.forget(worker, is_excused)
        if is_excused:
            self._excused.add(worker)

    def close(self) -> None:
        """Cancels all running audits."""
        for task in list(self._tasks):
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def auditor_of(options: LearnerOptions, rng: random.Random, calls: AuditCalls) -> Auditor:
    """Makes the auditor from the run's options; if an adapter is published, it audits nothing."""
    share = 0.0 if options.trainer.lora_rank else options.audit_share
    return Auditor(share, rng, options.audit_fleet_share, calls, audit_versions(options.staleness_bound))

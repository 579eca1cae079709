"""Moves rollout groups from offer to batch and performs the side effects: offers, segments, rewards, journal, batches.

Guarantees: the answer ADMITTED is sent only once the rollout is on disk; a batch is handed out only once its composition is on
disk; the number of groups in flight follows the plan's cap. Waits for: rewards (bounded by the task's limits) and, in
`next_batch`, for enough complete groups; the reward that completes a group wakes it. Everything runs on one event loop. Leaves to
others: all decisions (learner/batcher, whose actions are carried out here), checking who may report (ingest), messages to the
coordinator (`IntakeCalls`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from echo2.base.errors import EchoError, TaskError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import GroupSpec, Rollout, RolloutSegment, SegmentVerdict, Work
from echo2.learner import batcher_events as b
from echo2.learner.batch import Batch, TrainGroup
from echo2.learner.batcher import Batcher, Held
from echo2.learner.deliveries import Deliveries
from echo2.learner.episodes import NOBODY, turn_of
from echo2.learner.exam import ExamResult
from echo2.learner.group import Draw, Group
from echo2.learner.history import GroupDropped, History, Opened, Record, SegmentBegan
from echo2.learner.holding import Holding
from echo2.learner.offers import OfferConfig
from echo2.learner.runtime.examination import Examination
from echo2.learner.runtime.journal import Journal
from echo2.learner.runtime.options import EvaluationOptions
from echo2.learner.runtime.prompts import Prompts
from echo2.learner.runtime.world import TurnAnswer
from echo2.learner.shelf import Shelf
from echo2.outside.guard import Mishaps
from echo2.tasks.runtime.rewards import RewardFailure, Scored

_log = logging.getLogger("echo2.learner")


@dataclass(slots=True)
class RewardSums:
    """Counts and seconds of the rewards computed since the last step, for the metrics."""

    scored: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class IntakeOutcome:
    """What `Intake.tell` returns to its caller, after it has carried out the actions."""

    verdicts: tuple[SegmentVerdict, ...] = ()
    is_synced_first: bool = False
    handed: tuple[Rollout, ...] | None = None
    batch: Batch | None = None
    call_group: GroupId | None = None


@dataclass(frozen=True, slots=True)
class IntakeCalls:
    """Callbacks. `untruth`: a worker's report cannot be true. `held`: a worker's completions block scorers far more often than
    others' do. `answered`: an evaluation group has all its rewards. `examined`: an evaluation has its result. `drive`: start agents
    on a group. `sampled`: an agent's call has all its tokens. `grown`: it has some more. `failed`: scoring raised an error."""

    offer: Callable[[Sequence[GroupSpec]], None] = lambda specs: None
    close: Callable[[Sequence[GroupId], str], None] = lambda group_ids, reason: None
    untruth: Callable[[PeerId, str], None] = lambda peer_id, text: None
    held: Callable[[PeerId, str], None] = lambda peer_id, text: None
    answered: Callable[[TrainGroup], None] = lambda group: None
    examined: Callable[[ExamResult], None] = lambda result: None
    drive: Callable[[GroupSpec, Draw], None] = lambda spec, draw: None
    sampled: Callable[[Rollout], None] = lambda rollout: None
    grown: Callable[[Rollout], None] = lambda rollout: None
    failed: Callable[[BaseException], None] = lambda error: None


class Intake:
    """Runs the batcher. `cursor`: number of prompts drawn so far. Takes ownership of `shelf`: from now on only events change it."""

    def __init__(
        self,
        shelf: Shelf,
        journal: Journal,
        prompts: Prompts,
        offers: OfferConfig,
        cursor: int,
        examination: Examination | None = None,
        calls: IntakeCalls | None = None,
    ) -> None:
        self._exams = examination or Examination(EvaluationOptions(prompts=0), prompts)
        self._batcher = Batcher(shelf, offers, self._exams.rules)
        self.journal = journal
        self.prompts = prompts
        self.offers = offers
        self.cursor = cursor
        self.rewards = RewardSums()
        self.holding = Holding()
        self._calls = calls or IntakeCalls()
        self.exhausted: TaskError | None = None
        self._is_stopping = False
        self._opened_in: dict[GroupId, Step] = {}
        self._exams_held: dict[Version, list[Group]] = {}
        self._progress = asyncio.Event()
        self._scoring: set[asyncio.Task[None]] = set()
        self._mishaps = Mishaps(_log)

    @property
    def held(self) -> Held:
        """Read-only view of the groups."""
        return self._batcher.held

    def holds(self, group_id: GroupId) -> bool:
        """Whether a training or evaluation group is open or waits to be used."""
        return self._batcher.group(group_id) is not None

    def lacking(self) -> list[tuple[GroupSpec, int]]:
        """Every group that still needs a worker, with the number of its tokens received so far."""
        return self._batcher.lacking()

    @property
    def exam_waits_for(self) -> str:
        """Describes what the running evaluation still lacks; empty if none is running."""
        return self._batcher.exam_waits_for

    @property
    def deliveries(self) -> Deliveries:
        """What each worker has delivered, to be reported to the coordinator."""
        return self._batcher.deliveries

    # ---- the one door

    def tell(self, event: b.Event) -> IntakeOutcome:
        """Passes an event to the batcher and carries out the resulting actions."""
        outcome = IntakeOutcome()
        self._carry_out(self._batcher.handle(event), outcome)
        return outcome

    def _carry_out(self, actions: Sequence[b.Action], outcome: IntakeOutcome) -> None:
        for action in actions:
            match action:
                case b.AnswerReport(verdicts, is_synced_first):
                    outcome.verdicts, outcome.is_synced_first = verdicts, is_synced_first
                case b.Hand(rollouts):
                    outcome.handed = rollouts
                case b.Train(batch):
                    outcome.batch = batch
                case b.Keep(record):
                    self._keep(record)
                case b.Score(rollout):
                    self._begin_scoring(rollout)
                case b.Drive(spec, draw):
                    self._calls.drive(spec, draw)
                case b.CallOpened(group_id):
                    outcome.call_group = group_id
                case b.CallGrown(rollout):
                    self._calls.grown(rollout)
                case b.CallSampled(rollout):
                    self._calls.sampled(rollout)
                case b.AskPrompts(again, fresh):
                    self._carry_out(self._batcher.handle(b.PromptsDrawn(self._draw(again, fresh))), outcome)
                case b.OfferGroups(specs):
                    self._calls.offer(specs)
                case b.Close(group_ids, reason):
                    self._calls.close(group_ids, reason)
                case b.AccuseWorker(peer_id, text):
                    self._calls.untruth(peer_id, text)
                case b.Fared(cursor, rewards):
                    self.prompts.fared(cursor, rewards)
                case b.AskQuestions(version, numbers):
                    draws = tuple(self._exams.draw(version, number) for number in numbers)
                    self._carry_out(self._batcher.handle(b.QuestionsDrawn(version, draws)), outcome)
                case b.Answered(group):
                    self._calls.answered(group)
                case b.Examined(result):
                    self._calls.examined(result)
                case b.WakeTrainer():
                    self._progress.set()

    def _keep(self, record: Record) -> None:
        self.journal.append(record)
        if isinstance(record, Opened):
            self._opened_in[record.spec.group_id] = self.journal.segment

    def _draw(self, again: Sequence[Draw], fresh: int) -> tuple[Draw, ...]:
        """Draws the prompts of `again` once more, then up to `fresh` new ones, as long as the prompts last."""
        draws = [self.prompts.seeded(draw) for draw in again]
        for _ in range(fresh):
            cursor = self.prompts.next_wanted(self.cursor)
            if not self.prompts.split.has(cursor):
                self.exhausted = self.exhausted or self.prompts.exhaustion()
                break
            draws.append(self.prompts.draw(cursor))
            self.cursor = cursor + 1
        return tuple(draws)

    # ---- segments in

    async def report(
        self, segments: Sequence[RolloutSegment], attempt: int, sender: PeerId = NOBODY
    ) -> tuple[SegmentVerdict, ...]:
        """Takes in the segments of one report for a lease that the worker `sender` holds."""
        outcome = self.tell(b.Reported(tuple(segments), attempt, sender))
        if outcome.is_synced_first:
            await self.journal.commit()
        return outcome.verdicts

    def held_rollouts(self, group_id: GroupId, attempt: int) -> tuple[Rollout, ...] | None:
        """The rollouts of a group so far, for the worker that continues it as `attempt`; None if the group is closed or another
        worker has taken it over."""
        return self.tell(b.TakenOver(group_id, attempt)).handed

    def published(self, version: Version) -> None:
        """Accepts tokens sampled by `version` from now on."""
        self.tell(b.VersionLeft(version))

    def _begin_scoring(self, rollout: Rollout) -> None:
        task = asyncio.get_running_loop().create_task(self._score(rollout))
        self._scoring.add(task)
        task.add_done_callback(self._scored)

    async def _score(self, rollout: Rollout) -> None:
        """Gets the answer to a finished turn: a reward, or the environment's message that the next turn replies to."""
        at = turn_of(rollout.group_id, rollout.index)
        group = self._batcher.group(at.root)
        if group is None:
            return
        turns = self._batcher.turns(at.root, at.index)
        context_tokens = len(turns[-1].prompt_token_ids) + len(rollout.token_ids)
        sampled = [turn.rollout.token_ids for turn in turns]
        sender = turns[-1].senders[-1].peer_id if turns[-1].senders else NOBODY
        answer = await self._answered(group, sampled, context_tokens, sender)
        if answer.scored is None:
            self.tell(b.Said(at, answer.said))
            return
        scored = answer.scored
        self._count(scored, sender)
        if scored.reward is None:
            _log.warning("no reward for rollout %d of %s: %s", at.index, at.root, scored.message)
        value, parts = (scored.reward.value, scored.reward.parts) if scored.reward else (None, {})
        self.tell(b.Rewarded(at.root, at.index, value, parts))

    async def _answered(
        self, group: Group, sampled: Sequence[Sequence[int]], context_tokens: int, sender: PeerId
    ) -> TurnAnswer:
        """The environment's answer to a completion. An unexpected error must not end the run, because a worker's text can provoke
        it: such a rollout gets no reward, and the log names its sender. An `EchoError` comes from the task and ends the run."""
        try:
            asked = self._exams if group.spec.work is Work.EVALUATE else self.prompts
            return await asked.answer(group.draw.cursor, sampled, context_tokens, sender)
        except EchoError:
            raise
        except Exception as error:  # noqa: BLE001 - a completion, that is a worker, can provoke it
            self._mishaps.note("the answer to a completion", sender, error)
            return TurnAnswer(Scored(None, RewardFailure.FAULT, f"unforeseen {type(error).__name__}", 0.0))

    def _count(self, scored: Scored, sender: PeerId) -> None:
        self.rewards.seconds += scored.seconds
        self.rewards.failed += scored.reward is None
        self.rewards.scored += scored.reward is not None
        is_held = scored.failure is not None and scored.failure.is_held_against_sender
        text = self.holding.scored(sender, scored.seconds, is_held)
        if text is not None and sender != NOBODY:
            self._calls.held(sender, text)

    def _scored(self, task: asyncio.Task[None]) -> None:
        self._scoring.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._calls.failed(error)

    # ---- batches out

    async def next_batch(self) -> Batch | None:
        """Waits for the next batch and returns it once its composition is on disk; None after `stop_drawing` or once the prompts
        are exhausted."""
        while not self._is_stopping:
            self._progress.clear()
            batch = self.tell(b.BatchWanted()).batch
            if batch is not None:
                await self.journal.commit()
                return batch
            if self._batcher.is_short:
                break
            await self._progress.wait()
        return None

    def stop_drawing(self) -> None:
        """Makes a waiting `next_batch` return; a batch that is already drawn is still handed out."""
        self._is_stopping = True
        self._progress.set()

    @property
    def waits_for(self) -> str:
        """Describes what the next batch still lacks."""
        groups = self.held.groups.values()
        ready = sum(group.is_ready for group in groups)
        need = self.offers.groups_per_step
        begun = sum(not group.is_sampled and any(one.token_ids for one in group.rollouts) for group in groups)
        unbegun = sum(not group.is_sampled for group in groups) - begun
        return (
            f"rollouts: {ready} of {need} groups complete, {begun} begun by workers, {unbegun} not begun, "
            f"{len(self._scoring)} rewards due"
        )

    # ---- restarts

    def begin_segment(self, run_id: str) -> Step:
        """Starts a journal segment at the batcher's step; returns the oldest segment that a restart from here needs."""
        held = self.held
        live = {name: opened for name, opened in self._opened_in.items() if self._batcher.group(name) is not None}
        self._opened_in = live
        self.journal.begin(SegmentBegan(run_id, held.next_step, self.cursor, tuple(held.published)))
        return min(live.values(), default=held.next_step)

    def restore(self, history: History) -> None:
        """Restores what the journal recorded; the shelf already has its groups."""
        self.cursor = max(self.cursor, history.cursor)
        self._opened_in = dict(history.opened_in)
        self._exams_held = history.exam_groups()

    def resume(self, examined: Iterable[Version] = ()) -> None:
        """Starts or resumes work. `examined`: versions whose evaluation is complete; their groups are dropped."""
        for version in self._exams_held.keys() & set(examined):
            for group in self._exams_held.pop(version):
                self.journal.append(GroupDropped(group.spec.group_id))
        self.tell(b.Resumed(self._exams_held))

    async def close(self) -> None:
        """Stops scoring and syncs the journal, which keeps what was admitted."""
        self.tell(b.OffersEnded())
        for task in list(self._scoring):
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)
        try:
            await self.journal.commit()
        except EchoError as error:
            _log.warning("the journal's end was not synced: %s", error)

"""Groups on their way, with their side effects: offers out, segments in, rewards, the journal, the next batch.

Guarantees: ADMITTED is answered only once the rollout is on the disk; a batch leaves only once its composition is; the
number of groups in flight follows the plan's cap. Waits for: rewards (bounded by the task's limits) and, in
`next_batch`, for enough complete groups; woken by the reward that completes one. Everything runs on one event loop.
Leaves to others: all decisions (learner/batcher, learner/offers), who may report (ingest), telling the coordinator
(`on_offer`, `on_close`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo2.base.errors import EchoError, TaskError
from echo2.base.ids import GroupId, PeerId, Step
from echo2.base.rollout import GroupSpec, Rollout, RolloutSegment, SegmentVerdict, Verdict
from echo2.learner.batcher import Batch, Batcher, Closure
from echo2.learner.episodes import NOBODY, TurnOf, is_later_turn, turn_of
from echo2.learner.group import Draw
from echo2.learner.history import Began, Dropped, Finished, History, Opened, drawn_of
from echo2.learner.holding import Holding
from echo2.learner.offers import OfferConfig, consume_step, groups_wanted
from echo2.learner.runtime.journal import Journal
from echo2.learner.runtime.prompts import Prompts
from echo2.learner.runtime.world import Answer
from echo2.outside.guard import Mishaps
from echo2.tasks.runtime.rewards import RewardFailure, Scored

_log = logging.getLogger("echo2.learner")


@dataclass(slots=True)
class RewardSums:
    """Of the rewards computed since the last step: counts and seconds, for the metrics."""

    scored: int = 0
    failed: int = 0
    seconds: float = 0.0


class Intake:
    """`cursor`: how many prompts of the run were drawn."""

    def __init__(self, batcher: Batcher, journal: Journal, prompts: Prompts, offers: OfferConfig, cursor: int) -> None:
        self.batcher = batcher
        self.journal = journal
        self.prompts = prompts
        self.offers = offers
        self.cursor = cursor
        self.planned_cap_rollouts: int | None = None
        self.rewards = RewardSums()
        self.holding = Holding()
        self.on_offer: Callable[[Sequence[GroupSpec]], None] = lambda specs: None
        self.on_close: Callable[[Sequence[GroupId], str], None] = lambda group_ids, reason: None
        self.on_untruth: Callable[[PeerId, str], None] = lambda peer_id, text: None
        self.on_held: Callable[[PeerId, str], None] = lambda peer_id, text: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.is_offering = True
        self.exhausted: TaskError | None = None
        self._is_stopping = False
        self._opened_in: dict[GroupId, Step] = {}
        self._retries: deque[Draw] = deque()
        self._progress = asyncio.Event()
        self._scoring: set[asyncio.Task[None]] = set()
        self._mishaps = Mishaps(_log)

    # ---- segments in

    async def report(
        self, segments: Sequence[RolloutSegment], attempt: int, sender: PeerId = NOBODY
    ) -> tuple[SegmentVerdict, ...]:
        """Takes the segments of one report of one lease, which the worker `sender` holds."""
        verdicts = tuple(self.batcher.receive(segment, attempt, sender) for segment in segments)
        for accused, text in self.batcher.untruths.take():
            self.on_untruth(accused, text)
        admitted = [v for v in verdicts if v.verdict is Verdict.ADMITTED]
        for verdict in admitted:
            group = self.batcher.groups.get(verdict.group_id)  # gone if a later segment showed it to be stale
            if group is not None:
                self.journal.append(Finished(group.rollouts[verdict.index], group.senders.get(verdict.index, ())))
                self._begin_scoring(group.rollouts[verdict.index])
        self.settle()
        if admitted or any(v.verdict is Verdict.DUPLICATE for v in verdicts):
            # A copy of a rollout whose first acknowledgement was lost is durable only once that one is.
            await self.journal.commit()
        return verdicts

    def held_rollouts(self, group_id: GroupId, attempt: int) -> list[Rollout] | None:
        return self.batcher.held_rollouts(group_id, attempt)

    def score_what_is_held(self) -> None:
        """After a restart: finished rollouts that the journal gave back have no reward, and no next turn, yet."""
        for group_id, group in list(self.batcher.groups.items()):
            if is_later_turn(group_id):
                continue
            for index in range(len(group.rollouts)):
                last = self.batcher.turns(group_id, index)[-1].rollout
                if last.is_finished and index not in group.scored:
                    self._begin_scoring(last)

    def _begin_scoring(self, rollout: Rollout) -> None:
        task = asyncio.get_running_loop().create_task(self._score(rollout))
        self._scoring.add(task)
        task.add_done_callback(self._scored)

    async def _score(self, rollout: Rollout) -> None:
        """Has a finished turn answered: by a reward, or by the world, to which the next turn then speaks."""
        at = turn_of(rollout.group_id, rollout.index)
        group = self.batcher.groups.get(at.root)
        if group is None:
            return
        turns = self.batcher.turns(at.root, at.index)
        context_tokens = len(turns[-1].prompt_token_ids) + len(rollout.token_ids)
        sampled = [turn.rollout.token_ids for turn in turns]
        sender = turns[-1].senders[-1].peer_id if turns[-1].senders else NOBODY
        answer = await self._answered(group.draw.cursor, sampled, context_tokens, sender)
        if answer.scored is None:
            self._open_turn(at, answer.said)
            return
        scored = answer.scored
        self._count(scored, sender)
        if scored.reward is None:
            _log.warning("no reward for rollout %d of %s: %s", at.index, at.root, scored.message)
        self.batcher.reward(at.root, at.index, scored.reward.value if scored.reward else None)
        if group.is_ready:
            self.prompts.fared(group.draw.cursor, [value for value in group.rewards.values() if value is not None])
        self.settle()
        if self.batcher.is_batch_ready:
            self._progress.set()

    async def _answered(
        self, cursor: int, sampled: Sequence[Sequence[int]], context_tokens: int, sender: PeerId
    ) -> Answer:
        """What the world says to a completion. Its text must not be able to end the run by an error that nobody foresaw: such
        a rollout goes without a reward, and the log names its sender. Foreseen errors are the task's own and do end it."""
        try:
            return await self.prompts.answer(cursor, sampled, context_tokens, sender)
        except EchoError:
            raise
        except Exception as error:  # noqa: BLE001 - brought about by a completion, that is, by a worker
            self._mishaps.note("the answer to a completion", sender, error)
            return Answer(Scored(None, RewardFailure.FAULT, f"unforeseen {type(error).__name__}", 0.0))

    def _count(self, scored: Scored, sender: PeerId) -> None:
        self.rewards.seconds += scored.seconds
        self.rewards.failed += scored.reward is None
        self.rewards.scored += scored.reward is not None
        is_held = scored.failure is not None and scored.failure.is_held_against_sender
        text = self.holding.scored(sender, scored.seconds, is_held)
        if text is not None and sender != NOBODY:
            self.on_held(sender, text)

    def _open_turn(self, before: TurnOf, said: tuple[int, ...]) -> None:
        """Offers the next turn of an episode, whose prompt is all that came before it."""
        spec = self.batcher.open_turn(before, said)
        if spec is None:
            return
        self._begun(spec)
        if self.is_offering:
            self.on_offer([spec])

    def _begun(self, spec: GroupSpec) -> None:
        self.journal.append(Opened(self.batcher.groups[spec.group_id].draw, spec))
        self._opened_in[spec.group_id] = self.journal.segment

    def _scored(self, task: asyncio.Task[None]) -> None:
        self._scoring.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.on_failure(error)

    # ---- groups out

    def settle(self) -> None:
        """Passes closures on and offers what the cap allows."""
        closures = self.batcher.take_closures()
        for closure in closures:
            if closure.reason != "complete":
                self.journal.append(Dropped(closure.group_id))
            if closure.retry is not None:
                self._retries.append(closure.retry)
        for reason in dict.fromkeys(closure.reason for closure in closures):
            self.on_close(_ids_of(closures, reason), reason)
        if any(closure.reason != "complete" for closure in closures) and (moved := self.batcher.move_up()):
            self.on_offer(moved)
        if self.is_offering:
            self._offer()
        if self._is_short:
            self._progress.set()

    def _offer(self) -> None:
        wanted = groups_wanted(self.offers, self.planned_cap_rollouts, self.batcher.in_flight_groups)
        specs = [spec for _ in range(wanted) if (spec := self._open_next()) is not None]
        if specs:
            self.on_offer(specs)

    def _open_next(self) -> GroupSpec | None:
        """The next prompt's group, or None when there is no prompt left."""
        if self._retries:
            draw = self.prompts.seeded(self._retries.popleft())
        else:
            cursor = self.prompts.next_wanted(self.cursor)
            if not self.prompts.split.has(cursor):
                self.exhausted = self.exhausted or self.prompts.exhaustion()
                return None
            draw = self.prompts.draw(cursor)
            self.cursor = draw.cursor + 1
        step = consume_step(self.offers, self.batcher.next_step, self.batcher.in_flight_groups)
        spec = self.batcher.open_group(draw, step)
        self._begun(spec)
        return spec

    # ---- batches out

    async def next_batch(self) -> Batch | None:
        """The next batch, its composition on the disk; None once `stop_drawing` was called or the prompts ended."""
        while not self._is_stopping:
            batch = self.batcher.draw_batch()
            self.settle()
            if batch is not None:
                self.journal.append(drawn_of(batch))
                await self.journal.commit()
                return batch
            if self._is_short:
                break
            self._progress.clear()
            await self._progress.wait()
        return None

    @property
    def _is_short(self) -> bool:
        """Whether the prompts ended and what is in flight does not make another batch."""
        return self.exhausted is not None and self.batcher.in_flight_groups < self.offers.groups_per_step

    def stop_drawing(self) -> None:
        """Ends `next_batch` where it waits; a batch that was drawn is still handed out."""
        self._is_stopping = True
        self._progress.set()

    @property
    def waits_for(self) -> str:
        """What a batch still lacks, in words."""
        ready = sum(group.is_ready for group in self.batcher.groups.values())
        need = self.offers.groups_per_step
        sampling = sum(not group.is_sampled for group in self.batcher.groups.values())
        return (
            f"rollouts: {ready} of {need} groups complete, {sampling} being sampled, {len(self._scoring)} rewards due"
        )

    # ---- restarts

    def begin_segment(self, run_id: str) -> Step:
        """Starts a journal segment at the batcher's step; returns the oldest one that a restart from here needs."""
        step = self.batcher.next_step
        live = {group_id: opened for group_id, opened in self._opened_in.items() if group_id in self.batcher.groups}
        self._opened_in = live
        self.journal.begin(Began(run_id, step, self.cursor, tuple(self.batcher.published)))
        return min(live.values(), default=step)

    def restore(self, history: History) -> None:
        """Takes up what a journal gave back; the batcher has its groups already."""
        self.cursor = max(self.cursor, history.cursor)
        self._opened_in = dict(history.opened_in)
        self.batcher.move_up()  # the journal has the steps that groups were first offered for

    async def close(self) -> None:
        """Ends scoring; what was admitted stays in the journal."""
        self.is_offering = False
        for task in list(self._scoring):
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)
        try:
            await self.journal.commit()
        except EchoError as error:
            _log.warning("the journal's end was not synced: %s", error)


def _ids_of(closures: Sequence[Closure], reason: str) -> list[GroupId]:
    return [closure.group_id for closure in closures if closure.reason == reason]

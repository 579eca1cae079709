"""The learner's rollout groups from offer to batch: offers, reports, rewards, the journal, batches, evaluations.

    opened --report--> sampled --reward--> ready --next_batch--> trained
       |                  |  ^               |
       |             another turn            |
       '------- stale, barred, ... ----------'--> closed, maybe drawn again

Guarantees: ADMITTED is answered only once the rollout is on disk, a batch is handed out only once its composition is on disk;
groups in flight follow the plan's cap; after every call, closed groups are told, groups that are now due earlier are offered
again and missing ones are drawn (`_settle`). Waits for: rewards (bounded by the task's limits) and, in `next_batch`, for enough
complete groups. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from echo2.base.errors import EchoError, TaskError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import GroupSpec, Rollout, SamplingParams, SegmentVerdict, Verdict, Work
from echo2.learner.audit import Habits
from echo2.learner.bets import bounded_entry
from echo2.learner.rollouts import journal as records
from echo2.learner.rollouts.admission import RETRIES_MAX, Closure, OpenGroups, cap_groups
from echo2.learner.rollouts.evaluation import MOVES_MAX, Evaluations, VersionEvaluation
from echo2.learner.rollouts.groups import (
    NOBODY,
    Batch,
    Group,
    TrainGroup,
    TurnOf,
    evaluated_version,
    is_driven,
    is_driven_root,
    is_later_turn,
    root_of,
    turn_of,
)
from echo2.learner.rollouts.journal import History, Journal
from echo2.learner.rollouts.prompts import Prompts
from echo2.learner.rollouts.workers import FailureStreak
from echo2.outside.guard import Mishaps, Tasks
from echo2.tasks.rewards import RewardFailure, Scored
from echo2.tasks.visible import remedy

if TYPE_CHECKING:
    from echo2.learner.rollouts.agents import Agents

_log = logging.getLogger("echo2.learner")


class PoolPort(Protocol):
    """Tells the coordinator which groups need workers and which workers are accused; hears of a question's complete answer, of an
    evaluation's row, and of an error that ends the run."""

    def offer(self, specs: Sequence[GroupSpec]) -> None: ...
    def close(self, group_ids: Sequence[GroupId], reason: str) -> None: ...
    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None: ...
    def on_answer(self, group: TrainGroup) -> None: ...
    def on_evaluation(self, row: Mapping[str, object]) -> None: ...
    def fail(self, error: BaseException) -> None: ...


REWARDS_KEPT = 256  # the mean of a reward's time, which often varies as much as it is long, is then good to 6 %


@dataclass(slots=True)
class RewardSums:
    """Failed rewards and seconds since the start, for the metrics; seconds of the newest, for the planner."""

    failed: int = 0
    seconds: float = 0.0
    _newest: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=REWARDS_KEPT))

    def add(self, seconds: float, is_last: bool) -> None:
        """An answer of the task took `seconds`; `is_last`: it ended its rollout."""
        self.seconds += seconds
        self._newest.append((seconds, is_last))

    @property
    def seconds_each(self) -> float:
        """Process seconds that a rollout takes, over the newest; 0 before the first."""
        return sum(seconds for seconds, _ in self._newest) / max(1, sum(is_last for _, is_last in self._newest))


class RolloutPool:
    """Takes ownership of `groups`: from now on only this class changes them. Offers nothing before `resume`. `cursor`: number
    of prompts drawn so far. `barred`: workers from which nothing is taken, with the reason. `cap_rollouts`: the plan's bound on
    rollouts in flight; None: no plan yet."""

    def __init__(
        self, groups: OpenGroups, journal: Journal, history: History, prompts: Prompts, evaluations: Evaluations,
        port: PoolPort,
    ) -> None:  # fmt: skip
        self.groups, self.journal, self.prompts, self.evaluations = groups, journal, prompts, evaluations
        self._port = port
        self.agents: Agents | None = None  # they play the groups whose prompts come from agents
        self.cursor = history.cursor
        self.rewards = RewardSums()
        self.failures = FailureStreak("rewards", groups.config.learner.rollouts_per_step)
        self.exhausted: TaskError | None = None
        self.barred: dict[PeerId, str] = {}
        self._habits: dict[PeerId, Habits] = {}
        self.cap_rollouts: int | None = None
        self._retries: deque[tuple[int, int]] = deque()  # prompts by number, and which try comes next
        self._evaluation: VersionEvaluation | None = None
        self._next_evaluation: Version | None = None
        self._opened_in = dict(history.opened_in)
        self._is_offering = self._is_stopping = self._is_last_out = False
        self._progress = asyncio.Event()  # towards what the training loop waits for
        self._scoring = Tasks(port.fail)
        self._mishaps = Mishaps(_log)

    # ---- what is held

    def held_tokens(self, group_id: GroupId) -> dict[int, int]:
        """How many tokens of each rollout of an open group have come; none of a group that is not open."""
        group = self.groups.groups.get(group_id)
        return {index: len(held.token_ids) for index, held in enumerate(group.rollouts)} if group is not None else {}

    @property
    def is_short(self) -> bool:
        """Whether the prompts are exhausted and the groups in flight cannot fill another batch."""
        return self.exhausted is not None and self.groups.in_flight_groups < self.groups.groups_per_step

    def fills(self, steps: int) -> bool:
        """Whether the groups in flight are enough until so many steps are complete."""
        return self.groups.in_flight_groups >= (steps - self.groups.next_step) * self.groups.groups_per_step

    @property
    def rewards_due(self) -> int:
        return len(self._scoring)

    @property
    def waits_for(self) -> str:
        groups = self.groups.training
        ready = sum(group.is_ready for group in groups)
        begun = sum(not group.is_sampled and group.is_begun for group in groups)
        unbegun = sum(not group.is_sampled for group in groups) - begun
        return (
            f"rollouts: {ready} of {self.groups.groups_per_step} groups complete, {begun} begun by workers, "
            f"{unbegun} not begun, {self.rewards_due} rewards due"
            + (f"; {self.failures.text}" if self.failures.text else "")
        )

    @property
    def evaluation_waits_for(self) -> str:
        """Describes what the running evaluation still lacks; empty if none is running."""
        return self._evaluation.waits_for(self.groups.evaluation) if self._evaluation else ""

    # ---- reports and rewards

    async def report(
        self, segments: Sequence[Rollout], attempt: int, sender: PeerId = NOBODY
    ) -> tuple[SegmentVerdict, ...]:
        """Takes in the segments of one report for a lease that `sender` holds as its `attempt`."""
        verdicts = tuple(self.groups.receive(segment, attempt, sender) for segment in segments)
        for verdict in verdicts:
            group = self.groups.groups.get(verdict.group_id)
            if group is None or verdict.verdict not in (Verdict.ADMITTED, Verdict.HELD):
                continue  # None: a later segment of this report made the group stale
            self._on_tokens(group, group.rollouts[verdict.index], verdict.verdict is Verdict.ADMITTED)
        self._settle()
        # A duplicate is synced too: if the first acknowledgement was lost, the first copy may not be on disk yet.
        if any(verdict.verdict in (Verdict.ADMITTED, Verdict.DUPLICATE) for verdict in verdicts):
            await self.journal.commit()
        return verdicts

    def _on_tokens(self, group: Group, rollout: Rollout, is_admitted: bool) -> None:
        if is_admitted:
            self.journal.append(records.finished(rollout, group.senders.get(rollout.index, ())))
            if not is_driven(rollout.group_id):
                self._scoring.start(self._score(rollout))
        if not is_driven(rollout.group_id) or self.agents is None:
            return
        if is_admitted and rollout.is_finished:
            self.agents.episodes.on_completion(rollout.group_id, rollout)
        elif not is_admitted and not rollout.is_finished:  # else a later segment of this report has finished it
            self.agents.episodes.on_tokens(rollout.group_id, rollout.token_ids)

    async def _score(self, rollout: Rollout) -> None:
        """Gets the answer to a finished turn: a reward, or the environment's message that the next turn replies to."""
        at = turn_of(rollout.group_id, rollout.index)
        group = self.groups.groups.get(at.root)
        if group is None:
            return
        turns = self.groups.turns(at.root, at.index)
        asked, last = turns[-1]
        authors = tuple(dict.fromkeys(sent.peer_id for sent in asked.senders.get(last.index, ()))) or (NOBODY,)
        sender = self.groups.workers.likeliest(authors)  # the one whose other completions wait for this one
        context_tokens = len(asked.spec.prompt_token_ids) + len(rollout.token_ids)
        sampled = [turn.token_ids for _, turn in turns]
        source = self.prompts if group.is_training else self.evaluations
        try:
            scored = await source.answer(group.cursor, sampled, context_tokens, sender)
        except EchoError:
            raise  # the task's own: it ends the run
        except Exception as error:  # noqa: BLE001 - a completion, that is a worker, can provoke it: it costs this reward alone
            self._mishaps.note("the answer to a completion", sender, error)
            scored = Scored(None, RewardFailure.FAULT, f"unforeseen {type(error).__name__}", 0.0)
        self.rewards.add(scored.seconds, is_last=not scored.reply)
        if scored.reply:
            self._offer(self.groups.open_turn(at, scored.reply))
        else:
            is_held = scored.failure is not None and scored.failure.is_held_against_sender
            self.groups.workers.on_scored(authors, scored.seconds, is_held)
            self._reward(at, scored, sender)
        self._settle()

    def _reward(self, at: TurnOf, scored: Scored, sender: PeerId) -> None:
        reward = scored.reward
        self.rewards.failed += reward is None
        if reward is not None:
            self.failures.on_success(sender)
        else:
            _log.warning("no reward for rollout %d of %s: %s", at.index, at.root, scored.message)
            if too_many := self.failures.on_failure(scored.message, sender):
                text = f"task {self.prompts.name}: {too_many}{remedy(self.failures.message)}"
                self._port.fail(TaskError(text))
        group, value = self.groups.groups.get(at.root), None if reward is None else reward.value
        if group is None:
            return
        if self._evaluation is not None and not group.is_training:
            self._evaluation.on_sample(group, at.index, value, {} if reward is None else reward.parts)
            value = value or 0.0
        self.groups.reward(at.root, at.index, value)
        self._end_ready(group)

    def _end_ready(self, group: Group) -> None:
        """Tells the evaluation its answer once all its rewards are there."""
        root, evaluation = group.spec.group_id, self._evaluation
        if not group.is_ready or group.is_training or evaluation is None:
            return
        if root not in self.groups.groups:
            evaluation.on_answer(group, ())
            return
        whole = self.groups.train_group(group)
        evaluation.on_answer(group, [self.groups.groups[name] for name in self.groups.family(root)])
        self.groups.close_family(root, "complete")
        self.evaluations.write_samples(whole)
        self._port.on_answer(whole)

    # ---- agents

    def open_call(
        self, root: GroupId, chain: int | None, prompt: tuple[int, ...], sampling: SamplingParams,
        temperature: float | None,
    ) -> GroupId | None:  # fmt: skip
        """Leases an agent's call as the next of `chain`; None starts a new one. Returns None if the group of its episode is closed.
        `temperature` counts in evaluations only."""
        spec = self.groups.open_call(root, chain, prompt, sampling, temperature)
        with self._failing():
            self._offer(spec)
        self._settle()
        return None if spec is None else spec.group_id

    def end_episode(
        self, root: GroupId, chains: Mapping[int, int], reward: float | None, parts: Mapping[str, float], *,
        is_final: bool,
    ) -> None:  # fmt: skip
        """`chains`: how many calls of each count. `reward` None: the episode failed. Not final: another one takes its seat."""
        group = self.groups.groups.get(root)
        if group is None:
            return
        if self._evaluation is not None and not group.is_training and is_final:
            self._evaluation.on_sample(group, None, reward, parts)
        counted, lost = self.groups.end_episode(root, chains, reward, is_final=is_final)
        with self._failing():
            if group.is_training:
                self.journal.append(records.scored(root, counted, reward, lost, is_final=is_final))
            self._end_ready(group)
        self._settle()

    # ---- versions, workers, the plan

    def on_published(self, version: Version) -> None:
        self.groups.publish(version)
        if self._evaluation is not None and version > self._evaluation.version:
            self._evaluation.newer.append(version)
        self._settle()

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None:
        """Bars the worker, drops what it sent and was not trained on, and reports the accusation to the coordinator."""
        self.barred[peer_id] = reason
        self.groups.drop_sent_by(peer_id)
        dropped = self._evaluation.drop_sent_by(peer_id) if self._evaluation is not None else {}
        for number, answer in dropped.items():
            self._journal_dropped(answer.group_ids)
            if answer.retry < RETRIES_MAX[Work.EVALUATE]:
                self._open_question(number, answer.retry + 1)
        self._settle()
        self._port.accuse(peer_id, reason, is_certain=is_certain)

    def release(self, peer_id: PeerId) -> None:
        """The coordinator takes the worker back: it starts with a clean slate."""
        self.barred.pop(peer_id, None)
        self.groups.workers.forgive(peer_id)

    def habits_of(self, peer_id: PeerId) -> Habits:
        """What the worker reports about its engine; the weakest assumptions if it has reported nothing yet."""
        return self._habits.get(peer_id, Habits())

    def note_habits(self, peer_id: PeerId, habits: Habits) -> None:
        """Records a worker's habits. One that once did not draw by its seeds stays marked so: otherwise it could choose with
        each report how it is tested."""
        known = bounded_entry(self._habits, peer_id, lambda: habits)
        self._habits[peer_id] = replace(habits, draws_by_seed=habits.draws_by_seed and known.draws_by_seed)

    def on_plan(self, cap_rollouts: int | None) -> None:
        self.cap_rollouts = cap_rollouts
        self._settle()

    # ---- batches

    async def next_batch(self) -> Batch | None:
        """Waits for the next batch and returns it once its composition is on disk; None after `stop` or once the prompts are
        exhausted."""
        while not self._is_stopping:
            self._progress.clear()
            batch = self.groups.draw_batch()
            if batch is not None:
                self.journal.append(records.drawn(batch))
            self._settle()  # groups may have been closed as stale in either case
            if batch is not None:
                await self.journal.commit()
                return batch
            if self.is_short:
                break
            await self._progress.wait()
        return None

    def stop(self) -> None:
        """Ends the wait for a batch and for evaluations; a batch that is already drawn is still handed out."""
        self._is_stopping = True
        self._progress.set()

    # ---- after every call

    def _settle(self) -> None:
        """Accuses liars, tells closures, moves up the groups behind them, draws missing groups, goes on with the evaluation, wakes
        the training loop."""
        with self._failing():
            accused, self.groups.workers.accused = self.groups.workers.accused, []
            for sender in accused:
                self.accuse(PeerId(sender.peer_id), sender.reason, is_certain=sender.is_certain)
            self._tell_closures()
            if self._is_offering:
                self._draw_missing()
                self._settle_evaluation()
            if self.groups.is_batch_ready or self.is_short:
                self._progress.set()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Ends the run with any error of the block, such as a task's that cannot draw: agents and workers would only hear of it."""
        try:
            yield
        except Exception as error:
            self._port.fail(error)
            raise

    def _tell_closures(self) -> None:
        by_reason: dict[str, list[Closure]] = {}
        for closure in self.groups.take_closures():
            by_reason.setdefault(closure.reason, []).append(closure)
        for reason, closures in by_reason.items():
            group_ids = [closure.group_id for closure in closures]
            # A batch has a record of its own, and an answer is kept until its evaluation is over.
            if reason != "complete":
                self._journal_dropped(group_ids)
            self._port.close(group_ids, reason)
            if self.agents is not None:
                self.agents.on_closed(group_ids, reason)
        for closure in (closure for closures in by_reason.values() for closure in closures):
            if closure.again is not None and evaluated_version(closure.group_id) is None:
                self._retries.append(closure.again)
            elif closure.again is not None:
                self._open_question(*closure.again)
        if by_reason.keys() - {"complete"} and (moved := self.groups.move_up()):
            self._port.offer(moved)

    def _journal_dropped(self, group_ids: Iterable[GroupId]) -> None:
        """The latest turn first: if the power fails in between, none is left without those before it."""
        for group_id in sorted(group_ids, key=lambda name: turn_of(name, 0).turn, reverse=True):
            self.journal.append(records.closed(group_id))

    def _draw_missing(self) -> None:
        cap = cap_groups(self.groups.config, self.cap_rollouts)
        while self.groups.in_flight_groups < cap:
            if self._retries:
                cursor, retry = self._retries.popleft()
                if not self.prompts.split.has(cursor) or self.prompts.next_wanted(cursor) != cursor:
                    continue  # since options changed, it is too long or in no pass over the data
            else:
                cursor, retry = self.prompts.next_wanted(self.cursor), 0
                if not self.prompts.split.has(cursor):
                    self.exhausted = self.exhausted or self.prompts.exhaustion()
                    return
                self.cursor = cursor + 1
            self._offer(self.groups.open_group(cursor, self.prompts.draw(cursor), retry))

    def _offer(self, spec: GroupSpec | None) -> None:
        """Records an opened group and offers it; agents' problems are played instead, and their calls are offered."""
        if spec is None:
            return
        group = self.groups.groups[spec.group_id]
        self.journal.append(records.opened(group))
        self._opened_in[spec.group_id] = self.journal.segment
        if not is_driven_root(spec.group_id):
            if self._is_offering:
                self._port.offer([spec])
        elif self.agents is not None:
            self.agents.drive(spec, group.cursor)

    # ---- evaluations, one at a time

    def evaluate(self, version: Version, is_last: bool) -> None:
        """Evaluates a published version if it is due: after the running evaluation, and instead of any version that waits."""
        self._is_last_out = is_last
        if not self._is_offering or not self.evaluations.is_due(version, is_last):
            return
        if self._evaluation is None:
            self._evaluation = self._evaluation_of(version)
        elif version > self._evaluation.version:
            self._next_evaluation = version
        self._settle()

    def _evaluation_of(self, version: Version, moves: int = 0, asked: int = 0) -> VersionEvaluation:
        newer = [known for known in self.groups.published if known > version]
        return VersionEvaluation(self.evaluations, version, moves, asked, newer=newer)

    async def evaluations_ended(self) -> None:
        """Waits until no evaluation is running, or for `stop`. An evaluation without progress ends by itself (`tick`)."""
        while self._evaluation is not None and not self._is_stopping:
            self._progress.clear()
            await self._progress.wait()

    def _open_question(self, number: int, retry: int = 0) -> None:
        if self._evaluation is not None and self._is_offering:
            version, samples = self._evaluation.version, self.evaluations.at(number)[0].samples
            self._evaluation.asked = max(self._evaluation.asked, number + 1)
            prompt = self.evaluations.draw(version, number)
            if prompt is None:
                self._evaluation.leave_out(number)
            else:
                self._offer(self.groups.open_question(number, prompt, retry, version, samples))

    def _settle_evaluation(self) -> None:
        while (evaluation := self._evaluation) is not None:
            while evaluation.asked < evaluation.rules.questions:  # this is asked with every report
                if not (numbers := evaluation.wanted(self.groups.evaluation)):
                    break
                for number in numbers:
                    self._open_question(number)
            if not evaluation.is_answered:
                return
            self._end_evaluation(evaluation)

    def tick(self, now: float) -> None:
        """Moves an evaluation without progress to the newest version, or gives it up. Call about every second; `now`: seconds."""
        evaluation, groups = self._evaluation, self.groups.evaluation
        if evaluation is None or not evaluation.is_stuck(groups, now, self._is_last_out):
            return
        if not evaluation.newer or evaluation.moves >= MOVES_MAX:
            reason = (
                f"no answer to the evaluation of version {evaluation.version} came for {evaluation.idle_s(now):.0f} s, "
                "longer than its answers take: no worker is at it, or only slow ones"
            )
            self._end_evaluation(evaluation, reason)
        else:
            moves = evaluation.moves + evaluation.is_begun(groups)
            self._drop_evaluation(evaluation)
            self._evaluation, self._next_evaluation = self._evaluation_of(evaluation.newer[-1], moves), None
        self._settle()

    def _drop_evaluation(self, evaluation: VersionEvaluation) -> None:
        self._journal_dropped(evaluation.group_ids)
        self.groups.drop_evaluation()
        self._evaluation = None
        self._tell_closures()

    def _end_evaluation(self, evaluation: VersionEvaluation, reason: str = "") -> None:
        row = self.evaluations.record(evaluation, reason)  # first: without room for it, a restart has its answers still
        self._drop_evaluation(evaluation)
        version, self._next_evaluation = self._next_evaluation, None
        self._evaluation = None if version is None else self._evaluation_of(version)
        if row is not None:
            self._port.on_evaluation(row)
        self._progress.set()

    # ---- restarts

    def begin_segment(self, run_id: str) -> Step:
        """Starts a journal segment; returns the oldest segment that a restart from here needs."""
        held = {*self.groups.groups, *(self._evaluation.group_ids if self._evaluation is not None else ())}
        self._opened_in = {name: step for name, step in self._opened_in.items() if name in held}
        self.journal.begin(records.began(run_id, self.groups.next_step, self.cursor, self.groups.published))
        return min(self._opened_in.values(), default=self.groups.next_step)

    def resume(self) -> None:
        """Starts work, or resumes it with the groups that the journal restored. Finished rollouts have no reward or next turn
        yet, so they are scored. Restored groups are not offered here: the next hello sends them."""
        self._is_offering = True
        self.groups.draw_again(self._is_current)
        self.groups.move_up()  # the journal has the steps that groups were first offered for
        self._resume_evaluation()
        for group_id, group in self.groups.groups.items():
            if is_driven(group_id) or is_later_turn(group_id):
                continue
            for index in range(len(group.rollouts)):
                _, last = self.groups.turns(group_id, index)[-1]
                if last.is_finished and index not in group.rewards:
                    self._scoring.start(self._score(last))
        self._settle()

    def _is_current(self, spec: GroupSpec) -> bool:
        """Whether the run samples as it did when the group was opened: an engine that is laid out for shorter sequences would
        refuse it, and the trainer computes at one temperature."""
        now = replace(self.prompts.sampling, seed=spec.sampling.seed)
        is_alike = records.is_as_recorded(spec, replace(spec, sampling=now))
        if is_alike and not self.prompts.excess_of(spec.prompt_token_ids):
            return True
        _log.info("group %s is given up for another: the run's [sampling] has changed", spec.group_id)
        return False

    def _resume_evaluation(self) -> None:
        """Goes on with the newest evaluation that has no result, and drops the groups of others. Questions that the run asks
        otherwise now are asked again, under other names, and so are those of agents, which did not survive the restart: a worker
        that still samples for an earlier one cannot add to a new one."""
        rules, restored = self.evaluations, self.groups.evaluation
        versions = {group.spec.exact_version for group in restored}
        left = [version for version in versions if version is not None and version not in self.evaluations.rewards]
        newest = max(left, default=None) if rules.questions else None
        current = {
            group.spec.group_id: group
            for group in restored if group.spec.exact_version == newest and group.cursor < rules.questions
        }  # fmt: skip
        roots = {name for name, group in current.items() if rules.asks(group)}
        again: list[tuple[int, int]] = []
        dropped = [group for group in restored if root_of(group.spec.group_id) not in roots]
        for group in dropped:
            del self.groups.groups[group.spec.group_id]
            if group.spec.group_id in current and not is_later_turn(group.spec.group_id):
                again.append((group.cursor, group.retry + 1))
        self._journal_dropped(group.spec.group_id for group in dropped)
        if newest is None:
            return
        asked = 1 + max((group.cursor for group in current.values()), default=-1)
        self._evaluation = self._evaluation_of(newest, asked=asked)
        # Some may be missing: the power failed between the end of a question's group and the opening of its next one.
        missing = set(range(asked)) - {group.cursor for group in current.values()}
        for number, retry in (*again, *((number, 0) for number in sorted(missing))):
            self._open_question(number, retry)

    async def close(self) -> None:
        """Stops offering and scoring and syncs the journal, which keeps what was admitted."""
        self._is_offering = False
        await self._scoring.end()
        try:
            await self.journal.commit()
        except EchoError as error:
            _log.warning("the journal's end was not synced: %s", error)

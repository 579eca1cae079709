"""A rollout pool on a stage: its coordinator, journal, prompts and rewards are played, and it can be killed at any moment."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

from echo2.base.errors import DiskFull, TaskError
from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, Verdict, VersionSpan, Work
from echo2.config.run import RunConfig
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.evaluation import Evaluations as RunEvaluations, QuestionSet, VersionEvaluation
from echo2.learner.rollouts.groups import Batch, Prompt, TrainGroup, evaluated_version
from echo2.learner.rollouts.journal import History, began
from echo2.learner.rollouts.pool import RolloutPool
from echo2.tasks.rewards import RewardFailure, Scored
from echo2.tasks.task import Reward
from echo2.wire.gen.echo2.v1.journal_pb2 import JournalRecord
from tests.unit.learner.made import groups_config

STOP, PROMPTS = 1, 400
ALICE, BOB = PeerId("alice"), PeerId("bob")
SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(STOP,))
GREEDY = replace(SAMPLING, temperature=0.0)
PATIENCE_S = 60.0
LOOP = asyncio.new_event_loop()


def draw(cursor: int) -> Prompt:
    return (5, 6, 7), replace(SAMPLING, seed=cursor)


def piece(
    group_id: str, index: int, tokens: Sequence[int], offset: int = 0, version: int = 0, **changes: Any
) -> Rollout:
    """Tokens of a rollout; the stop token ends it."""
    finish = FinishReason.STOP if tokens and tokens[-1] == STOP else FinishReason.UNFINISHED
    numbers = tuple(-0.5 for _ in tokens)
    spans = (VersionSpan(Version(version), len(tokens)),) if tokens else ()
    segment = Rollout(GroupId(group_id), index, tuple(tokens), numbers, numbers, spans, finish, offset=offset)
    return replace(segment, **changes)


class Journal:
    """In memory. `synced`: how many records no power cut can take."""

    def __init__(self) -> None:
        self.records: list[tuple[Step, JournalRecord]] = []
        self.synced, self.segment, self.is_full = 0, Step(0), False

    def begin(self, first: JournalRecord) -> None:
        self.segment = Step(first.header.step)
        self.append(first)
        self.synced = len(self.records)

    def append(self, record: JournalRecord) -> None:
        if self.is_full:
            raise DiskFull("journal: no space left")
        self.records.append((self.segment, record))

    async def commit(self) -> None:
        target = len(self.records)
        await asyncio.sleep(0)
        self.synced = max(self.synced, target)


class Prompts:
    """The run's prompts; each answer is given by the test. `due`: what waits for it."""

    name = "stage"

    def __init__(self, count: int) -> None:
        self.sampling, self.too_long = SAMPLING, set[int]()  # prompts by number
        self.split = SimpleNamespace(has=lambda cursor: cursor < count)
        self.due: list[asyncio.Future[Scored]] = []

    def next_wanted(self, cursor: int) -> int:
        return next(number for number in itertools.count(cursor) if number not in self.too_long)

    def excess_of(self, ids: tuple[int, ...]) -> str:
        return "the limit" if self.too_long and len(ids) > 2 else ""

    def exhaustion(self) -> TaskError:
        return TaskError("data set exhausted")

    def draw(self, cursor: int) -> Prompt:
        assert cursor not in self.too_long, "the run would end"
        return ((5, 6) if self.too_long else (5, 6, 7)), replace(self.sampling, seed=cursor)

    async def answer(self, *arguments: Any) -> Scored:
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self.due.append(future)
        return await future


class Evaluations:
    """Every version is due. `rows`, `reasons`: of the ended evaluations with a result and without, in order; `rows` survive a kill,
    as their file does."""

    at, asks, questions = RunEvaluations.at, RunEvaluations.asks, RunEvaluations.questions

    def __init__(self, sets: Sequence[QuestionSet], prompts: Prompts, *, is_driven: bool) -> None:
        self.sets, self.answer, self.patience_s, self.is_driven = tuple(sets), prompts.answer, PATIENCE_S, is_driven
        self.rows: list[dict[str, Any]] = []
        self.reasons: list[str] = []

    @property
    def rewards(self) -> dict[int, float]:
        return {row["step"]: row["eval/reward"] for row in self.rows}

    def is_due(self, version: Version, is_last: bool) -> bool:
        return bool(self.questions) and version not in self.rewards

    def draw(self, version: Version, number: int) -> Prompt:
        return (5, 6), replace(GREEDY if self.is_driven else SAMPLING, seed=number)

    def write_samples(self, group: TrainGroup) -> None: ...

    def record(self, evaluation: VersionEvaluation, reason: str = "") -> Mapping[str, object] | None:
        row = {} if reason else evaluation.row()
        if row:
            self.rows.append(row)
        else:
            self.reasons.append(reason)
        return row or None


class Stage:
    """`offered`: the groups that the coordinator gives out. `acknowledged`: rollouts that workers were told are admitted."""

    def __init__(
        self, config: RunConfig | None = None, sets: Sequence[QuestionSet] = (), prompts: int = PROMPTS,
        vocabulary_size: int = 50,
    ) -> None:  # fmt: skip
        self.config, self.vocabulary_size = config or groups_config(), vocabulary_size
        self.loop = LOOP
        self.journal, self.prompts = Journal(), Prompts(prompts)
        self.evaluations = Evaluations(sets, self.prompts, is_driven=self.config.agent.is_on)
        self.offered: dict[GroupId, GroupSpec] = {}
        self.closed: list[tuple[GroupId, str]] = []
        self.accused: list[tuple[PeerId, str, bool]] = []
        self.batches: list[Batch] = []
        self.answered: list[TrainGroup] = []
        self.failures: list[BaseException] = []
        self.acknowledged: set[tuple[GroupId, int]] = set()
        self.checkpoint: tuple[Step, OpenGroups] = Step(0), self.new_groups()
        self.journal.begin(began("run", Step(0), 0, (Version(0),)))
        self.start()

    def new_groups(self) -> OpenGroups:
        return OpenGroups(self.config, self.vocabulary_size)

    def start(self, kept: int | None = None) -> None:
        """Begins, or comes back from the checkpoint and the journal. `kept`: how many of the unsynced records the disk has."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run_ready()
        if kept is not None:
            del self.journal.records[self.journal.synced + kept :]
        self.prompts.due.clear()
        self.driven: dict[GroupId, GroupSpec] = {}
        self.sampled: list[Rollout] = []
        self.grown: list[tuple[int, ...]] = []
        groups, history = self.restored()
        groups.take_closures()
        groups.drop_stale()
        pool: Any = RolloutPool
        self.pool: RolloutPool = self.loop.run_until_complete(
            self._made(pool, groups, self.journal, history, self.prompts, self.evaluations, self)
        )
        self.pool.agents = self if self.config.agent.is_on else None
        self.tell(self.pool.resume)
        self.offered = {group.spec.group_id: group.spec for group in self.pool.groups.lacking}  # as the hello says

    def restored(self) -> tuple[OpenGroups, History]:
        """What a start finds on the disk, after it has trained again."""
        history, (step, at_checkpoint) = History(), self.checkpoint
        groups = self.new_groups()
        groups.next_step, groups.published = at_checkpoint.next_step, list(at_checkpoint.published)
        groups.ledger.trained = dict(at_checkpoint.ledger.trained)
        for segment, record in self.journal.records:
            if segment >= step:
                history.apply(record, segment)
        history.restore(groups)
        while history.next_batch(groups) is not None:
            pass
        return groups, history

    @staticmethod
    async def _made(make: Any, *parts: Any) -> RolloutPool:
        made: RolloutPool = make(*parts)
        return made

    def take_checkpoint(self) -> None:
        """Begins a segment and forgets those that the pool says no restart needs."""
        oldest = self.pool.begin_segment("run")
        at = self.new_groups()
        at.next_step, at.published = self.pool.groups.next_step, list(self.pool.groups.published)
        at.ledger.trained = dict(self.pool.groups.ledger.trained)
        self.checkpoint = oldest, at
        kept = [(segment, record) for segment, record in self.journal.records if segment >= oldest]
        self.journal.records, self.journal.synced = kept, len(kept)

    # ---- what happens to it

    def run_ready(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    def tell(self, method: Any, *arguments: Any, **named: Any) -> Any:
        """Calls a method of the pool on its loop."""

        async def call() -> Any:
            return method(*arguments, **named)

        result = self.loop.run_until_complete(call())
        self.run_ready()
        return result

    def report(self, *segments: Rollout, attempt: int = 0, sender: PeerId = ALICE) -> list[Verdict]:
        verdicts = self.loop.run_until_complete(self.pool.report(segments, attempt, sender))
        self.acknowledged |= {(v.group_id, v.index) for v in verdicts if v.verdict is Verdict.ADMITTED}
        self.run_ready()
        return [verdict.verdict for verdict in verdicts]

    def reward(self, value: float | None, said: tuple[int, ...] = (), number: int = 0) -> None:
        """Answers a completion, by default the one that waits longest: with a reward, or with the environment's tokens."""
        future = self.prompts.due.pop(number)
        failure = RewardFailure.RAISED if value is None else None
        parts = {"exact": value or 0.0, "reward": 7.0, "tokens": 7.0, "pass@1": 7.0}  # the last three are a row's own
        scored = Scored(None if value is None else Reward(value, parts), failure, "planted", 0.25)
        future.set_result(Scored(None, None, "", 0.0, reply=said) if said else scored)
        self.run_ready()

    def next_batch(self) -> Batch | None:
        """A batch if one is ready; else the trainer's wait is given up."""

        async def ask() -> Batch | None:
            try:
                within_s = 5 if self.pool.groups.is_batch_ready else 0.001
                return await asyncio.wait_for(self.pool.next_batch(), within_s)
            except TimeoutError:
                return None

        batch = self.loop.run_until_complete(ask())
        self.batches += [] if batch is None else [batch]
        self.run_ready()
        return batch

    def fill(self, group_id: GroupId, version: int = 0, rewards: Sequence[float | None] = (0.0, 1.0)) -> None:
        for index, value in enumerate(rewards):
            assert self.report(piece(group_id, index, [9, STOP], version=version)) == [Verdict.ADMITTED]
            self.reward(value, number=-1)

    @property
    def questions(self) -> list[GroupId]:
        return [name for name, spec in self.offered.items() if spec.work is Work.EVALUATE]

    def answer(self, group_id: GroupId, reward: float = 1.0, sender: PeerId = ALICE) -> None:
        version = evaluated_version(group_id)
        assert version is not None
        for index in range(self.offered[group_id].rollout_count):
            self.report(piece(group_id, index, [9, STOP], version=version), sender=sender)
            self.reward(reward, number=-1)

    # ---- as the coordinator

    def offer(self, specs: Sequence[GroupSpec]) -> None:
        self.offered |= {spec.group_id: spec for spec in specs}

    def close(self, group_ids: Sequence[GroupId], reason: str) -> None:
        for group_id in group_ids:
            self.offered.pop(group_id, None)
            self.closed.append((group_id, reason))

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None:
        self.accused.append((peer_id, reason, is_certain))

    # ---- as the watcher

    def on_answer(self, group: TrainGroup) -> None:
        self.answered.append(group)

    def on_evaluation(self, row: Mapping[str, object]) -> None: ...

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    # ---- as the agents

    def drive(self, spec: GroupSpec, cursor: int) -> None:
        self.driven[spec.group_id] = spec

    @property
    def episodes(self) -> Self:
        return self

    def on_tokens(self, group_id: GroupId, token_ids: tuple[int, ...]) -> None:
        self.grown.append(token_ids)

    def on_completion(self, group_id: GroupId, rollout: Rollout) -> None:
        self.sampled.append(rollout)

    def on_closed(self, group_ids: Sequence[GroupId], reason: str) -> None:
        for group_id in group_ids:
            self.driven.pop(group_id, None)

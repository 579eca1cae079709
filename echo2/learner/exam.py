"""One evaluation ("exam"): held-out prompts ("questions"), leased for one version, from the first question to the result.

    due --AskQuestions--> opened --reports, rewards--> answered --all answered--> result
                            |   or agents' episodes       |
                            |<-- a worker is barred ------'
                            '--> no progress: again with the newest version, `MOVES_MAX` times, then given up

Guarantees: a question's rollouts hold only tokens of the exam's version. They never enter a batch, because they are on a
separate shelf from which no batch is drawn and whose ledger records nothing. At most `OPEN_MAX` questions are open at once.
An exam without progress for `patience_s` ends or moves to a newer version (sooner if newer versions overtook it). An agent's
episode lost to an infrastructure failure is counted as lost, not as reward 0. Leaves to others: which versions are
evaluated (runtime/exams), prompts and rewards (runtime/examination).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import comb

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import GroupSpec, Work
from echo2.learner.batch import TrainGroup
from echo2.learner.episodes import is_later_turn
from echo2.learner.group import Draw, Group, exam_group_id, exam_version_of
from echo2.learner.shelf import Shelf, ShelfConfig
from echo2.staleness.ledger import Ledger

OPEN_MAX = 256
"""Questions open at once; the next one opens when one is answered."""
MOVES_MAX = 3
"""How often an exam that was partly sampled restarts with a newer version."""
BEHIND_VERSIONS = 2
"""An exam that has no samples yet moves to the newest version once this many newer ones were published."""
OVERTAKEN_PATIENCE = 0.1
"""Share of `patience_s` that a begun exam waits for progress once it was overtaken so: probably no worker holds its version now."""
RETRIES_MAX = 64
"""How often a question is asked again because a worker that answered part of it was banned."""
PASSED_FROM = 1.0 - 1e-9
"""A sample passes if its reward is at least this."""


@dataclass(frozen=True, slots=True)
class ExamSet:
    """A set of `questions` prompts with `samples` completions each. `name`: as in the metrics."""

    name: str
    questions: int
    samples: int


@dataclass(frozen=True, slots=True)
class ExamRules:
    """`sets`: what to ask, in order. `patience_s`: an exam without progress for so long ends. `is_driven`: agents play the
    questions."""

    sets: tuple[ExamSet, ...] = ()
    patience_s: float = 600.0
    is_driven: bool = False

    @property
    def questions(self) -> int:
        return sum(one.questions for one in self.sets)

    def set_of(self, number: int) -> tuple[ExamSet, int]:
        """The set that contains question `number` (counted over all sets), and its index there. Raises `IndexError`."""
        for one in self.sets:
            if number < one.questions:
                return one, number
            number -= one.questions
        raise IndexError(f"question {number} after the last")


@dataclass(frozen=True, slots=True)
class SetResult:
    """`rewards[q][s]`: the reward of sample s of question q. `parts`: the scorer's other numbers, means over all samples."""

    name: str
    rewards: tuple[tuple[float, ...], ...]
    parts: Mapping[str, float]

    @property
    def reward(self) -> float:
        return statistics.fmean(value for rewards in self.rewards for value in rewards)

    def pass_at(self, k: int) -> float:
        """pass@k: probability that at least one of k samples passes; unbiased estimate from n >= k samples per question."""
        return statistics.fmean(
            1.0 - comb(len(rewards) - sum(value >= PASSED_FROM for value in rewards), k) / comb(len(rewards), k)
            for rewards in self.rewards
        )

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k: 1, 2, 4, ... up to the number of samples per question."""
        samples = min(len(rewards) for rewards in self.rewards)
        return tuple(1 << power for power in range(samples.bit_length()))


@dataclass(frozen=True, slots=True)
class ExamResult:
    """The result. If the exam was given up, `sets` is empty and `reason` says why. `lost`: episodes of agents that ended
    without a reward; None if agents do not play."""

    version: Version
    sets: tuple[SetResult, ...]
    rollouts: int
    tokens: int
    reason: str = ""
    lost: int | None = None

    @property
    def reward(self) -> float:
        """Mean over all questions of all sets."""
        return statistics.fmean(statistics.fmean(rewards) for one in self.sets for rewards in one.rewards)


@dataclass(slots=True)
class Exam:
    """The evaluation of one version. `training`: the shelf of the training groups; its accounts of workers are shared."""

    rules: ExamRules
    version: Version
    training: Shelf
    moves: int = 0
    asked: int = 0  # questions opened so far
    shelf: Shelf = field(init=False)
    _parts: dict[tuple[GroupId, int], Mapping[str, float]] = field(default_factory=dict)
    told: set[GroupId] = field(default_factory=set)  # answered, and reported closed to the coordinator
    _played: dict[GroupId, list[tuple[float, Mapping[str, float]]]] = field(default_factory=dict)  # agents' episodes
    _lost_episodes: int = 0
    _lost_numbers: set[int] = field(default_factory=set)  # questions without any episode that got a reward
    _seen: tuple[int, int] = (-1, -1)
    _progress_at: float | None = None

    def __post_init__(self) -> None:
        one = max((one.samples for one in self.rules.sets), default=1)
        config = ShelfConfig(0, one, one, self.training.config.vocabulary_size, RETRIES_MAX)
        self.shelf = Shelf(
            config, Ledger(0), Step(int(self.version)), [self.version],
            untruths=self.training.untruths, deliveries=self.training.deliveries,
        )  # fmt: skip

    def holds(self, group_id: GroupId) -> bool:
        return exam_version_of(group_id) == self.version

    # ---- questions

    def wanted(self) -> range:
        """Numbers of the questions to open now."""
        is_open = sum(not is_later_turn(group_id) for group_id in self.shelf.groups) - len(self.told)
        return range(self.asked, min(self.rules.questions, self.asked + max(0, OPEN_MAX - is_open)))

    def open(self, draws: Iterable[Draw]) -> list[GroupSpec]:
        """Opens one group per draw. `draw.cursor` is the question's number."""
        return [self._opened(draw) for draw in draws]

    def _opened(self, draw: Draw) -> GroupSpec:
        self.asked = max(self.asked, draw.cursor + 1)
        spec = GroupSpec(
            exam_group_id(self.version, draw.cursor, draw.retry, is_driven=self.rules.is_driven), draw.prompt_token_ids,
            self.rules.set_of(draw.cursor)[0].samples, draw.sampling, int(self.version), Work.EVALUATE, self.version,
        )  # fmt: skip
        self.shelf.open(spec, draw)
        return spec

    def take_back(self, groups: Iterable[Group]) -> None:
        """Restores the groups that the journal had of this exam."""
        for group in groups:
            self.shelf.groups[group.spec.group_id] = group
            self.asked = max(self.asked, group.draw.cursor + 1)

    # ---- answers

    def reward(
        self, group_id: GroupId, index: int, reward: float | None, parts: Mapping[str, float]
    ) -> TrainGroup | None:
        """Records the reward of a finished rollout; None (scoring failed) counts as 0. Returns the question's group if this
        completes it."""
        group = self.shelf.groups.get(group_id)
        if group is None:
            return None
        self._parts[group_id, index] = parts
        self.shelf.reward(group_id, index, reward or 0.0)
        if not group.is_ready or group_id in self.told:
            return None
        self.told.add(group_id)
        return self.shelf.train_group(group)

    def end_episode(
        self,
        root: GroupId,
        chains: Mapping[int, int],
        reward: float | None,
        parts: Mapping[str, float],
        *,
        is_final: bool,
    ) -> TrainGroup | None:
        """Ends an agent's episode as `Shelf.end_episode` does. Returns the question's group if this completes it."""
        group = self.shelf.groups.get(root)
        if group is None:
            return None
        if is_final and reward is not None:
            self._played.setdefault(root, []).append((reward, parts))
        self._lost_episodes += is_final and reward is None
        self.shelf.end_episode(root, chains, reward, is_final=is_final)
        if root not in self.shelf.groups:
            self._lost_numbers.add(group.draw.cursor)
            return None
        if not group.is_ready or root in self.told:
            return None
        self.told.add(root)
        return self.shelf.train_group(group)

    def drop_sent_by(self, peer_id: PeerId) -> None:
        """Closes every question that a banned worker answered even in part, so that other workers answer it again."""
        self.shelf.drop_sent_by(peer_id)
        self.told &= self.shelf.groups.keys()

    @property
    def is_answered(self) -> bool:
        return self.asked == self.rules.questions == len(self.told) + len(self._lost_numbers)

    @property
    def is_sampled(self) -> bool:
        """Whether workers have answered everything, so that only rewards are missing."""
        return self.asked == self.rules.questions and all(group.is_sampled for group in self.shelf.groups.values())

    @property
    def is_begun(self) -> bool:
        return any(rollout.token_ids for group in self.shelf.groups.values() for rollout in group.rollouts)

    def result(self) -> ExamResult:
        """The result of an answered exam."""
        assert self.is_answered, "an exam has a result once all of it is answered"
        by_number = {self.shelf.groups[group_id].draw.cursor: self.shelf.groups[group_id] for group_id in self.told}
        sets, begin = [], 0
        for one in self.rules.sets:
            groups = [by_number[number] for number in range(begin, begin + one.questions) if number in by_number]
            begin += one.questions
            if not groups:
                continue
            samples = [self._samples_of(group, one.samples) for group in groups]
            told = [parts for each in samples for _, parts in each]
            names = dict.fromkeys(name for parts in told for name in parts)
            means = {name: sum(parts.get(name, 0.0) for parts in told) / len(told) for name in names}
            sets.append(SetResult(one.name, tuple(tuple(value for value, _ in each) for each in samples), means))
        if not sets:
            return self.given_up(f"all {self._lost_episodes} episodes of agents were lost")
        return ExamResult(self.version, tuple(sets), *self._size(), lost=self._lost)

    def _samples_of(self, group: Group, samples: int) -> list[tuple[float, Mapping[str, float]]]:
        """The reward of each sample, and the scorer's other numbers."""
        group_id = group.spec.group_id
        if self.rules.is_driven:
            return self._played[group_id]
        return [(float(group.rewards[i] or 0.0), self._parts.get((group_id, i), {})) for i in range(samples)]

    def given_up(self, reason: str) -> ExamResult:
        return ExamResult(self.version, (), *self._size(), reason, self._lost)

    @property
    def _lost(self) -> int | None:
        return self._lost_episodes if self.rules.is_driven else None

    def _size(self) -> tuple[int, int]:
        """Number of begun rollouts (of ended episodes, if agents play), and of sampled tokens."""
        rollouts = [rollout for group in self.shelf.groups.values() for rollout in group.rollouts if rollout.token_ids]
        played = sum(map(len, self._played.values())) + self._lost_episodes
        return played if self.rules.is_driven else len(rollouts), sum(len(rollout.token_ids) for rollout in rollouts)

    # ---- time

    def idle_s(self, now: float) -> float:
        """Seconds since the last progress: a new token or a newly answered question."""
        seen = (len(self.told), self._size()[1])
        if seen != self._seen or self._progress_at is None:
            self._seen, self._progress_at = seen, now
        return now - self._progress_at

    def moved(self, version: Version, is_begun: bool) -> Exam:
        """The same exam from the start, with a newer version. `is_begun`: counts as one of the `MOVES_MAX` moves."""
        return Exam(self.rules, version, self.training, self.moves + is_begun)

    @property
    def waits_for(self) -> str:
        open_ones = sum(not group.is_sampled for group in self.shelf.groups.values())
        return (
            f"the evaluation of version {self.version}: {len(self.told)} of {self.rules.questions} prompts answered, "
            f"{open_ones} with workers or waiting for one"
        )


def exam_row(result: ExamResult, wall_s: float) -> dict[str, object]:
    """One line of evaluations.jsonl; docs/learner.md explains the names."""
    row: dict[str, object] = {
        "step": int(result.version), "eval/reward": result.reward, "eval/rollouts": result.rollouts,
        "eval/tokens": result.tokens, "eval/wall_s": wall_s,
    }  # fmt: skip
    if result.lost is not None:
        row["eval/lost_episodes"] = result.lost
    for one in result.sets:
        values = {"reward": one.reward} | {f"pass@{k}": one.pass_at(k) for k in one.ks} | dict(one.parts)
        if len(result.sets) == 1:
            row |= {f"eval/{name}": value for name, value in values.items() if name != "reward"}
        row |= {f"eval/{one.name}/{name}": value for name, value in values.items()}
    return row

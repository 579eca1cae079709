"""Evaluations: when one is due, its held-out questions, leased for one version alone, its progress, its result and its files.

    due --> opened --reports, rewards--> answered --all answered--> result
              |   or agents' episodes        |
              |<--- a worker is barred ------'
              '--> no progress: again with the newest version, `MOVES_MAX` times, then given up

Guarantees: version 0, the last one and the first of every `eval_every_steps` steps are evaluated, each with one line in
evaluations.jsonl; questions are never trained on, the same every time, and their seeds follow from the run's secret, so that no
worker knows them before the lease; an answer counts once; without a new answer for `patience_s` (longer where the fleet's answers
take long) an evaluation ends or moves to a newer version, at once if newer versions overtook it before its first tokens.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import comb
from pathlib import Path

from echo2.base.errors import ConfigError
from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rng import derived_seed
from echo2.config.run import RunConfig
from echo2.learner.metrics import number_in, past_evaluations
from echo2.learner.rollouts.groups import Group, Prompt, TrainGroup, evaluated_version, is_later_turn, root_of
from echo2.learner.rollouts.journal import is_as_recorded
from echo2.learner.rollouts.prompts import DRIVEN_PROMPT, Prompts, PromptWorld
from echo2.outside import monotonic, unix_now
from echo2.tasks.rewards import Scored
from echo2.tasks.split import permuted
from echo2.tasks.task import TaskInstance, TaskSpec

OPEN_MAX = 256  # questions open at once: enough for a fleet of that many workers, little enough to hold
MOVES_MAX = 3  # how often an evaluation that was partly sampled begins again with a newer version
BEHIND_VERSIONS = 2
"""An evaluation without samples moves to the newest version once this many newer ones were published."""
OVERTAKEN_PATIENCE = 0.1
"""Share of `patience_s` that a begun one waits once it was overtaken so, and any once the run's last version is out: probably no
worker holds its version now."""
SLOW_TIMES = 4.0
"""The next answer may take this many times the median answer's time; the first, while tokens come, this many times the patience."""

Sample = tuple[float, Mapping[str, float]]  # a reward, and the scorer's other numbers


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """A set of `questions` prompts with `samples` completions each. `name`: as in the metrics. `index_of`: the instance that each
    is. `world`: gives and scores them; None: the run's own tasks do."""

    name: str
    questions: int
    samples: int
    temperature: float = 0.0
    index_of: Callable[[int], int] = int
    world: PromptWorld | None = None


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """A question's answer. `retry`: of its group. `group_ids`: its group with all turns, which the journal keeps until the
    evaluation is over."""

    samples: tuple[Sample, ...]
    retry: int
    group_ids: tuple[GroupId, ...]
    senders: frozenset[PeerId]
    rollouts: int
    tokens: int


@dataclass(slots=True)
class VersionEvaluation:
    """The evaluation of one version. Methods that need the evaluation's open groups get them as `groups`."""

    rules: Evaluations
    version: Version
    moves: int = 0
    asked: int = 0  # questions opened so far
    answers: dict[int, QuestionAnswer] = field(default_factory=dict)  # by the question's number
    newer: list[Version] = field(default_factory=list)  # published since its own
    lost_episodes: int = 0  # of agents, that ended without a reward
    _samples: dict[GroupId, dict[int, Sample]] = field(default_factory=dict)  # by index; of agents, by episode
    _seen: tuple[int, int] = (-1, -1)  # answers and tokens, at the last look
    _progress_at: float | None = None
    _answered_at: float | None = None  # or begun at
    _begun_at: dict[GroupId, float] = field(default_factory=dict)
    _answers_s: list[float] = field(default_factory=list)  # from a question's first tokens to its answer
    _untimed: list[GroupId] = field(default_factory=list)  # answered since the last look

    def wanted(self, groups: Sequence[Group]) -> range:
        is_open = sum(not is_later_turn(group.spec.group_id) for group in groups)
        return range(self.asked, min(self.rules.questions, self.asked + max(0, OPEN_MAX - is_open)))

    def on_sample(self, group: Group, index: int | None, reward: float | None, parts: Mapping[str, float]) -> None:
        """Takes a sample's reward. `index`: of the rollout, whose failed scoring counts as 0; None for an agent's episode, which is
        left out if it has no reward."""
        if index is None and reward is None:
            self.lost_episodes += 1
            return
        samples = self._samples.setdefault(group.spec.group_id, {})
        samples[len(samples) if index is None else index] = (reward or 0.0, parts)

    def on_answer(self, group: Group, members: Sequence[Group]) -> None:
        """A question has all its rewards. `members`: its group and the groups of its rollouts' later turns; none if it was closed
        because all its episodes were lost."""
        samples = self._samples.pop(group.spec.group_id, {})
        self.answers[group.cursor] = QuestionAnswer(
            tuple(samples[key] for key in sorted(samples)),
            group.retry,
            tuple(member.spec.group_id for member in members),
            frozenset(sent.peer_id for member in members for sender in member.senders.values() for sent in sender),
            len(samples) if self.rules.is_driven else sum(member.begun_rollouts for member in members),
            sum(member.token_count for member in members),
        )
        self._untimed.append(group.spec.group_id)

    def leave_out(self, number: int) -> None:
        self.answers[number] = QuestionAnswer((), 0, (), frozenset(), 0, 0)

    def drop_sent_by(self, peer_id: PeerId) -> dict[int, QuestionAnswer]:
        """Drops the answers that a barred worker gave even in part, so that other workers answer the questions again. Returns them
        by number."""
        dropped = [number for number, answer in self.answers.items() if peer_id in answer.senders]
        return {number: self.answers.pop(number) for number in dropped}

    @property
    def group_ids(self) -> list[GroupId]:
        return [group_id for answer in self.answers.values() for group_id in answer.group_ids]

    @property
    def is_answered(self) -> bool:
        return self.asked == self.rules.questions == len(self.answers)

    # ---- results

    def row(self) -> dict[str, object]:
        """The result of an answered evaluation, as in evaluations.jsonl (docs/learner.md); empty if nothing was answered."""
        assert self.is_answered, "an evaluation has a result once all of it is answered"
        sets: dict[str, list[tuple[Sample, ...]]] = {}
        begin = 0
        for each in self.rules.sets:
            answers = (self.answers[number].samples for number in range(begin, begin + each.questions))
            begin += each.questions
            if samples := [answered for answered in answers if answered]:
                sets[each.name] = samples
        if not sets:
            return {}
        rollouts, tokens = self.size(())
        questions = [statistics.fmean(reward for reward, _ in each) for samples in sets.values() for each in samples]
        row: dict[str, object] = {
            "step": int(self.version), "eval/reward": statistics.fmean(questions), "eval/rollouts": rollouts,
            "eval/tokens": tokens,
        }  # fmt: skip
        if self.rules.is_driven:
            row["eval/lost_episodes"] = self.lost_episodes
        for name, samples in sets.items():
            numbers = _numbers_of(samples)
            if len(sets) == 1:  # whatever its scorer calls its numbers, the row's own stay
                row = {f"eval/{number}": value for number, value in numbers.items()} | row
            row |= {f"eval/{name}/{number}": value for number, value in numbers.items()}
        return row

    def size(self, groups: Sequence[Group]) -> tuple[int, int]:
        """Number of begun rollouts (of ended episodes, if agents play), and of sampled tokens."""
        rollouts = sum(answer.rollouts for answer in self.answers.values())
        if self.rules.is_driven:
            rollouts += self.lost_episodes + sum(map(len, self._samples.values()))
        else:
            rollouts += sum(group.begun_rollouts for group in groups)
        tokens = sum(answer.tokens for answer in self.answers.values()) + sum(group.token_count for group in groups)
        return rollouts, tokens

    # ---- time

    def is_stuck(self, groups: Sequence[Group], now: float, is_last_out: bool) -> bool:
        """Whether to move or give up: the fleet has had more time for the next answer than it needs, or newer versions overtook
        the evaluation before its first sample. Call it at every tick. `is_last_out`: no version comes after the newest. An
        overtaken evaluation without new answers probably has no worker: its version was replaced everywhere. An agent's answer
        takes many calls, and while only rewards are missing, no worker is needed: then it gets the whole patience."""
        answered_at, progress_at = self._look(groups, now)
        if len(self.newer) >= BEHIND_VERSIONS and not self.is_begun(groups):
            return True
        is_overtaken = len(self.newer) >= (1 if is_last_out else BEHIND_VERSIONS)
        is_sampled = self.asked == self.rules.questions and all(group.is_sampled for group in groups)
        patience_s = self.rules.patience_s
        if is_overtaken and not self.rules.is_driven and not is_sampled:
            patience_s *= OVERTAKEN_PATIENCE
        if self._answers_s:
            return now - answered_at >= max(patience_s, SLOW_TIMES * statistics.median(self._answers_s))
        # How long an answer takes is not known yet: tokens count, for a while.
        return now - progress_at >= patience_s or now - answered_at >= SLOW_TIMES * patience_s

    def is_begun(self, groups: Sequence[Group]) -> bool:
        return bool(self.answers) or any(group.is_begun for group in groups)

    def _look(self, groups: Sequence[Group], now: float) -> tuple[float, float]:
        """Notes the progress since the last look; returns when the last answer came, and when anything did."""
        before = self._seen
        self._seen = len(self.answers), self.size(groups)[1]
        if self._progress_at is None or self._seen != before:
            self._progress_at = now
        if self._answered_at is None or self._seen[0] != before[0]:
            self._answered_at = now
        self._answers_s += [now - self._begun_at.pop(group_id, now) for group_id in self._untimed]
        self._untimed.clear()
        for group in groups:
            if group.is_begun:
                self._begun_at.setdefault(root_of(group.spec.group_id), now)
        return self._answered_at, self._progress_at

    def idle_s(self, now: float) -> float:
        return 0.0 if self._answered_at is None else now - self._answered_at

    def waits_for(self, groups: Sequence[Group]) -> str:
        open_groups = sum(not group.is_sampled for group in groups)
        return (
            f"the evaluation of version {self.version}: {len(self.answers)} of {self.rules.questions} prompts answered, "
            f"{open_groups} with workers or waiting for one"
        )


def _numbers_of(samples: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Of a set's answers: the mean reward; pass@k for k = 1, 2, 4, ... up to the samples per question, the probability that one or
    more of k samples pass (reward 1), an unbiased estimate from n >= k samples; means of the scorer's other numbers."""
    flat = [sample for question in samples for sample in question]
    numbers = {"reward": statistics.fmean(reward for reward, _ in flat)}
    passed = [(len(question), sum(reward >= 1.0 - 1e-9 for reward, _ in question)) for question in samples]
    for k in (1 << power for power in range(min(n for n, _ in passed).bit_length())):
        numbers[f"pass@{k}"] = statistics.fmean(1.0 - comb(n - good, k) / comb(n, k) for n, good in passed)
    names = dict.fromkeys(name for _, parts in flat for name in parts)
    return {name: sum(parts.get(name, 0.0) for _, parts in flat) / len(flat) for name in names} | numbers


OWN = "held_out"  # name of the set held out of the run's own task
QUESTIONS_MAX = 16_384  # of all sets together: as many groups as a coordinator takes in one message, four times
EXAMPLES_KEPT = 8  # answers of each set in samples.jsonl: what a person reads
_log = logging.getLogger("echo2.learner")


class Evaluations:
    """The evaluations of a run. `sets`: what to ask, in order; without any, nothing is evaluated. `is_driven`: agents play the
    questions. `rewards`: mean over all prompts, by version. Makes the worlds of further tasks in the constructor, so that a wrong
    one raises `ConfigError` at the start."""

    def __init__(self, folder: Path, config: RunConfig, prompts: Prompts, patience_s: float) -> None:
        self._folder, self._prompts, task = folder, prompts, config.task
        self._every_steps = task.eval_every_steps
        self.rewards: dict[int, float] = {}
        self._newest_due = -1
        self._due_at: dict[Version, float] = {}
        sets: list[QuestionSet] = []
        for number, (name, count) in enumerate(prompts.held_out_counts):
            if count:
                temperature = _temperature(config, task.eval_samples)
                index_of = partial(prompts.split.held_out_index, number)
                sets.append(QuestionSet(name or OWN, count, task.eval_samples, temperature, index_of))
        for name, further in task.eval_sets.items():
            world = prompts.make_world(TaskSpec(further.task, further.args, prompts.seed))
            size, seed = world.size, derived_seed(prompts.seed, name)
            count, temperature = further.prompts or size or 0, _temperature(config, further.samples)
            if not count or (size is not None and count > size):
                expected = f"expected 1 to {size or QUESTIONS_MAX} prompts of {world.name}, got {further.prompts}"
                raise ConfigError(f"task.eval_sets: {name}: {expected}")
            asked = int if size is None else partial(permuted, size=size, seed=seed)
            sets.append(QuestionSet(name, count, further.samples, temperature, asked, world))
        names = [each.name for each in sets]
        if len(set(names)) != len(names):
            others = f"none called {OWN} or as a task of the mixture"
            raise ConfigError(f"task.eval_sets: expected names that differ, {others}, got {names}")
        self.sets, self.patience_s, self.is_driven = tuple(sets), patience_s, prompts.is_driven
        if self.questions > QUESTIONS_MAX:
            raise ConfigError(f"evaluation: expected at most {QUESTIONS_MAX} prompts, got {self.questions}")

    def go_on_from(self, step: int) -> None:
        """Reads what was evaluated before a restart at `step`."""
        self.rewards = past_evaluations(self._folder, step)
        self._newest_due = max(self.rewards, default=-1)

    @property
    def questions(self) -> int:
        return sum(each.questions for each in self.sets)

    def at(self, number: int) -> tuple[QuestionSet, int]:
        """The set that has question `number` (counted over all sets), and the question's position in it."""
        for each in self.sets:
            if number < each.questions:
                return each, number
            number -= each.questions
        raise IndexError(f"question {number} after the last")

    def is_due(self, version: Version, is_last: bool) -> bool:
        """Whether to evaluate a newly published version; notes it if so."""
        every = self._every_steps
        is_due = self._newest_due < 0 or version // every > self._newest_due // every or is_last
        if not is_due or version in self.rewards or not self.questions:
            return False
        self._newest_due = max(self._newest_due, version)
        self._due_at.setdefault(version, monotonic())
        return True

    @property
    def rollouts_per_step(self) -> float:
        return sum(each.questions * each.samples for each in self.sets) / self._every_steps

    # ---- questions, numbered over all sets

    def draw(self, version: Version, number: int) -> Prompt | None:
        """None for a question that cannot be asked."""
        prompts = self._prompts
        seed = prompts.secret_seed(f"{prompts.seed}/evaluation/{version}/{number}")
        asked = self.at(number)[0]
        sampling = replace(prompts.sampling, temperature=asked.temperature, seed=seed)
        if asked.temperature == 0:
            sampling = replace(sampling, top_p=1.0, top_k=0)
        if prompts.is_driven:  # the agent decides what to ask the model
            return DRIVEN_PROMPT, sampling
        ids = prompts.tokens_of(*self.problem(number), asked.name if asked.world else "")
        return None if ids is None else (ids, sampling)

    def asks(self, group: Group) -> bool:
        """Whether the group of an earlier start is what would be asked now: sets and sampling may have changed."""
        version = group.spec.exact_version
        if version is None or self.is_driven:
            return False
        if (drawn := self.draw(version, group.cursor)) is None:
            return False
        samples = self.at(group.cursor)[0].samples
        now = replace(group.spec, prompt_token_ids=drawn[0], sampling=drawn[1], rollout_count=samples)
        return is_as_recorded(group.spec, now)

    def problem(self, number: int) -> tuple[TaskInstance, PromptWorld | None]:
        """A question, and the world that scores its answer; None for the run's own world."""
        asked, place = self.at(number)
        world = self._prompts if asked.world is None else asked.world
        return world.instance(asked.index_of(place)), asked.world

    async def answer(self, number: int, turns: Sequence[Sequence[int]], context_tokens: int, sender: str) -> Scored:
        instance, world = self.problem(number)
        return await self._prompts.answer_instance(instance.index, turns, context_tokens, sender, world)

    # ---- files

    def write_samples(self, group: TrainGroup) -> None:
        """Appends the first few answers of each set to samples.jsonl."""
        asked, place = self.at(group.cursor)
        if place >= EXAMPLES_KEPT:
            return
        token_ids = (group.text_of(index)[0] for index in range(len(group.rewards)))
        try:
            prompt, *texts = map(self._prompts.chat.text_of, (group.spec.prompt_token_ids, *token_ids))
        except ConfigError:  # a worker may send tokens that no tokenizer decodes: they are worth 0
            return
        head = {
            "step": evaluated_version(group.spec.group_id), "set": asked.name, "prompt": prompt,
            "answer": self.problem(group.cursor)[0].answer,
        }  # fmt: skip
        with (self._folder / "samples.jsonl").open("a", encoding="utf-8") as samples:
            for text, reward in zip(texts, group.rewards, strict=True):
                row = head | {"completion": text, "reward": reward}
                samples.write(json.dumps(row, default=str) + "\n")  # an answer may be of any type

    def record(self, evaluation: VersionEvaluation, reason: str = "") -> Mapping[str, object] | None:
        """Writes the line of an ended evaluation and returns it; None, and a warning in the log, if it has no result. `reason`: why
        it was given up, if it was."""
        version = evaluation.version
        row = {} if reason else evaluation.row()
        if not row:
            lost = f"all {evaluation.lost_episodes} episodes of agents were lost"
            reason = reason or (lost if self.is_driven else "none of its prompts can be asked")
            _log.warning("no evaluation of version %d: %s", version, reason)
            return None
        wall_s = monotonic() - self._due_at.get(version, monotonic())
        row = {"unix_s": unix_now(), **row, "eval/wall_s": wall_s}
        reward = self.rewards[int(version)] = number_in(row, "eval/reward")
        with (self._folder / "evaluations.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        _log.info(
            "version %d: held-out reward %.3f over %s rollouts, %.1f s after it was due",
            version, reward, row["eval/rollouts"], wall_s,
        )  # fmt: skip
        return row

    def close(self) -> None:
        for each in self.sets:
            if each.world is not None:
                each.world.close()


def _temperature(config: RunConfig, samples: int) -> float:
    """One completion of a prompt is greedy; several, as pass@k needs them, are drawn as in training."""
    return config.sampling.temperature if samples > 1 else 0.0

"""The data plane of evaluations: the prompts of each named set, and the world that scores their answers.

Guarantees: the first set (in a mixture, one set per task) is held out and never trained on; a set has the same prompts in every
evaluation, so that its curve is comparable over time; the seed of a question is derived from the run's secret and the version, so
that no worker knows it before the lease. Leaves to others: leases and results (learner/exam), training prompts (prompts).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace

from echo2.base.errors import ConfigError
from echo2.base.ids import Version
from echo2.base.rng import derived_seed
from echo2.learner.exam import ExamRules, ExamSet
from echo2.learner.group import Draw
from echo2.learner.runtime.options import EvaluationOptions, EvaluationSet
from echo2.learner.runtime.prompts import DRIVEN_PROMPT, Prompts
from echo2.learner.runtime.world import PromptWorld, TurnAnswer
from echo2.tasks.split import permuted
from echo2.tasks.task import TaskInstance, TaskSpec

OWN = "held_out"
"""Name of the set held out of the run's own task."""
QUESTIONS_MAX = 16_384
"""Limit for all sets together."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One set. `world` None: held-out prompts of the run's own task, from position `first` on."""

    name: str
    questions: int
    samples: int
    temperature: float
    world: PromptWorld | None
    first: int = 0


class Examination:
    """Draws and scores the questions of all sets. `rules` has no sets if nothing is evaluated. Makes the worlds of further tasks in
    the constructor, so that a wrong one raises `ConfigError` at the start."""

    def __init__(self, options: EvaluationOptions, prompts: Prompts) -> None:
        self._prompts = prompts
        self._asked: list[_Asked] = []
        first = 0
        for name, count in prompts.held_out_counts:
            if count:
                self._asked.append(_Asked(name or OWN, count, options.samples, options.temperature, None, first))
            first += count
        for one in options.sets:
            self._asked.append(self._further(one))
        names = [one.name for one in self._asked]
        if len(set(names)) != len(names):
            others = f"none called {OWN} or as a task of the mixture"
            raise ConfigError(f"task.eval_sets: expected names that differ, {others}, got {names}")
        sets = tuple(ExamSet(one.name, one.questions, one.samples) for one in self._asked)
        self.rules = ExamRules(sets, options.patience_s, prompts.is_driven)
        if self.rules.questions > QUESTIONS_MAX:
            raise ConfigError(f"evaluation: expected at most {QUESTIONS_MAX} prompts, got {self.rules.questions}")

    def _further(self, one: EvaluationSet) -> _Asked:
        world = self._prompts.make_world(TaskSpec(one.task, one.args, self._prompts.seed))
        questions = one.prompts or world.size or 0
        if not questions or (world.size is not None and questions > world.size):
            most = world.size or QUESTIONS_MAX
            raise ConfigError(
                f"task.eval_sets: {one.name}: expected 1 to {most} prompts of {one.task}, got {one.prompts}"
            )
        return _Asked(one.name, questions, one.samples, one.temperature, world)

    def draw(self, version: Version, number: int) -> Draw:
        """Draws question `number`, counted over all sets, for its lease."""
        asked, place = self._at(number)
        prompts = self._prompts
        digest = hmac.digest(prompts.secret, f"{prompts.seed}/evaluation/{version}/{number}".encode(), "sha256")
        seed = int.from_bytes(digest[:8], "big") >> 1
        sampling = replace(prompts.sampling, temperature=asked.temperature, seed=seed)
        if asked.temperature == 0:
            sampling = replace(sampling, top_p=1.0, top_k=0)
        is_driven = prompts.is_driven  # then the agent decides what to ask the model
        return Draw(
            number, 0, DRIVEN_PROMPT if is_driven else prompts.tokens_of(self._instance(asked, place)), sampling
        )

    def problem(self, number: int) -> tuple[TaskInstance, PromptWorld | None]:
        """Question `number` for an agent, and the world that scores its answer; None for the run's own world."""
        asked, place = self._at(number)
        return self._instance(asked, place), asked.world

    async def answer(self, number: int, turns: Sequence[Sequence[int]], context_tokens: int, sender: str) -> TurnAnswer:
        """Answers a finished turn of question `number`."""
        asked, place = self._at(number)
        index = self._instance(asked, place).index
        return await self._prompts.answer_instance(index, turns, context_tokens, sender, asked.world)

    def name_of(self, number: int) -> str:
        """Name of a question's set."""
        return self._at(number)[0].name

    def place_of(self, number: int) -> int:
        """Position of a question in its set."""
        return self._at(number)[1]

    def _at(self, number: int) -> tuple[_Asked, int]:
        for asked in self._asked:
            if number < asked.questions:
                return asked, number
            number -= asked.questions
        raise IndexError("a question after the last")

    def _instance(self, asked: _Asked, place: int) -> TaskInstance:
        if asked.world is None:
            return self._prompts.held_out(asked.first + place)
        size = asked.world.size
        index = place if size is None else permuted(place, size, derived_seed(self._prompts.seed, asked.name))
        return asked.world.instance(index)

    def close(self) -> None:
        for asked in self._asked:
            if asked.world is not None:
                asked.world.close()

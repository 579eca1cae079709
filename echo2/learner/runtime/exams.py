"""Starts evaluations when they are due and records their results in evaluations.jsonl.

Guarantees: version 0 and the last version are evaluated, and in between the first version of every `every_steps` steps; training
continues meanwhile; a version gets one line, even if a kill interrupts its evaluation; answers are audited like rollouts for
training. Waits for: in `ended`, the running evaluation, which ends by itself (learner/exam); its end or `stop` wakes it. Leaves to
others: leases (learner/examining), prompts and rewards (examination).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from echo2.base.ids import Version
from echo2.learner.batch import TrainGroup
from echo2.learner.batcher_events import ExamDue
from echo2.learner.exam import ExamResult, exam_row
from echo2.learner.group import exam_version_of
from echo2.learner.runtime.examination import Examination
from echo2.learner.runtime.intake import Intake
from echo2.learner.runtime.metrics import past_evaluations
from echo2.learner.runtime.options import EvaluationOptions
from echo2.outside import monotonic, unix_now

FILE = "evaluations.jsonl"
_log = logging.getLogger("echo2.learner")


class Exams:
    """The evaluations of a run. `rewards`: mean over all prompts, by version. `written`: called with each line after writing it."""

    def __init__(
        self,
        folder: Path,
        options: EvaluationOptions,
        examination: Examination,
        intake: Intake,
        written: Callable[[Mapping[str, object]], None],
    ) -> None:
        self.rewards = past_evaluations(folder)
        self._written = written
        self._folder = folder
        self._options = options
        self._examination = examination
        self._intake = intake
        self._newest_due = max(self.rewards, default=-1)
        self._began_at: dict[Version, float] = {}
        self._news = asyncio.Event()
        self._is_stopping = False

    def version_left(self, version: Version, is_last: bool) -> None:
        """Starts the evaluation of a newly published version if one is due."""
        every = self._options.every_steps
        is_due = self._newest_due < 0 or version // every > self._newest_due // every or is_last
        if not is_due or version in self.rewards or not self._examination.rules.questions:
            return
        self._newest_due = max(self._newest_due, version)
        self._began_at.setdefault(version, monotonic())
        self._intake.tell(ExamDue(version))

    @property
    def rollouts_per_step(self) -> float:
        """Rollouts that evaluations need from workers, averaged per step."""
        return sum(one.questions * one.samples for one in self._examination.rules.sets) / self._options.every_steps

    async def ended(self) -> None:
        """Waits until no evaluation is running, or for `stop`."""
        while self._intake.exam_waits_for and not self._is_stopping:
            self._news.clear()
            await self._news.wait()

    def stop(self) -> None:
        self._is_stopping = True
        self._news.set()

    def answered(self, group: TrainGroup) -> None:
        """Appends the first few answers of each set to samples.jsonl."""
        if self._examination.place_of(group.cursor) >= self._options.examples_kept:
            return
        text_of, prompt = self._intake.prompts.text_of, group.spec.prompt_token_ids
        version = exam_version_of(group.spec.group_id)
        with (self._folder / "samples.jsonl").open("a", encoding="utf-8") as samples:
            for index, reward in enumerate(group.rewards):
                told = {"step": version, "set": self._examination.name_of(group.cursor), "prompt": text_of(prompt)}
                samples.write(
                    json.dumps(told | {"completion": text_of(group.text_of(index)[0]), "reward": reward}) + "\n"
                )

    def examined(self, result: ExamResult) -> None:
        """Writes the line of a finished evaluation; logs a warning if it has no result."""
        self._news.set()
        wall_s = monotonic() - self._began_at.get(result.version, monotonic())
        if not result.sets:
            _log.warning("no evaluation of version %d: %s", result.version, result.reason)
            return
        row = {"unix_s": unix_now(), **exam_row(result, wall_s)}
        self.rewards[int(result.version)] = result.reward
        with (self._folder / FILE).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        _log.info(
            "version %d: held-out reward %.3f over %d rollouts, %.1f s after it was due",
            result.version, result.reward, result.rollouts, wall_s,
        )  # fmt: skip
        self._written(row)

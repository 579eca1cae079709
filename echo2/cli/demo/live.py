"""Runs a run's processes on this machine from start to end, with the live screen, for `echo2 demo` and `echo2 run`.

Waits for: the end that the caller's `is_over` detects, unless nothing makes progress for `still_s`; polls twice a second.
Guarantees: every process is asked to stop when `run` returns or is cancelled. Leaves to others: which processes to start, signals,
the final report.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from echo2.base.errors import Unreachable
from echo2.cli.demo.launch import Children
from echo2.cli.demo.screen import ScreenState, draw
from echo2.cli.link_text import link_text
from echo2.cli.operator import OperatorClient
from echo2.wire.gen.echo2.v1 import coordinator_pb2

LOOK_EVERY_S = 0.5
PLAIN_LINE_EVERY_S = 10.0
STILL_STEPS = 6.0


class LiveRun:
    """`is_over`: asked after each poll. `still_s`: seconds without progress after which `run` raises Unreachable."""

    def __init__(
        self,
        children: Children,
        console: Console,
        is_plain: bool,
        is_over: Callable[[coordinator_pb2.RunStatus | None], bool],
        still_s: float = math.inf,
    ) -> None:
        self.children, self.console, self.is_plain, self._is_over = children, console, is_plain, is_over
        self.still_s = still_s
        self.moved = LastMove(time.monotonic())
        self.run_folder = children.run_folder
        self.state = ScreenState(title=f"echo2 {self.run_folder.name}")
        self.began = time.monotonic()
        self.offsets: dict[str, int] = {}
        self.printed_at = 0.0

    async def run(self, names: Sequence[str]) -> None:
        """Starts the coordinator, then `names`; returns at the end of the run, with all processes stopped."""
        try:
            await self.children.start("coordinator")
            await self.children.wait_for_links()
            for name in names:
                await self.children.start(name)
            link = link_text(f"@{self.run_folder / 'links' / 'operator.link'}")
            async with OperatorClient(link, self.run_folder / "operator") as operator:
                with self._live() as live:
                    await self._watch(operator, live)
        finally:
            await asyncio.shield(asyncio.create_task(self.children.stop_all()))

    @contextlib.contextmanager
    def _live(self) -> Iterator[Live | None]:
        if self.is_plain:
            yield None
            return
        with Live(draw(self.state), console=self.console, refresh_per_second=4, transient=False) as live:
            yield live

    async def _watch(self, operator: OperatorClient, live: Live | None) -> None:
        while True:
            self.children.raise_if_failed()
            if self.moved.still_s(self.state, time.monotonic()) > self.still_s:
                waits = self.state.status.learner.waits_for if self.state.status else ""
                raise Unreachable(
                    f"the run: expected a step, an evaluation, a version or tokens within {self.still_s:.0f} s, got none: it "
                    f"stands at step {self.state.status.learner.step if self.state.status else '?'}"
                    f"{f', waiting for {waits}' if waits else ''}; logs in {self.run_folder / 'logs'}"
                )
            with contextlib.suppress(Unreachable):  # a run survives a coordinator that is away for a while
                self.state.status = await operator.status()
            self._read_metrics()
            self._show(live)
            if self._is_over(self.state.status):
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def _read_metrics(self) -> None:
        """Reads new complete lines of metrics.jsonl and evaluations.jsonl."""
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            path = self.run_folder / "learner" / name
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self.offsets.get(name, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.offsets[name] = self.offsets.get(name, 0) + len(whole)
            for line in whole.splitlines():
                self._take(json.loads(line))

    def _take(self, row: Mapping[str, Any]) -> None:
        if "reward/mean" in row:
            self.state.rewards.append(float(row["reward/mean"]))
        if "eval/reward" in row:
            self.state.evaluations.append((int(row["step"]), float(row["eval/reward"])))

    def _show(self, live: Live | None) -> None:
        now = time.monotonic()
        self.state.elapsed_s = now - self.began
        self.state.phase = phase_of(self.state.status)
        if live is not None:
            live.update(draw(self.state))
        elif now - self.printed_at >= PLAIN_LINE_EVERY_S:
            self.printed_at = now
            self.console.print(plain_line(self.state), highlight=False, soft_wrap=True)


@dataclass(slots=True)
class LastMove:
    """Tracks when a run last made progress: a step, an evaluation, a new version, a version live on a worker, or sampled tokens.

    If only workers make progress, the limit on standing still is STILL_STEPS times as long.
    """

    at: float
    stepped_at: float = math.nan
    _seen: tuple[object, ...] = ()
    _steps: tuple[object, ...] = ()

    def still_s(self, state: ScreenState, now: float) -> float:
        """Returns the larger of the seconds since any progress, and the seconds since the learner's divided by STILL_STEPS."""
        steps: tuple[object, ...] = (len(state.rewards), len(state.evaluations))
        beats: tuple[object, ...] = ()
        if state.status is not None:
            learner = state.status.learner
            steps += (learner.step, learner.newest_version)
            beats = tuple((one.heartbeat.version, one.heartbeat.sampled_tokens) for one in state.status.workers)
        if steps != self._steps:
            self._steps, self.stepped_at = steps, now
        if (seen := (*steps, *beats)) != self._seen:
            self._seen, self.at = seen, now
        return max(now - self.at, (now - self.stepped_at) / STILL_STEPS)


def phase_of(status: coordinator_pb2.RunStatus | None) -> str:
    """Returns the run's phase in a word or two."""
    if status is not None and status.finished:
        return "finished"
    if status is None or not status.learner_is_connected:
        return "starting"
    if status.learner.is_finished:
        return "finishing"
    return "training" if status.learner.step else "first rollouts"


def plain_line(state: ScreenState) -> str:
    """Formats one status line for use without a screen. Leaves out what has not been measured yet."""
    status = state.status
    if status is None or not status.learner_is_connected:
        what = "the coordinator starts" if status is None else "the learner loads its model"
        return f"{state.elapsed_s:4.0f} s  {what}"
    learner, predicted = status.learner, status.plan.predicted_utilisation
    versions = " ".join(f"{w.name}:{w.heartbeat.version if w.heartbeat.has_version else '-'}" for w in status.workers)
    parts = [f"{state.elapsed_s:4.0f} s", f"step {learner.step}/{status.learner_hello.step_limit}"]
    if state.rewards:
        parts.append(f"reward {sum(state.rewards[-5:]) / len(state.rewards[-5:]):.2f}")
    parts += [f"version {learner.newest_version}", f"workers {versions or 'none yet'}"]
    if learner.step:
        parts.append(f"utilisation {learner.utilisation:.0%}{f' (predicted {predicted:.0%})' if predicted else ''}")
    parts += [f"buffered {learner.buffered_rollouts}", f"USD {status.usd_spent:.4f}"]
    return "  ".join([*parts, *([f"waits for {learner.waits_for}"] if learner.waits_for else [])])


def results_of(run_folder: Path) -> str:
    """Says where the model and the metrics are."""
    learner = run_folder / "learner"
    return f"the trained model is in {learner / 'model'}, one row a step in {learner / 'metrics.jsonl'}"

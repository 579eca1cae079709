"""Runs a run's processes on this machine from start to end, with the live screen, for `echo2 demo` and `echo2 run`.

Waits for: the learner's end, or what `is_over` says, unless nothing makes progress for `still_s`; polls twice a second.
Guarantees: every process is asked to stop when `run` returns or is cancelled, the coordinator of a finished run once what it
rented is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo2.base.errors import EchoError, Unreachable
from echo2.base.units import counted, format_bytes
from echo2.cli.operator import OperatorClient
from echo2.cli.options import link_text
from echo2.cli.processes import Children
from echo2.wire.gen.echo2.v1 import coordinator_pb2

LOOK_EVERY_S = 0.5  # as often as the page's stream changes
LOOKS_MAX = 2 * 86_400  # a day's
PLAIN_LINE_EVERY_S = 10.0  # a log of an hour has 360 lines
GIVE_BACK_WITHIN_S = 600.0  # twice what a command that ends a machine may take
STILL_STEPS = 6.0  # a long step looks so: only workers go on


class LiveRun:
    """`is_over`: asked after each poll with the run's status; the learner's end ends it, too. `still_s`: seconds without progress
    after which `run` raises Unreachable. `has_joined`: its learner has taken the config."""

    def __init__(
        self,
        children: Children,
        console: Console,
        is_plain: bool,
        is_over: Callable[[coordinator_pb2.RunStatus], bool],
        still_s: float = math.inf,
    ) -> None:
        self.children, self.console, self.is_plain, self._is_over = children, console, is_plain, is_over
        self.still_s, self.run_folder = still_s, children.run_folder
        self.state = ScreenState(title=f"echo2 {self.run_folder.name}")
        self.has_joined = self.has_seen_the_end = False
        self.newest = coordinator_pb2.RunStatus()  # of what is rented also after the last look at the run
        self._began, self._printed_at = time.monotonic(), -math.inf
        self._moved = LastMove(self._began)

    async def run(self, workers: Sequence[str]) -> None:
        """Starts coordinator, learner and `workers`; returns at the end of the run, with all processes stopped. A coordinator
        that knows the run as finished would send workers home, so they start once its learner has come to go on."""
        try:
            page = await self.children.start_coordinator()
            self.console.print(f"dashboard {page}", highlight=False, soft_wrap=True)
            await self.children.start("learner")
            screen = Live(draw(self.state), console=self.console, refresh_per_second=4)
            with contextlib.nullcontext() if self.is_plain else screen as live:
                is_over = False
                while not is_over:  # anew each day: certificate and link are renewed
                    async with self._operator() as operator:
                        for _ in range(LOOKS_MAX):
                            if is_over := await self._is_at_its_end(operator, live, workers):
                                break
                            await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await asyncio.shield(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        """Stops all processes, the coordinator last: nobody gives back later what a finished run has rented."""
        await self.children.stop_nodes()
        told = 0
        with contextlib.suppress(EchoError, OSError):  # an OSError: its time is over, or there is no link
            async with asyncio.timeout(GIVE_BACK_WITHIN_S):
                while self.children.is_running("coordinator"):
                    async with self._operator() as operator:
                        self.newest = await operator.status()
                    count = self.newest.open_machines
                    if not (self.newest.finished and count):
                        break
                    if count != told:
                        self.console.print(f"giving back {counted(count, 'rented machine')}", highlight=False)
                    told = count
                    await asyncio.sleep(LOOK_EVERY_S)
        if self.children.is_running("coordinator"):
            await self.children.stop("coordinator")

    def _operator(self) -> AbstractAsyncContextManager[OperatorClient]:
        link = link_text(f"@{self.run_folder / 'links' / 'operator.link'}")
        return OperatorClient.at(link, self.run_folder / "operator")

    async def _is_at_its_end(self, operator: OperatorClient, live: Live | None, workers: Sequence[str]) -> bool:
        """Looks at the processes and at the run once, and shows it."""
        state = self.state
        self.children.raise_if_failed()
        self.children.raise_if_learner_is_alone(time.monotonic())
        if self._moved.still_s(state, time.monotonic()) > self.still_s:
            waits = state.status.learner.waits_for if state.status else ""
            raise Unreachable(
                f"the run: expected a step, an evaluation, a version or tokens within {self.still_s:.0f} s, got none: it "
                f"stands at step {state.status.learner.step if state.status else '?'}"
                f"{f', waiting for {waits}' if waits else ''}; logs in {self.run_folder / 'logs'}"
            )
        with contextlib.suppress(Unreachable):  # a run survives a coordinator that is away for a while
            state.status = self.newest = await operator.status()
            self.has_joined |= state.status.learner_is_connected
        if state.status and not state.status.finished:
            for name in workers:
                if name not in self.children.processes:
                    await self.children.start(name)
        state.read(self.run_folder)
        self._show(live)
        self.has_seen_the_end = state.status is not None and self._is_over(state.status)
        return self.has_seen_the_end or not self.children.is_running("learner")

    def _show(self, live: Live | None) -> None:
        now = time.monotonic()
        self.state.elapsed_s = now - self._began
        if live is not None:
            live.update(draw(self.state))
        elif now - self._printed_at >= PLAIN_LINE_EVERY_S:
            self._printed_at = now
            self.console.print(Text(plain_line(self.state)), soft_wrap=True)


@dataclass(slots=True)
class LastMove:
    """Tracks when a run last made progress: a step, an evaluation, a new version, a version live on a worker, or sampled
    tokens. If only workers make progress, the limit on standing still is STILL_STEPS times as long."""

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
            beats = tuple((w.heartbeat.version, w.heartbeat.sampled_tokens) for w in state.status.workers)
        if steps != self._steps:
            self._steps, self.stepped_at = steps, now
        if (progress := (*steps, *beats)) != self._seen:
            self._seen, self.at = progress, now
        return max(now - self.at, (now - self.stepped_at) / STILL_STEPS)


def phase_of(status: coordinator_pb2.RunStatus | None) -> str:
    if status is not None and status.finished:
        return "finished"
    if status is None or not status.learner_is_connected:
        return "learner away" if status is not None and status.learner.step else "starting"
    if status.learner.is_finished:
        return "finishing"
    return "training" if status.learner.step else "first rollouts"


def plain_line(state: ScreenState) -> str:
    """Formats one status line for use without a screen. Leaves out what has not been measured yet."""
    status = state.status
    if status is None:
        return f"{state.elapsed_s:4.0f} s  the coordinator starts"
    if not status.learner_is_connected:
        step = status.learner.step
        loads = f"the learner loads what it saved after step {step}" if step else "the learner loads its model"
        return f"{state.elapsed_s:4.0f} s  {status.finished or loads}"
    learner, predicted, limit = status.learner, status.plan.predicted_utilisation, status.learner_hello.step_limit
    versions = ", ".join(
        f"{w.name} at {w.heartbeat.version}"
        if w.heartbeat.has_version
        else f"{w.name} waits for {w.heartbeat.waits_for or 'a version'}"
        for w in status.workers
        if w.state != "gone"
    )
    parts = [f"{state.elapsed_s:4.0f} s", f"step {learner.step}{f'/{limit}' if limit else ''}"]
    if state.rewards:
        parts.append(f"reward {sum(state.rewards[-5:]) / len(state.rewards[-5:]):.2f}")
    parts += [f"version {learner.newest_version}", f"workers: {versions or 'none yet'}"]
    if learner.utilisation:
        parts.append(f"utilisation {learner.utilisation:.0%}{f' (predicted {predicted:.0%})' if predicted else ''}")
    parts.append(f"buffered {learner.buffered_rollouts}")
    if status.usd_spent:
        parts.append(f"USD {status.usd_spent:.4f}")
    if status.headline_kind in ("warn", "bad"):
        parts.append(status.headline)
    elif learner.waits_for:
        parts.append(f"waits for {learner.waits_for}")
    return "  ".join(parts)


_BLOCKS = " ▁▂▃▄▅▆▇█"  # eighths of a character cell
_CURVE_HEIGHT = 6  # of 24 lines, what the tables leave
_LAG_WORDS = 14  # columns of a lag line before its bar
_KINDS = {"good": "green", "info": "cyan", "warn": "yellow", "bad": "bold red"}  # colours of the headline


@dataclass(slots=True)
class ScreenState:
    title: str
    elapsed_s: float = 0.0
    rewards: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    status: coordinator_pb2.RunStatus | None = None
    _offsets: dict[str, int] = field(default_factory=dict)

    def read(self, run_folder: Path) -> None:
        """Reads new complete lines of metrics.jsonl and evaluations.jsonl."""
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            path, begun = run_folder / "learner" / name, self._offsets.get(name, 0)
            if not path.exists():
                continue
            if path.stat().st_size < begun:  # a learner that has gone back has cut off what it makes anew
                begun = 0
                (self.rewards if name == "metrics.jsonl" else self.evaluations).clear()
            with path.open("rb") as file:
                file.seek(begun)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[name] = begun + len(whole)
            for row in map(json.loads, whole.splitlines()):
                if "reward/mean" in row:
                    self.rewards.append(float(row["reward/mean"]))
                if "eval/reward" in row:
                    self.evaluations.append((int(row["step"]), float(row["eval/reward"])))


@dataclass(frozen=True, slots=True)
class ResizableLines:
    """Lines drawn for the width that the screen leaves them, so that none is broken. `lines`: makes them for some columns."""

    lines: Callable[[int], Sequence[str]]
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = "\n".join(self.lines(options.max_width))
        yield Text(text, style=self.style, no_wrap=True, overflow="crop")


def curve(values: Sequence[float], width: int) -> list[str]:
    """Draws a block chart of values in 0..1, its top line first; each column is the mean of its slice of `values`."""
    if not values:
        return [""] * _CURVE_HEIGHT
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    lines = []
    for row in reversed(range(_CURVE_HEIGHT)):
        cells = (max(0.0, min(1.0, value * _CURVE_HEIGHT - row)) for value in means)
        lines.append("".join(_BLOCKS[round(cell * (len(_BLOCKS) - 1))] for cell in cells))
    return lines


def lag_lines(histogram: Sequence[int], bound: int, width: int) -> list[str]:
    total = sum(histogram) or 1
    shares = [count / total for count in histogram] + [0.0] * (bound + 1 - len(histogram))
    room = max(1, width - _LAG_WORDS - len(str(len(shares) - 1)) + 1)
    return [
        f"lag {lag}{'  ' if lag <= bound else ' !'} {share:5.0%} {'█' * round(share * room)}"
        for lag, share in enumerate(shares)
    ]


def draw(state: ScreenState) -> RenderableType:
    parts: list[RenderableType] = [_header(state)]
    if state.status is not None:
        parts += [_middle(state, state.status), _workers(state.status)]
    return Group(*parts)


def _header(state: ScreenState) -> RenderableType:
    minutes, seconds = divmod(int(state.elapsed_s), 60)
    text = Text(f"{state.title}   {f'{minutes}:{seconds:02d}   ' if state.elapsed_s else ''}", style="bold")
    text.append(phase_of(state.status), style="not bold cyan")
    if state.status is not None and state.status.headline:
        text.append(f"\n{state.status.headline}", style=_KINDS.get(state.status.headline_kind, ""))
    return text


def _middle(state: ScreenState, status: coordinator_pb2.RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=3)
    grid.add_column(ratio=2)
    learner, bound = status.learner, status.learner_hello.staleness_bound
    rewards, held_out = state.rewards, ", ".join(f"{step}: {reward:.2f}" for step, reward in state.evaluations[-6:])
    if not rewards and learner.train_s and status.learner_hello.step_limit:  # the learner's files lie elsewhere
        rewards, held_out = [learner.reward_mean], "" if learner.eval_reward == -1 else f"{learner.eval_reward:.2f}"
    now = f"{rewards[-1]:.2f}" if rewards else "-"
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    drawn = ResizableLines(lambda width: curve([(reward - low) / (high - low) for reward in rewards], width), "green")
    reward = Group(drawn, Text(f"now {now}   held-out at step  {held_out or '-'}"))
    grid.add_row(
        _panel(reward, f"mean reward ({low:.3g} to {high:.3g})"), _panel(_learner_text(state, status), "learner")
    )
    lags = Group(
        ResizableLines(lambda width: lag_lines(list(learner.lag_histogram), bound, width)),
        Text(f"tokens trained above S={bound}: {learner.over_stale_tokens_trained}", style="bold"),
    )
    grid.add_row(_panel(_plan_text(status), "capacity model"), _panel(lags, "lag of trained tokens"))
    return grid


def _panel(inside: RenderableType, title: str) -> Panel:
    return Panel(inside, title=title, title_align="left")


def _learner_text(state: ScreenState, status: coordinator_pb2.RunStatus) -> Text:
    learner, hello = status.learner, status.learner_hello
    rows = [
        f"step {learner.step}{f' / {hello.step_limit}' if hello.step_limit else ''}   version {learner.newest_version}"
    ]
    if learner.utilisation:  # nothing of this is measured before the first step
        predicted = status.plan.predicted_utilisation
        rows += [
            f"step takes {learner.train_s:.2f} s, waited {learner.wait_s:.2f} s",
            f"utilisation {learner.utilisation:.0%} measured{f', {predicted:.0%} predicted' if predicted else ''}",
        ]
    sent, whole = status.artifact_bytes_published, status.full_bytes_published
    share = f", {100 * sent / whole:.2g}% of full snapshots ({format_bytes(whole)})" if whole else ""
    buffered, cap = learner.buffered_rollouts, status.plan.in_flight_cap_rollouts
    rows += [
        f"in flight {learner.open_rollouts + buffered}{f' of {cap}' if cap else ''} rollouts, {buffered} of them buffered",
        f"deltas {format_bytes(sent)}{share}",
    ]
    if status.usd_spent or status.usd_per_hour:
        useful = status.usd_useful / status.usd_spent if status.usd_spent else 1.0
        row = f"spent ${status.usd_spent:.4f}, {useful:.0%} of it on work; now ${status.usd_per_hour:.2f}/h"
        if status.open_machines:
            row += f", {counted(status.open_machines, 'machine')} rented"
        if status.usd_spent and learner.trained_tokens:
            row += f", ${1e6 * status.usd_spent / learner.trained_tokens:.2f} per million tokens"
        rows.append(row)
    if learner.waits_for:
        rows.append(f"waits for {learner.waits_for} since {learner.waits_since_s:.1f} s")
    return Text("\n".join(rows))


def _plan_text(status: coordinator_pb2.RunStatus) -> Text:
    plan = status.plan
    if not plan.kappa:
        return Text("no plan yet")
    every = "every step" if plan.kappa == 1 else f"every {plan.kappa} steps"
    lines = [f"a version {every}, at most {plan.in_flight_cap_rollouts} rollouts in flight", *status.plan_terms]
    if status.measured_broadcast_s:
        lines.append(
            f"versions spread in {status.measured_broadcast_s:.2f} s, {plan.predicted_broadcast_s:.2f} s predicted"
        )
    return Text("\n".join(lines[:9]))


def _workers(status: coordinator_pb2.RunStatus) -> RenderableType:
    """Fits 80 columns: what a worker waits for is broken into lines beside its state. Its words are no markup. Of those that have
    gone, thousands after weeks of spot machines, the number is told."""
    living = [worker for worker in status.workers if worker.state != "gone"]
    table = Table(expand=True, title=None, box=None, padding=(0, 1))
    for name in ("worker", "state", "USD/h", "tokens/s", "version", "running"):
        is_text = name in ("worker", "state")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=name != "state")
    for worker in living:
        beat, state = worker.heartbeat, worker.activation if worker.state == "alive" else worker.state
        waits = f", waits for {beat.waits_for}" if beat.waits_for and worker.state == "alive" else ""
        table.add_row(
            Text(worker.name), Text(state + waits), f"{worker.hello.price_usd_per_hour:.2f}", f"{beat.tokens_per_s:.0f}",
            str(beat.version) if beat.has_version else "none", str(beat.running_sequences),
        )  # fmt: skip
    gone = len(status.workers) - len(living)
    return _panel(table, f"workers{f', {gone} more have gone' if gone else ''}")

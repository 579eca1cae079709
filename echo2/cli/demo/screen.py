"""Draws the demo's live screen from a given state: reward curve, versions, lags, workers, bytes, utilisation, money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo2.base.units import format_bytes
from echo2.wire.gen.echo2.v1 import coordinator_pb2

_BLOCKS = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 72
_CURVE_HEIGHT = 6


@dataclass(slots=True)
class ScreenState:
    """The data that the screen shows."""

    title: str
    elapsed_s: float = 0.0
    phase: str = ""
    rewards: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    status: coordinator_pb2.RunStatus | None = None


def curve(values: Sequence[float], width: int = _CURVE_WIDTH, height: int = _CURVE_HEIGHT) -> list[str]:
    """Draws a block chart of values in 0..1 as `height` lines, top first; each column is the mean of its slice of `values`."""
    if not values:
        return [""] * height
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = (max(0.0, min(1.0, value * height - row)) for value in means)
        lines.append("".join(_BLOCKS[round(cell * (len(_BLOCKS) - 1))] for cell in cells))
    return lines


def bar(share: float, width: int) -> str:
    """Draws a bar of block characters: `share` (0 to 1) of `width`."""
    return "█" * round(max(0.0, min(1.0, share)) * width)


def lag_lines(histogram: Mapping[int, int] | Sequence[int], bound: int, width: int = 22) -> list[str]:
    """Formats one line per lag, 0 to at least `bound`, with its share of trained tokens."""
    counts = dict(enumerate(histogram)) if not isinstance(histogram, Mapping) else dict(histogram)
    total = sum(counts.values()) or 1
    last = max(bound, *counts) if counts else bound
    return [
        f"lag {lag}{'  ' if lag <= bound else ' !'} {counts.get(lag, 0) / total:5.0%} {bar(counts.get(lag, 0) / total, width)}"
        for lag in range(last + 1)
    ]


def draw(state: ScreenState) -> RenderableType:
    """Draws the whole screen."""
    parts: list[RenderableType] = [_header(state)]
    if state.status is not None:
        parts += [_middle(state, state.status), _workers(state.status)]
    return Group(*parts)


def _header(state: ScreenState) -> RenderableType:
    text = Text()
    minutes, seconds = divmod(int(state.elapsed_s), 60)
    text.append(f"{state.title}   {minutes}:{seconds:02d}   ", style="bold")
    text.append(state.phase, style="cyan")
    return text


def _middle(state: ScreenState, status: coordinator_pb2.RunStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=3)
    grid.add_column(ratio=2)
    lines = curve(state.rewards)
    now = f"{state.rewards[-1]:.2f}" if state.rewards else "-"
    held_out = ", ".join(f"{step}: {reward:.2f}" for step, reward in state.evaluations[-6:]) or "-"
    reward = Text("\n".join(lines), style="green")
    reward.append(f"\nnow {now}   held-out at step  {held_out}", style="default")
    grid.add_row(
        Panel(reward, title="mean reward (0 to 1)", title_align="left"),
        Panel(_learner_text(status), title="learner", title_align="left"),
    )
    bound = status.learner_hello.staleness_bound
    lags = Text("\n".join(lag_lines(list(status.learner.lag_histogram), bound)))
    lags.append(f"\ntokens trained above S={bound}: {status.learner.over_stale_tokens_trained}", style="bold")
    grid.add_row(
        Panel(_plan_text(status), title="capacity model", title_align="left"),
        Panel(lags, title="lag of trained tokens", title_align="left"),
    )
    return grid


def _learner_text(status: coordinator_pb2.RunStatus) -> Text:
    learner, hello = status.learner, status.learner_hello
    rows = [f"step {learner.step} / {hello.step_limit}   version {learner.newest_version}"]
    if learner.step:  # nothing of this is measured before the first step
        measured, predicted = status.measured_utilisation or learner.utilisation, status.plan.predicted_utilisation
        rows += [
            f"step takes {learner.train_s:.2f} s, waited {learner.wait_s:.2f} s",
            f"utilisation {measured:.0%} measured{f', {predicted:.0%} predicted' if predicted else ''}",
        ]
    rows += [
        f"buffered {learner.buffered_rollouts}, in flight {learner.open_rollouts} of {status.plan.in_flight_cap_rollouts} rollouts",
        f"deltas {format_bytes(status.artifact_bytes_published)}{_share(status)}",
        f"spent ${status.usd_spent:.4f}, {useful_share(status):.0%} of it on work; now ${status.usd_per_hour:.2f}/h",
    ]
    if learner.waits_for:
        rows.append(f"waits for {learner.waits_for} since {learner.waits_since_s:.1f} s")
    return Text("\n".join(rows))


def useful_share(status: coordinator_pb2.RunStatus) -> float:
    """Share of the bill that paid for workers while they were working."""
    return status.usd_useful / status.usd_spent if status.usd_spent > 0 else 1.0


def _share(status: coordinator_pb2.RunStatus) -> str:
    if not status.full_bytes_published:
        return ""
    share = status.artifact_bytes_published / status.full_bytes_published
    return f", {share:.0%} of full snapshots ({format_bytes(status.full_bytes_published)})"


def _plan_text(status: coordinator_pb2.RunStatus) -> Text:
    plan = status.plan
    lines = [f"kappa {plan.kappa}, cap {plan.in_flight_cap_rollouts} rollouts", *status.plan_terms]
    lines.append(
        f"broadcast {status.measured_broadcast_s:.2f} s measured, {plan.predicted_broadcast_s:.2f} s predicted"
    )
    return Text("\n".join(lines[:9]))


def _workers(status: coordinator_pb2.RunStatus) -> RenderableType:
    table = Table(expand=True, title=None, box=None, padding=(0, 1))
    for name in (
        "worker",
        "state",
        "USD/h",
        "tokens/s",
        "rollouts/s",
        "version",
        "running",
        "leases",
        "sent",
        "received",
        "waits for",
    ):
        table.add_column(name, justify="left" if name in ("worker", "state", "waits for") else "right")
    for worker in status.workers:
        beat = worker.heartbeat
        table.add_row(
            worker.name, f"{worker.state}, {worker.activation}", f"{worker.hello.price_usd_per_hour:.2f}",
            f"{beat.tokens_per_s:.0f}", f"{beat.rollouts_per_s:.1f}", str(beat.version) if beat.has_version else "-",
            str(beat.running_sequences), str(worker.leases), format_bytes(beat.sent_chunk_bytes),
            format_bytes(beat.received_chunk_bytes), beat.waits_for,
        )  # fmt: skip
    return Panel(table, title="workers", title_align="left")

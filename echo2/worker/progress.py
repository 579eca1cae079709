"""Shows the progress of downloads, loads and catch-ups: as bars on a terminal, as log lines elsewhere.

Guarantees: at most one line every `LINE_EVERY_S` for each task, so quick tasks are not logged at all; bars disappear when done, and
log lines appear above them. Leaves to others: what to show (weights, worker).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable
from typing import Protocol, TextIO, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from echo2.outside import monotonic
from echo2.outside.under_way import far_text, ticking

LINE_EVERY_S = 3.0  # readable in a log
LOOK_S = 1.0  # a clock's tick on the screen
T = TypeVar("T")
_log = logging.getLogger("echo2.worker")


class ShowsProgress(Protocol):
    def at(self, what: str, done_bytes: int, whole_bytes: int) -> None:
        """`what` has `done_bytes` of `whole_bytes`; `whole_bytes` 0: not known, or not counted in bytes."""
        ...

    def ended(self, what: str) -> None: ...


async def shown(progress: ShowsProgress, what: str, work: Awaitable[T]) -> T:
    """Awaits `work` whose progress cannot be measured, such as a compilation, and shows that it is running and for how long."""
    progress.at(what, 0, 0)
    try:
        return await ticking(work, lambda: progress.at(what, 0, 0), LOOK_S)
    finally:
        progress.ended(what)


class ProgressLines:
    """Progress as log lines."""

    def __init__(self) -> None:
        self._told_at: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def at(self, what: str, done_bytes: int, whole_bytes: int) -> None:
        now = monotonic()
        began_at = self._began.setdefault(what, now)
        if now < self._told_at.setdefault(what, now) + LINE_EVERY_S:
            return
        self._told_at[what] = now
        if not whole_bytes and not done_bytes:
            _log.info("%s: under way for %.0f s", what, now - began_at)
            return
        _log.info("%s: %s", what, far_text(done_bytes, whole_bytes, now - began_at))

    def ended(self, what: str) -> None:
        self._told_at.pop(what, None)
        self._began.pop(what, None)


class ProgressBars:
    """Progress as bars on a terminal. While a bar is drawn, echo2's log handlers for that terminal write through rich's console."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        self._moved: list[logging.StreamHandler[TextIO]] = []

    def at(self, what: str, done_bytes: int, whole_bytes: int) -> None:
        progress = self._progress or self._begin()
        if what not in self._bars:
            self._bars[what] = progress.add_task(what, total=None)
        progress.update(self._bars[what], completed=done_bytes, total=whole_bytes or None)

    def ended(self, what: str) -> None:
        bar = self._bars.pop(what, None)
        if bar is None or self._progress is None:
            return
        self._progress.remove_task(bar)
        if not self._bars:
            self._progress.stop()
            self._progress = None
            for handler in self._moved:
                handler.setStream(self._stream)
            self._moved.clear()

    def _begin(self) -> Progress:
        columns = (
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn(),
            TextColumn("left:"), TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=Console(file=self._stream), transient=True)
        self._progress.start()
        for handler in logging.getLogger("echo2").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                handler.setStream(sys.stderr)  # which rich has redirected, so log lines appear above the bar
                self._moved.append(handler)
        return self._progress


def progress_for(stream: TextIO, as_json: bool) -> ShowsProgress:
    """Bars on a terminal, unless the log is for machines."""
    return ProgressBars(stream) if stream.isatty() and not as_json else ProgressLines()

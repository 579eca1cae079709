"""How every echo2 process starts, stops and fails.

Guarantees: the first SIGINT, SIGTERM or SIGHUP asks the daemon to stop cleanly, a second SIGINT or SIGTERM ends the process at
once; an `EchoError` ends it with one line on stderr and the error's exit code; nothing is left running.
Waits for: the daemon's `run` to return. Woken by: its end, or a signal.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import logging
import os
import shutil
import signal
import stat
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from echo2.base.clock import Pace
from echo2.base.errors import NO_ROOM, DiskFull, EchoError, ResourceError, TaskError

FORCED_EXIT_CODE = 130  # 128 + SIGINT, as shells have it
PARENT = "ECHO2_PARENT"  # variable with the process id of the command that started this process and must not outlive
COLUMNS_MAX = 100  # longer lines are hard to read; a narrower terminal wraps them earlier
END_WITHIN_S = 10.0  # a drain (2 s) and the end of an engine fit several times
PARENT_LOOK_S = 1.0  # a second of a lost child costs nothing
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
LINES_PER_S, LINES_BURST = 2.0, 20  # a traceback passes whole; a day of errors is 170,000 lines at most
UNWRITABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Errors that a folder named by the user can cause."""


class Daemon(Protocol):
    async def run(self) -> object:
        """Runs until done or asked to stop. Raises an `EchoError` if it cannot continue."""

    def stop(self) -> None:
        """Asks for a clean end; `run` returns soon after. Call it from the event loop's thread only."""


class _JsonLines(logging.Formatter):
    """One JSON object per line, for machines."""

    def format(self, record: logging.LogRecord) -> str:
        row = {"time": record.created, "level": record.levelname, "logger": record.name, "text": record.getMessage()}
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        return json.dumps(row)


class _PlainLines(logging.Formatter):
    """`30 Nov 12:00:01 learner  step 12 …`, for people: a log of weeks has each hour many times."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%d %b %H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("echo2.")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = f"{clock} {name:<12} {level}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class LogRateLimit(logging.Filter):
    """Rate-limits to LINES_PER_S lines a second and reports how many it dropped, so that no peer can fill the disk with errors."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._lines, self._unsaid = clock, Pace(LINES_PER_S, LINES_BURST), 0

    def filter(self, record: logging.LogRecord) -> bool:
        if self._lines.wait_s("", self._clock()) > 0:
            self._unsaid += 1
            return False
        if self._unsaid:
            record.msg, record.args = f"{record.getMessage()} ({self._unsaid} lines before it not logged)", ()
            self._unsaid = 0
        return True


def set_up_logging(as_json: bool, verbose: bool = False) -> None:
    """Sends logs of `echo2.*` to stderr, and warnings of other libraries too, rate-limited."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if as_json else _PlainLines())
    logging.lastResort = foreign = logging.StreamHandler()  # for libraries' logs: asyncio and gRPC log every failure
    foreign.setLevel(logging.WARNING)
    foreign.setFormatter(handler.formatter)
    foreign.addFilter(LogRateLimit())
    root = logging.getLogger("echo2")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(logging.DEBUG if verbose else logging.INFO)


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Lets Ctrl-C end the process at once and silently: torch and numpy print long tracebacks if interrupted while importing.
    Once a daemon exists, `run_daemon` asks it to stop instead; after the block, Ctrl-C raises KeyboardInterrupt. Does nothing
    outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is signal.SIG_DFL else before)


def die_with_parent() -> None:
    """If PARENT names a process, ends this one when that one is gone, whatever killed it: by SIGTERM first, so that a worker's
    engine ends its own processes, and after END_WITHIN_S by killing this process's group."""
    parent = os.environ.pop(PARENT, "")
    if not parent:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the kernel was told
        os._exit(FORCED_EXIT_CODE)
    threading.Thread(target=_end_after, args=(int(parent),), name="parent", daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)
    time.sleep(END_WITHIN_S)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(FORCED_EXIT_CODE)


def run_daemon(make: Callable[[], Daemon], folder: Path = Path()) -> int:
    """Runs the daemon that `make` returns, which writes under `folder`, until it ends. Returns the exit code."""
    from echo2.trust.ports import raise_descriptor_limit  # imported late, as in `_with_signals`

    try:
        raise_descriptor_limit()
        asyncio.run(_with_signals(make))
    except EchoError as error:
        return report_error(error)
    except SystemExit as error:  # of a user's own code: it would end us without a word, or as if the work was done
        at = traceback.extract_tb(error.__traceback__)[-1]
        return report_error(TaskError(f"{at.filename}, line {at.lineno}: expected code that returns, got exit {error}"))
    except OSError as error:
        if error.errno in NO_ROOM:
            return report_error(DiskFull(f"{folder}: expected room to write, got: {error}"))
        if error.filename is not None and error.errno in UNWRITABLE:
            return report_error(ResourceError(f"{error.filename}: expected a place to write, got: {error.strerror}"))
        raise
    return 0


def wrapped(text: str, indent: int) -> str:
    """`text` in lines that fit the terminal, COLUMNS_MAX at most, each after the first indented. No word is broken."""
    columns = min(COLUMNS_MAX, shutil.get_terminal_size().columns)
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def report_error(error: EchoError) -> int:
    """Prints it as one line; what ends a command without a failure is no error."""
    kind = [f"error: {type(error).__name__}:"] if error.exit_code else ["stopping:"]
    print(*kind, *str(error).split(), file=sys.stderr, flush=True)
    return error.exit_code


def stop_on_signals(stop: Callable[[signal.Signals], object], end: Callable[[], object]) -> None:
    """On the running loop: the first SIGINT, SIGTERM or SIGHUP calls `stop`, a second SIGINT or SIGTERM calls `end` and ends the
    process. A closed terminal, for which the kernel and the shell send SIGHUP each, takes no more output. SIGHUP stays ignored
    where it is, as under nohup."""
    loop, was_asked = asyncio.get_running_loop(), False

    def on_signal(number: signal.Signals) -> None:
        nonlocal was_asked
        if number is signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for output in (sys.__stdout__, sys.__stderr__):  # None if it was closed: then others have its number
                if output is not None and not stat.S_ISREG(os.fstat(output.fileno()).st_mode):
                    os.dup2(nowhere, output.fileno())
        elif was_asked:
            end()
            os._exit(FORCED_EXIT_CODE)
        if not was_asked:
            was_asked = True
            stop(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal, number)


async def _with_signals(make: Callable[[], Daemon]) -> None:
    from echo2.trust.tls import calls_have_ended  # imports gRPC, which other commands do not need

    daemon = make()

    def stop(number: signal.Signals) -> None:
        logging.getLogger("echo2").info("stopping: %s", number.name)
        daemon.stop()

    stop_on_signals(stop, lambda: None)
    try:
        await daemon.run()
    finally:
        await calls_have_ended()

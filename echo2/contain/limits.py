"""The limits of one contained run, and its result.

Guarantees: every limit is finite. Leaves to others: the kernel enforces memory, CPU and file sizes (runtime/inside), the
process outside enforces time and output (runtime/sandbox).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run, and of the process that forks the runs.

    `cpu_s`: computing time of a run; `wall_s` is longer, so that a busy machine fails no run. `scratch_bytes`: size of its
    temporary folder. The first `printed_bytes` of its output are kept; printing more than `printed_bytes_max` ends it.
    `start_s`: for importing packages and reading data, once for many runs.
    """

    cpu_s: int = 2
    wall_s: float = 10.0
    memory_bytes: int = 2 << 30
    scratch_bytes: int = 64 << 20
    open_files_max: int = 64
    request_bytes: int = 16 << 20
    answer_bytes: int = 1 << 20
    printed_bytes: int = 64 << 10
    printed_bytes_max: int = 16 << 20
    start_s: float = 120.0


class Ending(enum.IntEnum):
    """How a run ended. Only ANSWERED comes with an answer."""

    ANSWERED = 0
    CPU_USED_UP = 1  # it computed longer than its limit
    OUTPUT_USED_UP = 2  # it answered or printed more than its limit
    TIMED_OUT = 3  # it reached its wall time, but not its CPU time
    DIED = 4  # it ended without an answer: a signal, an exit
    REQUEST_TOO_LARGE = 5  # never started
    FAULT = 6  # the containment itself failed: could not start, ended, or did not answer


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a run. `body` is foreign data. `note` says why there is no answer; `printed` is what it wrote to
    stdout and stderr, truncated. `seconds`: wall time without queueing.
    """

    ending: Ending
    body: bytes = b""
    printed: bytes = b""
    note: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0

"""The limits of one contained run, its result, and the frames in which requests and answers travel.

Guarantees: every limit is finite.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from echo2.base.errors import MalformedMessage
from echo2.base.units import one_line

SCRATCH = "/scratch"  # a run's temporary folder


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run, and of the process that forks the runs. `cpu_s`: computing time of a run; `wall_s` is longer, so that
    a busy machine fails no run. `scratch_bytes`: size of its temporary folder; `scratch_files`: files, folders and links in it.
    The first `printed_bytes` of its output are kept; printing more than `printed_bytes_max` ends it. `start_s`: for importing
    packages and reading data, once for many runs."""

    cpu_s: int = 2
    wall_s: float = 10.0
    memory_bytes: int = 2 << 30
    scratch_bytes: int = 64 << 20
    scratch_files: int = 4096
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
    FAULT = 6  # the containment could not start, or could not shut the run in
    CONTAINMENT_ENDED = 7  # it ended, or did not answer, with this run in it, which is charged with the new start


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a run. `body` is foreign data. `note` says why there is no answer; `printed` is what it wrote to stdout and
    stderr, truncated. `seconds`: wall time without queueing; with a new start of the containment, if the run made it necessary."""

    ending: Ending
    body: bytes = b""
    printed: bytes = b""
    note: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def output(self) -> str:
        return self.printed.decode(errors="replace")


# Length of the rest, ending, whether it is the last, CPU seconds, length of what was printed.
HEAD = struct.Struct(">IBBdI")
LENGTH = struct.Struct(">I")  # a frame's length
TEXT_CHARS_MAX = 500  # a note of an error is one line of a log


def request_frame(message: Mapping[str, object]) -> bytes:
    payload = json.dumps(message).encode()
    return LENGTH.pack(len(payload)) + payload


def answer_frame(ending: Ending, is_last: bool, cpu_s: float, printed: bytes, body: bytes) -> bytes:
    """`is_last`: the process can answer no further request."""
    return HEAD.pack(len(printed) + len(body), ending, is_last, cpu_s, len(printed)) + printed + body


def foreign_object(body: bytes) -> dict[str, object]:
    """Parses a JSON object from bytes that hostile code may have written."""
    try:
        parsed = json.loads(body, parse_constant=int)  # which takes no NaN and no Infinity
    except (ValueError, RecursionError, MemoryError) as error:
        raise MalformedMessage(f"contained answer: expected JSON, got {error_text(error)}") from None
    if not isinstance(parsed, dict):
        raise MalformedMessage(f"contained answer: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def shown(text: object) -> str:
    """Foreign text made safe for a log: one line, printable, truncated."""
    return one_line(str(text), TEXT_CHARS_MAX).strip()


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {shown(error)}"

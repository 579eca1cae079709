"""Keeps the newest warnings and errors of this process, for the operator's dashboard.

Guarantees: the tail is bounded, each entry is one printable line; any thread may log. Leaves to others: sending it (telling).
"""

from __future__ import annotations

import logging
from collections import deque

from echo2.wire.bounds import LOG_CHARS_MAX, LOG_LINES_MAX
from echo2.wire.gen.echo2.v1 import coordinator_pb2


class LogTail(logging.Handler):
    """A log handler. `count`: lines kept so far, those dropped since included."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[coordinator_pb2.LogLine] = deque(maxlen=LOG_LINES_MAX)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        line = " ".join(text.split())
        line = "".join(c if c.isprintable() else "?" for c in line[:LOG_CHARS_MAX])
        is_error = record.levelno >= logging.ERROR
        self._lines.append(coordinator_pb2.LogLine(unix_s=record.created, is_error=is_error, text=line))
        self.count += 1

    def message(self) -> coordinator_pb2.LogTail:
        return coordinator_pb2.LogTail(lines=list(self._lines))

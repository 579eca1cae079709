"""Runs untrusted Python programs, such as code that a model wrote for a `python` tool or a unit test.

Guarantees: each program gets a fresh fork of the interpreter, an empty folder and no trace of earlier programs; no network;
read-only access to files of the system and of Python only; it cannot start processes; limits on CPU, wall time, memory, files
and output. Waits: futures, each completed within the limits. Leaves to others: what a result is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import PurePath

from echo2.base.errors import MalformedMessage, TaskError
from echo2.contain.limits import Answer, Ending, Limits
from echo2.contain.messages import foreign_object, shown
from echo2.contain.runtime.box import bubblewrap, view_here
from echo2.contain.runtime.pool import Pool
from echo2.contain.runtime.sandbox import Launch, Sandbox
from echo2.contain.view import SCRATCH

_MODULE = "echo2.contain.runtime.program_inside"


@dataclass(frozen=True, slots=True)
class Program:
    """`files`: contents by name (no folders), written beside the program before it starts."""

    code: str
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            if PurePath(name).name != name or name in ("", ".", ".."):
                raise TaskError(f"program: expected file names without folders, got {name!r}")


@dataclass(frozen=True, slots=True)
class Ran:
    """`problem` is empty after a clean exit. `output`: stdout and stderr together, truncated. If `ending` is FAULT, the machine
    failed, not the program, and nothing can be concluded about the program.
    """

    ending: Ending
    output: str
    problem: str
    seconds: float


class ProgramPool:
    """`process_count` processes, each running one program at a time. Raises ResourceError if containment does not work here."""

    def __init__(self, limits: Limits | None = None, process_count: int = 1, queue_max: int = 1 << 12):
        bubblewrap()
        launch = Launch(_MODULE, "", limits or Limits(), view_here(folder=SCRATCH))
        self._pool = Pool(lambda: Sandbox(launch), launch.limits, process_count, queue_max)

    def submit(self, program: Program, sender: str = "") -> Future[Ran]:
        """Queues a program. `sender`: whom it runs for; senders with long-running programs queue behind others."""
        body = {"code": program.code, "stdin": program.stdin, "files": dict(program.files)}
        return self._pool.submit(body, _ran, sender)

    def close(self) -> None:
        self._pool.close()


def _ran(answer: Answer) -> Ran:
    output = answer.printed.decode(errors="replace")
    if answer.ending is not Ending.ANSWERED:
        return Ran(answer.ending, output, answer.note, answer.seconds)
    try:
        problem = str(foreign_object(answer.body).get("problem", ""))
    except MalformedMessage as error:
        return Ran(Ending.DIED, output, shown(error), answer.seconds)
    return Ran(answer.ending, output, problem, answer.seconds)

"""A contained process, seen from outside: requests go in, bounded bytes come out.

Guarantees: no request takes longer than its wall time plus `GRACE_S`; memory stays within the limits; what comes back is data
that nothing here executes; whatever happens inside, the next request gets a healthy process, and the request that made a new
one necessary is charged for it: it was the only one inside. The process and everything it started end with `kill`, and with the
thread that started it. Waits for: the pipes, always with a deadline. Used by one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from echo2.base.errors import EchoError
from echo2.contain.box import View, box_command, bubblewrap
from echo2.contain.messages import HEAD, Answer, Ending, Limits, request_frame, shown

GRACE_S = 5.0  # a fork that is killed is reported by the template; on a loaded machine that takes seconds
_PIECE = 1 << 16  # a pipe's capacity on Linux


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run: `module` serves requests (inside.serve), set up from the text `setup`. `view` None: not contained, for code
    that the operator trusts."""

    module: str
    setup: str
    limits: Limits
    view: View | None


class Sandbox:
    """A contained process: started by the first request, and again after it has ended."""

    def __init__(self, launch: Launch):
        self._launch = launch
        self._limits = launch.limits
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self, is_wanted: Callable[[], bool]) -> bool:
        """Always ready: the first request starts the process, and starting does not count towards its time."""
        return True

    def ask(self, body: Mapping[str, object], times: int = 1) -> Answer:
        """Answers a request. `times`: it may take the time of this many runs, such as an episode's turns."""
        cpu_s, wall_s = self._limits.cpu_s * times, self._limits.wall_s * times
        frame = request_frame({"body": body, "cpu_s": cpu_s, "wall_s": wall_s})
        if len(frame) > self._limits.request_bytes:
            note = f"expected a request of at most {self._limits.request_bytes} bytes, got {len(frame)}"
            return Answer(Ending.REQUEST_TOO_LARGE, note=note)
        if self._process is not None and self._process.poll() is not None:  # it ended while it had no request
            self.kill()
        if self._process is None and (trouble := self._start()):
            return Answer(Ending.FAULT, note=shown(f"its process could not start: {trouble}"))
        began = time.monotonic()
        is_contained = self._launch.view is not None
        try:
            answer = self._exchange(frame, began + wall_s + (GRACE_S if is_contained else 0.0))
        except TimeoutError:
            answer = Answer(Ending.CONTAINMENT_ENDED if is_contained else Ending.TIMED_OUT)
            self.kill()
        except (EOFError, OSError) as error:
            note = shown(f"its process ended: {error}")
            answer = Answer(Ending.CONTAINMENT_ENDED if is_contained else Ending.FAULT, note=note)
            self.kill()
        if self._process is None and is_contained:
            self._start()  # if it fails, the next request meets the error again
        note = answer.note or _note(answer, cpu_s, wall_s, self._limits)
        return dataclasses.replace(answer, note=note, seconds=time.monotonic() - began)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def kill(self) -> None:
        """Kills the process and everything it started: a PID namespace ends with its first process."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process = None

    def _start(self) -> str:
        """Starts the process and makes it ready; returns what went wrong."""
        try:
            answer = self._launched(self._launch.view, time.monotonic() + self._limits.start_s)
        except (TimeoutError, EOFError, OSError, EchoError) as error:
            self.kill()
            return str(error) or "it took too long"
        if answer.ending is Ending.ANSWERED:
            return ""
        self.kill()
        return f"it could not be made ready: {answer.output}"

    def _launched(self, view: View | None, deadline: float) -> Answer:
        command = [sys.executable, "-P", "-m", self._launch.module]
        if view is None:
            search = os.pathsep.join(path for path in sys.path if path)
            environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
            errors, isolation = None, "none"
        else:
            command = box_command(bubblewrap().path, view, self._limits.scratch_bytes, command)
            environment, errors, isolation = {}, subprocess.DEVNULL, "fork"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, start_new_session=True
        )
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None, "both pipes were asked for"
            os.set_blocking(stream.fileno(), False)
        setup = {"setup": self._launch.setup, "limits": dataclasses.asdict(self._limits), "isolation": isolation}
        return self._exchange(request_frame(setup), deadline)

    def _exchange(self, frame: bytes, deadline: float) -> Answer:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "it was started"
        _write(process.stdin.fileno(), frame, deadline)
        head = _read(process.stdout.fileno(), HEAD.size, deadline)
        length, ending, is_last, cpu_s, printed_length = HEAD.unpack(head)
        bound = self._limits.answer_bytes + self._limits.printed_bytes
        if length > bound or printed_length > length or ending not in Ending._value2member_map_:
            raise EOFError(f"expected an answer of at most {bound} bytes, got {length}")
        data = _read(process.stdout.fileno(), length, deadline)
        if is_last:
            self.kill()
        return Answer(Ending(ending), data[printed_length:], data[:printed_length], "", 0.0, cpu_s)


def _note(answer: Answer, cpu_s: int, wall_s: float, limits: Limits) -> str:
    match answer.ending:
        case Ending.CPU_USED_UP:
            return f"computed longer than {cpu_s} s"
        case Ending.OUTPUT_USED_UP:
            return f"answered more than {limits.answer_bytes} bytes, or printed more than {limits.printed_bytes_max}"
        case Ending.TIMED_OUT:
            return f"no answer within {wall_s:g} s, of which it computed {answer.cpu_s:.1f} s"
        case Ending.CONTAINMENT_ENDED:
            return f"its process did not answer within {wall_s + GRACE_S:g} s"
        case Ending.FAULT:
            return shown("it could not be shut in: " + answer.output[-300:])
        case Ending.DIED:
            return shown("it ended without an answer: " + answer.output[-300:])
    return ""


def _wait_for(pipe: int, event: int, deadline: float) -> None:
    """Uses poll, because select fails for descriptors above 1,023, which a learner with many workers has."""
    polled = select.poll()
    polled.register(pipe, event)
    if not polled.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _write(pipe: int, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        _wait_for(pipe, select.POLLOUT, deadline)
        view = view[os.write(pipe, view[:_PIECE]) :]


def _read(pipe: int, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        _wait_for(pipe, select.POLLIN, deadline)
        piece = os.read(pipe, min(count - len(data), _PIECE))
        if not piece:
            raise EOFError("end of its answers")
        data += piece
    return bytes(data)

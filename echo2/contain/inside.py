"""Runs inside the containment: creates the request handler once, then answers each request in a fork of its own.

Guarantees: foreign text is read only in a fork, which has its own namespaces, temporary folder and limits on CPU, memory, files
and output, is under the system-call filter before it reads the request, and is killed and reaped before its answer is passed on.
So a run reaches neither this process nor the next run, and its answer is bytes that nothing here interprets. Waits for: the next
request (end of file ends it) and, at most `wall_s`, for a fork. Leaves to others: what a run sees of the machine (box), what its
answer means.

With isolation "none" (rewards that the operator trusts), requests are answered in this process, with only the memory limit,
and what they print goes to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from echo2.contain.kernel import Namespaces, filter_program
from echo2.contain.messages import LENGTH, Ending, Limits, answer_frame, error_text

Body = Mapping[str, object]
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 1, 22, 38, 2  # linux/prctl.h, linux/seccomp.h
_CPU_SLACK_S = 0.2  # an end this near to the limit was caused by it: the kernel accounts in ticks
_SHUT_IN = b"\1"
"""A run's first byte, written before it reads anything foreign: without it, the machine failed and not the run."""
_PIECE = 1 << 16  # a pipe's capacity on Linux
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Handler:
    """`answer` runs in a fork and may read all of a request; `prepare` runs before the fork, outside the run's time limit, and
    must not interpret foreign text.
    """

    answer: Callable[[Body], bytes]
    prepare: Callable[[Body], object] = lambda body: None


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


def serve(make: Callable[[str], Handler]) -> None:
    """Answers requests from stdin until its end. `make` creates the handler from the setup's text, which is trusted."""
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (setup := _read(requests)) is None:
        return
    limits = Limits(**setup["limits"])  # type: ignore[arg-type] # written by our own process
    namespaces = Namespaces(limits) if setup["isolation"] == "fork" else None
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    try:
        handler = make(str(setup["setup"]))
    except Exception as error:  # noqa: BLE001 - reported to the process that asked for it
        _write(replies, answer_frame(Ending.FAULT, True, 0.0, error_text(error).encode(), b""))
        return
    if namespaces is not None:
        return _serve_in_forks(handler, limits, namespaces, requests, replies)
    _write(replies, answer_frame(Ending.ANSWERED, False, 0.0, b"", b""))
    while (request := _read(requests)) is not None:
        _write(replies, answer_frame(Ending.ANSWERED, False, 0.0, b"", handler.answer(_body(request))))


def _serve_in_forks(handler: Handler, limits: Limits, namespaces: Namespaces, requests: int, replies: int) -> None:
    filter_program(platform.machine())  # an unsupported machine fails here, before the first request
    gc.collect()
    gc.freeze()
    _write(replies, answer_frame(Ending.ANSWERED, False, 0.0, b"", b""))
    is_last = False
    while not is_last and (request := _read(requests)) is not None:
        with contextlib.suppress(Exception):  # the fork meets the error again and reports it
            handler.prepare(_body(request))
        cpu_s, wall_s = int(str(request["cpu_s"])), float(str(request["wall_s"]))
        try:
            answer = _run(handler, _body(request), limits, namespaces, cpu_s, wall_s)
            is_last = not namespaces.clear()
        except OSError as error:  # no process or namespace to be had
            answer, is_last = (Ending.FAULT, 0.0, error_text(error).encode(), b""), True
        ending, used_s, printed, body = answer
        _write(replies, answer_frame(ending, is_last, used_s, printed, body))


def _body(request: Body) -> Body:
    body = request["body"]
    assert isinstance(body, dict), "requests are our own"
    return body


# ---- one run


def _run(
    handler: Handler, body: Body, limits: Limits, namespaces: Namespaces, cpu_s: int, wall_s: float
) -> tuple[Ending, float, bytes, bytes]:
    """Runs one request in a fork; returns the ending, CPU seconds used, printed bytes and answer."""
    reply_out, reply_in = os.pipe()
    printed_out, printed_in = os.pipe()
    pid = namespaces.fork()
    if pid == 0:
        status = 1
        try:
            namespaces.settle()
            _confine(reply_in, printed_in, limits, cpu_s)
            _write(3, _SHUT_IN)
            _write(3, handler.answer(body))
            sys.stdout.flush()
            sys.stderr.flush()
            status = 0
        finally:
            os._exit(status)
    os.close(reply_in)
    os.close(printed_in)
    answered, printed, early = _drained(reply_out, printed_out, limits, time.monotonic() + wall_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    os.close(reply_out)
    os.close(printed_out)
    used_s = usage.ru_utime + usage.ru_stime
    if not answered.startswith(_SHUT_IN):
        return Ending.FAULT, used_s, printed, b""
    answered = answered.removeprefix(_SHUT_IN)
    ending = ending_of(early, status, bool(answered), used_s, cpu_s)
    return ending, used_s, printed, answered if ending is Ending.ANSWERED else b""


def ending_of(early: Ending | None, status: int, has_answer: bool, used_s: float, cpu_s: int) -> Ending:
    """`early`: the limit for which the fork was killed from here; `status`: how it ended, as os.wait4 says.

    On a virtual machine whose time is stolen, the kernel may send SIGXCPU before the time that it reports reaches the limit.
    """
    if early is Ending.OUTPUT_USED_UP:
        return early
    if early is None and status == 0 and has_answer:
        return Ending.ANSWERED
    is_ended_by_limit = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    if is_ended_by_limit or used_s >= cpu_s - _CPU_SLACK_S:
        return Ending.CPU_USED_UP
    return early or Ending.DIED


def _drained(reply: int, printed: int, limits: Limits, deadline: float) -> tuple[bytes, bytes, Ending | None]:
    """Reads both pipes until the fork closes them, or until a limit is reached; returns that limit's ending."""
    kept = {reply: bytearray(), printed: bytearray()}
    room = {reply: limits.answer_bytes + len(_SHUT_IN), printed: limits.printed_bytes_max}
    waiting = select.poll()
    for pipe in kept:
        waiting.register(pipe, select.POLLIN)
    is_open = set(kept)
    early: Ending | None = None
    while is_open and early is None:
        left_s = deadline - time.monotonic()
        ready = waiting.poll(left_s * 1000) if left_s > 0 else []
        if not ready:
            early = Ending.TIMED_OUT
        for pipe, _ in ready:
            piece = os.read(pipe, _PIECE)
            room[pipe] -= len(piece)
            if not piece:
                waiting.unregister(pipe)
                is_open.discard(pipe)
            elif room[pipe] < 0:
                early = Ending.OUTPUT_USED_UP
            elif pipe == reply or len(kept[pipe]) < limits.printed_bytes:
                kept[pipe] += piece
    return bytes(kept[reply]), bytes(kept[printed][: limits.printed_bytes]), early


def _confine(reply: int, printed: int, limits: Limits, cpu_s: int) -> None:
    """Called in the fork: sets descriptors, limits and the filter. Irreversible."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    reply, printed = os.dup(reply), os.dup(printed)  # above 3, so that no dup2 below overwrites another
    for here, there in ((nothing, 0), (printed, 1), (printed, 2), (reply, 3)):
        os.dup2(here, there)
    os.closerange(4, 1 << 16)
    # SIGXCPU at the limit; the first process of a namespace ignores it, and others may handle it: so SIGKILL a second later.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for which, bound in (
        (resource.RLIMIT_FSIZE, limits.scratch_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files_max),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(which, (bound, bound))
    steps = filter_program(platform.machine())
    program = _Program(len(steps) // 8, steps)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the filter of system calls could not be installed")


# ---- frames


def _read(pipe: int) -> dict[str, object] | None:
    if (head := _exactly(pipe, LENGTH.size)) is None or (payload := _exactly(pipe, LENGTH.unpack(head)[0])) is None:
        return None
    message = json.loads(payload)
    assert isinstance(message, dict), "frames hold JSON objects"
    return message


def _exactly(pipe: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = os.read(pipe, min(count - len(data), _PIECE))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view[:_PIECE]) :]

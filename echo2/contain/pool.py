"""A pool of contained processes, and the queue that shares it among senders, some of whose requests take long.

Guarantees: the sender that has used least is next, so that one whose requests take long delays only its own; being away gains a
sender nothing; a sender in debt has at most one request running, so that others always find a process; a request that loses its
machine is asked again, `LOSSES_MAX` times. Waits for: in `close`, the requests in progress, each at most its time limit. `Pool` may
be called from any thread, `FairQueue` from one at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Generic, Protocol, TypeVar

from echo2.base.errors import LimitExceeded, MalformedMessage, TaskError
from echo2.contain.box import bubblewrap, view_here
from echo2.contain.messages import SCRATCH, Answer, Ending, Limits, foreign_object, shown
from echo2.contain.sandbox import GRACE_S, Launch, Sandbox

Item = TypeVar("Item")
SENDERS_MAX = 16_384  # more than the workers of the largest fleet (10,000); each is some bytes


@dataclass(slots=True)
class _Sender(Generic[Item]):
    used_s: float
    waiting: deque[Item] = field(default_factory=deque)
    running: int = 0
    is_in_debt: bool = False


class FairQueue(Generic[Item]):
    """Call `push`, `pop`, and `done` with the seconds used. `len` counts queued requests."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender[Item]] = {}
        self._level_s = 0.0  # usage of the sender served last: newcomers start there

    def __len__(self) -> int:
        return sum(len(account.waiting) for account in self._senders.values())

    def push(self, sender: str, item: Item) -> None:
        account = self._senders.get(sender)
        if account is None:
            if len(self._senders) >= SENDERS_MAX:
                idle = [name for name, other in self._senders.items() if not other.waiting and not other.running]
                for name in idle[:1]:
                    del self._senders[name]
            account = self._senders[sender] = _Sender(self._level_s)
        elif not account.waiting and not account.running:
            account.used_s = max(account.used_s, self._level_s)
        account.waiting.append(item)

    def pop(self) -> tuple[str, Item] | None:
        ready = [
            (account.used_s, name)
            for name, account in self._senders.items()
            if account.waiting and not (account.is_in_debt and account.running)
        ]
        if not ready:
            return None
        _, name = min(ready)
        account = self._senders[name]
        self._level_s = max(self._level_s, account.used_s)
        account.running += 1
        return name, account.waiting.popleft()

    def done(self, sender: str, seconds: float, is_held: bool) -> None:
        """A request of `sender` took `seconds`. `is_held`: it hit a limit; the sender is in debt until one does not."""
        account = self._senders.get(sender)
        if account is None:
            return
        account.running -= 1
        account.used_s += seconds
        account.is_in_debt = is_held

    def drain(self) -> list[Item]:
        items = [item for account in self._senders.values() for item in account.waiting]
        self._senders.clear()
        return items


Result = TypeVar("Result")
LOSSES_MAX = 2  # how often a request may lose its machine before it is given up: it may be what takes them down
# Endings for which the completion was to blame.
HELD = frozenset({Ending.CPU_USED_UP, Ending.OUTPUT_USED_UP, Ending.TIMED_OUT, Ending.CONTAINMENT_ENDED})


@dataclass(frozen=True, slots=True)
class _Request:
    body: Mapping[str, object]
    times: int
    future: Future[Any]
    read: Callable[[Answer], Any]
    losses: int = 0

    def finish(self, answer: Answer) -> None:
        try:
            self.future.set_result(self.read(answer))
        except BaseException as error:  # noqa: BLE001 - passed to the future's waiter
            self.future.set_exception(error)


class RunnerLost(Exception):
    """A runner's machine disappeared during a request; another one may answer it."""


class Runner(Protocol):
    """One process that answers requests, one at a time: `sandbox.Sandbox`, or an equivalent on another machine. Three methods do: a
    request brings its files, the answer brings what it printed, and nothing stays, so that another runner can be asked again."""

    def prepare(self, is_wanted: Callable[[], bool]) -> bool:
        """Waits until it can take a request; False once `is_wanted` returns False."""
        ...

    def ask(self, body: Mapping[str, object], times: int = 1) -> Answer:
        """Answers a request, which may take the time of `times` runs. Raises only RunnerLost."""
        ...

    def kill(self) -> None: ...


class Pool:
    """Call `submit` from any thread. `make` creates each process's runner; `limits`: of one run."""

    def __init__(self, make: Callable[[], Runner], limits: Limits, process_count: int, queue_max: int):
        self._make, self._limits = make, limits
        self.process_count = process_count
        self._queue_max = queue_max
        self._queue: FairQueue[_Request] = FairQueue()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(
        self, body: Mapping[str, object], read: Callable[[Answer], Result], sender: str = "", times: int = 1
    ) -> Future[Result]:
        """Queues `body`; the future gets what `read` makes of the answer. LimitExceeded if the queue is full."""
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise TaskError("pool of contained processes: expected an open one, it is closed")
            if len(self._queue) >= self._queue_max:
                raise LimitExceeded(f"pool of contained processes: expected at most {self._queue_max} requests waiting")
            self._queue.push(sender, _Request(body, times, future, read))
            if len(self._threads) < self.process_count:
                thread = threading.Thread(target=self._work, name=f"contained-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancels queued requests and waits for running ones, at most their time limit."""
        with self._changed:
            self._is_closed = True
            for request in self._queue.drain():
                if not request.future.cancel():  # it has lost a machine, and waits for another
                    request.finish(Answer(Ending.FAULT, note="the pool was closed"))
            self._changed.notify_all()
        limits = self._limits
        for thread in self._threads:
            thread.join(limits.wall_s + limits.start_s + GRACE_S)

    def _work(self) -> None:
        runner = self._make()
        try:
            while runner.prepare(lambda: not self._is_closed) and (entry := self._next()) is not None:
                sender, request = entry
                answer = Answer(Ending.DIED, note="cancelled")
                try:
                    if request.losses or request.future.set_running_or_notify_cancel():
                        answer = runner.ask(request.body, request.times)
                        request.finish(answer)
                except RunnerLost as lost:
                    self._again(sender, request, str(lost))
                except Exception as error:  # noqa: BLE001 - of a runner that does not keep to its contract
                    request.future.set_exception(error)
                finally:
                    with self._changed:
                        self._queue.done(sender, answer.seconds, bool(sender) and answer.ending in HELD)
                        self._changed.notify_all()
        finally:
            runner.kill()

    def _again(self, sender: str, request: _Request, note: str) -> None:
        with self._changed:
            is_given_up = self._is_closed or request.losses >= LOSSES_MAX
            if not is_given_up:
                self._queue.push(sender, replace(request, losses=request.losses + 1))
        if is_given_up:
            request.finish(Answer(Ending.FAULT, note=note))

    def _next(self) -> tuple[str, _Request] | None:
        """Waits for a request; None once the pool is closed."""
        with self._changed:
            while not self._is_closed:
                entry = self._queue.pop()
                if entry is not None:
                    return entry
                self._changed.wait()
            return None


def program_sandboxes(limits: Limits | None = None) -> Callable[[], Sandbox]:
    """Makes the sandboxes of programs on this machine. Raises ResourceError if containment does not work here."""
    bubblewrap()
    launch = Launch("echo2.contain.program_inside", "", limits or Limits(), view_here(folder=SCRATCH))
    return lambda: Sandbox(launch)


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


PROGRAMS_QUEUED_MAX = 1 << 12  # each holds its code and files


class ProgramPool:
    """`process_count` processes, each running one program at a time, here or where the runners of `make` are. Raises ResourceError
    if they are to be here and containment does not work here."""

    def __init__(self, limits: Limits | None = None, process_count: int = 1, make: Callable[[], Runner] | None = None):
        self._pool = Pool(make or program_sandboxes(limits), limits or Limits(), process_count, PROGRAMS_QUEUED_MAX)

    def submit(self, program: Program, sender: str = "") -> Future[Answer]:
        """Queues a program. `sender`: whom it runs for; senders with long-running programs queue behind others. The answer's `note`
        is empty after a clean exit; with the ending FAULT nothing can be concluded about the program."""
        body = {"code": program.code, "stdin": program.stdin, "files": dict(program.files)}
        return self._pool.submit(body, _ran, sender)

    def close(self) -> None:
        self._pool.close()


def _ran(answer: Answer) -> Answer:
    if answer.ending is not Ending.ANSWERED:
        return answer
    try:
        return replace(answer, note=str(foreign_object(answer.body).get("problem", "")))
    except MalformedMessage as error:
        return replace(answer, ending=Ending.DIED, note=shown(error))

"""Computes rewards: in this process for cheap tasks, else in a bounded pool of processes with time and memory limits.
The same pool steps multi-turn environments.

Guarantees: a reward that raises, hangs, eats memory or kills its process costs its own rollout, is counted, and is
reported by `Scored.failure`; nothing here raises because of it, and the next reward gets a healthy process. Processes
are started when first needed. Each thread of the pool waits for the next request (woken by `submit` and `close`) or for
its child's answer (at most `timeout_s`). Leaves to others: what becomes of a rollout without a reward (it is dropped).
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeVar

from echo2.base.errors import LimitExceeded, TaskError
from echo2.tasks.environment import Observation
from echo2.tasks.runtime import scorer as child
from echo2.tasks.task import ChatMessage, Reward, Task, TaskSpec

Result = TypeVar("Result")


class RewardFailure(enum.Enum):
    """Why there is no reward."""

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    DIED = "died"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward, or why there is none. `seconds` is the time it took, waiting in the queue excluded."""

    reward: Reward | None
    failure: RewardFailure | None
    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """The world's answer to a completion, or why there is none."""

    observation: Observation | None
    failure: RewardFailure | None
    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RewardLimits:
    """Bounds of the pool. `start_timeout_s` covers importing the task's packages and reading its data."""

    timeout_s: float = 10.0
    memory_bytes: int = 4 << 30
    process_count: int = 2
    queue_max: int = 1 << 16
    start_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class RewardCounts:
    """What became of rewards since the start."""

    scored: int = 0
    raised: int = 0
    timed_out: int = 0
    out_of_memory: int = 0
    died: int = 0
    too_large: int = 0


class Scorer(Protocol):
    """Computes rewards of one task. Results come as futures, so that threads and event loops can both wait."""

    def submit(self, index: int, completion_text: str) -> Future[Scored]:
        """Asks for the reward of a completion of instance `index`. `LimitExceeded` when the queue is full."""
        ...

    def counts(self) -> RewardCounts: ...

    def close(self) -> None:
        """Ends the processes; requests that wait are cancelled."""
        ...


def make_scorer(task: Task, spec: TaskSpec, limits: RewardLimits | None = None) -> Scorer:
    """In this process for a task that says it is cheap, else a pool. `spec` must be what `task` was made from."""
    return InProcessScorer(task) if task.is_cheap else RewardPool(spec, limits or RewardLimits())


class _Tally:
    """Counts, shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = RewardCounts()

    def add(self, failure: RewardFailure | None) -> None:
        name = "scored" if failure is None else failure.value
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + 1})

    def read(self) -> RewardCounts:
        with self._lock:
            return self._counts


class InProcessScorer:
    """For tasks whose score is trusted and takes microseconds: no process, no queue, the future is done at once."""

    def __init__(self, task: Task):
        self._task = task
        self._sample = lru_cache(maxsize=child.INSTANCES_CACHED)(task.sample)
        self._tally = _Tally()

    def submit(self, index: int, completion_text: str) -> Future[Scored]:
        began = time.monotonic()
        answer = child.scored(self._task, self._sample(index), completion_text)
        result = _scored(_outcome(answer, time.monotonic() - began))
        self._tally.add(result.failure)
        future: Future[Scored] = Future()
        future.set_result(result)
        return future

    def counts(self) -> RewardCounts:
        return self._tally.read()

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of one request: an answer, or why there is none."""

    answer: Mapping[str, object]
    failure: RewardFailure | None
    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Request:
    body: Mapping[str, object]
    finish: Callable[[_Outcome], None]
    begin: Callable[[], bool]
    cancel: Callable[[], bool]


class RewardPool:
    """`process_count` threads, each with a child process of its own that it may kill."""

    def __init__(self, spec: TaskSpec, limits: RewardLimits):
        self._spec_json = spec.to_json()
        self._limits = limits
        self._queue: queue.Queue[_Request | None] = queue.Queue(limits.queue_max)
        self._tally = _Tally()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, index: int, completion_text: str) -> Future[Scored]:
        return self._submit({"index": index, "text": completion_text}, _scored)

    def submit_step(self, index: int, completions: Sequence[str]) -> Future[Stepped]:
        """Asks for the world's answer to the last of an episode's completions; all of them are told, so that any
        process can answer. The pool must have been made for environments.
        """
        return self._submit({"index": index, "completions": list(completions)}, _stepped)

    def _submit(self, body: Mapping[str, object], read: Callable[[_Outcome], Result]) -> Future[Result]:
        if self._is_closed:
            raise TaskError("reward pool: expected an open pool, it is closed")
        future: Future[Result] = Future()
        request = _Request(
            body, lambda outcome: future.set_result(read(outcome)), future.set_running_or_notify_cancel, future.cancel
        )
        try:
            self._queue.put_nowait(request)
        except queue.Full as error:
            raise LimitExceeded(f"reward pool: expected at most {self._limits.queue_max} rewards waiting") from error
        self._start_a_thread_if_needed()
        return future

    def counts(self) -> RewardCounts:
        return self._tally.read()

    def close(self) -> None:
        """Waits at most one reward's time limit for the rewards in progress."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._queue.get_nowait()
                if request is not None:
                    request.cancel()
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(self._limits.timeout_s + self._limits.start_timeout_s)

    def _start_a_thread_if_needed(self) -> None:
        with self._lock:
            if len(self._threads) < self._limits.process_count and not self._is_closed:
                thread = threading.Thread(target=self._work, name=f"reward-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        process = _ScorerProcess(self._spec_json, self._limits)
        try:
            while (request := self._queue.get()) is not None:
                if not request.begin():
                    continue
                outcome = process.ask(request.body)
                self._tally.add(outcome.failure)
                request.finish(outcome)
        finally:
            process.kill()


class _ScorerProcess:
    """One child, started when first asked and again after it had to be killed. Used by one thread."""

    def __init__(self, spec_json: str, limits: RewardLimits):
        self._spec_json = spec_json
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, body: Mapping[str, object]) -> _Outcome:
        began = time.monotonic()
        try:
            process = self._process or self._start()
            began = time.monotonic()
            answer = self._exchange(process, body, self._limits.timeout_s)
        except TimeoutError:
            self.kill()
            failure, message = RewardFailure.TIMED_OUT, f"no answer within {self._limits.timeout_s} s"
            return _Outcome({}, failure, message, time.monotonic() - began)
        except TaskError as error:
            return _Outcome({}, RewardFailure.TOO_LARGE, str(error), time.monotonic() - began)
        except (EOFError, OSError) as error:
            self.kill()
            failure, message = RewardFailure.DIED, f"the reward's process ended: {error}"
            return _Outcome({}, failure, message, time.monotonic() - began)
        return _outcome(answer, time.monotonic() - began)

    def kill(self) -> None:
        """Kills the child and whatever it started."""
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

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "echo2.tasks.runtime.scorer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        setup = {"task": self._spec_json, "memory_bytes": self._limits.memory_bytes}
        answer = self._exchange(self._process, setup, self._limits.start_timeout_s)
        if "error" in answer:
            raise EOFError(f"it could not make the task: {answer['error']}")
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], message: object, timeout_s: float) -> Mapping[str, object]:
        assert process.stdin is not None and process.stdout is not None, "both pipes were asked for"
        deadline = time.monotonic() + timeout_s
        frame = io.BytesIO()
        child.write_frame(frame, message)
        process.stdin.write(frame.getbuffer())
        process.stdin.flush()
        length = int.from_bytes(_read_exactly(process.stdout.fileno(), 4, deadline), "big")
        if length > child.FRAME_BYTES_MAX:
            raise EOFError(f"expected an answer of at most {child.FRAME_BYTES_MAX} bytes, got {length}")
        answer = json.loads(_read_exactly(process.stdout.fileno(), length, deadline))
        assert isinstance(answer, dict), "the child answers JSON objects"
        return answer


def _read_exactly(descriptor: int, count: int, deadline: float) -> bytes:
    """Reads past the stream's buffer, straight from the pipe, so that `select` sees what is there."""
    data = b""
    while len(data) < count:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError
        piece = os.read(descriptor, count - len(data))
        if not piece:
            raise EOFError("end of its answers")
        data += piece
    return data


def _outcome(answer: Mapping[str, object], seconds: float) -> _Outcome:
    if "error" in answer:
        failure = RewardFailure.OUT_OF_MEMORY if answer.get("is_memory") else RewardFailure.RAISED
        return _Outcome({}, failure, str(answer["error"]), seconds)
    return _Outcome(answer, None, "", seconds)


def _scored(outcome: _Outcome) -> Scored:
    reward = None if outcome.failure else _reward(outcome.answer)
    return Scored(reward, outcome.failure, outcome.message, outcome.seconds)


def _stepped(outcome: _Outcome) -> Stepped:
    observation = None if outcome.failure else _observation(outcome.answer)
    return Stepped(observation, outcome.failure, outcome.message, outcome.seconds)


def _reward(answer: Mapping[str, object]) -> Reward:
    parts = answer["parts"]
    assert isinstance(parts, Mapping), "a reward's parts are an object"
    named = {str(name): float(str(number)) for name, number in parts.items()}
    return Reward(float(str(answer["value"])), named)


def _observation(answer: Mapping[str, object]) -> Observation:
    if "value" in answer:
        return Observation((), _reward(answer))
    messages = answer["messages"]
    assert isinstance(messages, list), "messages are a list of [role, content]"
    return Observation(tuple(ChatMessage(str(role), str(content)) for role, content in messages))

"""Computes rewards: in this process for echo2's own plain comparisons, else in contained processes with limits on time,
memory and output. The same pool steps multi-turn environments.

Guarantees: if a scorer executes a completion's text, it does so in a process of its own, without network, files or keys; a reward
is a finite number within bounds. A scorer that raises, hangs, exhausts memory or kills its process costs only that rollout; the
failure is counted and reported in `Scored.failure`, and nothing here raises because of it. Leaves to others: what becomes of a
rollout without a reward (it is dropped), which sender failures are counted against (learner/holding).

A completion that made its scorer exhaust a limit (CPU time, memory, output) gets reward 0; any other failure gives no reward
(None), since it may be the machine's or the scorer's fault. docs/tasks.md argues for this rule.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol, TypeVar

from echo2.base.errors import ConfigError, MalformedMessage, ResourceError, TaskError
from echo2.contain.limits import Answer, Ending, Limits
from echo2.contain.messages import foreign_object, shown
from echo2.contain.runtime.box import bubblewrap, view_here
from echo2.contain.runtime.pool import Pool
from echo2.contain.runtime.sandbox import Launch, Sandbox
from echo2.tasks.environment import Observation
from echo2.tasks.executing import trusted_text
from echo2.tasks.runtime import scorer as child
from echo2.tasks.runtime.hub_data import folder_to_show, local_data_set
from echo2.tasks.runtime.registry import is_users_own
from echo2.tasks.task import ChatMessage, Reward, Task, TaskSpec

_log = logging.getLogger("echo2.rewards")
PARTS_MAX = 64
NAME_CHARS_MAX = 64
MESSAGES_MAX = 64
OWN_REWARD_MAX = 1e6
EXHAUSTED = "exhausted"


class RewardFailure(enum.Enum):
    """Why there is no reward, or why it is 0."""

    RAISED = "raised"
    EXHAUSTED = "exhausted"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    DIED = "died"
    TOO_LARGE = "too_large"
    FAULT = "fault"

    @property
    def is_held_against_sender(self) -> bool:
        """Whether the failure may be deliberate: any but those that are certainly the machine's or the scorer's fault."""
        return self not in (RewardFailure.RAISED, RewardFailure.FAULT)


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward, or why there is none. `seconds`: time taken, without waiting in the queue."""

    reward: Reward | None
    failure: RewardFailure | None
    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """The world's answer to a completion, or why there is none. `seconds`: as in `Scored`."""

    observation: Observation | None
    failure: RewardFailure | None
    message: str
    seconds: float


Result = TypeVar("Result", Scored, Stepped)
PROCESSES_MIN, PROCESSES_MAX = 2, 16


@dataclass(frozen=True, slots=True)
class RewardLimits:
    """Bounds of the pool. `cpu_s` and `timeout_s` (wall time) apply to each request. `start_timeout_s` covers importing the task's
    packages and reading its data."""

    cpu_s: int = 2
    timeout_s: float = 10.0
    memory_bytes: int = 2 << 30
    process_count: int = 2
    queue_max: int = 1 << 16
    start_timeout_s: float = 120.0


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def reward_processes(cores: int) -> int:
    """Number of processes: a quarter of the cores, since the trainer uses the others, but at least two, so that one slow
    completion does not block the others."""
    return max(PROCESSES_MIN, min(PROCESSES_MAX, cores // 4))


def limits_of(spec: TaskSpec) -> RewardLimits:
    """Chooses default limits: built-in scorers need milliseconds, a user's own may run tests."""
    count = reward_processes(available_cores())
    if is_users_own(spec):
        return RewardLimits(cpu_s=10, timeout_s=30.0, process_count=count)
    return RewardLimits(process_count=count)


@dataclass(frozen=True, slots=True)
class Containment:
    """How rewards are contained. `is_trusted`: they are not; they run with the learner's own rights. `readable`: paths that
    contained rewards may read besides the task's own package and data. `hidden`: folders hidden from them even inside those. `ray`:
    address of the Ray cluster that runs them; empty: this machine. `processes`: how many at once; 0: derived from the cores.
    """

    is_trusted: bool = False
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    ray: str = ""
    processes: int = 0


@dataclass(frozen=True, slots=True)
class RewardCounts:
    """Counts of rewards and failures since the start."""

    scored: int = 0
    raised: int = 0
    exhausted: int = 0
    timed_out: int = 0
    out_of_memory: int = 0
    died: int = 0
    too_large: int = 0
    fault: int = 0


class RewardScorer(Protocol):
    """Computes rewards of one task. Results come as futures, so that threads and event loops can both wait."""

    def submit(self, index: int, completion_text: str, sender: str = "") -> Future[Scored]:
        """Asks for the reward of a completion of instance `index`. Raises `LimitExceeded` if the queue is full. `sender`: the
        completion's sender; senders whose rewards take long are queued behind others.
        """
        ...

    def counts(self) -> RewardCounts: ...

    def close(self) -> None:
        """Ends the processes and cancels waiting requests."""
        ...


def make_scorer(
    task: Task, spec: TaskSpec, limits: RewardLimits | None = None, containment: Containment | None = None
) -> RewardScorer:
    """Makes a scorer: in this process for echo2's own plain comparisons, else a pool. `spec` must be what `task` was made from.

    A user's own task that says it is cheap is scored here only if rewards are trusted.
    """
    containment = containment or Containment()
    if spec.name == "verifiers" and spec.args.get("agent") is not None and not containment.is_trusted:
        raise ConfigError(
            "task verifiers: expected task.trusted_rewards = true where its own agents play, for their tools and rewards run "
            "with the learner's rights and see what models write"
        )
    if task.is_cheap and (containment.is_trusted or not is_users_own(spec)):
        return InProcessScorer(task)
    return RewardPool(spec, limits, containment)


class _Tally:
    """Thread-safe counts."""

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
    """Scores in this process, for trusted scores that take microseconds: no queue, and each future is done at once."""

    def __init__(self, task: Task):
        self._task = task
        self._sample = lru_cache(maxsize=child.INSTANCES_CACHED)(task.sample)
        self._tally = _Tally()

    def submit(self, index: int, completion_text: str, sender: str = "") -> Future[Scored]:
        began = time.monotonic()
        answer = child.scored(self._task, self._sample(index), completion_text)
        result = _scored(_told(answer, time.monotonic() - began), is_trusted=True, bound=OWN_REWARD_MAX)
        self._tally.add(result.failure)
        future: Future[Scored] = Future()
        future.set_result(result)
        return future

    def counts(self) -> RewardCounts:
        return self._tally.read()

    def close(self) -> None:
        pass


class RewardPool:
    """A pool of processes that score or step; contained, unless rewards are trusted."""

    def __init__(self, spec: TaskSpec, limits: RewardLimits | None = None, containment: Containment | None = None):
        containment = containment or Containment()
        limits = limits or limits_of(spec)
        if containment.processes:
            limits = replace(limits, process_count=containment.processes)
        self._is_trusted = containment.is_trusted
        self._bound = OWN_REWARD_MAX if is_users_own(spec) else 1.0
        self._tally = _Tally()
        self._pool = _pool_of(spec, limits, containment)

    def submit(self, index: int, completion_text: str, sender: str = "") -> Future[Scored]:
        read = partial(_scored, is_trusted=self._is_trusted, bound=self._bound)
        return self._pool.submit(
            {"index": index, "text": completion_text}, lambda a: self._counted(read(_read(a))), sender
        )

    def submit_step(self, index: int, completions: Sequence[str], sender: str = "") -> Future[Stepped]:
        """Asks for the world's answer to the last of an episode's completions. Sends all of them, so that any process can
        answer; the time limit grows with their number. The pool must have been made for environments.
        """
        read = partial(_stepped, is_trusted=self._is_trusted, bound=self._bound)
        body = {"index": index, "completions": list(completions)}
        return self._pool.submit(body, lambda a: self._counted(read(_read(a))), sender, max(1, len(completions)))

    def counts(self) -> RewardCounts:
        return self._tally.read()

    def close(self) -> None:
        """Waits at most one reward's time limit for the rewards in progress."""
        self._pool.close()

    def _counted(self, result: Result) -> Result:
        self._tally.add(result.failure)
        return result


def _pool_of(spec: TaskSpec, limits: RewardLimits, containment: Containment) -> Pool:
    if containment.ray:
        from echo2.tasks.runtime.ray_rewards import RayRunner, processes_of_cluster

        count = limits.process_count if containment.processes else processes_of_cluster(containment.ray)
        there = replace(containment, ray="")
        return Pool(lambda: RayRunner(spec, limits, there), bounds_of(limits), count, limits.queue_max)
    launch = launch_of(spec, limits, containment)
    return Pool(lambda: Sandbox(launch), launch.limits, limits.process_count, limits.queue_max)


def bounds_of(limits: RewardLimits) -> Limits:
    """Limits of one request, as contain takes them."""
    return Limits(
        cpu_s=limits.cpu_s, wall_s=limits.timeout_s, memory_bytes=limits.memory_bytes, start_s=limits.start_timeout_s
    )


def launch_of(spec: TaskSpec, limits: RewardLimits, containment: Containment) -> Launch:
    """Describes how to start the processes. Raises `ConfigError` if they cannot be contained and are not trusted."""
    bounds = bounds_of(limits)
    module = "echo2.tasks.runtime.scorer"
    if containment.is_trusted:
        _log.warning("%s", trusted_text(spec.name, spec.args))
        return Launch(module, spec.to_json(), bounds, None)
    try:
        bubblewrap()
    except ResourceError as error:
        raise ConfigError(
            f"task {spec.name}: expected to contain its rewards, which look at what models wrote, but {error}. "
            "task.trusted_rewards = true runs them with the learner's rights instead: its keys and weights are then theirs"
        ) from None
    modules = [spec.name.partition(":")[0]] if is_users_own(spec) else []
    path = spec.args.get("path")
    data: tuple[str, ...] = ()
    if isinstance(path, str) and path and not modules:  # contained processes have no network, so fetch the data here
        local = local_data_set(path)
        spec, data = replace(spec, args={**spec.args, "path": str(local)}), (str(folder_to_show(local)),)
    view = view_here(modules, (*containment.readable, *data), containment.hidden)
    return Launch(module, spec.to_json(), bounds, view)


# ---- answers


@dataclass(frozen=True, slots=True)
class _Told:
    """A scorer's answer, or why there is none."""

    answer: Mapping[str, object]
    failure: RewardFailure | None
    message: str
    seconds: float


_FAILURES = {
    Ending.CPU_USED_UP: RewardFailure.EXHAUSTED,
    Ending.OUTPUT_USED_UP: RewardFailure.EXHAUSTED,
    Ending.TIMED_OUT: RewardFailure.TIMED_OUT,
    Ending.DIED: RewardFailure.DIED,
    Ending.REQUEST_TOO_LARGE: RewardFailure.TOO_LARGE,
    Ending.FAULT: RewardFailure.FAULT,
}


def _read(answer: Answer) -> _Told:
    if answer.ending is not Ending.ANSWERED:
        return _Told({}, _FAILURES[answer.ending], answer.note, answer.seconds)
    try:
        return _told(foreign_object(answer.body), answer.seconds)
    except MalformedMessage as error:
        return _Told({}, RewardFailure.DIED, str(error), answer.seconds)


def _told(answer: Mapping[str, object], seconds: float) -> _Told:
    if "error" in answer:
        failure = RewardFailure.OUT_OF_MEMORY if answer.get("is_memory") is True else RewardFailure.RAISED
        return _Told({}, failure, shown(answer["error"]), seconds)
    return _Told(answer, None, "", seconds)


def _nought(told: _Told, is_trusted: bool) -> Reward | None:
    """Returns reward 0 for a completion that exhausted its scorer, else None."""
    is_used_up = told.failure is RewardFailure.EXHAUSTED or (
        told.failure is RewardFailure.OUT_OF_MEMORY and not is_trusted
    )
    return Reward(0.0, {EXHAUSTED: 1.0}) if is_used_up else None


def _scored(told: _Told, is_trusted: bool, bound: float) -> Scored:
    if told.failure is not None:
        return Scored(_nought(told, is_trusted), told.failure, told.message, told.seconds)
    try:
        return Scored(_reward(told.answer, bound), None, "", told.seconds)
    except (MalformedMessage, TaskError) as error:
        return Scored(None, RewardFailure.RAISED, shown(error), told.seconds)


def _stepped(told: _Told, is_trusted: bool, bound: float) -> Stepped:
    if told.failure is not None:
        reward = _nought(told, is_trusted)
        observation = Observation((), reward) if reward is not None else None
        return Stepped(observation, told.failure, told.message, told.seconds)
    try:
        return Stepped(_observation(told.answer, bound), None, "", told.seconds)
    except (MalformedMessage, TaskError) as error:
        return Stepped(None, RewardFailure.RAISED, shown(error), told.seconds)


def _reward(answer: Mapping[str, object], bound: float) -> Reward:
    parts = answer.get("parts")
    if (
        not isinstance(parts, Mapping)
        or len(parts) > PARTS_MAX
        or any(len(str(name)) > NAME_CHARS_MAX for name in parts)
    ):
        raise MalformedMessage(f"reward: expected at most {PARTS_MAX} parts, got {shown(parts)}")
    value = _number(answer.get("value"))
    if abs(value) > bound:
        raise MalformedMessage(f"reward: expected a value from {-bound:g} to {bound:g}, got {value:g}")
    return Reward(value, {shown(name): _number(number) for name, number in parts.items()})


def _number(found: object) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise MalformedMessage(f"reward: expected a number, got {shown(found)}")
    try:
        number = float(found)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MalformedMessage("reward: expected a finite number")
    return number


def _observation(answer: Mapping[str, object], bound: float) -> Observation:
    if "value" in answer:
        return Observation((), _reward(answer, bound))
    messages = answer.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        raise MalformedMessage(f"world: expected 1 to {MESSAGES_MAX} messages, got {shown(messages)}")
    return Observation(tuple(_message(message) for message in messages))


def _message(found: object) -> ChatMessage:
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(part, str) for part in found):
        raise MalformedMessage(f"world: expected a message as [role, content], got {shown(found)}")
    role, content = found
    if role not in ("system", "user", "assistant", "tool"):
        raise MalformedMessage(f"world: expected the role system, user, assistant or tool, got {shown(role)}")
    return ChatMessage(role, content)

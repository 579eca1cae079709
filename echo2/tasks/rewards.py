"""Computes rewards: in this process for echo2's own plain comparisons, else in contained processes with limits on time,
memory and output. The same pool steps multi-turn environments.

Guarantees: a reward is a finite number within bounds; a scorer that raises, hangs, exhausts memory or kills its process costs
only that rollout; the failure is reported in `Scored.failure`, and nothing here raises because of it. A completion that made its
scorer exhaust a limit (CPU time, memory, output) gets reward 0, unless a harmless text on the same instance does so too: then the
instance is at fault, and its completions get no reward. docs/tasks.md argues for this rule.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

from echo2.base.errors import ConfigError, LimitExceeded, MalformedMessage, ResourceError, TaskError
from echo2.contain.box import bubblewrap, view_here
from echo2.contain.messages import Answer, Ending, Limits, foreign_object, shown
from echo2.contain.pool import Pool, RunnerLost
from echo2.contain.sandbox import GRACE_S, Launch, Sandbox
from echo2.tasks import scorer as child
from echo2.tasks.built_in import trusted_text
from echo2.tasks.data_files import local_data_set, paths_to_show
from echo2.tasks.mathematics import MathTask
from echo2.tasks.registry import drawn, is_environment, is_users_own, make_task
from echo2.tasks.task import ChatMessage, Reward, Task, TaskSpec
from echo2.tasks.visible import own_files, own_modules, remedy

_log = logging.getLogger("echo2.rewards")
PARTS_MAX = 64  # each part is a curve on the page
NAME_CHARS_MAX = 64  # a column's heading
MESSAGES_MAX = 64  # of one step; an environment answers a turn with a few
OWN_REWARD_MAX = 1e6  # keeps a group's mean and squares finite in float32
EXHAUSTED = "exhausted"  # part of the reward 0 of a completion that used up its limits
SAMPLE_TEXTS = ("0", "")  # a number, and nothing: what a scorer meets first from an untrained model
PROBED_MAX = 100_000  # 10 MB of set
AGAIN_S = 600.0  # until an instance is tried again for which its scorer waited in vain, as for a judge that was away


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


_USED_UP = (RewardFailure.EXHAUSTED, RewardFailure.TIMED_OUT, RewardFailure.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward; or what an environment says next; or why there is neither. `seconds`: time taken, without waiting in the queue.
    `reply`: what the environment says as tokens, before the model's next turn."""

    reward: Reward | None
    failure: RewardFailure | None
    message: str
    seconds: float
    messages: tuple[ChatMessage, ...] = ()
    reply: tuple[int, ...] = ()


PROCESSES_MIN, PROCESSES_MAX = 2, 16  # one may hang while the other scores; more than 16 are for a cluster (task.ray)
QUEUE_MAX = 1 << 16  # requests that wait: some minutes of a fleet


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def reward_processes(cores: int) -> int:
    """Number of processes: a quarter of the cores, since the trainer uses the others, but at least two, so that one slow
    completion does not block the others."""
    return max(PROCESSES_MIN, min(PROCESSES_MAX, cores // 4))


def limits_of(spec: TaskSpec) -> Limits:
    """Limits of a reward, whose packages and data are read before its time: built-in scorers need milliseconds, a user's own may
    run tests."""
    return Limits(cpu_s=10, wall_s=30.0) if is_users_own(spec) else Limits()


@dataclass(frozen=True, slots=True)
class Containment:
    """How rewards are contained. `is_trusted`: they are not; they run with the learner's own rights. `readable`: paths that
    contained rewards may read besides the task's own package and data. `hidden`: folders hidden from them even inside those. `ray`:
    address of the Ray cluster that runs them; empty: this machine. `processes`: how many at once; 0: derived from the cores."""

    is_trusted: bool = False
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    ray: str = ""
    processes: int = 0


class RewardScorer(Protocol):
    """Computes rewards of one task. Results come as futures, so that threads and event loops can both wait. `process_count`:
    rewards computed at once; 0: in this process."""

    process_count: int

    def submit(self, index: int, completion_text: str, sender: str = "") -> Future[Scored]:
        """Asks for the reward of a completion of instance `index`. Raises `LimitExceeded` if the queue is full. `sender`: the
        completion's sender; senders whose rewards take long are queued behind others."""
        ...

    def close(self) -> None:
        """Ends the processes and cancels waiting requests."""
        ...


def make_scorer(
    task: Task, spec: TaskSpec, limits: Limits | None = None, containment: Containment | None = None
) -> RewardScorer:
    """Makes a scorer: in this process for echo2's own plain comparisons, else a pool. `spec` must be what `task` was made from.
    A user's own task that says it is cheap is scored here only if rewards are trusted."""
    containment = containment or Containment()
    if spec.name == "verifiers" and spec.args.get("agent") is not None and not containment.is_trusted:
        raise ConfigError(
            "task verifiers: expected task.trusted_rewards = true where its own agents play, for their tools and rewards run "
            "with the learner's rights and see what models write"
        )
    if task.is_cheap and (containment.is_trusted or not is_users_own(spec)):
        return InProcessScorer(task)
    return RewardPool(spec, limits, containment)


def check_rewards(spec: TaskSpec, containment: Containment | None = None) -> None:
    """Makes one reward process ready and scores a sample, so that a run whose rewards cannot work does not start. Raises
    `TaskError` if none of SAMPLE_TEXTS and the sample's own answer gets a reward: one that does is enough, since a task may
    refuse any text."""
    containment = replace(containment or Containment(), processes=1)
    scorer: RewardScorer
    texts: tuple[str, ...] = SAMPLE_TEXTS
    if is_environment(spec):
        scorer = RewardPool(spec, None, containment)
        asked = (scorer.submit_step(0, [text]) for text in texts)
    else:
        task = make_task(spec)
        texts = (str(drawn(spec.name, task.sample, 0).answer), *SAMPLE_TEXTS)
        scorer = make_scorer(task, spec, None, containment)
        asked = (scorer.submit(0, text) for text in texts)
    messages = []
    with contextlib.closing(scorer):
        for answer in asked:
            result = answer.result()
            if result.failure is None:
                return
            messages.append(result.message)
            if result.failure is RewardFailure.FAULT:  # the process itself: another text does not help
                break
    advice = "" if containment.is_trusted else remedy(messages[0])
    raise TaskError(
        f"task {spec.name}: expected a reward for a sample before the run starts, got {messages[0]}{advice}"
    )


REFERENCES_S = 20.0  # what a start may take for them: thousands of rows; others are met while training
REFERENCES_AT_ONCE = 32  # in one process; a part in which one fails is asked again, one at a time


def unjudgeable_references(spec: TaskSpec, containment: Containment | None = None) -> frozenset[int]:
    """The instances of a data set whose reference cannot be judged: scoring a harmless text on them fails. Checks, and logs with
    file and row, as many as `REFERENCES_S` allows. Raises `TaskError` if they are more than half."""
    task = None if is_environment(spec) else make_task(spec)
    if not isinstance(task, MathTask):
        return frozenset()
    failed: dict[int, str] = {}
    asked: deque[tuple[range, Future[Scored]]] = deque()
    until, count = time.monotonic() + REFERENCES_S, 0
    with contextlib.closing(RewardPool(spec, None, containment)) as pool:
        while asked or (count < task.size and time.monotonic() < until):
            if count < task.size and len(asked) < 4 * pool.process_count and time.monotonic() < until:
                part = range(count, min(task.size, count + REFERENCES_AT_ONCE))
                asked.append((part, pool.submit_references(part)))
                count = part.stop
                continue
            part, answer = asked.popleft()
            result = answer.result()
            if len(part) > 1 and (result.reward is None or result.reward.value < 0 or result.failure is not None):
                asked += [(range(index, index + 1), pool.submit(index, SAMPLE_TEXTS[0])) for index in part]
            elif result.failure is not None:
                index = part.start
                failed[index] = f"{task.where(index)} ({task.sample(index).answer[:40]!r}: {result.message[:120]})"
    if count < task.size:
        _log.info("%s: %d of %d references were tried within %.0f s", task.name, count, task.size, REFERENCES_S)
    named = "; ".join(list(failed.values())[:8])
    if 2 * len(failed) > count:
        raise TaskError(
            f"{task.name}: expected references that can be judged, {len(failed)} of {count} cannot: {named}"
        )
    if failed:
        text = "%s: %d of %d references cannot be judged; their rows are left out: %s"
        _log.warning(text, task.name, len(failed), count, named)
    return frozenset(failed)


class InProcessScorer:
    process_count = 0

    def __init__(self, task: Task):
        self._task = task
        self._sample = lru_cache(maxsize=child.INSTANCES_CACHED)(task.sample)

    def submit(self, index: int, completion_text: str, sender: str = "") -> Future[Scored]:
        began = time.monotonic()
        answer = child.scored(self._task, self._sample(index), completion_text)
        return _done(_read_fields(answer, time.monotonic() - began, is_trusted=True, bound=OWN_REWARD_MAX))

    def close(self) -> None:
        pass


class RewardPool:
    """A pool of processes that score or step; contained, unless rewards are trusted."""

    def __init__(self, spec: TaskSpec, limits: Limits | None = None, containment: Containment | None = None):
        containment = containment or Containment()
        limits = limits or limits_of(spec)
        # The largest reward: 1 of a task of echo2's; others weigh as they like.
        bound = OWN_REWARD_MAX if is_users_own(spec) or spec.name == "verifiers" else 1.0
        self._read = partial(_scored, is_trusted=containment.is_trusted, bound=bound)
        self._at_fault: dict[int, tuple[float, Scored]] = {}  # what no completion could be scored on, and until when
        self._sound: set[int] = set()  # instances on which a harmless text was scored
        self._pool = _pool_of(spec, limits, containment)
        self.process_count = self._pool.process_count

    def submit(self, index: int, completion_text: str, sender: str = "") -> Future[Scored]:
        until, fault = self._at_fault.get(index, (-math.inf, None))
        if fault is not None and time.monotonic() < until:
            return _done(fault)
        answer: Future[Scored] = Future()
        asked = self._pool.submit({"index": index, "text": completion_text}, self._read, sender)
        asked.add_done_callback(lambda done: self._judge(done, answer, index))
        return answer

    def _judge(self, asked: Future[Scored], answer: Future[Scored], index: int) -> None:
        """Passes the result on. Where a completion used up its limits, a harmless text is scored first: if that uses them up as
        well, the instance is at fault, and neither this completion nor a later one of it is held against its sender."""
        if asked.cancelled():
            answer.cancel()
        elif (error := asked.exception()) is not None:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        elif asked.result().failure not in _USED_UP or index in self._sound:
            self._give(answer, asked.result())
        else:
            self._probe(asked.result(), answer, index)

    def _probe(self, result: Scored, answer: Future[Scored], index: int) -> None:
        def probed(probe: Future[Scored]) -> None:
            is_known = not probe.cancelled() and probe.exception() is None
            if is_known and probe.result().failure in _USED_UP:
                text = f"instance {index} itself: scoring {SAMPLE_TEXTS[0]!r} fails too ({probe.result().message})"
                _log.warning("%s; its completions get no reward", text)
                fault = Scored(None, RewardFailure.FAULT, text, 0.0)
                has_waited = probe.result().failure is RewardFailure.TIMED_OUT
                self._at_fault[index] = time.monotonic() + AGAIN_S if has_waited else math.inf, fault
                self._give(answer, fault)
                return
            if is_known and len(self._sound) < PROBED_MAX:
                self._sound.add(index)
            self._give(answer, result)

        try:
            self.submit_references(range(index, index + 1)).add_done_callback(probed)
        except LimitExceeded:  # the queue is full; the next such completion asks again
            self._give(answer, result)

    def _give(self, answer: Future[Scored], result: Scored) -> None:
        if answer.set_running_or_notify_cancel():  # else whoever asked has given up meanwhile
            answer.set_result(result)

    def submit_references(self, part: range) -> Future[Scored]:
        """Scores a harmless text on each instance of `part` in one process; the reward is below 0 if one of them fails."""
        body = {"index": part.start, "text": SAMPLE_TEXTS[0], "stop": part.stop}
        return self._pool.submit(body, self._read)

    def submit_step(self, index: int, completions: Sequence[str], sender: str = "") -> Future[Scored]:
        """Asks for the world's answer to the last of an episode's completions. Sends all of them, so that any process can
        answer; the time limit grows with their number. The pool must have been made for environments."""
        body = {"index": index, "completions": list(completions)}
        return self._pool.submit(body, partial(self._read, is_step=True), sender, max(1, len(completions)))

    def close(self) -> None:
        """Waits at most one reward's time limit for the rewards in progress."""
        self._pool.close()


def _pool_of(spec: TaskSpec, limits: Limits, containment: Containment) -> Pool:
    if containment.ray:
        count = containment.processes or processes_of_cluster(containment.ray)
        return Pool(lambda: RayRunner(spec, limits, replace(containment, ray="")), limits, count, QUEUE_MAX)
    launch = launch_of(spec, limits, containment)
    count = containment.processes or reward_processes(available_cores())
    return Pool(lambda: Sandbox(launch), limits, count, QUEUE_MAX)


def launch_of(spec: TaskSpec, limits: Limits, containment: Containment) -> Launch:
    """Describes how to start the processes. Raises `ConfigError` if they cannot be contained and are not trusted."""
    module = "echo2.tasks.scorer"
    if containment.is_trusted:
        _log.warning("%s", trusted_text(spec.name, spec.args))
        return Launch(module, spec.to_json(), limits, None)
    try:
        bubblewrap()
    except ResourceError as error:
        raise ConfigError(
            f"task {spec.name}: expected to contain its rewards, which look at what models wrote, but {error}. "
            "task.trusted_rewards = true runs them with the learner's rights instead: its keys and weights are then theirs"
        ) from None
    modules = own_modules(spec.name) if is_users_own(spec) else []
    path = spec.args.get("path")
    data = tuple(own_files(spec)) if modules else ()
    if isinstance(path, str) and path and not modules:  # contained processes have no network, so fetch the data here
        local = local_data_set(path)
        spec, data = replace(spec, args={**spec.args, "path": str(local)}), tuple(map(str, paths_to_show(local)))
    view = view_here(modules, (*containment.readable, *data), containment.hidden)
    return Launch(module, spec.to_json(), limits, view)


# ---- answers


# How the container's endings are told.
_FAILURES = {
    Ending.CPU_USED_UP: RewardFailure.EXHAUSTED, Ending.OUTPUT_USED_UP: RewardFailure.EXHAUSTED,
    Ending.TIMED_OUT: RewardFailure.TIMED_OUT, Ending.DIED: RewardFailure.DIED, Ending.FAULT: RewardFailure.FAULT,
    Ending.REQUEST_TOO_LARGE: RewardFailure.TOO_LARGE, Ending.CONTAINMENT_ENDED: RewardFailure.DIED,
}  # fmt: skip


def _scored(answer: Answer, *, is_trusted: bool, bound: float, is_step: bool = False) -> Scored:
    """What a process answered. `is_step`: it may be what an environment says, in place of a reward."""
    if answer.ending is not Ending.ANSWERED:
        return _failed(_FAILURES[answer.ending], answer.note, answer.seconds, is_trusted)
    try:
        fields = foreign_object(answer.body)
    except MalformedMessage as error:
        return _failed(RewardFailure.DIED, str(error), answer.seconds, is_trusted)
    return _read_fields(fields, answer.seconds, is_trusted=is_trusted, bound=bound, is_step=is_step)


def _read_fields(
    fields: Mapping[str, object], seconds: float, *, is_trusted: bool, bound: float, is_step: bool = False
) -> Scored:
    if "error" in fields:
        failure = RewardFailure.OUT_OF_MEMORY if fields.get("is_memory") is True else RewardFailure.RAISED
        return _failed(failure, shown(fields["error"]), seconds, is_trusted)
    try:
        if is_step and "value" not in fields:
            return Scored(None, None, "", seconds, _messages(fields.get("messages")))
        return Scored(_reward(fields, bound), None, "", seconds)
    except (MalformedMessage, TaskError) as error:
        return Scored(None, RewardFailure.RAISED, shown(error), seconds)


def _failed(failure: RewardFailure, message: str, seconds: float, is_trusted: bool) -> Scored:
    """A completion that exhausted its scorer gets reward 0, any other failure none."""
    is_used_up = failure is RewardFailure.EXHAUSTED or (failure is RewardFailure.OUT_OF_MEMORY and not is_trusted)
    return Scored(Reward(0.0, {EXHAUSTED: 1.0}) if is_used_up else None, failure, message, seconds)


def _done(result: Scored) -> Future[Scored]:
    future: Future[Scored] = Future()
    future.set_result(result)
    return future


def _reward(answer: Mapping[str, object], bound: float) -> Reward:
    parts = answer.get("parts")
    if (
        not isinstance(parts, Mapping)
        or len(parts) > PARTS_MAX
        or any(len(str(name)) > NAME_CHARS_MAX for name in parts)
    ):
        text = f"reward: expected at most {PARTS_MAX} parts, with names of {NAME_CHARS_MAX} characters at most"
        raise MalformedMessage(f"{text}, got {shown(parts)}")
    value = _number(answer.get("value"))
    if abs(value) > bound:
        raise MalformedMessage(f"reward: expected a value from {-bound:g} to {bound:g}, got {value:g}")
    return Reward(value, {shown(name): _number(number) for name, number in parts.items()})


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedMessage(f"reward: expected a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MalformedMessage("reward: expected a finite number")
    return number


def _messages(items: object) -> tuple[ChatMessage, ...]:
    if not isinstance(items, list) or not 0 < len(items) <= MESSAGES_MAX:
        raise MalformedMessage(f"world: expected 1 to {MESSAGES_MAX} messages, got {shown(items)}")
    for message in items:
        if not isinstance(message, list) or len(message) != 2 or not all(isinstance(part, str) for part in message):
            raise MalformedMessage(f"world: expected a message as [role, content], got {shown(message)}")
        if message[0] not in ("system", "user", "assistant", "tool"):
            raise MalformedMessage(f"world: expected the role system, user, assistant or tool, got {shown(message[0])}")
    return tuple(ChatMessage(role, content) for role, content in items)


CLUSTER_PROCESSES_MAX = 256  # bounds the actors that one learner keeps
LOOK_S, TOLD_S = 1.0, 60.0  # how often a cluster is looked at, and how often a wait for it is logged
_connecting = threading.Lock()


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ConfigError(f"task.ray: expected the package ray (pip install ray), got: {error}") from None
    return ray


def _connected(address: str) -> Any:
    ray = _ray()
    with _connecting:
        if not ray.is_initialized():
            try:
                ray.init(address, namespace="echo2", log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"task.ray: expected a Ray cluster at {address}, got: {error}") from None
    return ray


def processes_of_cluster(address: str) -> int:
    """Returns one per CPU of the cluster, at most CLUSTER_PROCESSES_MAX. Raises ConfigError if it is unreachable or has no CPU."""
    cpus = int(_connected(address).cluster_resources().get("CPU", 0))
    if cpus < 1:
        raise ConfigError(f"task.ray: expected a Ray cluster with CPUs at {address}, it offers none")
    return min(CLUSTER_PROCESSES_MAX, cpus)


class RayScorer:
    def __init__(self, spec: TaskSpec, limits: Limits, containment: Containment) -> None:
        self._sandbox = Sandbox(launch_of(spec, limits, containment))

    def ready(self) -> None:
        """Returns once the actor is constructed, which fails on a machine that cannot contain rewards."""

    def ask(self, body: Mapping[str, object], times: int) -> Answer:
        return self._sandbox.ask(body, times)


class RayRunner:
    """A runner of `Pool` that holds one actor at a time. The cluster must be connected already."""

    def __init__(self, spec: TaskSpec, limits: Limits, containment: Containment) -> None:
        self._made_of, self._limits = (spec, limits, containment), limits
        self._actor: Any = None

    def prepare(self, is_wanted: Callable[[], bool]) -> bool:
        """Waits for a machine with a free CPU before a request is taken from the queue. Returns False once `is_wanted` does."""
        if self._actor is not None:
            return True
        ray, waited_s, problem = _ray(), 0.0, "it has no CPU free"
        ready: Any = None
        while is_wanted():
            try:
                if ready is None:
                    kind = ray.remote(RayScorer).options(num_cpus=1, scheduling_strategy="SPREAD", max_restarts=0)
                    self._actor = kind.remote(*self._made_of)
                    ready = self._actor.ready.remote()
                done, _ = ray.wait([ready], timeout=LOOK_S)
                if done:
                    ray.get(ready)
                    return True
            except Exception as error:  # noqa: BLE001 - not only RayError: a client's is a ConnectionError
                problem, ready = shown(error), None
                self.kill()
                threading.Event().wait(LOOK_S)
            waited_s += LOOK_S
            if waited_s >= TOLD_S:
                waited_s = 0.0
                _log.warning("a reward process waits for a machine of the Ray cluster: %s", problem)
        return False

    def ask(self, body: Mapping[str, object], times: int = 1) -> Answer:
        ray = _ray()
        limit_s = self._limits.wall_s * times + 2 * GRACE_S + self._limits.start_s
        try:
            answer: Answer = ray.get(self._actor.ask.remote(dict(body), times), timeout=limit_s)
        except Exception as error:  # noqa: BLE001 - as above; a timeout, too
            self.kill()
            raise RunnerLost(shown(f"no answer from the Ray cluster within {limit_s:.0f} s: {error}")) from None
        return answer

    def kill(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                _ray().kill(actor)

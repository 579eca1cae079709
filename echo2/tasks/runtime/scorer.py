"""The child process that computes rewards and steps environments: requests on stdin, answers on stdout, one by one.

Guarantees: memory is limited before the task is made; whatever the task prints goes to stderr and cannot break the
protocol; it ends when its parent does. Waits for: the next request on stdin; end of file wakes and ends it. Leaves to
others: the time limit (its parent kills it).

Frames: four bytes of length, then JSON. First the parent sends {task, memory_bytes}; the child answers {ready: true} or
{error}. Then {index, text} asks for the reward of a completion, answered by {value, parts}; {index, completions} for
the world's answer to the last of an episode's completions, answered by {messages} or {value, parts}. What the task
raises is answered by {error, is_memory}.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import BinaryIO

from echo2.base.errors import TaskError
from echo2.tasks.environment import Environment, EnvironmentSource, Observation
from echo2.tasks.runtime.registry import is_environment, make_environment_source, make_task
from echo2.tasks.task import Reward, Task, TaskInstance, TaskSpec, spec_from_json

FRAME_BYTES_MAX = 16 << 20
INSTANCES_CACHED = 256
EPISODES_OPEN_MAX = 256
_PR_SET_PDEATHSIG = 1


def write_frame(stream: BinaryIO, message: object) -> None:
    """Writes one message; `TaskError` if it is over the limit."""
    payload = json.dumps(message).encode()
    if len(payload) > FRAME_BYTES_MAX:
        raise TaskError(f"reward message: expected at most {FRAME_BYTES_MAX} bytes, got {len(payload)}")
    stream.write(len(payload).to_bytes(4, "big") + payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> dict[str, object] | None:
    """The next message; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    message = json.loads(stream.read(min(int.from_bytes(head, "big"), FRAME_BYTES_MAX)))
    assert isinstance(message, dict), "frames hold JSON objects"
    return message


Answer = dict[str, object]


def scored(task: Task, instance: TaskInstance, text: str) -> Answer:
    """The answer to one request for a reward. Whatever the task raises becomes the answer."""
    return _caught(lambda: _reward(task.score(instance, text)))


def _caught(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except MemoryError:
        return {"error": "memory limit reached", "is_memory": True}
    except Exception as error:  # noqa: BLE001 - the user's code; recorded, counted and reported by the parent
        return {"error": f"{type(error).__name__}: {error}"[:500], "is_memory": False}


def _reward(reward: Reward) -> Answer:
    return {"value": reward.value, "parts": dict(reward.parts)}


def _observation(observation: Observation) -> Answer:
    if observation.reward is not None:
        return _reward(observation.reward)
    return {"messages": [[message.role, message.content] for message in observation.messages]}


def _answering(spec: TaskSpec) -> Callable[[Answer], Answer]:
    """The function from requests to answers for this task or environment."""
    if is_environment(spec):
        steps = EpisodeReplay(make_environment_source(spec))
        return lambda request: _caught(lambda: _observation(steps.step(_index(request), _completions(request))))
    task = make_task(spec)
    sample = lru_cache(maxsize=INSTANCES_CACHED)(task.sample)
    return lambda request: _caught(lambda: _reward(task.score(sample(_index(request)), str(request["text"]))))


def _index(request: Answer) -> int:
    return int(str(request["index"]))


def _completions(request: Answer) -> tuple[str, ...]:
    completions = request["completions"]
    assert isinstance(completions, list), "an environment is asked with its completions"
    return tuple(str(text) for text in completions)


class EpisodeReplay:
    """Steps episodes that are told whole each time. Keeps the newest few open, so that most steps replay nothing."""

    def __init__(self, source: EnvironmentSource):
        self._source = source
        self._open: OrderedDict[tuple[int, tuple[str, ...]], Environment] = OrderedDict()

    def step(self, index: int, completions: tuple[str, ...]) -> Observation:
        """The world's answer to the last of `completions`."""
        if not completions:
            raise TaskError(f"{self._source.name} episode {index}: expected at least one completion")
        environment = self._open.pop((index, completions[:-1]), None)
        if environment is None:
            environment = self._replayed(index, completions[:-1])
        observation = environment.step(completions[-1])
        if not observation.is_done:
            self._open[(index, completions)] = environment
            if len(self._open) > EPISODES_OPEN_MAX:
                self._open.popitem(last=False)
        return observation

    def _replayed(self, index: int, completions: tuple[str, ...]) -> Environment:
        environment = self._source.open(index)
        environment.reset()
        for text in completions:
            if environment.step(text).is_done:
                raise TaskError(f"{self._source.name} episode {index}: expected no completion after its end")
        return environment


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers until the requests end."""
    setup = read_frame(requests)
    if setup is None:
        return
    memory_bytes = int(str(setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        answer = _answering(spec_from_json(str(setup["task"])))
    except Exception as error:  # noqa: BLE001 - reported to the parent
        write_frame(replies, {"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    write_frame(replies, {"ready": True})
    while (request := read_frame(requests)) is not None:
        write_frame(replies, answer(request))


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()

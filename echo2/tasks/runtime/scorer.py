"""The child process that computes rewards: reads requests on stdin, answers on stdout, one at a time.

Guarantees: memory is limited before the task is made; whatever the task prints goes to stderr and cannot break the
protocol; it ends when its parent does. Waits for: the next request on stdin; end of file wakes and ends it. Leaves to
others: the time limit (its parent kills it).

Frames: four bytes of length, then JSON. First the parent sends {task, memory_bytes}; the child answers {ready: true} or
{error: ...}. Then {index, text} is answered by {value, parts} or {error, is_memory}.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import BinaryIO

from echo2.base.errors import TaskError
from echo2.tasks.runtime.registry import make_task
from echo2.tasks.task import Task, TaskInstance, spec_from_json

FRAME_BYTES_MAX = 16 << 20
INSTANCES_CACHED = 256
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


def scored(task: Task, instance: TaskInstance, text: str) -> dict[str, object]:
    """The answer to one request. Whatever the task raises becomes the answer."""
    try:
        reward = task.score(instance, text)
        return {"value": reward.value, "parts": dict(reward.parts)}
    except MemoryError:
        return {"error": "memory limit reached", "is_memory": True}
    except Exception as error:  # noqa: BLE001 - the user's code; recorded, counted and reported by the parent
        return {"error": f"{type(error).__name__}: {error}"[:500], "is_memory": False}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers until the requests end."""
    setup = read_frame(requests)
    if setup is None:
        return
    memory_bytes = int(str(setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        task = make_task(spec_from_json(str(setup["task"])))
    except Exception as error:  # noqa: BLE001 - reported to the parent, which raises it
        write_frame(replies, {"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    sample = lru_cache(maxsize=INSTANCES_CACHED)(task.sample)
    write_frame(replies, {"ready": True})
    while (request := read_frame(requests)) is not None:
        write_frame(replies, scored(task, sample(int(str(request["index"]))), str(request["text"])))


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()

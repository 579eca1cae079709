"""A task whose rewards misbehave on demand, as users' rewards do: what it does is named by the completion."""

import asyncio
import mmap
import os
import signal
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np

from echo2.tasks.task import Reward, TaskInstance


class Naughty:
    name = "naughty"
    size = None
    is_cheap = False

    def __init__(self, seed: int, is_cheap: bool = False):
        self.seed = seed
        self.is_cheap = is_cheap

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, f"prompt {index}", f"answer {index}")

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        match completion_text:
            case "raise":
                raise ValueError("no such answer")
            case "exit":
                raise SystemExit(0)
            case "cancel":
                raise asyncio.CancelledError("no Exception, as those of pytest.fail and trio")
            case "nan":
                return Reward(float("nan"))
            case "hang":
                threading.Event().wait()
            case "eat":
                return Reward(float(len(bytearray(64 << 30))))
            case "die":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "spin":
                while True:
                    pass
            case "bare":
                return 0.5  # type: ignore[return-value]
            case "asks":
                return Reward(float(len(os.read(0, 9))))
            case "maps":  # as CUDA and other languages' run times reserve addresses
                mmap.mmap(-1, 8 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ).close()
            case "half":
                return Reward(Fraction(1, 2), {"share": Fraction(1, 4)})  # type: ignore[arg-type]
            case "chatter":
                print("a reward that prints to stdout " * 100, flush=True)
        return Reward(1.0 + instance.index, {"seed": float(self.seed)})


class Counted(Naughty):
    """Its answers are numbers of numpy's, as a table's rows have them."""

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, f"prompt {index}", np.int64(index))  # type: ignore[arg-type]


class BadRow(Naughty):
    """Whatever is said about instance 1, judging it never ends."""

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        return super().score(instance, "spin" if instance.index == 1 else completion_text)


class Reads(Naughty):
    """Pays if it can read the file that `where` names, a URL."""

    def __init__(self, seed: int, where: str):
        super().__init__(seed)
        self.path = Path(where.removeprefix("file:"))

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        return Reward(float(self.path.exists() and bool(self.path.read_text())))


class NotATask:
    def __init__(self, seed: int):
        self.name = "not a task"


class Ends(Naughty):
    """Exits where it should give an instance."""

    def sample(self, index: int) -> TaskInstance:
        raise SystemExit(0)


class Always(Naughty):
    """Raises for every completion."""

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        raise ValueError("no reward today")


class NoMessages(Naughty):
    """Its chats are of plain dictionaries."""

    def sample(self, index: int) -> TaskInstance:
        return TaskInstance(index, [{"role": "user", "content": "x"}], "")  # type: ignore[arg-type]


class NoSize(Naughty):
    size = "9"  # type: ignore[assignment]


class NoFile(Naughty):
    def __init__(self, seed: int):
        super().__init__(seed)
        raise FileNotFoundError("no words here")


class Heavy(Naughty):
    """Its data do not fit."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.data = bytearray(64 << 30)


class Starts(Naughty):
    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        threading.Thread(target=print).start()
        return Reward(0.0)


class Keyed(Naughty):
    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        return Reward(float(os.environ["ECHO2_JUDGE"]))

"""Starts the daemons of tests as forks of one process that has imported torch, transformers and gRPC, seconds of work each time.

Guarantees: what it forks is a process as if started anew, with a group, environment, folder and log of its own, which ends as
Python ends; nobody else's memory is in it, since this process has no threads and no connection but the tests'. Like a child that
was not waited for, an ended process keeps its number until its exit code has been read. It ends with the process that runs the
tests, and each fork with the test that asked for it.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OWNER = "ECHO2_TESTS"  # variable with the id of the process that runs pytest, also in those of pytest-xdist
IMPORTED = (
    "echo2.cli.coordinator", "echo2.cli.learner", "echo2.cli.worker", "echo2.coordinator.coordinator", "echo2.learner.learner",
    "echo2.learner.startup", "echo2.worker.worker", "echo2.worker.engines.making", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of all processes of tests; libraries read them as they are imported."""
REQUEST_BYTES = 1 << 20  # command and environment, some kilobytes


def _address() -> str:
    return f"\0echo2-tests-{os.environ[OWNER]}"


class ForkedProcess:
    """With the members of a `Popen` that tests use. `words` are what Python is given: a module after `-m`, or a script."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], folder: Path, log: int) -> None:
        self._socket = _connected()
        request = {"words": [*words], "environment": {**environment}, "folder": str(folder)}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [log])
        self.pid = int(self._socket.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self.returncode = int(self._socket.recv(64))
            self._socket.close()
        return self.returncode

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._socket.close()

    def wait(self, timeout: float) -> int:
        if self.returncode is None and not select.select([self._socket], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        code = self.poll()
        assert code is not None
        return code


def _connected() -> socket.socket:
    """To the server, which the first who asks starts: of several that start at a time one has the address, the others end."""
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
    silent, is_started = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)], False
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(_address())
            return connection
        except ConnectionRefusedError:
            connection.close()
        if not is_started:
            command = [sys.executable, "-m", "tests.fork_server"]
            os.posix_spawn(sys.executable, command, environment, file_actions=silent, setsid=True)
        is_started = True
        time.sleep(0.02)  # until it listens; it imports after that


def _serve() -> None:
    """Returns in a forked process only, as that."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address())
    except OSError:
        os._exit(0)  # another serves
    listener.listen(64)
    owner = os.pidfd_open(int(os.environ[OWNER]))
    for name in IMPORTED:
        importlib.import_module(name)
    from echo2.weights import warm_up

    warm_up(importlib.import_module("torch").bfloat16)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "a fork has no other thread than the one that forked"
    gc.freeze()
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells the process's end
    ended: dict[socket.socket, int] = {}
    while True:
        askers = {connection.fileno(): fd for fd, (_, connection) in running.items()}
        awaited: list[Any] = [listener, owner, *running, *askers, *ended]
        ready, _, _ = select.select(awaited, [], [])
        if owner in ready:
            for pid, _ in running.values():
                os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 1)
            if not request:  # who asked is gone
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                _become(json.loads(request), descriptors[0])
                return
            os.close(descriptors[0])
            os.setpgid(pid, pid)  # here as well: whoever is told of it may kill its group at once
            connection.send(str(pid).encode())
            running[os.pidfd_open(pid)] = pid, connection
            continue
        for fd in [fd for fd in ready if fd in askers]:  # the test is over, or its process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running[askers[fd]][0], signal.SIGKILL)
        for fd in [fd for fd in ready if fd in running]:
            pid, connection = running.pop(fd)
            told = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
            os.close(fd)
            assert told is not None
            code = told.si_status if told.si_code == os.CLD_EXITED else -told.si_status
            with contextlib.suppress(OSError):
                connection.send(str(code).encode())
            ended[connection] = pid
        for connection in [connection for connection in ready if connection in ended]:
            os.waitpid(ended.pop(connection), 0)
            connection.close()


def _become(request: dict[str, object], log: int) -> None:
    """What was asked for: the caller runs `sys.argv` then."""
    os.setpgid(0, 0)
    for target, source in ((1, log), (2, log)):
        os.dup2(source, target)
    os.closerange(3, 1024)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    sys.argv[:] = request["words"]  # type: ignore[call-overload]


def _run() -> None:
    if sys.argv[0] == "-m":
        name = sys.argv[1]
        del sys.argv[0]
        sys.path[0] = str(Path.cwd())
        if name in sys.modules:
            sys.exit(sys.modules[name].main())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
    _run()

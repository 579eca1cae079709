"""The owner's commands to a running worker (`who`, `status`, `drain`, `leave`) over a socket; the workers that run here.

One JSON object per line each way: `{"command": "status"}` -> `{"ok": true, ...}`. Guarantees: only the owner can use the socket;
one worker per folder (a second one is refused); a request over `LINE_BYTES_MAX`, or one that does not arrive within `ANSWER_S`,
ends the connection. The list of workers comes from the control sockets that the kernel reports as listening: a killed worker is not
listed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from echo2.base.errors import ConfigError, EchoError, ProtocolError, StateError, Unreachable

LINE_BYTES_MAX = 1 << 16  # a request is one short line of JSON
ANSWER_S = 30.0  # every command is answered at once: `drain` when it begins, not when it ends
SOCKET_PATH_BYTES_MAX = 100  # the system's limit is 108
SOCKET_NAME = "echo-worker.sock"
DEEP_SOCKET_NAME = re.compile(r"echo-worker-\d+-[0-9a-f]{16}\.sock")
CommandAnswer = dict[str, object]
_log = logging.getLogger("echo2.worker")


def socket_path(folder: Path) -> Path:
    """Where the worker of `folder` listens. If the path would be too long for a socket, one in the temporary folder is used."""
    path = folder.resolve() / SOCKET_NAME
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"echo-worker-{os.getuid()}-{name}.sock"


class ControlServer:
    """Listens between `start` and `stop`; answers `who` itself and passes the name of any other command to `answer`."""

    def __init__(self, folder: Path, name: str, answer: Callable[[str], Awaitable[CommandAnswer]]) -> None:
        self._folder, self._name, self._answer, self._path = folder, name, answer, socket_path(folder)
        self._server: asyncio.Server | None = None
        self._lock = -1  # while it runs

    async def start(self) -> None:
        """Starts listening; StateError if another worker runs in the folder."""
        self._lock = os.open(self._folder / "worker.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StateError(
                f"{self._folder}: another worker runs in this folder; give this one another --name or --folder"
            ) from None
        self._path.unlink(missing_ok=True)  # left by a killed worker
        old_mask = os.umask(0o077)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path, limit=LINE_BYTES_MAX)
        finally:
            os.umask(old_mask)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._path.unlink(missing_ok=True)
            os.close(self._lock)  # last: then the next worker may have its socket there

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await reader.readline()
            writer.write(json.dumps(await self._reply(line)).encode() + b"\n")
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
        except (TimeoutError, OSError, ValueError) as error:
            _log.debug("control connection ended: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _reply(self, line: bytes) -> CommandAnswer:
        try:
            request = json.loads(line)
            command = request["command"]
        except (ValueError, KeyError, TypeError):
            return {"ok": False, "error": 'expected one line such as {"command": "status"}'}
        if command == "who":
            return {"ok": True, "name": self._name, "folder": str(self._folder.resolve()), "pid": os.getpid()}
        try:
            return {"ok": True, **await self._answer(str(command))}
        except EchoError as error:
            return {"ok": False, "error": str(error)}


async def ask(folder: Path, command: str) -> CommandAnswer:
    return await ask_at(socket_path(folder), command, f"worker of {folder}")


async def ask_at(path: Path, command: str, name: str, within_s: float = ANSWER_S) -> CommandAnswer:
    """As `ask`, for the socket at `path`. Without an answer raises Unreachable, on a refusal ProtocolError; both say `name`."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
            try:
                writer.write(json.dumps({"command": command}).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise Unreachable(f"{name}: expected one to answer, got none ({str(error) or 'no answer'})") from None
    answer = json.loads(line) if line else {"ok": False, "error": "it closed the connection"}
    if not answer.pop("ok"):
        raise ProtocolError(f"{name}: {answer.get('error', 'it refused')}")
    return dict(answer)


TABLE = Path("/proc/net/unix")
WHO_S = 10.0  # on a loaded machine a worker answers after seconds; one that hangs must not keep the list back
WORKERS_MAX = 256  # a machine has a few; bounds how many are asked at once
_LISTENS = 0x10000  # __SO_ACCEPTCON in the table's column of flags


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """One worker. If it did not answer, `name` is empty and `trouble` says why."""

    name: str
    folder: Path
    socket: Path
    trouble: str = ""

    def __str__(self) -> str:
        return f"{self.name or '?'} in {self.folder}" + (f" ({self.trouble})" if self.trouble else "")


def listening_sockets(table: bytes) -> Iterator[Path]:
    """The workers' sockets in the kernel's table: `Num: RefCount Protocol Flags Type St Inode Path`."""
    for line in table.splitlines():
        columns = line.split(maxsplit=7)
        if len(columns) == 8 and columns[7].startswith(b"/") and int(columns[3], 16) & _LISTENS:
            path = Path(os.fsdecode(columns[7]))
            if path.name == SOCKET_NAME or DEEP_SOCKET_NAME.fullmatch(path.name):
                yield path


async def running_workers() -> list[RunningWorker]:
    """The running workers, sorted by name and folder, at most WORKERS_MAX. Unreachable if the system has no such table."""
    try:
        table = TABLE.read_bytes()
    except OSError as error:
        raise Unreachable(f"{TABLE}: expected the list of sockets, got: {error}; name the worker's --folder") from None
    paths = [path for path in sorted(set(listening_sockets(table))) if os.access(path, os.W_OK)]
    workers = await asyncio.gather(*(_who(path) for path in paths[:WORKERS_MAX]))
    return sorted(workers, key=lambda worker: (worker.name, worker.folder))


async def _who(path: Path) -> RunningWorker:
    try:
        answer = await ask_at(path, "who", f"worker at {path}", WHO_S)
    except EchoError as error:
        return RunningWorker("", path.parent, path, str(error))
    return RunningWorker(str(answer["name"]), Path(str(answer["folder"])), path)


def the_one(workers: list[RunningWorker], name: str) -> RunningWorker:
    """The only worker, or the only one named `name` (empty: any). Unreachable if there is none, ConfigError if several."""
    meant = [worker for worker in workers if name in ("", worker.name)]
    if len(meant) == 1:
        return meant[0]
    called = f" named {name}" if name else ""
    if not meant:
        others = f"; others run: {_listed(workers)}" if workers else ""
        raise Unreachable(f"worker: expected one{called} that runs on this machine, found none{others}")
    raise ConfigError(
        f"worker: expected one{called}, found {len(meant)}: {_listed(meant)}; choose by --name or --folder"
    )


def _listed(workers: list[RunningWorker]) -> str:
    return "; ".join(map(str, workers))

"""The owner's commands to a running worker (`status`, `drain`, `leave`) over a socket in its folder.

One JSON object per line each way: `{"command": "status"}` -> `{"ok": true, ...}`. Guarantees: only the owner can use the socket;
one worker per folder (a second one is refused); a request over `LINE_BYTES_MAX`, or one that does not arrive within `ANSWER_S`,
ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from echo2.base.errors import EchoError, ProtocolError, Unreachable
from echo2.outside.files import hold

LINE_BYTES_MAX = 1 << 16  # a request is one short line of JSON
ANSWER_S = 30.0  # every command is answered at once: `drain` when it begins, not when it ends
SOCKET_PATH_BYTES_MAX = 100  # the system's limit is 108
SOCKET_NAME = "echo-worker.sock"
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
    """Listens between `start` and `stop`; passes the name of each command to `answer`."""

    def __init__(self, folder: Path, answer: Callable[[str], Awaitable[CommandAnswer]]) -> None:
        self._folder, self._answer, self._path = folder, answer, socket_path(folder)
        self._server: asyncio.Server | None = None
        self._lock = -1  # while it runs

    async def start(self) -> None:
        """Starts listening; StateError if another worker runs in the folder."""
        self._lock = hold(self._folder / "worker.lock", "worker")
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
            command = json.loads(line)["command"]
        except (ValueError, KeyError, TypeError):
            return {"ok": False, "error": 'expected one line such as {"command": "status"}'}
        try:
            return {"ok": True, **await self._answer(str(command))}
        except EchoError as error:
            return {"ok": False, "error": str(error)}


async def ask(folder: Path, command: str) -> CommandAnswer:
    """Asks the worker of `folder`. Without an answer raises Unreachable, on a refusal ProtocolError."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(socket_path(folder), limit=1 << 20)
            with contextlib.closing(writer):
                writer.write(json.dumps({"command": command}).encode() + b"\n")
                line = await reader.readline()
    except (OSError, TimeoutError) as error:
        raise Unreachable(f"worker of {folder}: expected one to answer, got none ({str(error) or 'timeout'})") from None
    answer = json.loads(line) if line else {"ok": False, "error": "it closed the connection"}
    if not answer.pop("ok"):
        raise ProtocolError(f"worker of {folder}: {answer.get('error', 'it refused')}")
    return dict(answer)

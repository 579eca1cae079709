"""The owner's commands to a running worker, and the list of those that run here."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from echo2.base.errors import ProtocolError, StateError, Unreachable
from echo2.cli import worker
from echo2.worker import control as running
from echo2.worker.control import ControlServer, ask, listening_sockets, running_workers, socket_path


async def answered(command: str) -> dict[str, object]:
    match command:
        case "status":
            return {"version": 3}
        case "drain" | "leave":
            return {"text": f"{command} begins"}
    raise ProtocolError(f"command: expected status, got {command}")


@pytest.mark.parametrize("depth", [1, 12])
async def test_a_running_worker_answers_its_owner_however_deep_its_folder(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["a-rather-long-name"] * depth)
    folder.mkdir(parents=True)
    socket_path(folder).touch()  # left by a killed worker
    servers = [ControlServer(folder, "w0", answered) for _ in range(2)]
    ends = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
    assert {type(end) for end in ends} == {type(None), StateError}, "of two that start at once, one runs"
    server = servers[ends.index(None)]
    assert await ask(folder, "status") == {"version": 3}
    with pytest.raises(ProtocolError, match="expected status, got dance"):
        await ask(folder, "dance")
    with pytest.raises(
        StateError, match="another worker runs in this folder; give this one another --name or --folder"
    ):
        await ControlServer(folder, "w0", answered).start()
    assert socket_path(folder).stat().st_mode & 0o077 == 0
    await server.stop()
    with pytest.raises(Unreachable, match="expected one to answer"):
        await ask(folder, "status")
    await server.start()  # the place is free again
    await server.stop()
    assert await run(f"echo-worker status --folder '{folder}'") == 10


async def test_who_asks_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "ANSWER_S", 0.05)
    server = ControlServer(tmp_path, "w0", answered)
    await server.start()
    reader, writer = await asyncio.open_unix_connection(socket_path(tmp_path))
    assert await reader.read() == b""
    writer.close()
    await server.stop()


@pytest.fixture(autouse=True)
def only_workers_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's table as it is when it is read, without other people's workers."""
    table = running.TABLE

    class Own:
        def read_bytes(self) -> bytes:
            deep = {os.fsencode(socket_path(folder)) for folder in tmp_path.rglob("*") if folder.is_dir()}
            rows = table.read_bytes().splitlines()
            return b"\n".join(row for row in rows if os.fsencode(tmp_path) in row or row.split(maxsplit=7)[-1] in deep)

    monkeypatch.setattr(running, "TABLE", Own())


@asynccontextmanager
async def workers(folders: dict[str, Path]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for name, folder in folders.items():
            folder.mkdir(parents=True)
            server = ControlServer(folder, name.split("@")[0], answered)
            await server.start()
            stack.push_async_callback(server.stop)
        yield


async def run(line: str) -> int:
    program, *words = shlex.split(line)
    assert program == "echo-worker"
    return await asyncio.to_thread(worker.main, words)


async def test_the_worker_is_found_alone_by_name_or_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with workers({"berlin": tmp_path.joinpath("runs", *["a rather long name"] * 12)}):
        for line in ("echo-worker status", "echo-worker drain", "echo-worker leave"):
            assert await run(line) == 0
    assert capsys.readouterr().out.splitlines() == ["version  3", "drain begins", "leave begins"]
    folders = {"berlin": tmp_path / "one", "oslo": tmp_path / "two", "oslo@other": tmp_path / "three"}
    async with workers(folders):
        assert await run("echo-worker status") == 2
        told = capsys.readouterr().err
        assert "expected one, found 3: berlin in " in told and "choose by --name or --folder" in told
        assert all(str(folder) in told for folder in folders.values())
        assert await run("echo-worker status --name berlin") == 0
        assert await run("echo-worker status --name oslo") == 2
        assert await run(f"echo-worker status --folder '{folders['oslo']}'") == 0
        assert await run("echo-worker status --name rome") == 10
        assert "found none; others run: berlin in " in capsys.readouterr().err


def test_a_killed_workers_socket_is_no_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(socket_path(tmp_path)))
        killed.listen()
        assert list(listening_sockets(running.TABLE.read_bytes())) == [socket_path(tmp_path)]
    assert socket_path(tmp_path).exists() and asyncio.run(running_workers()) == []
    assert worker.main(["status"]) == 10
    assert "expected one that runs on this machine, found none" in capsys.readouterr().err
    socket_path(tmp_path).unlink()
    monkeypatch.setattr(running, "WHO_S", 0.01)
    with socket.socket(socket.AF_UNIX) as hangs:
        hangs.bind(str(socket_path(tmp_path)))
        hangs.listen()
        (found,) = asyncio.run(running_workers())
    assert (found.name, found.folder) == ("", tmp_path) and "expected one to answer" in str(found)
    monkeypatch.setattr(running, "TABLE", tmp_path / "none")
    with pytest.raises(Unreachable, match="--folder"):
        asyncio.run(running_workers())


def test_other_programs_sockets_and_connections_are_no_workers() -> None:
    listens, connected = b"0000: 00000002 00000000 00010000 0001 01 1 ", b"0000: 00000003 00000000 00000000 0001 03 2 "
    rows = [
        b"Num       RefCount Protocol Flags    Type St Inode Path", listens + b"/run/x/control.sock",
        listens + b"@abstract/echo-worker.sock", connected + b"/w/echo-worker.sock",
        listens + b"/w with a space/echo-worker.sock", b"0000: 00000002 00000000 00010000 0001 01 3",
    ]  # fmt: skip
    assert list(listening_sockets(b"\n".join(rows))) == [Path("/w with a space/echo-worker.sock")]

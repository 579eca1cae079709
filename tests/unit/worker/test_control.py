"""The owner's commands to a running worker, and how it is found."""

import asyncio
import os
import shlex
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from echo2.base.errors import ProtocolError, StateError, Unreachable
from echo2.cli import worker
from echo2.worker import control as running
from echo2.worker.control import ControlServer, ask, socket_path


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
    servers = [ControlServer(folder, answered) for _ in range(2)]
    ends = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
    assert {type(end) for end in ends} == {type(None), StateError}, "of two that start at once, one runs"
    server = servers[ends.index(None)]
    assert await ask(folder, "status") == {"version": 3}
    with pytest.raises(ProtocolError, match="expected status, got dance"):
        await ask(folder, "dance")
    with pytest.raises(StateError, match=f"process {os.getpid()} runs a worker in it; give this one another folder"):
        await ControlServer(folder, answered).start()
    assert socket_path(folder).stat().st_mode & 0o077 == 0
    await server.stop()
    with pytest.raises(Unreachable, match="expected one to answer"):
        await ask(folder, "status")
    await server.start()  # the place is free again
    await server.stop()
    assert await run(f"echo-worker status --folder '{folder}'") == 10


async def test_who_asks_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "ANSWER_S", 0.05)
    server = ControlServer(tmp_path, answered)
    await server.start()
    reader, writer = await asyncio.open_unix_connection(socket_path(tmp_path))
    assert await reader.read() == b""
    writer.close()
    await server.stop()


async def run(line: str) -> int:
    program, *words = shlex.split(line)
    assert program == "echo-worker"
    return await asyncio.to_thread(worker.main, words)


async def test_the_worker_is_found_alone_by_name_or_by_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert await run("echo-worker status") == 10
    assert "found none; choose by --name or --folder" in capsys.readouterr().err
    folders = [tmp_path / ".local" / "share" / "echo2" / f"worker-{name}" for name in ("berlin", "oslo")]
    async with AsyncExitStack() as running_workers:
        for folder in folders:
            folder.mkdir(parents=True)
            server = ControlServer(folder, answered)
            await server.start()
            running_workers.push_async_callback(server.stop)
            if folder is folders[0]:
                assert [await run(f"echo-worker {name}") for name in ("status", "drain", "leave")] == [0, 0, 0]
                assert capsys.readouterr().out.splitlines() == ["version  3", "drain begins", "leave begins"]
        assert await run("echo-worker status") == 10
        assert ", ".join(map(str, folders)) in capsys.readouterr().err
        assert await run("echo-worker status --name berlin") == 0
        assert await run(f"echo-worker status --folder '{folders[1]}' --json") == 0
        assert await run("echo-worker status --name rome") == 10
        assert "worker-rome: expected one to answer" in capsys.readouterr().err

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo2.base.errors import ProtocolError, StateError, Unreachable
from echo2.cli import worker
from echo2.worker.runtime.control import ControlServer, ask, socket_path


async def answered(command: str) -> dict[str, object]:
    if command != "status":
        raise ProtocolError(f"command: expected status, got {command}")
    return {"version": 3}


@pytest.mark.parametrize("depth", [1, 12])
def test_a_running_worker_answers_its_owner_however_deep_its_folder(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["a-rather-long-name"] * depth)
    folder.mkdir(parents=True)

    async def scene() -> None:
        server = ControlServer(folder, "w0", answered)
        await server.start()
        assert await ask(folder, "status") == {"version": 3}
        with pytest.raises(ProtocolError, match="expected status, got dance"):
            await ask(folder, "dance")
        with pytest.raises(StateError, match="another worker runs in this folder"):
            await ControlServer(folder, "w0", answered).start()
        assert socket_path(folder).stat().st_mode & 0o077 == 0
        await server.stop()
        with pytest.raises(Unreachable, match="expected one to answer"):
            await ask(folder, "status")

    asyncio.run(scene())


def test_a_socket_left_by_a_killed_worker_is_taken_over(tmp_path: Path) -> None:
    async def scene() -> None:
        socket_path(tmp_path).touch()
        server = ControlServer(tmp_path, "w0", answered)
        await server.start()
        assert await ask(tmp_path, "status") == {"version": 3}
        await server.stop()

    asyncio.run(scene())


def test_the_owners_commands_ask_the_worker_and_print_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def obeyed(command: str) -> dict[str, object]:
        return {"version": 3, "waits_for": ""} if command == "status" else {"text": f"{command} begins"}

    async def scene() -> None:
        server = ControlServer(tmp_path, "w0", obeyed)
        await server.start()
        for command in ("status", "drain", "leave"):
            code = await asyncio.to_thread(worker.main, [command, "--folder", str(tmp_path)])
            assert code == 0
        await server.stop()

    asyncio.run(scene())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["version", "3"]
    assert printed[-2:] == ["drain begins", "leave begins"]
    assert worker.main(["status", "--folder", str(tmp_path)]) == 10

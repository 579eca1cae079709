"""The hub's download in its process: real processes, a hub of the test's own."""

from __future__ import annotations

import asyncio
import http.server
import json
import math
import os
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from echo2.worker.runtime import hub
from echo2.worker.runtime.hub import bytes_in, download

SLOW = """
import json, os, pathlib, sys, threading, time
from echo2.worker.runtime import hub
threading.Thread(target=hub._end_with_parent, daemon=True).start()
folder = pathlib.Path(sys.argv[1])
(folder / "pid").write_text(str(os.getpid()))
hub._report(whole_bytes=int(sys.argv[2]))
with (folder / "part").open("wb", buffering=0) as file:
    while True:
        file.write(os.urandom(1 << 16))
        hub._report(came_bytes=hub.bytes_in(folder))
        time.sleep(0.05)
"""


def slow(folder: Path, whole_bytes: int) -> tuple[str, ...]:
    """A hub that never gets to its end."""
    return sys.executable, "-c", SLOW, str(folder), str(whole_bytes)


def is_running(folder: Path) -> bool:
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


async def until_it_comes(folder: Path) -> None:
    async with asyncio.timeout(60):
        while not (folder / "part").exists() or (folder / "part").stat().st_size < 1 << 17:
            await asyncio.sleep(0.01)


def test_a_download_that_is_not_wanted_any_more_ends_and_keeps_what_came(tmp_path: Path) -> None:
    async def scene() -> None:
        task = asyncio.create_task(download("a/b", lambda: math.inf, slow(tmp_path, 1 << 40)))
        await until_it_comes(tmp_path)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_running(tmp_path)
        size = (tmp_path / "part").stat().st_size
        await asyncio.sleep(0.2)
        assert (tmp_path / "part").stat().st_size == size >= 1 << 17

    asyncio.run(scene())


def test_a_download_much_slower_than_a_keyframe_is_given_up_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("echo2.worker.hub_pace.JUDGED_FROM_S", 0.5)

    async def scene() -> None:
        assert await download("a/b", lambda: 1.0, slow(tmp_path, 1 << 40)) is None
        assert not is_running(tmp_path)

    with caplog.at_level("INFO", "echo2.worker"):
        asyncio.run(scene())
    assert "download of a/b from the hub is given up: it would take" in caplog.text


def test_a_download_ends_with_the_worker_that_asked_for_it(tmp_path: Path) -> None:
    async def scene() -> None:
        command = slow(tmp_path, 1 << 40)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        await until_it_comes(tmp_path)
        assert process.stdin is not None
        process.stdin.close()  # as a kill of the worker does
        assert await asyncio.wait_for(process.wait(), 30) == 1

    asyncio.run(scene())


def test_what_the_hub_refuses_is_left_to_peers(tmp_path: Path) -> None:
    refusing = (sys.executable, "-c", "import sys; sys.exit(1)")
    assert asyncio.run(download("a/b", lambda: math.inf, refusing)) is None
    done = (sys.executable, "-c", f"from echo2.worker.runtime import hub; hub._report(folder={str(tmp_path)!r})")
    assert asyncio.run(download("a/b", lambda: math.inf, done)) == tmp_path


class Hub(http.server.BaseHTTPRequestHandler):
    """A model hub with one model, `a/b`."""

    files: ClassVar = {"model.safetensors": b"x" * 100_000, "config.json": b"{}", "pytorch_model.bin": b"y"}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        said: object = {"id": "a/b", "sha": "a" * 40, "siblings": self._listed("rfilename")}
        if "/tree/" in path:
            said = self._listed("path")
        name = path.rpartition("/")[2]
        data = self.files.get(name) or json.dumps(said).encode()
        self.send_response(200 if name in self.files or path.startswith("/api/models/a/b") else 404)
        for header, value in (("ETag", name), ("X-Repo-Commit", "a" * 40), ("Content-Length", str(len(data)))):
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def _listed(self, key: str) -> list[dict[str, object]]:
        return [{"type": "file", key: name, "size": len(data), "oid": name} for name, data in self.files.items()]

    def log_message(self, *_: object) -> None:
        pass


def test_the_hubs_own_client_brings_weights_and_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        try:
            folder = asyncio.run(download("a/b", lambda: math.inf))
        finally:
            server.shutdown()
    assert folder is not None
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_bytes_that_have_not_come_yet_do_not_count(tmp_path: Path) -> None:
    with (tmp_path / "made_at_full_size").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "came").write_bytes(os.urandom(1 << 20))
    os.sync()
    assert 1 << 20 <= bytes_in(tmp_path) < 1 << 24
    assert bytes_in(tmp_path / "none") == 0 and hub.FILES

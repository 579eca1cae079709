"""The base checkpoint of this machine: in memory only as long as it may be needed."""

import asyncio
import gc
import http.server
import json
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from echo2.base.ids import RunId, Version
from echo2.broadcast.route import BaseCheckpoint
from echo2.outside.guard import ProgressLines, ShowsProgress
from echo2.weights import HostWeights
from echo2.worker import base_checkpoint
from echo2.worker.base_checkpoint import KEYFRAME_TIMES, STALLED_S, BaseCheckpointLoader, download, find_base, load_base

RUN, LINES = RunId("r"), ProgressLines(logging.getLogger("echo2.worker"))


class Node:
    """What a node was told of the base."""

    def __init__(self) -> None:
        self.told: list[BaseCheckpoint | None] = []
        self.is_sought: list[bool] = []

    def set_base(self, base: BaseCheckpoint | None, *, is_sought: bool = False) -> None:
        self.told.append(base)
        self.is_sought.append(is_sought)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(2):
        save_file({f"w{number}": torch.full((64,), float(number))}, str(tmp_path / f"{number}.safetensors"))
    return tmp_path


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HostWeights]]:
    found: list[weakref.ref[HostWeights]] = []
    original = base_checkpoint.load_base

    def load(*arguments: object) -> HostWeights | None:
        weights = original(*arguments)  # type: ignore[arg-type]
        if weights is not None:
            found.append(weakref.ref(weights))
        return weights

    monkeypatch.setattr(base_checkpoint, "load_base", load)
    return found


def is_gone(weights: weakref.ref[HostWeights]) -> bool:
    gc.collect()
    return weights() is None


async def offered(loader: BaseCheckpointLoader) -> Node:
    node = Node()
    await loader.offer_to(node)  # type: ignore[arg-type]
    assert node.is_sought == [True, False]
    return node


async def test_weights_are_in_memory_only_until_another_way_is_taken(
    folder: Path, loads: list[weakref.ref[HostWeights]]
) -> None:
    ended, mismatched, given = (BaseCheckpointLoader(RUN, str(folder), "m", LINES) for _ in range(3))
    for loader in (ended, mismatched, given):
        assert (await offered(loader)).told[-1] == BaseCheckpoint(Version(0), 0.0)
    fingerprint = given._fingerprint
    ended.end()
    assert mismatched.proven(Version(3), "0" * 16) is None
    assert sum(map(is_gone, loads)) == 2, "given up, or no keyframe's"
    weights = given.proven(Version(0), fingerprint)
    assert weights is not None and given.proven(Version(0), fingerprint) is None, "given once"
    del weights
    assert all(map(is_gone, loads)), "the loader keeps nothing of what it gave"
    again = await mismatched.candidate()
    assert again is not None and f"{again.fingerprint():016x}" == fingerprint, "a delta from the base may come yet"
    assert await ended.candidate() is None
    loads.clear()
    # As where memory is short, or the store has a version.
    short = BaseCheckpointLoader(RUN, str(folder), "m", LINES, loads_ahead=False)
    assert (await offered(short)).told[-1] == BaseCheckpoint(Version(0), 0.0)
    assert short.proven(Version(0), "0" * 16) is None and not loads
    weights = await short.candidate()
    assert weights is not None and weights.version == 0 and len(loads) == 1, "only a delta from the base has it loaded"
    looks = iter((True, False))
    assert load_base(folder, lambda: next(looks)) is None, "it stops between two files once it is not wanted"


async def test_what_cannot_be_searched_or_read_counts_as_absent_and_peers_have_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*names: str) -> None:
        raise errors.pop()

    (folder / "2.safetensors").symlink_to(folder / "pruned from the cache")
    assert (await offered(BaseCheckpointLoader(RUN, str(folder), "m", LINES))).told == [None, None]
    monkeypatch.setattr(base_checkpoint, "find_base", refuse)
    errors = [PermissionError("hub: permission denied"), RuntimeError("Could not determine home directory.")]
    while errors:
        assert (await offered(BaseCheckpointLoader(RUN, str(folder), "m", LINES))).told == [None, None]
    for text in ("cannot be used", "cannot be searched for it (hub: permission denied); peers have it"):
        assert text in caplog.text


def test_a_download_that_was_given_up_half_way_is_no_checkpoint(tmp_path: Path) -> None:
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    for name in names[:2]:
        save_file({"w": torch.zeros(4)}, str(tmp_path / name))
    assert find_base(str(tmp_path), "m") is None, "the hub is asked for the rest"
    save_file({"w": torch.zeros(4)}, str(tmp_path / names[2]))
    assert find_base(str(tmp_path), "m") == tmp_path
    for other in ("consolidated", "model"):  # by their maker's names; one file, beside parts of another time
        save_file({other: torch.zeros(4)}, str(tmp_path / f"{other}.safetensors"))
        weights = load_base(tmp_path)
        assert [spec.name for spec in weights.table.specs] == ["model" if other == "model" else "w"]


async def test_the_hub_is_waited_for_as_long_as_it_is_worth_it_and_let_go_with_the_base(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """However long that is: a large model over a usual link takes more than ten minutes."""
    asked: list[float] = []
    ended: list[str] = []

    async def download(model_id: str, keyframe_s: Callable[[], float], progress: ShowsProgress) -> Path | None:
        asked.append(keyframe_s())
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(model_id)
        return None

    monkeypatch.setattr(base_checkpoint, "download", download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    loader = BaseCheckpointLoader(RUN, "nobody/at-all", "m", LINES, keyframe_s=lambda: 7.0)
    node = Node()
    offering = asyncio.create_task(loader.offer_to(node))  # type: ignore[arg-type]
    while not asked:
        await asyncio.sleep(0.01)
    assert node.is_sought == [True], "nothing is fetched beside it"
    loader.end()
    await asyncio.wait_for(offering, 10)
    assert node.told[-1] is None and ended == ["nobody/at-all"] and asked == [7.0]
    here = BaseCheckpointLoader(RUN, "nobody/at-all", "m", LINES)
    assert (await offered(here)).told[-1] is None and len(asked) == 1, "a worker with a version asks no hub"


OF_32B = 65_500_000_000
NEEDED = OF_32B / (KEYFRAME_TIMES * 1000.0)  # bytes a second, where a keyframe takes 1,000 s


@pytest.mark.parametrize(
    ("keyframe_s", "rate", "between_s"),
    [
        (0.7 * OF_32B / 50e6, lambda now: 50e6, None),  # 22 minutes at 400 Mbit/s: a keyframe takes nearly as long
        (0.7 * OF_32B / 50e6, lambda now: 5e6, (30, 60)),
        (1000.0, lambda now: NEEDED * (0.1 if now < 20 else 2.0), None),  # judged by its last minute
        *((math.inf, lambda now, at=at: 1e7 if now <= at else 0.0, (at, at + STALLED_S + 10)) for at in (0, 30, 1500)),
    ],
)
def test_a_download_is_waited_for_unless_it_stops_or_takes_much_longer_than_a_keyframe(
    keyframe_s: float, rate: Callable[[float], float], between_s: tuple[float, float] | None
) -> None:
    pace, came = base_checkpoint.HubDownload("m", 0.0), 0.0
    pace.whole_bytes = OF_32B
    for now in range(0, 2000, 5):
        came = min(OF_32B, came + 5 * rate(now))
        pace.arrived_bytes = int(came)
        if pace.why_given_up(keyframe_s, now):
            assert between_s is not None and between_s[0] <= now <= between_s[1]
            return
        if came == OF_32B:
            break
    assert between_s is None


PIECE = 1 << 14


class Hub(http.server.BaseHTTPRequestHandler):
    """A model hub with one model, `a/b`. `pause` is waited for after each piece of its weights, and `sent` counts the pieces."""

    files: ClassVar = {
        "model.safetensors": b"x" * (20 * PIECE),
        "config.json": b"{}",
        "pytorch_model.bin": b"y",
        "consolidated.safetensors": b"z",
    }
    pause_s: ClassVar = 0.0
    sent: ClassVar = 0
    is_cut: ClassVar = threading.Event()  # set once the client has closed the connection

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answer: object = {"id": "a/b", "sha": "a" * 40, "siblings": self._listed("rfilename")}
        if "/tree/" in path:
            answer = self._listed("path")
        name = path.rpartition("/")[2]
        data = self.files.get(name) or json.dumps(answer).encode()
        self.send_response(200 if name in self.files or path.startswith("/api/models/a/b") else 404)
        for header, value in (("ETag", name), ("X-Repo-Commit", "a" * 40), ("Content-Length", str(len(data)))):
            self.send_header(header, value)
        self.end_headers()
        if self.command != "GET":
            return
        try:
            for begin in range(0, len(data), PIECE):
                self.wfile.write(data[begin : begin + PIECE])
                if len(data) > PIECE:
                    type(self).sent += 1
                    threading.Event().wait(self.pause_s)
        except OSError:
            self.is_cut.set()

    do_HEAD = do_GET

    def _listed(self, key: str) -> list[dict[str, object]]:
        return [{"type": "file", key: name, "size": len(data), "oid": name} for name, data in self.files.items()]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    class Own(Hub):
        is_cut: ClassVar = threading.Event()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever).start()
        at = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, at)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", at)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", PIECE)
        monkeypatch.setattr(base_checkpoint, "LOOK_S", 0.05)
        monkeypatch.setattr("echo2.outside.guard.LOOK_S", 0.05)
        yield Own
        server.shutdown()


async def test_weights_and_config_alone_are_brought_and_what_is_there_is_not_brought_twice(served: type[Hub]) -> None:
    folder = await download("a/b", lambda: math.inf, LINES)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == served.files["model.safetensors"]
    assert await download("a/b", lambda: math.inf, LINES) == folder and served.sent == 20


async def test_a_download_that_is_not_wanted_any_more_ends_with_the_piece_on_its_way(served: type[Hub]) -> None:
    served.pause_s = 0.05
    task = asyncio.create_task(download("a/b", lambda: math.inf, LINES))
    while served.sent < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(served.is_cut.wait, 30)
    assert served.sent < 20


async def test_a_download_much_slower_than_a_keyframe_and_what_the_hub_does_not_have_are_left_to_peers(
    served: type[Hub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base_checkpoint, "JUDGED_FROM_S", 0.3)
    served.pause_s = 0.2
    with caplog.at_level("INFO", "echo2.worker"):
        assert await download("a/b", lambda: 0.01, bar := Mock()) is None
        assert await download("a/none", lambda: math.inf, LINES) is None
    assert "a/b cannot be had from the hub (the download is given up: it would take" in caplog.text and served.sent < 20
    assert "a/none cannot be had from the hub" in caplog.text
    assert any(0 < call.args[1] < call.args[2] for call in bar.at.call_args_list) and bar.ended.called

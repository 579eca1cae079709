"""The base checkpoint of this machine: in memory only as long as it may be needed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echo2.base.ids import RunId, Version
from echo2.weights import HostWeights
from echo2.weights.policy import BaseCheckpoint
from echo2.worker.runtime import base_checkpoint
from echo2.worker.runtime.base_checkpoint import BaseCheckpointLoader, find_base, load_base

RUN = RunId("r")


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
    """The weights of each load."""
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


def test_weights_are_in_memory_only_until_another_way_is_taken(
    folder: Path, loads: list[weakref.ref[HostWeights]]
) -> None:
    async def scene() -> None:
        ended, mismatched, given = (BaseCheckpointLoader(RUN, str(folder), "m") for _ in range(3))
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

    asyncio.run(scene())


def test_where_memory_is_short_or_the_store_has_a_version_only_a_delta_from_the_base_has_it_loaded(
    folder: Path, loads: list[weakref.ref[HostWeights]]
) -> None:
    async def scene() -> None:
        loader = BaseCheckpointLoader(RUN, str(folder), "m", loads_ahead=False)
        assert (await offered(loader)).told[-1] == BaseCheckpoint(Version(0), 0.0) and not loads
        assert loader.proven(Version(0), "0" * 16) is None and not loads
        weights = await loader.candidate()
        assert weights is not None and weights.version == 0 and len(loads) == 1

    asyncio.run(scene())


def test_loading_stops_between_two_files_once_it_is_not_wanted(folder: Path) -> None:
    looks: list[bool] = []

    def is_wanted() -> bool:
        looks.append(not looks)
        return looks[-1]

    assert load_base(folder, is_wanted) is None and looks == [True, False]
    assert load_base(folder) is not None


def test_a_download_that_was_given_up_half_way_is_no_checkpoint(tmp_path: Path) -> None:
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    for name in names[:2]:
        save_file({"w": torch.zeros(4)}, str(tmp_path / name))
    assert find_base(str(tmp_path), "m") is None, "the hub is asked for the rest"
    save_file({"w": torch.zeros(4)}, str(tmp_path / names[2]))
    assert find_base(str(tmp_path), "m") == tmp_path


def test_the_hub_is_waited_for_as_long_as_it_is_worth_it_and_let_go_with_the_base(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """However long that is: a large model over a usual link takes more than ten minutes."""
    asked: list[float] = []
    ended: list[str] = []

    async def download(model_id: str, keyframe_s: Callable[[], float]) -> Path | None:
        asked.append(keyframe_s())
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(model_id)
        return None

    async def scene() -> None:
        monkeypatch.setattr(base_checkpoint, "download", download)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        loader = BaseCheckpointLoader(RUN, "nobody/at-all", "m", keyframe_s=lambda: 7.0)
        node = Node()
        offering = asyncio.create_task(loader.offer_to(node))  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            while not asked:
                await asyncio.sleep(0.01)
        assert node.is_sought == [True], "nothing is fetched beside it"
        loader.end()
        await asyncio.wait_for(offering, 10)
        assert node.told[-1] is None and ended == ["nobody/at-all"] and asked == [7.0]
        here = BaseCheckpointLoader(RUN, "nobody/at-all", "m")
        assert (await offered(here)).told[-1] is None and len(asked) == 1, "a worker with a version asks no hub"

    asyncio.run(scene())

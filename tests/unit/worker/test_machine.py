from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.coordinator.runtime.catalogue import built_in_models
from echo2.worker.options import EngineChoice
from echo2.worker.runtime.machine import (
    LocalGpu,
    WorkerMachine,
    check_room,
    chosen_engine,
    findings,
    look,
    memory_used_bytes,
    parse_gpus,
    reach,
)

BARE = WorkerMachine(gpus=(), cores=2, memory_bytes=8 << 30, free_disk_bytes=10 << 30, has_vllm=False)
WITH_GPUS = replace(BARE, gpus=parse_gpus("NVIDIA H200, 143771, 570.1\nNVIDIA H200, 143771, 570.1\n"), has_vllm=True)


def test_gpus_are_read_and_broken_lines_skipped() -> None:
    assert parse_gpus("NVIDIA L4, 23034, 550.54\n[Unknown Error]\n") == (LocalGpu("NVIDIA L4", 23034 << 20, "550.54"),)
    assert WITH_GPUS.gpu_text == "2 x NVIDIA H200"
    assert BARE.gpu_text == "cpu"


def test_vllm_is_chosen_where_there_is_a_gpu_and_vllm() -> None:
    assert chosen_engine(EngineChoice.AUTO, BARE) is EngineChoice.EMBEDDED
    assert chosen_engine(EngineChoice.AUTO, WITH_GPUS) is EngineChoice.VLLM
    assert chosen_engine(EngineChoice.AUTO, replace(WITH_GPUS, has_vllm=False)) is EngineChoice.EMBEDDED
    assert chosen_engine(EngineChoice.EMBEDDED, WITH_GPUS) is EngineChoice.EMBEDDED
    with pytest.raises(ConfigError, match="expected vLLM to be installed"):
        chosen_engine(EngineChoice.VLLM, BARE)


def test_a_model_that_cannot_fit_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    size = built_in_models()["qwen3-0.6b"]
    published = size.gpu_weight_bytes
    check_room(BARE, size, published, tmp_path)
    with pytest.raises(ResourceError, match=r"memory: expected 4\.5 GB while a keyframe of 1\.2 GB is taken"):
        check_room(replace(BARE, memory_bytes=4 << 30), size, published, tmp_path)
    check_room(
        replace(WITH_GPUS, memory_bytes=4 << 30), size, published, tmp_path
    )  # an engine's own weights are on the GPU
    with pytest.raises(ResourceError, match="disk at"):
        check_room(replace(BARE, free_disk_bytes=1 << 30), size, published, tmp_path)
    with pytest.raises(ResourceError, match=r"/dev/shm: expected 311\.2 MB free, .* got 67\.1 MB; .*--shm-size"):
        check_room(replace(WITH_GPUS, shared_memory_bytes=64 << 20), size, published, tmp_path)


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    machine = look(tmp_path)
    assert machine.cores >= 1 and machine.memory_bytes > 1 << 28 and machine.free_disk_bytes > 0
    assert "cores" in machine.describe()


def test_findings_name_gpu_memory_and_disk(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in findings(replace(BARE, free_memory_bytes=4 << 30), tmp_path, 8 << 30)}
    assert set(found) == {"GPU", "memory", "disk"} and all(finding.is_good for finding in found.values())
    assert not findings(replace(BARE, free_disk_bytes=1 << 20), tmp_path, 8 << 30)[2].is_good


def test_an_address_that_nobody_answers_at_is_found_out() -> None:
    async def scene() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert (await reach([f"127.0.0.1:{port}"])).is_good
        server.close()
        await server.wait_closed()
        closed = await reach([f"127.0.0.1:{port}"])
        assert not closed.is_good and f"127.0.0.1:{port} (" in closed.text

    asyncio.run(scene())


def test_memory_counts_the_processes_of_an_engine_and_theirs() -> None:
    before, held = memory_used_bytes(), 64 << 20
    grandchild = f"import sys; held = b'x' * {held}; print('here', flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        assert memory_used_bytes() > before + held * 3 // 4
        process.communicate()

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.worker.options import EngineChoice
from echo2.worker.runtime.machine import Gpu, Machine, check_room, chosen_engine, look, parse_gpus

BARE = Machine(gpus=(), cores=2, memory_bytes=8 << 30, free_disk_bytes=10 << 30, has_vllm=False)
WITH_GPUS = replace(BARE, gpus=parse_gpus("NVIDIA H200, 143771, 570.1\nNVIDIA H200, 143771, 570.1\n"), has_vllm=True)


def test_gpus_are_read_and_broken_lines_skipped() -> None:
    assert parse_gpus("NVIDIA L4, 23034, 550.54\n[Unknown Error]\n") == (Gpu("NVIDIA L4", 23034 << 20, "550.54"),)
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
    check_room(BARE, 1 << 30, tmp_path)
    with pytest.raises(ResourceError, match=r"memory: expected 12\.9 GB"):
        check_room(BARE, 4 << 30, tmp_path)
    with pytest.raises(ResourceError, match="disk at"):
        check_room(replace(BARE, free_disk_bytes=1 << 30), 1 << 30, tmp_path)


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    machine = look(tmp_path)
    assert machine.cores >= 1 and machine.memory_bytes > 1 << 28 and machine.free_disk_bytes > 0
    assert "cores" in machine.describe()

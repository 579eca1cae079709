"""How a model goes on a machine: slots by memory, engines by GPUs, refusals by name."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.ids import Version
from echo2.worker.engine import SwapMode
from echo2.worker.options import EngineChoice, Quantisation, WorkerOptions
from echo2.worker.runtime.engines.vllm import VllmEngine, _only_gpus
from echo2.worker.runtime.machine import WorkerMachine, parse_gpus
from echo2.worker.runtime.make_engine import fit_engine, make_engine
from tests.contract.engine_rig import Staged, tiny_config
from tests.unit.cost_model.test_sizing import QWEN3_8B

CPU = WorkerMachine(gpus=(), cores=2, memory_bytes=16 << 30, free_disk_bytes=100 << 30, has_vllm=False)
FOUR_GPUS = replace(CPU, gpus=parse_gpus("NVIDIA L40S, 46068, 580.65\n" * 4), has_vllm=True, memory_bytes=200 << 30)


def options(folder: Path, slot_count: int = 0) -> WorkerOptions:
    return WorkerOptions(join_link="", folder=folder, slot_count=slot_count)


def test_sequences_are_by_memory_and_capped_as_told(tmp_path: Path) -> None:
    small = tiny_config("qwen3")
    assert fit_engine(EngineChoice.EMBEDDED, small, options(tmp_path), CPU, 64).sequences == 64
    told = fit_engine(EngineChoice.EMBEDDED, small, options(tmp_path, 7), CPU, 64)
    assert (told.sequences, told.engine_count, told.sequence_tokens) == (7, 1, 64)


def test_gpus_become_engines_and_a_model_too_large_for_one_is_spread_over_several(tmp_path: Path) -> None:
    fit = fit_engine(EngineChoice.VLLM, QWEN3_8B, options(tmp_path), FOUR_GPUS, 2560)
    assert fit.engine_count == 4 and "4 engines" in fit.reason
    large = QWEN3_8B | {"num_hidden_layers": 100}
    fit = fit_engine(EngineChoice.VLLM, large, options(tmp_path), FOUR_GPUS, 2560)
    assert (fit.engine_count, fit.tensor_parallel) == (2, 2) and "2 engines" in fit.reason
    one_gpu = replace(FOUR_GPUS, gpus=FOUR_GPUS.gpus[:1])
    with pytest.raises(ResourceError, match="in equal parts of 32 heads, they do not"):
        fit_engine(EngineChoice.VLLM, large, options(tmp_path), one_gpu, 9216)


def test_former_versions_and_the_base_are_kept_where_the_run_audits_and_memory_is_left(tmp_path: Path) -> None:
    """8B in bf16: 21.8 GB while a keyframe is taken, 8.2 GB of former versions, 16.4 GB of a base."""

    def fit(memory_gb: int, *, is_audited: bool = True) -> tuple[bool, bool]:
        machine = replace(FOUR_GPUS, memory_bytes=memory_gb * 10**9)
        found = fit_engine(EngineChoice.VLLM, QWEN3_8B, options(tmp_path), machine, 2560, is_audited=is_audited)
        return found.keeps_former, found.loads_base

    assert fit(40) == (True, True) and fit(40, is_audited=False) == (False, True)
    assert fit(32) == (True, False), "a worker with less memory goes without"
    assert fit(24) == (False, False)


def test_an_engine_of_an_unaudited_run_has_its_processes_keep_nothing_of_an_update() -> None:
    settled: list[Version | None] = []

    class Weights:
        former: frozenset[Version] = frozenset()

        async def nothing(self, *_: object, **__: object) -> None:
            pass

        stage = apply = pause_generation = resume_generation = update_weight_version = nothing

        async def settle(self, *, is_kept: bool, replaced: Version | None) -> None:
            settled.append(replaced)

    async def scene(*, keeps_former: bool) -> list[Version | None]:
        settled.clear()
        engine = VllmEngine(tiny_config("qwen3"), keeps_former=keeps_former)
        engine._weights.close()
        engine._weights = engine._llm = Weights()  # type: ignore[assignment]
        for version in range(3):
            parent = Version(version - 1) if version else None
            await engine.swap(Staged(Version(version), parent, []), SwapMode.RECOMPUTE_KV)
        engine._folder.cleanup()
        return list(settled)

    assert asyncio.run(scene(keeps_former=True)) == [None, 0, 1]
    assert asyncio.run(scene(keeps_former=False)) == [None, None, None]


def test_a_model_beyond_the_machine_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="memory: expected"):
        fit_engine(EngineChoice.EMBEDDED, QWEN3_8B, options(tmp_path), CPU)


def test_rounding_is_for_the_embedded_engine_and_refused_by_name_elsewhere(tmp_path: Path) -> None:
    rounding = replace(options(tmp_path), quantisation=Quantisation.INT8)
    fit = fit_engine(EngineChoice.VLLM, tiny_config("qwen3"), rounding, FOUR_GPUS)
    with pytest.raises(ConfigError, match=r"worker.quantisation: int8 is not supported on vLLM engines"):
        make_engine(EngineChoice.VLLM, tiny_config("qwen3"), rounding, fit)


def test_an_engine_is_shown_its_gpus_among_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with _only_gpus((2,)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6, 7")
    with _only_gpus((1, 2)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    with _only_gpus(()):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4, 6, 7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4, 6, 7"

"""How a model goes on a machine: slots by memory, engines by GPUs, refusals by name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.cost_model.sizing import Quantisation
from echo2.worker.options import EngineChoice, WorkerOptions
from echo2.worker.runtime.engines.vllm_start import only_gpus
from echo2.worker.runtime.machine import WorkerMachine, parse_gpus
from echo2.worker.runtime.make_engine import fit_engine, make_engine
from tests.contract.engine_rig import tiny_config
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
    with only_gpus((2,)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6, 7")
    with only_gpus((1, 2)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    with only_gpus(()):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4, 6, 7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4, 6, 7"

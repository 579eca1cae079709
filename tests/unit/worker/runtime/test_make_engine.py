"""How a model goes on a machine: slots by memory, engines by GPUs, refusals by name."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.ids import Version
from echo2.cost_model.sizing import Quantisation
from echo2.worker.engine import SwapMode
from echo2.worker.options import EngineChoice, WorkerOptions
from echo2.worker.runtime.engines.vllm import VllmEngine, VllmTuning
from echo2.worker.runtime.engines.vllm_start import only_gpus
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
        engine = VllmEngine(tiny_config("qwen3"), tuning=VllmTuning(keeps_former=keeps_former))
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


def test_each_engine_rounds_in_its_way_and_refuses_the_others_by_name(tmp_path: Path) -> None:
    small = tiny_config("qwen3")
    for choice, quantisation, message in (
        (
            EngineChoice.VLLM,
            Quantisation.INT8,
            "worker.quantisation: int8 is the embedded engine's.*expected fp8 or none",
        ),
        (EngineChoice.EMBEDDED, Quantisation.FP8, "worker.quantisation: fp8 is vLLM's.*expected int8 or none"),
    ):
        rounding = replace(options(tmp_path), quantisation=quantisation)
        fit = fit_engine(choice, small, rounding, FOUR_GPUS)
        with pytest.raises(ConfigError, match=message):
            make_engine(choice, small, rounding, fit)


def test_latent_attention_is_refused_on_vllm_which_would_not_follow_its_changes() -> None:
    with pytest.raises(ConfigError, match="latent attention"):
        VllmEngine({**tiny_config("qwen3"), "kv_lora_rank": 8})


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_models_whose_layers_cannot_follow_are_refused_before_vllm_starts(tmp_path: Path, field: str) -> None:
    rounding = replace(options(tmp_path), quantisation=Quantisation.FP8)
    fit = fit_engine(EngineChoice.VLLM, tiny_config("qwen3"), rounding, FOUR_GPUS)
    with pytest.raises(ConfigError, match=rf"worker.quantisation: fp8 is not for models with .* \({field} 8\)"):
        make_engine(EngineChoice.VLLM, tiny_config("qwen3", **{field: 8}), rounding, fit)


def test_rounded_weights_take_less_of_a_card_and_their_masters_the_hosts_memory(tmp_path: Path) -> None:
    rounding = replace(options(tmp_path), quantisation=Quantisation.FP8)
    exact = fit_engine(EngineChoice.VLLM, QWEN3_8B, options(tmp_path), FOUR_GPUS, 2560)
    rounded = fit_engine(EngineChoice.VLLM, QWEN3_8B, rounding, FOUR_GPUS, 2560)
    assert rounded.cache_tokens > 1.2 * exact.cache_tokens and rounded.engine_count == 4
    assert "masters in the host's memory" in rounded.reason
    small = replace(FOUR_GPUS, memory_bytes=60 << 30)
    assert fit_engine(EngineChoice.VLLM, QWEN3_8B, options(tmp_path), small, 2560).engine_count == 4
    with pytest.raises(ResourceError, match="memory: expected"):
        fit_engine(EngineChoice.VLLM, QWEN3_8B, rounding, small, 2560)


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

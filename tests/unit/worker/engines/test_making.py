"""How a model goes on a machine: slots by memory, engines by GPUs, refusals by name."""

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from echo2.base.errors import ConfigError, EngineError, ResourceError
from echo2.base.rollout import ROUTING_KEY, FinishReason, SamplingParams
from echo2.base.staged import StagedVersion
from echo2.config.run import RunConfig
from echo2.cost_model.sizing import Fit, Quantisation
from echo2.outside.guard import shown
from echo2.worker.engines.adapter import CONFIG_KEY, AdapterSpec
from echo2.worker.engines.embedded import loop as loop_module
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.embedded.forward import CachedDecoder
from echo2.worker.engines.engine import GenerateRequest, SwapMode
from echo2.worker.engines.making import NO_FINGERPRINT, SeveralEngines, fit_engine, make_engine
from echo2.worker.engines.vllm.vllm_engine import BaseOfAdapter, VllmEngine, only_gpus, refuse_unsupported
from echo2.worker.engines.vllm.vllm_weights import VllmWeights
from echo2.worker.machine import WorkerMachine, parse_gpus
from echo2.worker.options import WorkerOptions
from tests.contract.engine_rig import delta_of, keyframe_of, make_versions, tiny_config
from tests.unit.cost_model.test_sizing import QWEN3_8B

CONFIG = tiny_config("qwen3")
MODELS = make_versions(CONFIG)
CPU = WorkerMachine(gpus=(), cores=2, memory_bytes=16 << 30, free_disk_bytes=100 << 30, has_vllm=False)
FOUR_GPUS = replace(CPU, gpus=parse_gpus("NVIDIA L40S, 46068, 580.65\n" * 4), has_vllm=True, memory_bytes=200 << 30)


def options(folder: Path, **worker: object) -> WorkerOptions:
    return WorkerOptions("", folder, RunConfig.model_validate({"worker": worker}))


def test_engines_are_by_gpus_and_sequences_by_memory_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """8B in bf16: 21.8 GB while a keyframe is taken, 16.4 GB of a base."""

    def fit(machine: WorkerMachine, config: dict[str, object] = QWEN3_8B, length: int = 2560, **worker: object) -> Fit:
        choice = "vllm" if machine.gpus else "embedded"
        return fit_engine(choice, config, options(tmp_path, **worker), machine, length)

    assert fit(CPU, CONFIG, 64).sequences == 64
    told = fit(CPU, CONFIG, 64, slots=7)
    assert (told.sequences, told.engine_count, told.sequence_tokens) == (7, 1, 64)
    exact, large = fit(FOUR_GPUS), QWEN3_8B | {"num_hidden_layers": 100}
    assert exact.engine_count == 4 and "4 engines" in exact.reason
    spread = fit(FOUR_GPUS, large)
    assert (spread.engine_count, spread.tensor_parallel) == (2, 2) and "2 engines" in spread.reason
    rounded = fit(FOUR_GPUS, quantisation="fp8")
    assert rounded.cache_tokens > 1.2 * exact.cache_tokens and "masters in the host's memory" in rounded.reason
    small = replace(FOUR_GPUS, memory_bytes=60 << 30)
    assert fit(small).engine_count == 4
    loads = [fit(replace(FOUR_GPUS, memory_bytes=size * 10**9)).loads_base for size in (40, 32)]
    assert loads == [True, False], "a worker with less memory goes without"
    for text, machine, config, worker in (
        ("in equal parts of 32 heads, they do not", replace(FOUR_GPUS, gpus=FOUR_GPUS.gpus[:1]), large, {}),
        ("memory: expected", CPU, QWEN3_8B, {}),
        ("memory: expected", small, QWEN3_8B, {"quantisation": "fp8"}),
    ):
        with pytest.raises(ResourceError, match=text):
            fit(machine, config, 9216 if "heads" in text else 2560, **worker)
    for machine in (replace(CPU, memory_bytes=40 << 30), replace(FOUR_GPUS, memory_bytes=12 << 30)):
        arguments = (options(tmp_path), machine, 2560, 100 << 20)  # an adapter of 100 MB
        choice = "vllm" if machine.gpus else "embedded"
        fit_engine(choice, QWEN3_8B, *arguments)
        with pytest.raises(ResourceError, match="memory: expected"):  # there is no room for its base
            fit_engine(choice, QWEN3_8B | ADAPTER, *arguments)


ADAPTER = {CONFIG_KEY: {"rank": 8, "scale": 1.0, "dtype": "bfloat16", "base_fingerprint": "0" * 16}}
ADAPTED = CONFIG | ADAPTER
LONGROPE, DYNAMIC = {"rope_type": "longrope", "original_max_position_embeddings": 32}, {"rope_type": "dynamic"}
HYBRID = tiny_config("lfm2", layer_types=["conv", "full_attention", "conv"])


@pytest.mark.parametrize(
    ("choice", "config", "worker", "named"),
    [
        ("embedded", CONFIG, {"quantisation": "bf16"}, "needs a processor that multiplies it .amx_bf16 or avx512_bf16"),
        ("embedded", CONFIG, {"quantisation": "fp8"}, "worker.quantisation: fp8 is vLLM's.*expected none"),
        ("embedded", HYBRID, {"quantisation": "bf16"}, "quantisation: bf16 is for the fused path; expected none"),
        ("embedded", ADAPTED, {"quantisation": "bf16"}, "bf16 is for whole weights, .* publishes an adapter"),
        ("vllm", CONFIG, {"quantisation": "bf16"}, "bf16 is the embedded engine's; .*expected none or fp8"),
        ("embedded", HYBRID, {"swap_mode": "keep_kv"}, "worker.swap_mode: keep_kv is not for .* a state.*recompute_kv"),
        ("vllm", ADAPTED | {"kv_lora_rank": 8}, {}, "latent attention .* only in whole weights"),
        ("vllm", CONFIG | {"kv_lora_rank": 8}, {"quantisation": "fp8"}, "latent attention .* not rounded"),
        ("vllm", CONFIG | {"rope_parameters": LONGROPE}, {}, "context_tokens: expected 2 to the model's 32, got "),
        ("vllm", CONFIG | {"rope_parameters": {"full_attention": DYNAMIC}}, {}, "rope_type: dynamic rotates"),
        ("vllm", CONFIG | {ROUTING_KEY: True}, {"draft_tokens": 2}, "draft_tokens: expected 0, .* got 2"),
        ("vllm", CONFIG | {"mamba_d_state": 8}, {}, r"Mamba's layers \(mamba_d_state 8\).*embedded"),
        ("vllm", CONFIG | {"ssm_state_size": 8, "layer_types": ["mamba", "attention"]}, {}, "Mamba's layers"),
        *(
            ("vllm", CONFIG | {name: 8}, {"quantisation": "fp8"}, rf"fp8 is not for models with .* \({name} 8\)")
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
        ),
    ],
)
def test_what_an_engine_does_not_do_is_refused_by_name_before_it_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    config: dict[str, object],
    worker: dict[str, str],
    named: str,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": "processor" not in named})
    asked = options(tmp_path, **worker)
    with pytest.raises(ConfigError, match=named):
        make_engine(choice, config, asked, fit_engine(choice, CONFIG, asked, FOUR_GPUS, 64))
    for taken in ({"mamba_d_state": 8, "layer_types": ["attention"]}, {"kv_lora_rank": 8}):  # hybrid; latent attention
        refuse_unsupported(CONFIG | taken, Quantisation.NONE, None)


def test_what_vllms_kernels_for_cpus_do_not_compute_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.worker.engines.vllm.vllm_engine.is_cpu", lambda: True)
    base = BaseOfAdapter(AdapterSpec(4, 1.0, "bfloat16", "0123456789abcdef"), "/nowhere")
    linear, capped = {"layer_types": ["linear_attention"]}, {"attn_logit_softcapping": 3.0}
    with_images = {"model_type": "gemma3", "text_config": CONFIG | linear}
    gpt2 = {"model_type": "gpt2", "n_positions": 64, "vocab_size": 96}
    for config in (with_images, CONFIG | capped, gpt2 | capped):
        with pytest.raises(ConfigError, match="vLLM's CPU kernels .*expected a GPU, or --worker.engine embedded"):
            asyncio.run(started(VllmEngine(config, adapter=base)))


async def test_a_worker_that_is_stopped_while_vllm_starts_ends_its_processes_once_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, begun, may_go_on = mock.Mock(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def make_llm(_: VllmEngine) -> mock.Mock:
        loop.call_soon_threadsafe(begun.set)
        may_go_on.wait()
        return llm

    monkeypatch.setattr(VllmEngine, "_make_llm", make_llm)
    starting = asyncio.create_task(shown(mock.Mock(), "load of the engine", VllmEngine(CONFIG).start()))
    await begun.wait()
    starting.cancel()
    loop.call_soon(may_go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await starting
    llm.shutdown.assert_called_once_with()


async def test_vllms_process_that_is_killed_in_a_swap_is_an_error_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = mock.AsyncMock(side_effect=RuntimeError("EngineCore encountered an issue"))
    llm = mock.Mock(collective_rpc=mock.AsyncMock(return_value=[""]), pause_generation=dead, resume_generation=dead)
    monkeypatch.setattr(VllmEngine, "_make_llm", lambda _: llm)
    monkeypatch.setattr(VllmWeights, "stage", mock.AsyncMock())
    engine = VllmEngine(CONFIG)
    await engine.start()
    with pytest.raises(EngineError, match="vLLM failed in the swap to version 0: RuntimeError.'EngineCore"):
        await engine.swap(keyframe_of(MODELS[0], 0), SwapMode.RECOMPUTE_KV)
    await engine.stop()


async def started(engine: VllmEngine) -> None:
    try:
        await engine.start()
    finally:
        await engine.stop()


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


@pytest.mark.parametrize("slowdown", [1.0, 4.0])
def test_a_slowed_worker_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slowdown: float) -> None:
    """By a clock that only its passes and its pauses move."""
    now, asked, decode = [0.0], options(tmp_path, slowdown=slowdown), CachedDecoder.decode

    def moves(seconds: float) -> None:
        now[0] += seconds

    def timed(*arguments: Any) -> torch.Tensor:
        moves(0.25)
        return decode(*arguments)

    monkeypatch.setattr(CachedDecoder, "decode", timed)
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = make_engine("embedded", CONFIG, asked, fit_engine("embedded", CONFIG, asked, CPU, 64))
    loop, staged = cast(EmbeddedEngine, engine)._loop, keyframe_of(MODELS[0], 0)
    monkeypatch.setattr(loop._stop, "wait", moves)
    with torch.inference_mode():
        loop.swap(loop_module.LiveSwap(staged.version, None, loop.weights.checked(staged), SwapMode.RECOMPUTE_KV))
        loop.run_commands()
        loop.submit(request("r", "r"))
        for step in range(1, 4):
            loop.step()
            assert now[0] == step * 0.25 * slowdown


class FailsOnce(EmbeddedEngine):
    """Refuses its next swap when told to, as an engine whose process is short of memory would."""

    fails = False

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        if self.fails:
            self.fails = False
            raise EngineError(f"version {staged.version}: no memory")
        return await super().swap(staged, mode)


def request(name: str, group: str, count: int = 40) -> GenerateRequest:
    return GenerateRequest(name, (1, 2, 3), (), SamplingParams(max_new_tokens=count), group)


async def test_a_group_stays_together_and_new_groups_go_where_there_is_room() -> None:
    engines = [EmbeddedEngine(CONFIG, slot_count=8) for _ in range(2)]
    both = SeveralEngines(engines)
    await both.start()
    for name in ("a0", "a1", "b0", "b1", "c0", "c1", "a2"):
        both.submit(request(name, name[0]))
    with pytest.raises(EngineError, match="expected a new id"):
        both.submit(request("a2", "b"))
    for engine in engines:
        await engine.fingerprint(1)  # commands are obeyed in order: what was submitted is counted by now
    assert [engine.stats().waiting_sequences for engine in engines] == [5, 2], "a, c on one engine and b on the other"
    await both.swap(keyframe_of(MODELS[0], 0), SwapMode.RECOMPUTE_KV)
    ended = 0
    while ended < 7:
        ended += sum(chunk.finish_reason is not FinishReason.UNFINISHED for chunk in await both.next_chunks())
    assert both.stats().sampled_tokens == 7 * 40
    both.submit(request("a2", "a", 1))  # ids are free again after their end
    await both.stop()


async def test_a_swap_that_fails_on_one_engine_is_seen_and_whole_tensors_repair_it() -> None:
    steady, failing = EmbeddedEngine(CONFIG, slot_count=2), FailsOnce(CONFIG, slot_count=2)
    both = SeveralEngines([steady, failing])
    await both.start()
    await both.swap(keyframe_of(MODELS[0], 0), SwapMode.RECOMPUTE_KV)
    before = await both.fingerprint(5)
    failing.fails = True
    with pytest.raises(EngineError, match="engine 1 of 2: version 1: no memory"):
        await both.swap(delta_of(MODELS[0], MODELS[1], 0, 1), SwapMode.RECOMPUTE_KV)
    assert both.version is None
    assert await both.fingerprint(5) == NO_FINGERPRINT
    await both.swap(keyframe_of(MODELS[1], 1), SwapMode.RECOMPUTE_KV)
    assert both.version == 1
    assert await both.fingerprint(5) == await steady.fingerprint(5) != before
    await both.stop()

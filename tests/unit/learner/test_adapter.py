"""LoRA from the learner's step to the worker's sampling: only the adapter travels."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.base.errors import ConfigError, VersionMismatch
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.config.run import ModelSection, RunConfig
from echo2.cost_model.sizing import Fit
from echo2.learner.training.model import CONFIG_KEY, PolicyModel
from echo2.worker.engines.engine import GenerateRequest, SwapMode
from echo2.worker.engines.making import make_engine, parse_model_config
from echo2.worker.options import WorkerOptions
from echo2.worker.weights import HostSnapshot
from tests.unit.learner.fleet import Run, options_for, prepared_from
from tests.unit.learner.tiny import make_tiny_model

PROMPT, SEED = (5, 6, 7, 8, 9), 3
FIT = Fit(1, 1, sequences=4, sequence_tokens=64, cache_tokens=256, reason="a trial")


def lora_options(folder: Path, model: Path, weights_dtype: str = "bfloat16") -> Any:
    adapter = {"weights_dtype": weights_dtype, "lora_rank": 4}
    return options_for(folder, model, model=adapter, learner={"steps": 4, "lr": 3e-2, "audit_share": 0.5})


def worker_engine(config_json: bytes, folder: Path, base: str) -> Any:
    options = WorkerOptions("link", folder, RunConfig(model=ModelSection(path=base)))
    return make_engine("embedded", parse_model_config(config_json), options, FIT)


async def sampled(engine: Any, host: Any) -> tuple[list[int], list[float], int]:
    await engine.start()
    await engine.swap(HostSnapshot(host), SwapMode.RECOMPUTE_KV)
    sampling = SamplingParams(max_new_tokens=12, seed=SEED)
    engine.submit(GenerateRequest("r", PROMPT, (), sampling, "g"))
    tokens: list[int] = []
    logprobs: list[float] = []
    is_over = False
    while not is_over:
        for chunk in await engine.next_chunks():
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            is_over = chunk.finish_reason is not FinishReason.UNFINISHED
    found = await engine.fingerprint(host.key)
    await engine.stop()
    return tokens, logprobs, found


def logprobs_under(model: Any, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    return logits.gather(1, ids[0, len(PROMPT) :, None])[:, 0]


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "float32", "nf4"])
def test_a_worker_samples_from_the_adapted_policy(model_path: Path, tmp_path: Path, weights_dtype: str) -> None:
    run = Run(lora_options(tmp_path / "run", model_path, weights_dtype))
    summary = asyncio.run(run.finish())
    host, hello = run.follower.host, run.coordinator.hellos[0]
    names = [spec.name for spec in host.table.specs]
    assert names and all(".lora_A.weight" in name or ".lora_B.weight" in name for name in names)
    assert any(host.bits(name).any() for name in names if "lora_B" in name), "the adapter learned something"
    assert CONFIG_KEY in json.loads(hello.model_config_json)
    assert f"{host.fingerprint():016x}" == summary.fingerprint

    engine = worker_engine(hello.model_config_json, tmp_path / "worker", str(model_path))
    tokens, logprobs, found = asyncio.run(sampled(engine, host))
    assert found == host.fingerprint(), "the engine holds the bits that were published"
    assert run.daemon.learner is not None
    learners: Any = run.daemon.learner.loop.p.model
    ours = logprobs_under(learners.hf_model, tokens)
    assert torch.allclose(ours, torch.tensor(logprobs), atol=2e-4)
    base = PolicyModel(str(model_path), weights_dtype, torch.device("cpu"), 1.0)
    assert not torch.allclose(ours, logprobs_under(base.hf_model, tokens), atol=1e-2), "not the base's any more"

    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert torch.allclose(logprobs_under(exported, tokens), ours, atol=1e-4 if weights_dtype == "float32" else 5e-2)
    again = prepared_from(lora_options(tmp_path / "run", model_path, weights_dtype))
    assert again.team.step_count == 4 and set(again.published) == set(names)
    assert again.team.snapshot().keys() == again.published.keys(), "it goes on from its checkpoint"


def test_another_base_or_none_is_refused_by_the_worker(model_path: Path, tmp_path: Path) -> None:
    model = PolicyModel(str(model_path), "bfloat16", torch.device("cpu"), 1.0, lora_rank=2)
    config = model.config_json()
    other = make_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(VersionMismatch, match="expected the learner's base model, fingerprint"):
        worker_engine(config, tmp_path, str(other))
    with pytest.raises(ConfigError, match=r"model\.path: the learner publishes an adapter only"):
        worker_engine(config, tmp_path, "")
    broken = {**json.loads(config), CONFIG_KEY: {"rank": 0, "scale": 1, "dtype": "bfloat16", "base_fingerprint": ""}}
    with pytest.raises(ConfigError, match="expected a rank of 1"):
        worker_engine(json.dumps(broken).encode(), tmp_path, str(model_path))
    vllms = make_engine("vllm", parse_model_config(config), WorkerOptions("link", tmp_path), FIT)
    with pytest.raises(ConfigError, match=r"model\.path: the learner publishes an adapter only"):
        asyncio.run(vllms.start())  # refused before vLLM is looked for
    asyncio.run(vllms.stop())

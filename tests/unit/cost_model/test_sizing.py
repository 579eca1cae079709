from __future__ import annotations

import argparse
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import echo2.cost_model
from echo2.base.errors import ConfigError, ResourceError
from echo2.base.units import format_bytes
from echo2.cli.doctor import model_findings
from echo2.cli.learner import learner_options
from echo2.cli.sizing import fit_rows, lengths_of, model_of
from echo2.cli.worker import worker_options
from echo2.config.load import load_config
from echo2.coordinator.money.market import built_in_catalogue, built_in_models
from echo2.cost_model.machines import worker_prior
from echo2.cost_model.sizing import (
    CPU_PROCESS_BYTES,
    DENSE,
    SEQUENCES_CPU,
    SEQUENCES_CPU_MAX,
    SEQUENCES_MAX,
    ModelSize,
    Quantisation,
    RunLengths,
    cpu_fit,
    gpu_fit,
    model_size,
)
from echo2.learner.training.loading import config_json_of, size_of
from echo2.worker.engines.making import fit_engine
from echo2.worker.machine import WorkerMachine, parse_gpus
from tests.contract.engine_rig import tiny_config

SHAPES = tomllib.loads((Path(echo2.cost_model.__file__).parent / "models.toml").read_text())
QWEN3_8B: dict[str, object] = SHAPES["qwen3-8b"]
GIB = 1 << 30


@pytest.mark.parametrize(
    "config",
    [
        *(tiny_config(family, pad_token_id=None) for family in DENSE if family not in ("qwen2", "ministral", "gemma2")),
        tiny_config("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        tiny_config("qwen2", head_dim=16),
        tiny_config("gemma2", head_dim=16, tie_word_embeddings=True),
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_the_formula_says_what_is_counted_on_the_model_itself(config: dict[str, object]) -> None:
    known = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    assert model_size(config).parameters == sum(p.numel() for p in model.parameters())
    assert model_size(json.loads(config_json_of(known, size_of(known)))) == replace(
        model_size(config), vocabulary=96, context_tokens=256
    )


@pytest.mark.parametrize(
    ("model_type", "shape", "billions", "active"),
    [
        (
            "mixtral",
            {
                "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
            },
            46.7, 12.9,
        ),
        ("gpt_oss", {"num_local_experts": 32, "num_hidden_layers": 24, "num_experts_per_tok": 4}, 20.9, 4.2),
        ("deepseek_v3", {}, 671.0, 37.6),
        (
            "qwen3_moe",
            {
                "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
                "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            },
            30.5, 3.35,
        ),
    ],
)  # fmt: skip
def test_experts_are_counted_on_the_model_itself(
    tmp_path: Path, model_type: str, shape: dict[str, object], billions: float, active: float
) -> None:
    known = AutoConfig.for_model(model_type, **shape)
    size = size_of(known)
    assert size.billions == pytest.approx(billions, rel=0.003)
    assert size.active_parameters / 1e9 == pytest.approx(active, rel=0.01)
    known.save_pretrained(tmp_path)
    assert model_of(str(tmp_path))[0] == size, "`echo2 plan` and `echo2 doctor` read the same"
    assert model_size(json.loads(config_json_of(known, size))) == size, "and workers, from the learner"
    with pytest.raises(ConfigError, match=f"{model_type}.*counted on the model itself"):
        model_size(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize("model_type, keys, queries", [("deepseek_v3", 24_576, 24_576), ("qwen3_next", 512, 4096)])
def test_queries_are_as_wide_as_the_heads_whatever_the_cache_holds(model_type: str, keys: int, queries: int) -> None:
    size = size_of(AutoConfig.for_model(model_type))
    assert (size.kv_width, size.query_width) == (keys, queries)


def test_a_config_that_lacks_a_field_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        model_size({key: value for key, value in QWEN3_8B.items() if key != "hidden_size"})
    with pytest.raises(ConfigError, match="vocab_size"):
        model_size(QWEN3_8B | {"vocab_size": "many"})


# A prompt of 2,048 tokens and a completion of 512.
RUN = RunLengths(2560)


def test_sequences_are_those_of_the_run_and_not_of_the_context() -> None:
    models = built_in_models()
    assert gpu_fit(models["qwen3-0.6b"], [24 * GIB], RUN).sequences == 149
    assert gpu_fit(models["qwen3-0.6b"], [24 * GIB], RunLengths(2560, sequences_cap=16)).sequences == 16
    small = model_size(tiny_config("qwen3"))
    assert cpu_fit(small, 8 * GIB, RunLengths(64)).sequences == SEQUENCES_CPU_MAX, "its products cost less than a step"
    assert cpu_fit(small, 8 * GIB, RunLengths(64, sequences_cap=7)).sequences == 7
    assert gpu_fit(models["qwen3-8b"], [80 * GIB], RUN).sequences == SEQUENCES_MAX == 256
    whole = gpu_fit(models["qwen3-8b"], [80 * GIB], RunLengths(0))
    assert (whole.sequences, whole.sequence_tokens) == (20, 40960), "without the run's word: the model's context"


def test_a_cpu_holds_what_half_of_its_spare_memory_does() -> None:
    large = model_size(QWEN3_8B | {"num_hidden_layers": 4})
    held = 6 * large.parameters + CPU_PROCESS_BYTES
    each = 4 * large.kv_values_per_token * 4096
    fit = cpu_fit(large, held + 2 * each * 5, RunLengths(4096))
    assert (fit.sequences, fit.whole_sequences) == (10, 5)
    assert cpu_fit(built_in_models()["smollm2-135m"], 8 * GIB, RunLengths(80)).sequences == SEQUENCES_CPU
    with pytest.raises(ResourceError, match=r"one sequence of 4096 tokens .* at most 2048 tokens") as refused:
        cpu_fit(large, held + each, RunLengths(4096))
    assert f"{format_bytes(held + 2 * each)} of memory" in str(refused.value)
    narrow = cpu_fit(large, 4 * large.parameters + CPU_PROCESS_BYTES + each * 5, RunLengths(4096, 0, Quantisation.BF16))
    assert (narrow.sequences, narrow.whole_sequences) == (10, 5), (
        "bf16: half the weights beside what is published, half the cache"
    )


def test_weights_rounded_to_fp8_take_one_byte_on_the_card_and_two_in_the_hosts_memory() -> None:
    size = model_size(QWEN3_8B)
    embedding, norms = 151_936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096
    assert size.parameters == size.linear_parameters + 2 * embedding + norms
    assert size.card_bytes(Quantisation.FP8) == size.linear_parameters + 2 * (2 * embedding + norms)
    assert size.masters_bytes(Quantisation.FP8) == 2 * size.linear_parameters
    exact = Quantisation.NONE
    assert (size.card_bytes(exact), size.masters_bytes(exact)) == (size.gpu_weight_bytes, 0)
    rounded = RunLengths(RUN.longest_tokens, quantisation=Quantisation.FP8)
    exact_fit, fit = gpu_fit(size, [24 * GIB], RUN), gpu_fit(size, [24 * GIB], rounded)
    freed = size.linear_parameters // (2 * size.kv_values_per_token)
    assert abs(fit.cache_tokens - exact_fit.cache_tokens - freed) <= 1
    assert "13.9 GB of masters" in fit.reason and "masters" not in exact_fit.reason
    with pytest.raises(ResourceError, match=r"rounded weights \(worker.quantisation fp8\)"):
        gpu_fit(size, [16 * GIB], RUN)
    assert gpu_fit(size, [16 * GIB], rounded).sequences >= 1, "it fits as told"
    assert size_of(AutoConfig.for_model(**tiny_config("qwen3_moe"))).linear_parameters == 0


def test_a_wider_engine_is_taken_where_the_weights_leave_room_for_few() -> None:
    size = model_size(QWEN3_8B)
    assert gpu_fit(size, [80 * GIB] * 8, RUN).engine_count == 8
    assert gpu_fit(size, [24 * GIB] * 4, RUN).tensor_parallel == 1, "36 sequences a GPU are enough"
    longer = RunLengths(9216)
    assert gpu_fit(size, [24 * GIB], longer).sequences == 10
    assert gpu_fit(size, [24 * GIB] * 4, longer).tensor_parallel == 2, "10 are not"
    assert gpu_fit(size, [24 * GIB] * 5, longer).engine_count == 2
    assert gpu_fit(size, [80 * GIB, 24 * GIB], longer).tensor_parallel == 2, "the smallest decides"


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    size = built_in_models()["qwen3-32b"]
    with pytest.raises(ResourceError, match="weights of 65.5 GB") as refused:
        gpu_fit(size, [48 * GIB], RunLengths(9216))
    said = str(refused.value)
    assert "2 such GPUs" in said and "one GPU of" in said
    assert gpu_fit(size, [48 * GIB] * 2, RunLengths(9216)).tensor_parallel == 2, "what is said to fit does"
    with pytest.raises(ResourceError, match=r"sequences of at most \d+ tokens") as refused:
        gpu_fit(built_in_models()["qwen3-8b"], [20 * GIB], RunLengths(40960))
    tokens = int(re.search(r"at most (\d+) tokens", str(refused.value))[1])  # type: ignore[index]
    assert gpu_fit(built_in_models()["qwen3-8b"], [20 * GIB], RunLengths(tokens)).whole_sequences == 1


def test_only_divisors_of_the_heads_come_into_question() -> None:
    size = ModelSize(10 * GIB, 1, 1, head_count=12, kv_head_count=3)
    assert gpu_fit(size, [24 * GIB] * 4, RunLengths(1)).tensor_parallel == 1
    with pytest.raises(ResourceError, match="in equal parts of 12 heads"):
        gpu_fit(size, [8 * GIB] * 4, RunLengths(1))


EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "configs").glob("math-*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("gib", [24, 80])
def test_worker_planner_and_doctor_agree(path: Path, gib: int, tmp_path: Path) -> None:
    config = load_config([path], None, {})
    name = config.model.path.rpartition("/")[2].lower()
    gpu = replace(built_in_catalogue()["L40S"], memory_gib=gib)
    size, lengths = model_of(config.model.path)[0], lengths_of(config)
    planned = worker_prior(gpu, size, lengths)
    rows = {row[0]: row for row in fit_rows(size, lengths, [gpu])}
    machine = WorkerMachine(
        parse_gpus(f"NVIDIA X, {gib << 10}, 580.1\n" * planned.gpu_count), 8, 1 << 40, 1 << 42, has_vllm=True
    )
    join = argparse.Namespace(link="", name="w", folder=tmp_path, preemption="", advertise="")
    said = learner_options(config, "", tmp_path)
    longest = min(said.longest_tokens, size.context_tokens)
    at_work = fit_engine("vllm", SHAPES[name], worker_options(join, config), machine, longest, 0)
    assert at_work.engine_count * at_work.sequences == planned.slots
    assert (at_work.tensor_parallel, at_work.cache_tokens) == (planned.fit.tensor_parallel, planned.fit.cache_tokens)
    assert next(iter(rows.values()))[1:3] == (str(planned.gpu_count), str(planned.slots))
    found = next(finding for finding in model_findings(machine, config) if finding.what == "worker of it here")
    assert at_work.reason in found.text

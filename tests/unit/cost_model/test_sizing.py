import argparse
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
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
from echo2.cost_model import sizing
from echo2.cost_model.machines import worker_prior
from echo2.cost_model.sizing import Checkpointing, LearnerRun, RunLengths, cpu_fit, gpu_fit, learner_memory, model_size
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
        *(
            tiny_config(family, pad_token_id=None)
            for family in sizing.DENSE
            if family not in ("qwen2", "ministral", "gemma2")
        ),
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
    assert cpu_fit(small, 8 * GIB, RunLengths(64)).sequences == sizing.SEQUENCES_CPU_MAX, (
        "its products cost less than a step"
    )
    assert cpu_fit(small, 8 * GIB, RunLengths(64, sequences_cap=7)).sequences == 7
    assert gpu_fit(models["qwen3-8b"], [80 * GIB], RUN).sequences == sizing.SEQUENCES_MAX == 256
    whole = gpu_fit(models["qwen3-8b"], [80 * GIB], RunLengths(0))
    assert (whole.sequences, whole.sequence_tokens) == (20, 40960), "without the run's word: the model's context"


def test_a_cpu_holds_what_half_of_its_spare_memory_does() -> None:
    large = model_size(QWEN3_8B | {"num_hidden_layers": 4})
    held = 6 * large.parameters + sizing.CPU_PROCESS_BYTES
    each = 4 * large.kv_values_per_token * 4096
    fit = cpu_fit(large, held + 2 * each * 5, RunLengths(4096))
    assert (fit.sequences, fit.whole_sequences) == (10, 5)
    assert cpu_fit(built_in_models()["smollm2-135m"], 8 * GIB, RunLengths(80)).sequences == sizing.SEQUENCES_CPU
    with pytest.raises(ResourceError, match=r"one sequence of 4096 tokens .* at most 2048 tokens") as refused:
        cpu_fit(large, held + each, RunLengths(4096))
    assert f"{format_bytes(held + 2 * each)} of memory" in str(refused.value)
    narrow = cpu_fit(
        large, 4 * large.parameters + sizing.CPU_PROCESS_BYTES + each * 5, RunLengths(4096, 0, sizing.Quantisation.BF16)
    )
    assert (narrow.sequences, narrow.whole_sequences) == (10, 5), "bf16: half of weights and cache"


def test_weights_rounded_to_fp8_take_one_byte_on_the_card_and_two_in_the_hosts_memory() -> None:
    size = model_size(QWEN3_8B)
    embedding, norms = 151_936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096
    assert size.parameters == size.linear_parameters + 2 * embedding + norms
    assert size.card_bytes(sizing.Quantisation.FP8) == size.linear_parameters + 2 * (2 * embedding + norms)
    assert size.masters_bytes(sizing.Quantisation.FP8) == 2 * size.linear_parameters
    exact = sizing.Quantisation.NONE
    assert (size.card_bytes(exact), size.masters_bytes(exact)) == (size.gpu_weight_bytes, 0)
    rounded = RunLengths(RUN.longest_tokens, quantisation=sizing.Quantisation.FP8)
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
    size = sizing.ModelSize(10 * GIB, 1, 1, head_count=12, kv_head_count=3)
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


# ---- what a learner needs: state by the parameter, activations by the budget, shared out over GPUs; how often a checkpoint

MODELS = built_in_models()


def test_the_state_of_eight_billion_is_twenty_bytes_a_parameter_over_its_gpus_and_two_less_on_one() -> None:
    size = MODELS["qwen3-8b"]
    run = LearnerRun(checkpoints_kept=2)
    whole = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=1, run=run)
    shared = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8, run=run)
    assert whole.state_bytes == 18 * size.parameters and 8 * shared.state_bytes == 20 * size.parameters
    assert whole.activation_bytes == shared.activation_bytes, "each rank has a micro-batch of its own"
    assert whole.disk_bytes == 3 * 14 * size.parameters, "masters, both moments and the published weights, three times"
    assert shared.host_bytes > (12 + 4) * size.parameters, "the copies that a checkpoint is written from"
    stored = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8, run=replace(run, store_bytes=33 << 30))
    assert stored.disk_bytes == shared.disk_bytes + (33 << 30)


def test_eight_billion_fit_one_gpu_of_80_gb_with_their_masters_on_its_host() -> None:
    size, room = MODELS["qwen3-8b"], int(0.9 * 80e9)
    need = {
        how: learner_memory(size, 8192, Checkpointing.FULL, gpu_count=1, run=LearnerRun(optimizer_state=how))
        for how in ("float32", "8bit", "host")
    }
    assert need["host"].device_bytes < room < need["8bit"].device_bytes < need["float32"].device_bytes
    assert need["host"].host_bytes - need["float32"].host_bytes == 12 * size.parameters
    assert need["8bit"].disk_bytes < 0.6 * need["float32"].disk_bytes


def test_checkpointing_is_taken_where_activations_outgrow_memory_and_selective_lies_between() -> None:
    size = MODELS["qwen3-8b"]
    small, full = MODELS["smollm2-135m"], Checkpointing.FULL
    assert (
        sizing.checkpointing_of("auto", size, 16384, 2) is full is not sizing.checkpointing_of("auto", small, 2048, 4)
    )
    assert sizing.checkpointing_of("auto", small, 1 << 16, 4) is full, "a budget may be large for any model"
    off, some, full = (sizing.activation_bytes(size, 16384, keeps, 2) for keeps in Checkpointing)
    assert full < some < off and off > 10 * full - 10 * 4 * (256 << 20)
    # What attention gave, the input, and the products of keys, output and the MLP's second.
    assert some - full == 16384 * 2 * size.layer_count * (4096 + 1024 + 4096 + 12288)
    assert sizing.checkpointing_of("selective", size, 16384, 2) is Checkpointing.SELECTIVE


def test_audits_keep_the_versions_of_two_bounds_and_each_costs_host_memory() -> None:
    size = MODELS["qwen3-8b"]
    two, six, off = (
        learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8, run=run).host_bytes
        for run in (LearnerRun(2), LearnerRun(6), LearnerRun(6, is_audited=False))
    )
    assert (sizing.audit_versions(2), sizing.audit_versions(6)) == (6, 14)
    each = sizing.AUDIT_CHANGED_SHARE * sizing.AUDIT_BYTES_OF_CHANGE * size.parameters
    assert abs(six - two - 8 * each) < 4 and abs(six - off - 14 * each) < 4
    held = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8, run=LearnerRun(2, rollout_tokens=4e7))
    assert held.host_bytes - two == 4_000_000_000, "100 bytes for each token of a rollout in flight"


def test_an_adapter_needs_its_base_once_and_a_state_for_itself_alone() -> None:
    """Linear layers of Qwen3-4B: 2560 wide, 32 heads and 8 of keys of 128, 9728 in the MLP."""
    size = MODELS["qwen3-4b"]
    adapter = sizing.adapter_parameters(size, 16)
    each = (2560 + 4096) * 2 + 2 * (2560 + 1024) + 3 * (2560 + 9728)
    assert adapter == 16 * 36 * each
    found = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=1, run=LearnerRun(adapter_rank=16))
    assert found.state_bytes == 2 * size.parameters + 18 * adapter
    assert found.disk_bytes == 3 * 14 * adapter, "two checkpoints and the one being written"


def test_eight_billion_in_four_bits_train_an_adapter_on_24_gb() -> None:
    size, memory_bytes = MODELS["qwen3-8b"], 24 << 30
    coded, whole = LearnerRun(adapter_rank=16, has_nf4_base=True), LearnerRun(adapter_rank=16)
    assert (
        sizing.fewest_gpus(size, 16384, memory_bytes, coded) == 1 < sizing.fewest_gpus(size, 16384, memory_bytes, whole)
    )
    state = [learner_memory(size, 4096, Checkpointing.FULL, gpu_count=1, run=run).state_bytes for run in (coded, whole)]
    assert state[1] - state[0] == pytest.approx((2 - 4.25 / 8) * size.linear_parameters, abs=1.0)


SECONDS = st.floats(1e-3, 3600.0)


@given(SECONDS, SECONDS, st.floats(1.0, 10.0))
def test_no_other_interval_of_checkpoints_costs_much_less(checkpoint_s: float, train_s: float, waiting: float) -> None:
    step_s = waiting * train_s

    def cost(steps: int) -> float:
        return checkpoint_s / (steps * step_s) + steps * train_s / (2 * sizing.KILLED_EVERY_S)

    found = sizing.steps_between(checkpoint_s, train_s, step_s)
    assert 1 <= found <= sizing.STEPS_MAX and (found == 1 or found * train_s <= sizing.REPLAY_S)
    allowed = [steps for steps in range(1, sizing.STEPS_MAX + 1) if steps == 1 or steps * train_s <= sizing.REPLAY_S]
    assert cost(found) <= 1.3 * min(map(cost, allowed)), "rounded down: a step less loses little"
    assert sizing.steps_between(1.0, 0.0, 0.0) == sizing.STEPS_MAX, "nothing was trained yet"

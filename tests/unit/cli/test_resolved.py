"""What options that follow the machine and the model become, and that the reason is told."""

import math
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from echo2.broadcast.artifact import store_bytes_for
from echo2.cli.doctor import learner_finding
from echo2.cli.learner import learner_options
from echo2.cli.main import main
from echo2.cli.plan import learner_gpus, load_catalogue
from echo2.cli.sizing import LearnerMachine, gpus_text, learner_line, learner_needs, learner_run, resolved, threads
from echo2.config.load import load_config, parse_overrides
from echo2.coordinator.money.market import built_in_models
from echo2.cost_model.sizing import Checkpointing, checkpoint_bytes, learner_memory, model_size, token_budget_for
from echo2.learner.audit import Auditor
from echo2.learner.startup import new_team
from echo2.learner.training.ranks import Ranks
from echo2.worker.machine import Finding, WorkerMachine, parse_gpus

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"


def test_the_trainer_takes_all_cores_but_one_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads(cores) for cores in (1, 2, 16)] == [1, 1, 15]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(16) == 3


@pytest.mark.parametrize(
    ("example", "budget", "does"),
    [("math-qwen3-8b", 16_384, True), ("laptop", 1024, False), ("laptop", 2048, True)],  # of float32 on a CPU
)
def test_gradient_checkpointing_follows_model_and_budget(example: str, budget: int, does: bool, tmp_path: Path) -> None:
    on_cpu = {"learner.token_budget": str(budget), "learner.device": "cpu"}
    config = load_config([EXAMPLES / f"{example}.toml"], None, on_cpu | {"learner.gradient_checkpointing": "auto"})
    found = resolved(config)["learner.gradient_checkpointing"]
    assert found.value is does and "of activations for" in found.why
    assert learner_options(config, "", tmp_path).trainer.gradient_checkpointing is does
    size = built_in_models()[config.model.path.rpartition("/")[2].lower()]
    needs = learner_needs(config, size, LearnerMachine(0, memory_bytes=1 << 40))
    assert needs.checkpointing is (Checkpointing.FULL if does else Checkpointing.OFF)
    told = load_config([EXAMPLES / f"{example}.toml"], None, {"learner.gradient_checkpointing": str(not does).lower()})
    assert learner_options(told, "", tmp_path).trainer.gradient_checkpointing is not does


@pytest.mark.parametrize(
    ("model", "longest", "gib", "gpus", "budget"),
    [
        ("smollm2-135m", 80, 23, 0, 2_048),  # a CPU: the largest without checkpointing
        ("qwen3-0.6b", 2_560, 23, 0, 4_096),  # nor below two of the longest sequence
        ("qwen3-0.6b", 2_560, 80, 1, 16_384),
        ("qwen3-4b", 2_560, 80, 1, 4_096),  # the state leaves little
        ("qwen3-8b", 9_216, 80, 4, 16_384),
    ],
)
def test_a_micro_batch_is_as_large_as_these_allow(model: str, longest: int, gib: int, gpus: int, budget: int) -> None:
    assert token_budget_for(built_in_models()[model], longest, gib << 30, gpus) == budget


def test_the_trainer_takes_the_micro_batch_of_this_machine_unless_told(tmp_path: Path) -> None:
    example = [EXAMPLES / "math-qwen3-0.6b.toml"]
    path = {"learner.token_budget": "0", "model.path": "qwen3-0.6b", "learner.device": "cpu"}
    config = load_config(example, None, path | {"sampling.max_new_tokens": "256", "sampling.max_prompt_tokens": "128"})
    found = resolved(config)["learner.token_budget"]
    assert "sequences of up to 384 tokens" in found.why
    assert learner_options(config, "", tmp_path).trainer.token_budget == found.value
    told = load_config(example, None, {"learner.token_budget": "777"})
    assert "learner.token_budget" not in resolved(told)
    assert learner_options(told, "", tmp_path).trainer.token_budget == 777


def test_config_show_says_what_options_become_here_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "show", str(EXAMPLES / "math-qwen3-8b.toml"), "--learner.device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "sequences of 9216 tokens (max_prompt_tokens + max_new_tokens of each turn" in shown
    file = tmp_path / "shown.toml"
    file.write_text(shown)
    overrides = {"learner.device": "cpu"}
    assert load_config([file], None, {}) == load_config([EXAMPLES / "math-qwen3-8b.toml"], None, overrides)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"staleness.bound": "4"}, "dapo"),
        ({"staleness.bound": "5"}, "luspo"),
        ({"staleness.bound": "16", "learner.loss": "gspo"}, "gspo"),
        ({"learner.loss": "tests.unit.learner.test_loss:own_loss"}, "tests.unit.learner.test_loss:own_loss"),
    ],
)
def test_the_loss_follows_the_staleness_bound_unless_named(told: dict[str, str], name: str, tmp_path: Path) -> None:
    config = load_config([EXAMPLES / "laptop.toml"], None, told)
    assert learner_options(config, "", tmp_path).trainer.loss.loss == name
    assert ("learner.loss" in resolved(config)) is ("learner.loss" not in told)


def test_scripts_of_own_trainers_find_the_model_and_the_rate(tmp_path: Path) -> None:
    config = load_config([], None, {"model.path": "somewhere", "learner.lr": "0.25"})
    trainer = learner_options(config, "", tmp_path).trainer
    assert (trainer.model_path, trainer.lr) == ("somewhere", 0.25)
    assert (trainer.grad_clip, trainer.nonfinite_steps_max, trainer.row_tokens) == (1.0, 5, 0)


def test_settings_of_the_loss_reach_the_trainer(tmp_path: Path) -> None:
    told = {
        "learner.correction": "tis_token", "learner.kl_coefficient": "0.5", "learner.clip": "[0.5, 0.75]",
    }  # fmt: skip
    loss = learner_options(load_config([EXAMPLES / "laptop.toml"], None, told), "", tmp_path).trainer.loss
    assert (loss.correction, loss.cap, loss.kl_coefficient) == ("tis_token", 2.0, 0.5)
    assert (loss.clip_low, loss.clip_high) == (0.5, 0.75)


# ---- plan, doctor and the learner itself ask one rule what a learner needs of memory and disk

EXAMPLE_FILES = sorted((Path(__file__).parents[3] / "examples" / "configs").glob("*.toml"))
EXAMPLE = next(path for path in EXAMPLE_FILES if path.stem == "math-qwen3-8b")
H100_MIB = 81_559
LARGE = 1 << 42


def test_the_disk_that_is_told_holds_what_the_learner_writes(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    config = load_config([], None, {"model.path": str(tmp_path / "model")})
    options = learner_options(config, "", tmp_path)
    team, size = new_team(options, Ranks()), model_size(shape)
    assert team.checkpoint_bytes == checkpoint_bytes(size.parameters, 2 * size.parameters)
    told = learner_needs(config, size, LearnerMachine(0, memory_bytes=1 << 34)).memory.disk_bytes
    assert told == 3 * team.checkpoint_bytes + store_bytes_for(team.model.snapshot_bytes)
    auditor = Auditor(config, random.Random(0), None, print)  # type: ignore[arg-type]
    assert auditor.versions_max == 2 * config.staleness.bound + 2


def test_eight_billion_at_a_bound_of_six_take_the_disk_and_host_memory_that_their_run_asks() -> None:
    config, size = load_config([EXAMPLE], None, {}), built_in_models()["qwen3-8b"]
    run = learner_run(config, size)
    assert run.rollout_tokens == 2048 * 7 * 0.35 * 8192
    found = learner_needs(config, size, LearnerMachine(8, 85_500_000_000)).memory
    assert found.disk_bytes == (3 * 14 * size.parameters) + store_bytes_for(2 * size.parameters)
    known = learner_memory(size, 16384, Checkpointing.FULL, gpu_count=8).host_bytes
    eight_versions_more = int(0.02 * 6 * 14 * size.parameters) - int(0.02 * 6 * 6 * size.parameters)
    assert found.host_bytes - known == eight_versions_more + int(100 * run.rollout_tokens)
    assert "of disk for checkpoints and chunks" in learner_line(config, size, LearnerMachine(8, 85_500_000_000))


def machine(gpu_count: int, memory_bytes: int = LARGE, disk_bytes: int = LARGE) -> WorkerMachine:
    gpus = parse_gpus(f"NVIDIA H100 80GB HBM3, {H100_MIB}, 580.65.06\n" * gpu_count)
    return WorkerMachine(gpus, 16, memory_bytes, disk_bytes, has_vllm=True)


def finding_of(path: Path, here: WorkerMachine, *more: str) -> Finding:
    config = load_config([path], None, parse_overrides(more))
    return learner_finding(here, config, built_in_models()[config.model.path.rpartition("/")[2].lower()])


@pytest.mark.parametrize(
    ("here", "option", "lacks", "would"),
    [
        (machine(1), "", "GPU memory: 161.1 GB needed on one GPU, 77.0 GB there", "4 such GPUs"),
        (machine(1), "", "GPU memory", "learner.optimizer_state host, with 247.7 GB of host memory"),
        (machine(1), "--learner.optimizer_state=host", "", ""),
        (machine(0, memory_bytes=64 << 30), "", "needed on the CPU, 68.7 GB there", "4 H100 GPUs"),
        (machine(4, memory_bytes=64 << 30), "--learner.device=cpu", "needed on the CPU", "4 H100 GPUs"),
        (machine(8, memory_bytes=64 << 30), "", "host memory: 149.4 GB needed, 68.7 GB there", "a host with"),
        (machine(8, disk_bytes=1 << 38), "", "disk: 377.3 GB needed, 274.9 GB free", "of free disk"),
        (machine(1), "--model.lora_rank=9 --learner.token_budget=114688", "GPU memory", "model.weights_dtype nf4"),
        (machine(4), "--learner.token_budget=65536", "GPU memory", "learner.token_budget 32768"),
        (machine(4), "--learner.token_budget=32768", "", ""),
        (machine(4), "", "", ""),
    ],
)
def test_the_doctor_says_what_a_learner_lacks_here(here: WorkerMachine, option: str, lacks: str, would: str) -> None:
    found = finding_of(EXAMPLE, here, *option.split())
    assert found.is_good is not bool(lacks)
    assert lacks in found.text and would in found.advice and bool(found.advice) is bool(would)


def test_ranks_of_several_machines_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(path for path in EXAMPLE_FILES if path.stem == "math-qwen3-32b")
    assert not finding_of(path, machine(8)).is_good
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert finding_of(path, machine(8, memory_bytes=300 << 30)).is_good, "this host keeps half of the ranks' memory"
    assert not finding_of(path, machine(8, memory_bytes=200 << 30)).is_good


@pytest.mark.parametrize("path", EXAMPLE_FILES, ids=lambda path: path.stem)
def test_plan_and_doctor_agree(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The header's torchrun starts as many ranks as echo2 plan names GPUs; these are enough for the doctor, and half are not."""
    monkeypatch.syspath_prepend(str(path.parent))
    text = path.read_text()
    nodes, ranks = (re.search(rf"--{name} (\d+)", text) for name in ("nnodes", "nproc-per-node"))
    asked = int(nodes[1] if nodes else 1) * int(ranks[1] if ranks else 1)
    config = load_config([path], None, {})
    size = built_in_models()[config.model.path.rpartition("/")[2].lower()]
    assert learner_gpus(config, {}, size, load_catalogue(None))[1] == asked
    if path.stem.startswith("math"):  # the pools of others are looked for longest; their learner takes one GPU anyway
        assert main(["plan", str(path)]) == 0
        told = capsys.readouterr().out
        assert f"on {gpus_text(asked)} (" in told and "SHORT" not in told
        if config.coordinator.usd_per_hour_cap < math.inf:
            assert "not feasible" not in told, "the example's own cap pays for the pool that it needs"
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert finding_of(path, machine(asked)).is_good
    assert asked == 1 or not finding_of(path, machine(asked // 2)).is_good


def test_what_the_learner_needs_names_its_copies_and_those_that_do_not_fit_the_gpus() -> None:
    size = built_in_models()["qwen3-8b"]
    for replicas, text in (
        ("1", "on each of 8 GPUs ("), ("2", "on each of 8 GPUs, 2 copies of 4 each ("),
        ("3", "learner.replicas = 3 does not divide 8 ranks: such a learner does not start"),
    ):  # fmt: skip
        config = load_config([], None, {"learner.replicas": replicas})
        assert text in learner_line(config, size, LearnerMachine(8, 80 << 30))
        here = learner_finding(machine(8), config, size)
        assert (here.is_good is False) == (replicas == "3"), here.text
    small = learner_finding(machine(8), config, built_in_models()["qwen3-0.6b"])
    assert small.is_good is False and "Too little" not in small.text, "it would fit, and does not start"

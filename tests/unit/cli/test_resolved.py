"""What options that follow the machine and the model become, and that the reason is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.cli.learner import learner_options
from echo2.cli.main import main
from echo2.cli.sizing import LearnerMachine, learner_needs, resolved, threads
from echo2.config.load import load_config
from echo2.coordinator.money.market import built_in_models
from echo2.cost_model.sizing import Checkpointing, token_budget_for

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
def test_gradient_checkpointing_follows_the_model_and_the_budget_as_plan_and_doctor_tell(
    example: str, budget: int, does: bool, tmp_path: Path
) -> None:
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
def test_a_micro_batch_is_as_large_as_machine_and_model_allow(
    model: str, longest: int, gib: int, gpus: int, budget: int
) -> None:
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
def test_the_loss_follows_the_staleness_bound_unless_it_is_named(
    told: dict[str, str], name: str, tmp_path: Path
) -> None:
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

"""What options that follow the machine and the model become, and that the reason is told."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.cli.learner import learner_options
from echo2.cli.main import main
from echo2.cli.resolved import resolved, threads
from echo2.config.load import load_config
from echo2.coordinator.runtime.catalogue import built_in_models
from echo2.cost_model.memory import token_budget_for
from echo2.learner.runtime.options import TrainerOptions
from echo2.tasks.runtime.rewards import reward_processes

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"


def test_the_trainer_takes_all_cores_but_one_unless_told() -> None:
    assert [threads(cores).value for cores in (1, 2, 16)] == [1, 1, 15]
    assert "learner.threads" not in resolved(load_config((), None, {"learner.threads": "3"}), 16)


def test_reward_processes_follow_the_cores() -> None:
    assert [reward_processes(cores) for cores in (1, 2, 16, 64, 256)] == [2, 2, 4, 16, 16]
    found = resolved(load_config((), None, {"task.name": "sort_digits"}), 32)
    assert found["learner.checkpoint_every_steps"].value == "at most 20"
    given = load_config((), None, {"learner.checkpoint_every_steps": "7"})
    assert "learner.checkpoint_every_steps" not in resolved(given, 32)
    assert found["task.reward_processes"].value == 8


def test_chunks_follow_the_keyframe() -> None:
    large = resolved(load_config([EXAMPLES / "math-qwen3-8b.toml"], None, {"broadcast.chunk_bytes": "256KiB"}), 4)
    assert large["broadcast.chunk_bytes"].value == "1.0 MB" and "keyframe" in large["broadcast.chunk_bytes"].why
    small = resolved(load_config([EXAMPLES / "math-qwen3-8b.toml"], None, {"broadcast.chunk_bytes": "4MiB"}), 4)
    assert "broadcast.chunk_bytes" not in small


def test_checkpoints_follow_their_cost_unless_a_number_is_given(tmp_path: Path) -> None:
    free = learner_options(load_config([EXAMPLES / "math-qwen3-8b.toml"], None, {}), "", tmp_path).checkpoint
    assert free.follows_cost and free.every_steps == 20
    told = load_config([EXAMPLES / "math-qwen3-8b.toml"], None, {"learner.checkpoint_every_steps": "7"})
    given = learner_options(told, "", tmp_path).checkpoint
    assert not given.follows_cost and given.every_steps == 7


@pytest.mark.parametrize(("example", "does"), [("math-qwen3-8b", True), ("laptop", False)])
def test_gradient_checkpointing_follows_the_model_and_the_budget(example: str, does: bool, tmp_path: Path) -> None:
    overrides = {"learner.gradient_checkpointing": "auto"} | ({"learner.token_budget": "2048"} if not does else {})
    config = load_config([EXAMPLES / f"{example}.toml"], None, overrides)
    found = resolved(config, 4)["learner.gradient_checkpointing"]
    assert found.value is does and "of activations for" in found.why
    assert learner_options(config, "", tmp_path).trainer.gradient_checkpointing is does
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
    found = resolved(config, 4)["learner.token_budget"]
    assert "sequences of up to 384 tokens" in found.why
    assert learner_options(config, "", tmp_path).trainer.token_budget == found.value
    told = load_config(example, None, {"learner.token_budget": "777"})
    assert "learner.token_budget" not in resolved(told, 4)
    assert learner_options(told, "", tmp_path).trainer.token_budget == 777


def test_config_show_says_what_options_become_here_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "show", str(EXAMPLES / "math-qwen3-8b.toml"), "--learner.threads", "5"]) == 0
    shown = capsys.readouterr().out
    assert "# here: 9216 (max_prompt_tokens + max_new_tokens of each turn" in shown
    assert "one of them for sockets" not in shown, "what was told needs no reason"
    file = tmp_path / "shown.toml"
    file.write_text(shown)
    overrides = {"learner.threads": "5"}
    assert load_config([file], None, {}) == load_config([EXAMPLES / "math-qwen3-8b.toml"], None, overrides)


@pytest.mark.parametrize(
    ("told", "kind", "normalised"),
    [
        ({"staleness.bound": "4"}, "token", "dapo"),
        ({"staleness.bound": "5"}, "gspo", "luspo"),
        ({"staleness.bound": "16", "learner.objective": "gspo"}, "gspo", "grpo"),
        ({"staleness.bound": "16", "learner.normalisation": "dapo"}, "gspo", "dapo"),
        ({"learner.objective": "sapo"}, "sapo", "grpo"),
        ({"learner.objective": "vespo"}, "vespo", "dapo"),
    ],
)
def test_the_objective_follows_the_staleness_bound(
    told: dict[str, str], kind: str, normalised: str, tmp_path: Path
) -> None:
    config = load_config([EXAMPLES / "laptop.toml"], None, told)
    loss = learner_options(config, "", tmp_path).trainer.loss
    assert (loss.objective.kind.value, loss.normalisation.value) == (kind, normalised)
    shown = resolved(config, 4)
    assert ("learner.objective" in shown) is ("learner.objective" not in told)
    assert ("learner.normalisation" in shown) is ("learner.normalisation" not in told)


def test_every_setting_of_the_loss_reaches_the_trainer(tmp_path: Path) -> None:
    told = {
        "learner.objective": "vespo", "learner.normalisation": "luspo", "learner.correction": "masked",
        "learner.is_cap": "3", "learner.is_floor": "0.25", "learner.is_band": "[0.25, 4.0]",
        "learner.sapo_temperatures": "[2.0, 3.0]", "learner.vespo_positive": "[1.0, 1.5]",
        "learner.vespo_negative": "[4.0, 4.5]", "learner.second_moment_max": "0.5", "learner.off_policy_nats_max": "0.125",
        "learner.kl_coefficient": "0.5", "learner.kl_weighted_by_ratio": "false", "learner.clip_low": "0.5",
        "learner.clip_high": "0.75", "learner.ratio_ceiling": "8", "learner.adam_epsilon": "1e-6",
        "learner.updates_per_batch": "2", "learner.train_on_truncated": "false",
    }  # fmt: skip
    trainer = learner_options(load_config([EXAMPLES / "laptop.toml"], None, told), "", tmp_path).trainer
    held, default = trainer.loss, TrainerOptions("").loss
    for part, plain in ((held, default), (held.objective, default.objective), (held.correction, default.correction)):
        for field in fields(part):
            assert getattr(part, field.name) != getattr(plain, field.name), field.name
    assert (trainer.epsilon, trainer.updates_per_batch, trainer.trains_on_truncated) == (1e-6, 2, False)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"learner.updates_per_batch": "99", "learner.prompts_per_step": "8"}, "whole groups"),
        ({"learner.is_band": "[1.5, 4.0]"}, "below 1"),
        ({"learner.is_floor": "0.9", "learner.is_cap": "0.5"}, "is_cap"),
        ({"learner.objective": "vespo", "learner.correction": "tis_sequence"}, "per-token"),
    ],
)
def test_settings_of_the_loss_that_cannot_hold_are_refused_before_torch_is_paid_for(
    told: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config((), None, told)

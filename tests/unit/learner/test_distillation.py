"""On-policy distillation: a teacher's log-probabilities of the student's tokens are its advantages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from echo2.base.errors import ConfigError
from echo2.base.ids import Step
from echo2.config.run import RunConfig
from echo2.learner.rollouts.groups import Batch
from echo2.learner.rollouts.prompts import check_teacher
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.trainer import Trainer
from tests.unit.learner.made import group_of, new_trainer, rollout_of
from tests.unit.learner.tiny import make_tiny_model

PROMPTS = torch.arange(3, 35)
TOKENS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student; and a teacher of another size that has learned to say one thing, by supervised steps."""
    torch.set_num_threads(1)
    student = make_tiny_model(tmp_path_factory.mktemp("student"))
    teacher = make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=7, hidden=48)
    trainer = new_trainer(teacher, "float32", lr=3e-3, supervised_steps=12)
    ids = torch.cat([PROMPTS[:, None], torch.tensor([[10, 11, 10, 11]]).expand(len(PROMPTS), TOKENS)], 1)
    for step in range(12):
        trainer.step(batch_of(ids.tolist(), [[0.0] * TOKENS] * len(PROMPTS), step))
    trainer.model.save(trainer.model.snapshot(), teacher)
    return student, teacher


def taught(student: Path, teacher: Path, lr: float) -> Trainer:
    return new_trainer(student, "float32", lr=lr, teacher=str(teacher), grad_clip=1e9)


def sampled(trainer: Trainer, step: int) -> Batch:
    """The student's own tokens after each prompt; all rewards are equal."""
    ids = PROMPTS[:, None]
    generator, logprobs = torch.Generator().manual_seed(step), []
    for _ in range(TOKENS):
        with torch.no_grad():
            row_BV = trainer.model.hf_model(ids).logits[:, -1].log_softmax(-1)
        drawn_B1 = torch.multinomial(row_BV.exp(), 1, generator=generator)
        logprobs.append(row_BV.gather(-1, drawn_B1))
        ids = torch.cat([ids, drawn_B1], 1)
    return batch_of(ids.tolist(), torch.cat(logprobs, 1).tolist(), step)


def batch_of(rows: list[list[int]], logprobs: list[list[float]], step: int) -> Batch:
    """A group of one rollout for each row: a prompt of one token, and what was sampled."""
    made = zip(rows, logprobs, strict=True)
    rollouts = [rollout_of(row[1:], name=f"g{number}", logprobs=told) for number, (row, told) in enumerate(made)]
    groups = [group_of(row[:1], [rollout], [0.5]) for row, rollout in zip(rows, rollouts, strict=True)]
    return Batch(Step(step), tuple(groups))


def distance(trainer: Trainer) -> float:
    """KL of the student from the teacher after each prompt, nats."""
    assert trainer.reference is not None
    with torch.no_grad():
        own, other = (
            m.hf_model(PROMPTS[:, None]).logits[:, -1].log_softmax(-1) for m in (trainer.model, trainer.reference)
        )
    return float((own.exp() * (own - other)).sum(-1).mean())


def test_each_tokens_advantage_is_minus_its_reverse_kl(models: tuple[Path, Path]) -> None:
    trainer = taught(*models, lr=1e-3)
    batch = sampled(trainer, 0)
    ids = torch.tensor([[*group.spec.prompt_token_ids, *group.rollouts[0].token_ids] for group in batch.groups])

    def logprobs(model: PolicyModel) -> torch.Tensor:
        return model.hf_model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    assert trainer.reference is not None
    with torch.no_grad():
        teacher = logprobs(trainer.reference)
    own = logprobs(trainer.model)
    (-(teacher - own.detach()) * own).mean().backward()
    norm = torch.stack([p.grad.norm() for p in trainer.model.hf_model.parameters() if p.grad is not None]).norm()
    trainer.model.hf_model.zero_grad()
    result = trainer.step(batch)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4) and result.metrics is not None
    assert result.metrics["kl/reference"] > 0.1


def test_the_student_comes_nearer_to_the_teacher_whatever_the_rewards(models: tuple[Path, Path]) -> None:
    trainer = taught(*models, lr=1e-2)
    before = distance(trainer)
    for step in range(15):
        trainer.step(sampled(trainer, step))
    assert distance(trainer) < 0.25 * before


def test_a_teacher_with_another_tokenizer_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    student, teacher = models
    config = RunConfig.model_validate({"model": {"path": str(student)}, "learner": {"teacher": str(teacher)}})
    check_teacher(config)
    other = make_tiny_model(tmp_path / "other")
    text = json.loads((other / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (other / "tokenizer.json").write_text(json.dumps(text))
    learner = config.learner.model_copy(update={"teacher": str(other)})
    with pytest.raises(ConfigError, match=r"learner.teacher .*: expected a model with the tokenizer .* got 2 of"):
        check_teacher(config.model_copy(update={"learner": learner}))


def test_a_teacher_with_fewer_embeddings_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    larger = make_tiny_model(tmp_path / "padded", vocabulary=128)
    with pytest.raises(ConfigError, match="expected at least the model's 128 embeddings"):
        taught(larger, models[1], lr=1e-3)
    assert new_trainer(larger, "float32").reference is None

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from echo2.base.errors import ConfigError
from echo2.base.ids import Step
from echo2.base.rollout import LOSS_COLUMNS, AdamStep, ClientLoss, Example
from echo2.learner.rollouts.groups import Batch, TrainGroup
from echo2.learner.training.loss import group_advantages
from echo2.learner.training.packing import client_losses
from echo2.learner.training.trainer import Trainer
from tests.unit.learner.made import new_trainer, random_groups
from tests.unit.learner.test_trainer import PLAIN, gradient_of

ADAM = AdamStep(1e-3, 0.9, 0.99, 1e-8, grad_clip=1e9)


@pytest.mark.parametrize("settings", [{"beta1": 1.0}, {"lr": -1e-3}, {"epsilon": -1.0}, {"weight_decay": -0.1}])
def test_settings_of_adam_that_unlearn_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="adam_params: expected betas from 0"):
        replace(ADAM, **settings)


def examples_of(groups: tuple[TrainGroup, ...]) -> list[Example]:
    """The rollouts as a client sends them: with the advantages of the loop's own loss, divided by all tokens."""
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float32)
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group.rewards])
    advantages = iter(group_advantages(rewards, numbers, "grpo", None).values_R.tolist())
    total = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    examples = []
    for group in groups:
        prompt = group.spec.prompt_token_ids
        for rollout in group.rollouts:
            whole = np.array([*prompt, *rollout.token_ids], dtype=np.int64)
            advantage, logprobs = (np.zeros((len(whole) - 1, 1), np.float32) for _ in range(2))
            advantage[len(prompt) - 1 :] = next(advantages) / total
            logprobs[len(prompt) - 1 :, 0] = rollout.logprobs
            examples.append(Example(whole[:-1], whole[1:, None], {"advantages": advantage, "logprobs": logprobs}))
    return examples


def gradient_that_was_applied(trainer: Trainer) -> list[torch.Tensor]:
    _, is_made = trainer.optim_step(ADAM)
    assert is_made
    return [trainer.optimiser.state[master]["exp_avg"] / (1 - ADAM.beta1) for master in trainer.model.masters]


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_a_client_s_gradient_is_the_loop_s_own(model_path: Path, calls: int, weights_dtype: str) -> None:
    groups = random_groups(3)
    options = {**PLAIN, "weights_dtype": weights_dtype, "token_budget": 60}
    own = gradient_of(new_trainer(model_path, **options), Batch(Step(0), groups))
    trainer, examples = new_trainer(model_path, **options), examples_of(groups)
    for begin in range(calls):
        trainer.forward_backward(examples[begin::calls], ClientLoss("ppo", 0.8, 1.28))
    applied = gradient_that_was_applied(trainer)
    assert any(gradient.abs().max() > 1e-4 for gradient in applied)
    for one, other in zip(own, applied, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_forward_pass_scores_any_targets_and_leaves_no_gradient(model_path: Path) -> None:
    trainer = new_trainer(model_path, **PLAIN)
    ids, targets = np.array([5, 9, 11, 7]), np.array([[3, 4], [5, 6], [40, 41], [9, 10]])
    example = Example(ids, targets, {"weights": np.ones((4, 2), np.float32)})
    with torch.no_grad():
        alone = torch.log_softmax(trainer.model.hf_model(input_ids=torch.tensor(ids)[None]).logits[0], -1)
    alone = alone.gather(-1, torch.tensor(targets))
    found, loss = trainer.forward_backward([example, example], ClientLoss("cross_entropy"), is_trained=False)
    for logprobs in found:
        assert torch.allclose(logprobs, alone, atol=1e-5)
    assert loss == pytest.approx(-2 * float(alone.sum()), rel=1e-4)
    assert trainer.optim_step(ADAM) == (0.0, True), "nothing was added up"


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_forgotten(model_path: Path) -> None:
    trainer = new_trainer(model_path, **PLAIN)
    example = examples_of(random_groups(1))[0]
    before = [master.clone() for master in trainer.model.masters]
    infinite = {"weights": np.full(example.targets_NK.shape, np.inf, np.float32)}
    trainer.forward_backward([replace(example, columns=infinite)], ClientLoss("cross_entropy"))
    assert trainer.optim_step(ADAM)[1] is False
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.masters, strict=True))
    trainer.forward_backward([example], ClientLoss("importance_sampling"))
    assert trainer.optim_step(ADAM)[1] is True


@pytest.mark.parametrize("name", LOSS_COLUMNS)
def test_the_losses_are_those_of_tinker_s_api(name: str) -> None:
    """Written once more, by the formulas of its pages, for tokens within and beyond the clip."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], requires_grad=True)
    sampled, weights = torch.tensor([-1.05, -1.0, -1.5, -3.0, -2.0]), torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.0, -1.0])
    found = client_losses(
        ClientLoss(name), logprobs, {"weights": weights, "logprobs": sampled, "advantages": advantages}
    )
    ratio = torch.exp(logprobs - sampled)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    expected = {
        "cross_entropy": -logprobs * weights,
        "importance_sampling": -ratio * advantages,
        "ppo": -torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": -clipped.detach() * logprobs * advantages,
        "dro": -(logprobs * advantages - 0.5 * 0.05 * (logprobs - sampled) ** 2),
    }[name]
    assert torch.allclose(found, expected, atol=1e-6)
    gradients = [torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)[0] for loss in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-6)

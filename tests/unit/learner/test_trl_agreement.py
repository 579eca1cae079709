"""The same batch through TRL's GRPOTrainer and through ours: advantages, loss and gradient agree within 1e-5.

The fixture holds TRL's own results (tests/make_trl_fixtures.py made it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo2.learner.training.loss import BatchTotals, LossConfig, PackedTokens, group_advantages, policy_loss

TOLERANCE = 1e-5
FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures" / "trl_grpo.json").read_text())
BATCH: dict[str, Any] = FIXTURE["batch"]
CASES: list[dict[str, Any]] = FIXTURE["cases"]
SETTINGS = [{k: v for k, v in case.items() if k not in ("advantages", "loss", "gradient")} for case in CASES]
NAMES = [" ".join(f"{k}={v}" for k, v in settings.items()) for settings in SETTINGS]
ADVANTAGE_OF_SCALE = {"group": "grpo", "none": "dr_grpo"}


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([number for row in rows for number in row], dtype=torch.float32)


def correction_of(case: dict[str, Any]) -> str:
    if "mode" not in case:
        return "behaviour"
    if case["clip_max"] >= 1e6:
        return "decoupled"
    return {"token_truncate": "tis_token", "sequence_truncate": "tis_sequence"}[case["mode"]]


def config_of(case: dict[str, Any]) -> LossConfig:
    """TRL's `epsilon_high` of cispo is the bound itself, ours is measured from 1."""
    loss, high = case["loss_type"], case.get("epsilon_high", 0.28)
    is_gspo = loss == "grpo" and case.get("importance_sampling_level") == "sequence"
    return LossConfig(
        "gspo" if is_gspo else loss,
        clip_low=case.get("epsilon", 0.2),
        clip_high=high - 1.0 if loss == "cispo" else high,
        correction=correction_of(case),
        cap=case.get("clip_max", 2.0),
        kl_coefficient=case.get("beta", 0.0),
    )


def advantages_of(case: dict[str, Any]) -> Tensor:
    rewards_R = torch.tensor(BATCH["rewards"], dtype=torch.float32)
    group_R = torch.arange(len(rewards_R)) // BATCH["group_size"]
    return group_advantages(rewards_R, group_R, ADVANTAGE_OF_SCALE[case.get("scale_rewards", "group")]).values_R


def loss_and_gradient(case: dict[str, Any], advantages_R: Tensor) -> tuple[float, Tensor]:
    lengths = torch.tensor(BATCH["lengths"])
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    mask_T = flat(BATCH["mask"]) > 0
    current_T = flat(BATCH["current"]).requires_grad_()
    micro_batches = case.get("accumulation", 1)
    totals = BatchTotals(int(mask_T.sum()), len(lengths), BATCH["completion_tokens_max"])
    # Without a correction, TRL's old policy is the ratio's anchor.
    old = {"none": current_T.detach(), "proximal": flat(BATCH["proximal"]), "behaviour": flat(BATCH["behaviour"])}
    anchor_T = flat(BATCH["behaviour"]) if "mode" in case else old[case["old"]]
    size = len(lengths) // micro_batches
    total = 0.0
    for first in range(0, len(lengths), size):
        part_T = (sequence_T >= first) & (sequence_T < first + size)
        tokens = PackedTokens(
            current_T[part_T],
            anchor_T[part_T],
            advantages_R[first : first + size],
            sequence_T[part_T] - first,
            mask_T[part_T],
            None if case["old"] == "none" else flat(BATCH["proximal"])[part_T],
            flat(BATCH["reference"])[part_T],
        )
        loss = policy_loss(tokens, config_of(case), totals).loss
        loss.backward()
        total += float(loss.detach())
    assert current_T.grad is not None
    return total, current_T.grad


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_advantages_loss_and_gradient_agree_with_trl(case: dict[str, Any]) -> None:
    advantages_R = advantages_of(case)
    expected_R = torch.tensor(case["advantages"])
    torch.testing.assert_close(advantages_R, expected_R, rtol=TOLERANCE, atol=TOLERANCE)
    loss, gradient_T = loss_and_gradient(case, advantages_R)
    assert loss == pytest.approx(case["loss"], rel=TOLERANCE, abs=TOLERANCE)
    expected_T = flat(case["gradient"])
    torch.testing.assert_close(gradient_T, expected_T, rtol=0.0, atol=TOLERANCE * float(expected_T.abs().max()))


def test_the_fixture_exercises_what_it_should() -> None:
    """The settings differ in effect: no two cases but equivalent ones share a gradient, and clipping bites."""
    gradients = [tuple(round(x, 7) for row in case["gradient"] for x in row) for case in CASES]
    of_each = {tuple(sorted((k, str(v)) for k, v in s.items() if k != "accumulation")) for s in SETTINGS}
    assert len(set(gradients)) == len(of_each)
    default = flat(CASES[0]["gradient"])
    trained = flat(BATCH["mask"]) > 0
    contrast = torch.repeat_interleave(torch.tensor(CASES[0]["advantages"]), torch.tensor(BATCH["lengths"])) != 0
    assert bool((default[trained & contrast] == 0).any())
    assert bool((default[~trained] == 0).all())

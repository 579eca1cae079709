"""Chooses the learner's attention: FlexAttention on a GPU if it gives the same results as the dense mask, else dense.

Guarantees: FlexAttention is chosen only if, with this model on this device, its log-probabilities agree with the dense mask's and
its gradient is finite; all ranks make the same choice. Leaves to others: both forms of a mask (attention).
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.learner.runtime.attention import BLOCK, Attention, UnitTree
from echo2.learner.runtime.collate import PackedInputs
from echo2.learner.runtime.model import Policy
from echo2.learner.runtime.ranks import Ranks

Wish = Literal["auto", "dense", "flex"]
TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Largest allowed difference of a token's log-probability; a thousand bf16 roundings add up to a few hundredths."""
TRIAL_ROWS, TRIAL_BLOCKS = 2, 3

_log = logging.getLogger("echo2.learner")


def choose_attention(policy: Policy, wish: Wish, device: torch.device, ranks: Ranks | None = None) -> Attention:
    """Chooses an attention, switches `policy` to it and returns it. Raises `ConfigError` if `wish` is `flex` and that fails."""
    if wish == "flex" and device.type == "cpu":
        raise ConfigError(
            "learner.attention: expected auto or dense on a CPU, where FlexAttention has no gradient, got flex"
        )
    if wish == "dense" or device.type == "cpu":
        return policy.attention
    failure = _failure_of_flex(policy, device)
    failed_somewhere = (ranks or Ranks()).largest(1.0 if failure else 0.0) > 0.0
    if not failed_somewhere:
        policy.attend_by(Attention.FLEX)
        return Attention.FLEX
    policy.attend_by(Attention.DENSE)
    reason = failure or "another rank could not"
    if wish == "flex":
        raise ConfigError(f"learner.attention: expected flex to work with this model on {device}, got: {reason}")
    _log.warning(
        "attention: dense masks, slower on long rows, since FlexAttention fails with this model on %s: %s",
        device,
        reason,
    )
    return Attention.DENSE


def trial_inputs(
    vocabulary: int, seed: int = 0, rows: int = TRIAL_ROWS, width: int = TRIAL_BLOCKS * BLOCK
) -> PackedInputs:
    """Random units that fill rows, with padding after them; every sampled token is a target."""
    draw = torch.Generator().manual_seed(seed)
    unit = -torch.arange(1, width + 1, dtype=torch.int32).repeat(rows, 1)
    part, positions = torch.zeros(rows, width, dtype=torch.int32), torch.zeros(rows, width, dtype=torch.long)
    predictors: list[int] = []
    for b in range(rows):
        column, number = 0, 0
        while column < width - 2:
            prompt, *completions = torch.randint(1, max(2, width // 3), (4,), generator=draw).tolist()
            start = column
            for index, length in enumerate((prompt, *completions)):
                end = min(column + length, width)
                unit[b, column:end], part[b, column:end] = number, index
                first = 0 if index == 0 else prompt
                positions[b, column:end] = torch.arange(first, first + end - column)
                if index and end > column:
                    predictors += [b * width + start + prompt - 1, *range(b * width + column, b * width + end - 1)]
                column = end
            number += 1
    ids = torch.randint(0, vocabulary, (rows, width), generator=draw)
    targets = torch.randint(0, vocabulary, (len(predictors),), generator=draw)
    return PackedInputs(ids, positions, UnitTree(unit, part), torch.tensor(predictors), targets)


def difference_of(found_T: Tensor, expected_T: Tensor, dtype: torch.dtype) -> str:
    """How log-probabilities computed in `dtype` differ from those with a dense mask; empty if they agree up to rounding."""
    off, limit = float((found_T - expected_T).abs().max()), TOLERANCE_NATS.get(dtype, 1e-1)
    if off <= limit:  # false for NaN
        return ""
    return f"log-probabilities differ by {off:.3g} nats from those with a dense mask, {limit:g} at most expected"


def _failure_of_flex(policy: Policy, device: torch.device) -> str:
    """Why FlexAttention cannot be used; empty if it works."""
    inputs = trial_inputs(int(policy.hf_model.get_input_embeddings().weight.shape[0])).to(device)
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    try:
        with torch.no_grad():
            expected_T = policy(inputs)[0]
        policy.attend_by(Attention.FLEX)
        found_T: Tensor = policy(inputs)[0]
        torch.autograd.backward(found_T.sum())
        off = float((found_T.detach() - expected_T).abs().max())
        limit = TOLERANCE_NATS.get(policy.hf_model.dtype, 1e-1)
        if not off <= limit:
            return (
                f"log-probabilities differ by {off:.3g} nats from those with a dense mask, {limit:g} at most expected"
            )
        if not all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None):
            return "its gradient is not finite"
    except Exception as error:  # noqa: BLE001 (kernels raise many kinds of errors; each means dense)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        for parameter in parameters:
            parameter.grad = None
    return ""

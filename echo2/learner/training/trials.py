"""What is tried on the loaded model before the first step: the layout in rows, and the faster attention.

Guarantees: a model whose rows do not give the log-probabilities of its own forward pass is refused; FlexAttention is used only
if it agrees with a dense mask and has a finite gradient. Leaves to others: masks (packing), the forward pass (model).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.base.rollout import SamplingParams
from echo2.learner.training.model import Policy, reshard
from echo2.learner.training.packing import BLOCK, Attention, PackedInputs, UnitTree
from echo2.learner.training.ranks import Ranks
from echo2.learner.training.token_scores import TokensToScore

Wish = Literal["auto", "dense", "flex"]
TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Largest allowed difference of log-probabilities: of each token in float32; of their mean in bf16, where rounding alone moves
single tokens of a random 8 B model by up to 0.75 nats."""
ROUNDINGS_MAX = 4.0
"""How many times its own rounding a bf16 model may be off in rows. Right rows were off by at most 3.5 times (five random models of
7 B to 15 B on an H200, 48 trials each), rows whose completions saw each other by 3.4 to 25 times in a dense model, and by 1 to
4.6 times in a mixture of experts, whose routers choose others when rounded: there only float32 tells."""
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


TRIAL_PROMPT, TRIAL_COMPLETIONS = 24, (8, 5)
"""Tokens of a prompt, beyond its window of attention if it has one, and of its completions."""


def refuse_wrong_rows(policy: Policy, longest_tokens: int, whose: str) -> None:
    """`ConfigError` unless rows give the log-probabilities of the model's own forward pass, one sequence at a time; beyond the
    window of attention too, if the run's sequences are longer. A collective."""
    windows = [window for window in policy.windows.values() if window < longest_tokens]
    prompt = max(2, min(max(windows, default=0) + TRIAL_PROMPT, longest_tokens - sum(TRIAL_COMPLETIONS)))
    embedding = policy.hf_model.get_input_embeddings().weight
    draw = torch.Generator().manual_seed(0)
    rollouts = [torch.randint(0, embedding.shape[0], (prompt + count,), generator=draw) for count in TRIAL_COMPLETIONS]
    rollouts = [torch.cat([rollouts[0][:prompt], ids[prompt:]]) for ids in rollouts]
    dtype, was_training, rounding = policy.hf_model.dtype, policy.hf_model.training, 0.0
    policy.hf_model.eval()
    with torch.no_grad():
        expected_T = _own_logprobs(policy, rollouts, prompt)
        found_T = policy(_rows_of(rollouts, prompt, policy.is_packed).to(embedding.device))[0].cpu()
        if dtype != torch.float32:  # what comes behind a token changes only how it is rounded
            longer = [torch.cat([ids, other[prompt:]]) for ids, other in zip(rollouts, rollouts[::-1], strict=True)]
            rounding = float((_own_logprobs(policy, longer, prompt) - expected_T).abs().mean())
    policy.hf_model.train(was_training)
    reshard(policy)
    if difference := difference_of(found_T, expected_T, dtype, rounding):
        raise ConfigError(f"{whose}: the learner cannot lay out its sequences in rows: {difference}")


def _own_logprobs(policy: Policy, sequences: Sequence[Tensor], prompt: int) -> Tensor:
    """Log-probabilities of the completions' tokens by the model's own forward pass, one sequence at a time."""
    device, sampling = (
        policy.hf_model.get_input_embeddings().weight.device,
        SamplingParams(temperature=policy.temperature),
    )
    found: list[Tensor] = []
    for ids, count in zip(sequences, TRIAL_COMPLETIONS, strict=True):
        target_T = ids[prompt:].to(device)
        numbers_T = torch.zeros(len(target_T), dtype=torch.float64, device=device)
        columns_CT = policy(TokensToScore(ids[None, :-1].to(device), target_T, numbers_T, sampling))[0]
        found.append(columns_CT[0, :count].float())
    return torch.cat(found)


def _rows_of(rollouts: Sequence[Tensor], prompt: int, is_packed: bool) -> PackedInputs:
    """Rollouts of one prompt, in one row that shares it or in a row each."""
    pieces = [[rollouts[0][:prompt], *(ids[prompt:] for ids in rollouts)]] if is_packed else [[ids] for ids in rollouts]
    width = max(sum(map(len, row)) for row in pieces)
    ids, positions = (
        torch.zeros(len(pieces), width, dtype=torch.long),
        torch.zeros(len(pieces), width, dtype=torch.long),
    )
    unit = -torch.arange(1, width + 1, dtype=torch.int32).repeat(len(pieces), 1)
    part, predictors, targets = torch.zeros_like(unit), list[Tensor](), list[Tensor]()
    for b, row in enumerate(pieces):
        column = 0
        for number, piece in enumerate(row):
            span = slice(column, column + len(piece))
            first = prompt if number else 0
            ids[b, span], unit[b, span], part[b, span] = piece, 0, number
            positions[b, span] = torch.arange(first, first + len(piece))
            if number or not is_packed:
                begin = column if number else prompt
                before = prompt - 1 if number else begin - 1
                predictors += [torch.tensor([b * width + before]), b * width + torch.arange(begin, span.stop - 1)]
                targets.append(piece if number else piece[prompt:])
            column = span.stop
    return PackedInputs(ids, positions, UnitTree(unit, part), torch.cat(predictors), torch.cat(targets))


def difference_of(found_T: Tensor, expected_T: Tensor, dtype: torch.dtype, rounding_nats: float = 0.0) -> str:
    """How log-probabilities computed in `dtype` differ from those expected; empty if they agree up to rounding. `rounding_nats`:
    by how much the model's own forward pass differs from itself on average."""
    off_T, limit = (found_T - expected_T).abs(), TOLERANCE_NATS.get(dtype, 1e-1)
    off = float(off_T.max() if dtype == torch.float32 else off_T.mean())
    limit = max(limit, ROUNDINGS_MAX * rounding_nats)
    if off <= limit:  # false for NaN
        return ""
    return f"log-probabilities differ by {off:.3g} nats from those expected, by {limit:.3g} at most allowed"


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
        if difference := difference_of(found_T.detach(), expected_T, policy.hf_model.dtype):
            return difference
        if not all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None):
            return "its gradient is not finite"
    except Exception as error:  # noqa: BLE001 (kernels raise many kinds of errors; each means dense)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        for parameter in parameters:
            parameter.grad = None
    return ""

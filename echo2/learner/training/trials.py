"""What is tried on the loaded model before the first step: the layout in rows, and the faster attention.

Guarantees: a model whose rows do not give the log-probabilities of its own forward pass is refused; FlexAttention is used only
if it agrees with a dense mask and has a finite gradient. Leaves to others: masks (packing), the forward pass (model).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from echo2.base.errors import ConfigError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.rollouts.groups import TrainGroup
from echo2.learner.training.model import Policy, reshard
from echo2.learner.training.packing import (
    BLOCK,
    Attention,
    PackedInputs,
    PackingLimits,
    collate,
    lengths_of,
    plan_microbatches,
)
from echo2.learner.training.ranks import Ranks
from echo2.learner.training.token_scores import TokensToScore

TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Largest allowed difference of log-probabilities: of each token in float32; of their mean in bf16, where rounding alone moves
single tokens of a random 8 B model by up to 0.75 nats."""
ROUNDINGS_MAX = 4.0
"""How many times its own rounding a bf16 model may be off in rows. Right rows were off by at most 3.5 times (five random models of
7 B to 15 B on an H200, 48 trials each), rows whose completions saw each other by 3.4 to 25 times in a dense model, and by 1 to
4.6 times in a mixture of experts, whose routers choose others when rounded: there only float32 tells."""
TRIAL_ROWS, TRIAL_BLOCKS = 2, 3

_log = logging.getLogger("echo2.learner")


def choose_attention(policy: Policy, device: torch.device, ranks: Ranks | None = None) -> None:
    """Switches `policy` to FlexAttention if that works on every rank's device; a CPU has no gradient of it."""
    if device.type == "cpu":
        return
    failure = _failure_of_flex(policy, device)
    if (ranks or Ranks()).largest(1.0 if failure else 0.0) == 0.0:
        policy.attend_by(Attention.FLEX)
        return
    policy.attend_by(Attention.DENSE)
    add_up_in_order()
    _log.warning(
        "attention: dense masks, slower on long rows, since FlexAttention fails with this model on %s: %s",
        device, failure or "another rank could not",
    )  # fmt: skip


def add_up_in_order() -> None:
    """torch's attention with a mask adds gradients up in any order on a GPU unless told otherwise, and a step that is trained again
    must have the bits that it had."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)


def trial_inputs(
    vocabulary: int, seed: int = 0, rows: int = TRIAL_ROWS, width: int = TRIAL_BLOCKS * BLOCK
) -> PackedInputs:
    """At most this many rows of random rollouts, padded to whole blocks."""
    draw = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        length = int(torch.randint(1, max(2, width // 3), (1,), generator=draw))
        return torch.randint(0, vocabulary, (length,), generator=draw)

    groups = [_group_of(drawn(), [drawn() for _ in range(3)]) for _ in range(3 * rows)]
    micro = plan_microbatches(lengths_of(groups), PackingLimits(rows * width, width))[0]
    return collate(groups, micro, BLOCK).inputs


def _group_of(prompt: Tensor, completions: Sequence[Tensor]) -> TrainGroup:
    name, rollouts = GroupId("trial"), []
    for index, ids in enumerate(completions):
        numbers, spans = (0.0,) * len(ids), (VersionSpan(Version(0), len(ids)),)
        rollouts.append(Rollout(name, index, tuple(ids.tolist()), numbers, numbers, spans, FinishReason.STOP))
    spec = GroupSpec(name, tuple(prompt.tolist()), len(rollouts), SamplingParams(), 0)
    return TrainGroup(spec, 0, tuple(rollouts), (0.0,) * len(rollouts))


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
        group = _group_of(rollouts[0][:prompt], [ids[prompt:] for ids in rollouts])
        (micro,) = plan_microbatches(lengths_of([group]), PackingLimits(1 << 30, 1 << 30, policy.is_packed))
        ways = [micro, replace(micro, by_units=True)] if policy.attends_by_units else [micro]
        found = [policy(collate([group], way).inputs.to(embedding.device))[0].cpu() for way in ways]
        if dtype != torch.float32:  # what comes behind a token changes only how it is rounded
            longer = [torch.cat([ids, other[prompt:]]) for ids, other in zip(rollouts, rollouts[::-1], strict=True)]
            rounding = float((_own_logprobs(policy, longer, prompt) - expected_T).abs().mean())
    policy.hf_model.train(was_training)
    reshard(policy)
    for found_T in found:
        if difference := difference_of(found_T, expected_T, dtype, rounding):
            raise ConfigError(f"{whose}: the learner cannot lay out its sequences in rows: {difference}")


def _own_logprobs(policy: Policy, sequences: Sequence[Tensor], prompt: int) -> Tensor:
    """Log-probabilities of the completions' tokens by the model's own forward pass, one sequence at a time."""
    device = policy.hf_model.get_input_embeddings().weight.device
    sampling = SamplingParams(temperature=policy.temperature)
    found: list[Tensor] = []
    for ids, count in zip(sequences, TRIAL_COMPLETIONS, strict=True):
        target_T = ids[prompt:].to(device)
        numbers_T = torch.zeros(len(target_T), dtype=torch.float64, device=device)
        columns_CT = policy(TokensToScore(ids[None, :-1].to(device), target_T, numbers_T, sampling))[0]
        found.append(columns_CT[0, :count].float())
    return torch.cat(found)


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

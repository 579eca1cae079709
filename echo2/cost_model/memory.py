"""Memory and disk that a learner needs: its state exactly, its activations estimated for one micro-batch.

Pure. The state is bf16 or float32 weights, float32 masters, both moments of AdamW, gradients and the published copies.
`echo2 plan`, `echo2 doctor` and the learner itself use the sizes of checkpoints, the number of versions kept for audits and
the memory of rollouts from here.
The estimate of activations counts what a layer keeps for its backward pass; `benchmarks.bench_scale` compares the sum with a
real process. Leaves to others: measuring the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from echo2.cost_model.sizing import GPU_MEMORY_SHARE, ModelSize

PROCESS_BYTES = 448 << 20
"""Code, tokenizer, tasks, sockets; torch and transformers alone take 0.3 GB."""
MASTER_BYTES = 4
MOMENT_BYTES: Mapping[str, float] = {"float32": 8.0, "host": 8.0, "8bit": 2.0 + 8.0 / 256.0}
"""Bytes per parameter of AdamW's two moments; in 8 bits with a float32 scale for each block of 256."""
STATE_BYTES_CPU = 4 + 4 + 2 + 2
"""Bytes per parameter on a CPU beside master and moments: weights and gradient in float32, the published bits and those being
encoded. A checkpoint is written straight from the tensors, without a copy."""
STATE_BYTES_GPU, SHARDED_GRADIENT_BYTES = 2 + 4, 2
"""Bytes per parameter on GPUs beside master and moments: weights in bf16 and the summed gradient in float32; on several, a
micro-batch's gradient in bf16 as well. Published copies are on the host."""
HOST_BYTES_GPU = 2 + 2
"""Host bytes per parameter of a learner on GPUs, beside the copies of masters and moments from which a checkpoint is written: the
published bits and those being encoded."""
AUDIT_CHANGED_SHARE = 0.02
"""Share of the weights that a version changes at learning rates of 1e-6 to 1e-5."""
AUDIT_BYTES_OF_CHANGE = 6  # index and value of a changed weight
AUDIT_BOUNDS = 2
"""Audits keep the versions of this many staleness bounds, at most one per step: a rollout is audited within one bound."""
ROLLOUT_TOKEN_BYTES = 100
"""Host bytes per token of a rollout in flight or waiting for its step: ID, log-probabilities, sender, journal."""
REFERENCE_BYTES_CPU, REFERENCE_BYTES_GPU = 4, 2
"""Bytes per parameter of the base model that the KL penalty uses as reference."""
ADAPTER_BASE_BYTES_CPU, ADAPTER_BASE_BYTES_GPU = 6, 2
"""Bytes per parameter of an adapter's base model: on a CPU float32, plus bf16 while it is read; on a GPU bf16."""
NF4_BYTES = 1 / 2 + 2 / 64
"""Bytes per parameter of a base's linear layers in nf4: a code, and a scale for each 64."""
NF4_WORK_BYTES = 6
"""Bytes per parameter of the layer whose weight is being made from its codes (weights/precision)."""
LOGIT_COPIES = 5
"""Of one slice of the head: logits, their distance from the largest, its exponential, and the gradient in two forms."""
HEAD_GRADIENTS = 3
"""Gradients the size of the whole head: one slice's, the sum of those before, and the sum of both."""
LOGIT_BYTES_CPU, LOGIT_BYTES_GPU = 64 << 20, 256 << 20  # of one block of logits; larger blocks are no faster
ROW_WIDTHS = 4
"""Length of a row of packed sequences over the model's width, so that attention costs about as much as the linear layers."""
MASK_BYTES = 8
"""Bytes per pair of positions in a row, while the mask is built and then used by all layers."""
CHECKPOINTING_FROM_BYTES = 6 << 30
"""With more activations than this, gradient checkpointing is worth a third more time."""
TOKEN_BUDGET_MAX, TOKEN_BUDGET_MAX_CPU, TOKEN_BUDGET_MIN = 16_384, 4_096, 1_024
"""Tokens of a micro-batch: more do not make a device faster, fewer leave it idle between kernels."""
GPUS_MAX = 64
"""Most GPUs tried for one copy of the state, when the GPU count is not given."""


class Checkpointing(Enum):
    """What a layer keeps for its backward pass."""

    OFF = "off"
    SELECTIVE = "selective"  # its input, the output of attention and every second matrix product
    FULL = "full"  # its input


def checkpoint_bytes(trained_parameters: int, published_bytes: int, optimizer_state: str = "float32") -> int:
    """Disk bytes of one checkpoint over all ranks: masters, moments and the weights last published."""
    return int((MASTER_BYTES + MOMENT_BYTES[optimizer_state]) * trained_parameters) + published_bytes


def audit_versions(staleness_bound: int) -> int:
    """Number of versions that the learner keeps for audits: two bounds' worth, one before the oldest, and the newest."""
    return AUDIT_BOUNDS * staleness_bound + 2


def adapter_parameters(size: ModelSize, rank: int) -> int:
    """Parameters of a low-rank adapter on all linear layers but the head: rank times the inputs and outputs of each."""
    mlp = size.mlp_width or 3 * size.hidden
    widths = 2 * (size.hidden + size.query_width) + 2 * (size.hidden + size.kv_width) + 3 * (size.hidden + mlp)
    return rank * size.layer_count * widths


@dataclass(frozen=True, slots=True)
class LearnerRun:
    """What a learner stores in a run. `store_bytes`: disk for chunks. `published_value_bytes`: bytes per published parameter.
    `rollout_tokens`: tokens of rollouts in flight or waiting for their step. `replicas`: copies of the state among the GPUs.
    `adapter_rank`: 0 trains all weights. `has_nf4_base`: the adapter's base is in 4 bits. `optimizer_state`: a key of
    `MOMENT_BYTES`. `is_audited`: former versions are kept. `reference`: size of a model kept beside, the teacher or, for the KL
    penalty of a run without an adapter, the base; None: there is none."""

    staleness_bound: int = 2
    checkpoints_kept: int = 2
    store_bytes: int = 0
    published_value_bytes: int = 2
    rollout_tokens: float = 0.0
    replicas: int = 1
    adapter_rank: int = 0
    optimizer_state: str = "float32"
    has_nf4_base: bool = False
    is_audited: bool = True
    reference: ModelSize | None = None

    def trained_parameters(self, size: ModelSize) -> int:
        """The adapter's parameters, or all if there is no adapter."""
        return adapter_parameters(size, self.adapter_rank) if self.adapter_rank else size.parameters

    def published_bytes(self, size: ModelSize) -> int:
        """Bytes of one full version."""
        return self.published_value_bytes * self.trained_parameters(size)


NO_RUN = LearnerRun()
"""For when only the model is known; audits keep the versions of the default staleness bound."""


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """`device_bytes`: per GPU, or on the host if the learner runs on a CPU. `host_bytes`: additional host memory of all ranks."""

    state_bytes: int
    activation_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


def layer_values(size: ModelSize, checkpointing: Checkpointing, value_bytes: int) -> int:
    """Values per token that a layer keeps for its backward pass, as computed by transformers' modules."""
    if checkpointing is Checkpointing.FULL:
        return size.hidden
    mlp = size.mlp_width or 3 * size.hidden
    if checkpointing is Checkpointing.SELECTIVE:
        # Matrix products, the kept ones in capitals: queries, KEYS, values, OUTPUT, gate, UP, down.
        return 2 * size.hidden + size.query_width + size.kv_width + mlp
    # Both norms: input (in float32), normalised input, output. Attention: queries, keys and values by head, and its output.
    # MLP: both products, one of them through its activation, and their product.
    norms = (3 if value_bytes == 4 else 4) * 2 * size.hidden
    head_norms = (2 if value_bytes == 4 else 3) * (size.query_width + size.kv_width) if size.has_head_norms else 0
    return norms + head_norms + 4 * size.query_width + 4 * mlp


def activation_bytes(
    size: ModelSize, token_budget: int, checkpointing: Checkpointing, value_bytes: int, run: LearnerRun = NO_RUN
) -> int:
    """Activation bytes of one micro-batch. With checkpointing, only one layer at a time keeps everything."""
    values = size.layer_count * layer_values(size, checkpointing, value_bytes)
    if checkpointing is not Checkpointing.OFF:
        values += layer_values(size, Checkpointing.OFF, value_bytes)
    piece = LOGIT_BYTES_CPU if value_bytes == 4 else LOGIT_BYTES_GPU
    logits = LOGIT_COPIES * min(piece, 4 * token_budget * size.vocabulary)
    head = 0 if run.adapter_rank else HEAD_GRADIENTS * value_bytes * size.vocabulary * size.hidden
    if run.has_nf4_base:
        head += NF4_WORK_BYTES * size.hidden * max(size.mlp_width, size.query_width)
    row = min(token_budget, ROW_WIDTHS * size.hidden)
    mask = MASK_BYTES * token_budget * row if value_bytes == 4 else 0  # on a GPU the mask is kept in blocks
    return token_budget * values * value_bytes + logits + head + mask


def checkpointing_of(
    asked: bool | Literal["auto", "selective"], size: ModelSize, token_budget: int, value_bytes: int
) -> Checkpointing:
    """The kind of checkpointing that the option `learner.gradient_checkpointing` (`asked`) selects."""
    if asked == "selective":
        return Checkpointing.SELECTIVE
    if asked == "auto":  # whether recomputing layers in the backward pass is worth its time
        asked = activation_bytes(size, token_budget, Checkpointing.OFF, value_bytes) > CHECKPOINTING_FROM_BYTES
    return Checkpointing.FULL if asked else Checkpointing.OFF


def token_budget_for(size: ModelSize, longest: int, memory_bytes: int, gpu_count: int, run: LearnerRun = NO_RUN) -> int:
    """The largest power of two, in tokens, whose micro-batch fits in memory beside the state and holds the run's longest sequence.

    `memory_bytes`: per GPU, or of the host if `gpu_count` is 0. A CPU gains nothing from large micro-batches, so there the budget
    must also not need checkpointing.
    """
    least, budget = max(TOKEN_BUDGET_MIN, longest), TOKEN_BUDGET_MAX if gpu_count else TOKEN_BUDGET_MAX_CPU
    while budget >= 2 * least and not _is_good_budget(size, budget, memory_bytes, gpu_count, run):
        budget //= 2
    return budget


def _is_good_budget(size: ModelSize, budget: int, memory_bytes: int, gpu_count: int, run: LearnerRun) -> bool:
    checkpointing = checkpointing_of("auto", size, budget, 2 if gpu_count else 4)
    if checkpointing is not Checkpointing.OFF and not gpu_count:
        return False
    found = learner_memory(size, budget, checkpointing, gpu_count=gpu_count, run=run)
    return found.device_bytes <= GPU_MEMORY_SHARE * memory_bytes


def fewest_gpus(
    size: ModelSize,
    token_budget: int,
    gpu_memory_bytes: int,
    run: LearnerRun = NO_RUN,
    asked: bool | Literal["auto", "selective"] = "auto",
) -> int:
    """The fewest GPUs on which a learner of this model fits: `run.replicas` times the smallest power of two that holds one copy of
    the state, at most `GPUS_MAX` per copy, even if that is not enough. `asked`: `learner.gradient_checkpointing`."""
    checkpointing, alone = checkpointing_of(asked, size, token_budget, 2), replace(run, replicas=1)
    for power in range(GPUS_MAX.bit_length()):
        found = learner_memory(size, token_budget, checkpointing, gpu_count=1 << power, run=alone)
        if found.device_bytes <= GPU_MEMORY_SHARE * gpu_memory_bytes:
            return run.replicas << power
    return run.replicas * GPUS_MAX


def learner_memory(
    size: ModelSize, token_budget: int, checkpointing: Checkpointing, *, gpu_count: int, run: LearnerRun = NO_RUN
) -> LearnerMemory:
    """Memory and disk of a learner on `gpu_count` GPUs, or on the CPU for 0, which keeps everything in host memory. There are
    `run.replicas` copies of the state; the GPUs of one copy share it evenly. Each rank keeps its own rows on its host, whichever
    copy it belongs to. The disk holds one copy."""
    trained = run.trained_parameters(size)
    kept = AUDIT_CHANGED_SHARE * AUDIT_BYTES_OF_CHANGE * audit_versions(run.staleness_bound)
    audit = int(kept * size.parameters) if run.is_audited and not run.adapter_rank else 0
    masters = int((MASTER_BYTES + MOMENT_BYTES[run.optimizer_state]) * trained)
    is_on_device = run.optimizer_state != "host" or not gpu_count
    base = (STATE_BYTES_GPU if gpu_count else STATE_BYTES_CPU) * trained + (masters if is_on_device else 0)
    host = PROCESS_BYTES + int(ROLLOUT_TOKEN_BYTES * run.rollout_tokens)
    if gpu_count > run.replicas:
        base += SHARDED_GRADIENT_BYTES * trained
    codes = 0  # of which each rank has all
    if run.has_nf4_base:
        codes = int(NF4_BYTES * size.linear_parameters)
        base += (2 if gpu_count else 4) * (size.parameters - size.linear_parameters)
        host += max(1, gpu_count) * (ADAPTER_BASE_BYTES_GPU if gpu_count else ADAPTER_BASE_BYTES_CPU) * size.parameters
    elif run.adapter_rank:
        base += (ADAPTER_BASE_BYTES_GPU if gpu_count else ADAPTER_BASE_BYTES_CPU) * size.parameters
    if run.reference is not None:
        base += (REFERENCE_BYTES_GPU if gpu_count else REFERENCE_BYTES_CPU) * run.reference.parameters
    if gpu_count:
        state = codes + base // max(1, gpu_count // run.replicas)
        copies = masters if is_on_device else 2 * masters
        host += run.replicas * (HOST_BYTES_GPU * trained + copies + audit)
    else:
        state = run.replicas * (codes + base + audit)
    checkpoint = checkpoint_bytes(trained, run.published_bytes(size), run.optimizer_state)
    return LearnerMemory(
        state_bytes=state,
        activation_bytes=activation_bytes(size, token_budget, checkpointing, 2 if gpu_count else 4, run),
        host_bytes=host,
        disk_bytes=(run.checkpoints_kept + 1) * checkpoint + run.store_bytes,
    )


# ---- steps between two checkpoints (Young 1974): n = sqrt(2 * C * M / (T * P)), at most REPLAY_S / T and STEPS_MAX, at least 1. C:
# seconds that a checkpoint blocks the learner; T: seconds to train a step again; P: from one step to the next, waiting included; M:
# between two kills. Each second then spends C / (n * P) on checkpoints and n * T / (2 * M) on retraining; this n minimises the sum.

KILLED_EVERY_S = 86_400.0
"""Assumed time between two kills of a learner: a day. Four times as often would halve the interval."""
REPLAY_S = 900.0
"""Most seconds that a restart spends on retraining, because workers' deliveries wait for it."""
STEPS_MAX = 20  # more would lose more of a run of few steps than checkpoints cost
CHECKPOINT_BYTES_PER_S = 5e9
"""Prior of the copy rate from one GPU or CPU into unpinned host memory, until the first checkpoint is measured."""


def steps_between(checkpoint_s: float, train_s: float, step_s: float) -> int:
    """The interval in steps. All times in seconds: `train_s` of a step without waiting, `step_s` with it."""
    if train_s <= 0.0:
        return STEPS_MAX
    cheapest = math.sqrt(2.0 * checkpoint_s * KILLED_EVERY_S / (train_s * max(train_s, step_s)))
    return max(1, int(min(cheapest, REPLAY_S / train_s, STEPS_MAX)))

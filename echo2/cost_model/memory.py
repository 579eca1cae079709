"""What a learner needs of memory and disk: its state exactly, its activations by the budget of one micro-batch.

Pure. The state is bf16 or float32 weights, float32 masters, both moments of AdamW, gradients and the published copies.
`echo2 plan`, `echo2 doctor` and the learner itself take the sizes of checkpoints, the versions that audits keep and the
memory of rollouts from here.
Activations are an estimate of what a layer keeps for its backward pass; `benchmarks.bench_scale` holds the sum against a
real process. Leaves to others: measuring the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from echo2.cost_model.sizing import GPU_MEMORY_SHARE, ModelSize

PROCESS_BYTES = 448 << 20
"""Code, tokenizer, tasks, sockets; of torch and transformers alone 0.3 GB."""
STATE_BYTES_CPU = 4 + 4 + 8 + 4 + 2 + 2
"""Of a parameter: weights, master, AdamW, gradient in float32; the published bits and the ones that are being coded. A checkpoint
is written from where its tensors lie."""
STATE_BYTES_GPU = 2 + 4 + 8 + 2 + 4
"""Weights and their gradient in bf16, master, AdamW and the summed gradient in float32; published copies are the host's."""
HOST_BYTES_GPU = 2 + 2 + 12
"""The published bits, the ones that are being coded, and the copies of masters and moments that a checkpoint is written from."""
AUDIT_CHANGED_SHARE = 0.02
"""Of the weights, that a version changes at learning rates of 1e-6 to 1e-5."""
AUDIT_BYTES_OF_CHANGE = 6
AUDIT_BOUNDS = 2
"""Versions of so many staleness bounds are kept for audits, one a step at most: a rollout is looked at within a bound."""
ROLLOUT_TOKEN_BYTES = 100
"""Of host memory for each token of a rollout that is in flight or waits for its step: id, log-probabilities, sender, journal."""
REFERENCE_BYTES_CPU, REFERENCE_BYTES_GPU = 4, 2
"""Of a parameter of the base model, which the KL penalty compares with."""
ADAPTER_BASE_BYTES_CPU, ADAPTER_BASE_BYTES_GPU = 6, 2
"""Of a parameter beneath an adapter: float32 on a CPU, and bf16 beside it while it is read; bf16 on a GPU."""
LOGIT_COPIES = 3
"""Logits, softmax and gradient, of one slice of the head."""
HEAD_GRADIENTS = 3
"""Of the whole head: of one slice, the sum of those before, and the sum of both."""
LOGIT_BYTES_CPU, LOGIT_BYTES_GPU = 64 << 20, 256 << 20
ROW_WIDTHS = 4
"""Rows of packed sequences are this many times the model's width, so that attention costs about what the linear layers do."""
MASK_BYTES = 8
"""Of a pair of positions of a row, while the mask is made and then used by all layers."""
CHECKPOINTING_FROM_BYTES = 6 << 30
"""Activations beyond this are worth a third more time."""
TOKEN_BUDGET_MAX, TOKEN_BUDGET_MAX_CPU, TOKEN_BUDGET_MIN = 16_384, 4_096, 1_024
"""Of a micro-batch: more tokens make a device no faster, fewer leave it idle between kernels."""
GPUS_MAX = 64
"""Of a learner that is planned for without a word about it."""
CHECKPOINT_STATE_BYTES = 12
"""Of a trained parameter, on disk: master, first and second moment in float32."""


class Checkpointing(Enum):
    """What a layer keeps for its backward pass."""

    OFF = "off"
    SELECTIVE = "selective"  # its input, what attention gave and every second matrix product
    FULL = "full"  # its input


def checkpoint_bytes(trained_parameters: int, published_bytes: int) -> int:
    """One checkpoint on disk, of all ranks: the trainer's state and the weights last published."""
    return CHECKPOINT_STATE_BYTES * trained_parameters + published_bytes


def audit_versions(staleness_bound: int) -> int:
    """How many former versions the learner keeps for audits: those of two bounds, one before the oldest, and the newest."""
    return AUDIT_BOUNDS * staleness_bound + 2


def adapter_parameters(size: ModelSize, rank: int) -> int:
    """Of a low-rank adapter on all linear layers but the head: rank times the inputs and outputs of each."""
    mlp = size.mlp_width or 3 * size.hidden
    widths = 2 * (size.hidden + size.query_width) + 2 * (size.hidden + size.kv_width) + 3 * (size.hidden + mlp)
    return rank * size.layer_count * widths


@dataclass(frozen=True, slots=True)
class LearnerRun:
    """What a run has its learner keep. `store_bytes`: of disk for chunks. `published_value_bytes`: of a published parameter.
    `rollout_tokens`: of rollouts in flight and waiting for their step. `replicas`: copies of the state among the GPUs.
    `adapter_rank` 0: all weights are trained. `is_audited`: former versions are kept. `has_reference`: the base model is kept
    for the KL penalty."""

    staleness_bound: int = 2
    checkpoints_kept: int = 0
    store_bytes: int = 0
    published_value_bytes: int = 2
    rollout_tokens: float = 0.0
    replicas: int = 1
    adapter_rank: int = 0
    is_audited: bool = True
    has_reference: bool = False

    def trained_parameters(self, size: ModelSize) -> int:
        """Those of the adapter, or all."""
        return adapter_parameters(size, self.adapter_rank) if self.adapter_rank else size.parameters

    def published_bytes(self, size: ModelSize) -> int:
        """One version, whole."""
        return self.published_value_bytes * self.trained_parameters(size)


NO_RUN = LearnerRun()
"""Nothing is known but the model; audits keep the versions of the default staleness bound."""


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """`device_bytes`: of each GPU, or of the host on a CPU; `host_bytes`: of the host beside that, of all ranks together."""

    state_bytes: int
    activation_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


def layer_values(size: ModelSize, checkpointing: Checkpointing, value_bytes: int) -> int:
    """That a layer keeps of a token, as transformers' modules compute it."""
    if checkpointing is Checkpointing.FULL:
        return size.hidden
    mlp = size.mlp_width or 3 * size.hidden
    if checkpointing is Checkpointing.SELECTIVE:  # products: queries, KEYS, values, OUTPUT, gate, UP, down
        return 2 * size.hidden + size.query_width + size.kv_width + mlp
    # Both norms: what came in (in float32), what was normalised, what goes out. Attention: queries, keys and values by head, what
    # it gave. The MLP: both products, one through its activation, both multiplied.
    norms = (3 if value_bytes == 4 else 4) * 2 * size.hidden
    head_norms = (2 if value_bytes == 4 else 3) * (size.query_width + size.kv_width) if size.has_head_norms else 0
    return norms + head_norms + 4 * size.query_width + 4 * mlp


def activation_bytes(size: ModelSize, token_budget: int, checkpointing: Checkpointing, value_bytes: int) -> int:
    """Of one micro-batch. With checkpointing one layer at a time is whole."""
    values = size.layer_count * layer_values(size, checkpointing, value_bytes)
    if checkpointing is not Checkpointing.OFF:
        values += layer_values(size, Checkpointing.OFF, value_bytes)
    piece = LOGIT_BYTES_CPU if value_bytes == 4 else LOGIT_BYTES_GPU
    logits = LOGIT_COPIES * min(piece, 4 * token_budget * size.vocabulary)
    head = HEAD_GRADIENTS * value_bytes * size.vocabulary * size.hidden
    row = min(token_budget, ROW_WIDTHS * size.hidden)
    mask = MASK_BYTES * token_budget * row if value_bytes == 4 else 0  # on a GPU: blocks
    return token_budget * values * value_bytes + logits + head + mask


def wants_checkpointing(size: ModelSize, token_budget: int, value_bytes: int) -> bool:
    """Whether layers are better computed again in the backward pass."""
    return activation_bytes(size, token_budget, Checkpointing.OFF, value_bytes) > CHECKPOINTING_FROM_BYTES


def checkpointing_of(
    asked: bool | Literal["auto", "selective"], size: ModelSize, token_budget: int, value_bytes: int
) -> Checkpointing:
    """By the option `learner.gradient_checkpointing`."""
    if asked == "selective":
        return Checkpointing.SELECTIVE
    does = wants_checkpointing(size, token_budget, value_bytes) if asked == "auto" else asked
    return Checkpointing.FULL if does else Checkpointing.OFF


def token_budget_for(size: ModelSize, longest: int, memory_bytes: int, gpu_count: int, run: LearnerRun = NO_RUN) -> int:
    """The largest power of two whose micro-batch fits beside the state in memory (of each GPU, or of the host for 0 GPUs), and
    that holds the run's longest sequence. A CPU, which gains nothing by large ones, takes one that needs no checkpointing."""
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
    """The fewest GPUs among which a learner of this model fits: `run.replicas` times the least power of two that one copy of the
    state needs; of one copy `GPUS_MAX` where that is not enough. `asked`: `learner.gradient_checkpointing`."""
    checkpointing, alone = checkpointing_of(asked, size, token_budget, 2), replace(run, replicas=1)
    for power in range(GPUS_MAX.bit_length()):
        found = learner_memory(size, token_budget, checkpointing, gpu_count=1 << power, run=alone)
        if found.device_bytes <= GPU_MEMORY_SHARE * gpu_memory_bytes:
            return run.replicas << power
    return run.replicas * GPUS_MAX


def learner_memory(
    size: ModelSize, token_budget: int, checkpointing: Checkpointing, *, gpu_count: int, run: LearnerRun = NO_RUN
) -> LearnerMemory:
    """On `gpu_count` GPUs, or on the CPU for 0, where all of it is in the host's memory. The state is there `run.replicas` times;
    the GPUs of one copy share it evenly. Each rank keeps its own rows on its host, whichever copy it belongs to; on disk there
    is one copy."""
    trained = run.trained_parameters(size)
    kept = AUDIT_CHANGED_SHARE * AUDIT_BYTES_OF_CHANGE * audit_versions(run.staleness_bound)
    audit = int(kept * size.parameters) if run.is_audited and not run.adapter_rank else 0
    base = (STATE_BYTES_GPU if gpu_count else STATE_BYTES_CPU) * trained
    if run.adapter_rank:
        base += (ADAPTER_BASE_BYTES_GPU if gpu_count else ADAPTER_BASE_BYTES_CPU) * size.parameters
    if run.has_reference:
        base += (REFERENCE_BYTES_GPU if gpu_count else REFERENCE_BYTES_CPU) * size.parameters
    host = PROCESS_BYTES + int(ROLLOUT_TOKEN_BYTES * run.rollout_tokens)
    if gpu_count:
        state = base // max(1, gpu_count // run.replicas)
        host += run.replicas * (HOST_BYTES_GPU * trained + audit)
    else:
        state = run.replicas * (base + audit)
    checkpoint = checkpoint_bytes(trained, run.published_bytes(size))
    return LearnerMemory(
        state_bytes=state,
        activation_bytes=activation_bytes(size, token_budget, checkpointing, 2 if gpu_count else 4),
        host_bytes=host,
        disk_bytes=(run.checkpoints_kept + 1) * checkpoint + run.store_bytes,
    )

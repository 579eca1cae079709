"""What a learner needs of memory: its state exactly, its activations by the budget of one micro-batch.

Pure. The state is bf16 or float32 weights, float32 masters, both moments of AdamW, gradients and the published copies.
Activations are an estimate of what a layer keeps for its backward pass; `benchmarks.bench_scale` holds the sum against a
real process. Leaves to others: measuring the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.cost_model.sizing import GPU_MEMORY_SHARE, ModelSize

PROCESS_BYTES = 1 << 30
"""Code, tokenizer, tasks, sockets."""
STATE_BYTES_CPU = 4 + 4 + 8 + 4 + 2 + 2
"""Of a parameter: weights, master, AdamW, gradient in float32; the published bits and the ones that are being coded."""
STATE_BYTES_GPU = 2 + 4 + 8 + 2 + 4
"""Weights and their gradient in bf16, master, AdamW and the summed gradient in float32; published copies are the host's."""
HOST_BYTES_GPU = 2 + 2
VALUES_KEPT = 17
"""Of a token's hidden width and layer, without checkpointing; with it one value is kept, and one layer at a time is whole."""
LOGIT_COPIES = 4
"""Logits, their float32 copy, softmax and gradient, of one slice of the head."""
LOGIT_BYTES = 256 << 20
CHECKPOINTING_FROM_BYTES = 4 << 30
"""Activations beyond this are worth a third more time."""
TOKEN_BUDGET_MAX, TOKEN_BUDGET_MAX_CPU, TOKEN_BUDGET_MIN = 16_384, 4_096, 1_024
"""Of a micro-batch: more tokens make a device no faster, fewer leave it idle between kernels."""
GPUS_MAX = 64
"""Of a learner that is planned for without a word about it."""
CHECKPOINT_BYTES = 12
"""Of a parameter, on disk: masters and both moments."""


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """`device_bytes`: of each GPU, or of the host on a CPU; `host_bytes`: of the first rank's host, beside GPUs."""

    state_bytes: int
    activation_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


def activation_bytes(size: ModelSize, token_budget: int, *, is_checkpointed: bool, value_bytes: int) -> int:
    """Of one micro-batch."""
    layer = token_budget * size.hidden * value_bytes
    kept = layer * (size.layer_count + VALUES_KEPT if is_checkpointed else VALUES_KEPT * size.layer_count)
    logits = LOGIT_COPIES * min(LOGIT_BYTES, 4 * token_budget * size.vocabulary)
    return kept + logits


def wants_checkpointing(size: ModelSize, token_budget: int, value_bytes: int) -> bool:
    """Whether layers are better computed again in the backward pass."""
    return (
        activation_bytes(size, token_budget, is_checkpointed=False, value_bytes=value_bytes) > CHECKPOINTING_FROM_BYTES
    )


def token_budget_for(size: ModelSize, longest: int, memory_bytes: int, gpu_count: int) -> int:
    """The largest power of two whose micro-batch fits beside the state in memory (of each GPU, or of the host for 0 GPUs), and
    that holds the run's longest sequence. A CPU, which gains nothing by large ones, takes one that needs no checkpointing."""
    least, budget = max(TOKEN_BUDGET_MIN, longest), TOKEN_BUDGET_MAX if gpu_count else TOKEN_BUDGET_MAX_CPU
    while budget >= 2 * least and not _is_good_budget(size, budget, memory_bytes, gpu_count):
        budget //= 2
    return budget


def _is_good_budget(size: ModelSize, budget: int, memory_bytes: int, gpu_count: int) -> bool:
    is_checkpointed = wants_checkpointing(size, budget, 2 if gpu_count else 4)
    if is_checkpointed and not gpu_count:
        return False
    found = learner_memory(size, budget, is_checkpointed=is_checkpointed, gpu_count=gpu_count, checkpoints_kept=0)
    return found.device_bytes <= GPU_MEMORY_SHARE * memory_bytes


def fewest_gpus(size: ModelSize, token_budget: int, gpu_memory_bytes: int) -> int:
    """The least power of two of GPUs among which a learner of this model fits; `GPUS_MAX` where that is not enough."""
    is_checkpointed = wants_checkpointing(size, token_budget, 2)
    for power in range(GPUS_MAX.bit_length()):
        found = learner_memory(
            size, token_budget, is_checkpointed=is_checkpointed, gpu_count=1 << power, checkpoints_kept=0
        )
        if found.device_bytes <= GPU_MEMORY_SHARE * gpu_memory_bytes:
            return 1 << power
    return GPUS_MAX


def learner_memory(
    size: ModelSize, token_budget: int, *, is_checkpointed: bool, gpu_count: int, checkpoints_kept: int
) -> LearnerMemory:
    """On `gpu_count` GPUs that share the state evenly, or on the CPU for 0."""
    value_bytes = 2 if gpu_count else 4
    state = (STATE_BYTES_GPU if gpu_count else STATE_BYTES_CPU) * size.parameters
    return LearnerMemory(
        state_bytes=state // max(1, gpu_count),
        activation_bytes=activation_bytes(size, token_budget, is_checkpointed=is_checkpointed, value_bytes=value_bytes),
        host_bytes=PROCESS_BYTES + (HOST_BYTES_GPU * size.parameters if gpu_count else 0),
        disk_bytes=(checkpoints_kept + 1) * CHECKPOINT_BYTES * size.parameters,
    )

"""Model size and how many sequences of a run fit on a machine: one rule for worker, planner and doctor.

Pure arithmetic from a transformers config; needs no weights. The number of sequences is the KV cache capacity in tokens over
the run's longest sequence (prompt limit + completions of all turns), not over the model's context; user options can only lower
it. Guarantees: the parameter count is the model's own: the learner counts it on the model's shapes and hands it on in the
config, and the formula for a few dense families agrees with it; a refusal says what would fit instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.units import counted, format_bytes

GPU_MEMORY_SHARE = 0.9  # share of GPU memory for weights and KV cache; the rest is for activations and the driver
GPU_BYTES = 2  # bytes per weight and per cached value on a GPU: engines compute in bf16 there
CPU_PROCESS_BYTES = 512 << 20  # a worker's own code and the activations between the layers of a step
CPU_CACHE_SHARE = 0.5
"""Share of the memory besides weights and code that the KV cache may use; the other half is left to the machine."""
FILL = 2
"""Sequences start at different times, so on average each uses half of its longest length; a paged cache holds this many
times as many."""
ROUND_BYTES = 256 << 20
"""Bytes of a keyframe copied at a time through shared memory into an engine's processes; a larger tensor is copied alone."""
HANDOVER_SHARE, HANDOVER_BYTES = 1.3, 512 << 20
"""Host and shared memory of a worker while it loads a keyframe, besides the engine's own weights: a share of the published
bytes, plus a constant."""
SEQUENCES_MAX = 256  # vLLM's usual limit of sequences at a time
SEQUENCES_CPU = 32  # fewer leave cores waiting at small models
SEQUENCES_CPU_MAX = 64
"""Beyond this, once matrix products dominate, more sequences per thread hardly add tokens and delay every rollout."""
CPU_OVERHEAD_PARAMETERS = 25_000_000
"""Divided by the model's parameter count, this gives the sequences whose matrix products take as long as the rest of a step: up
to there, a tiny model gains from more sequences."""
WIDER_SHARE = 0.85
"""Share of its speed that a GPU keeps each time the engine's GPU count doubles; assumed, for the exchange per layer."""
SEQUENCES_WANTED = 32
"""With fewer sequences, a GPU reads its weights for too few tokens per step, and more GPUs per engine pay off."""


class Quantisation(Enum):
    """How an engine quantises the weights it generates with; the published weights are kept as well."""

    NONE = "none"
    BF16 = "bf16"  # the embedded engine, on processors that multiply it
    FP8 = "fp8"  # vLLM

    @property
    def cpu_bytes(self) -> int:
        """Bytes per value on a CPU: the embedded engine computes and caches in float32, or in bf16."""
        return 2 if self is Quantisation.BF16 else 4


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's shape. `kv_values_per_token`: keys and values of all layers. `context_tokens`: the model's longest context."""

    parameters: int
    kv_values_per_token: int
    context_tokens: int
    head_count: int
    kv_head_count: int
    layer_count: int = 1
    hidden: int = 1
    vocabulary: int = 1
    idle_parameters: int = 0
    """Parameters of the experts that a token is not routed to."""
    mlp_width: int = 0
    """Values per token between an MLP's matrices, over all experts that the token is routed to; 0: unknown."""
    has_head_norms: bool = False
    """Whether queries and keys are normalised per head."""
    head_width: int = 0
    """Values of a query, and of a key, in one head; 0: derived from the cache, which is smaller for latent attention."""
    linear_parameters: int = 0
    """Parameters that vLLM may quantise: the layers' matrices, without embedding and head; 0 for a model with experts."""

    @property
    def kv_width(self) -> int:
        return self.kv_head_count * self.head_width or self.kv_values_per_token // (2 * self.layer_count)

    @property
    def query_width(self) -> int:
        """Values of a token's queries in one layer."""
        return self.head_count * (self.kv_width // max(1, self.kv_head_count))

    @property
    def active_parameters(self) -> int:
        return self.parameters - self.idle_parameters

    @property
    def billions(self) -> float:
        return self.parameters / 1e9

    @property
    def gpu_weight_bytes(self) -> int:
        return GPU_BYTES * self.parameters

    def card_bytes(self, quantisation: Quantisation) -> int:
        """GPU memory for one engine's weights, without scales (a thousandth of the quantised weights)."""
        return self.gpu_weight_bytes - (self.linear_parameters if quantisation is Quantisation.FP8 else 0)

    def masters_bytes(self, quantisation: Quantisation) -> int:
        """Host memory for the published values of the weights that one GPU engine has quantised."""
        return GPU_BYTES * self.linear_parameters if quantisation is Quantisation.FP8 else 0

    @property
    def round_bytes(self) -> int:
        """Shared memory needed while a keyframe is copied to an engine's processes."""
        return max(ROUND_BYTES, GPU_BYTES * self.vocabulary * self.hidden)


@dataclass(frozen=True, slots=True)
class RunLengths:
    """What one run needs from an engine: its longest sequence in tokens. `sequences_cap` (0: none) and the quantisation
    are the user's options."""

    longest_tokens: int
    sequences_cap: int = 0
    quantisation: Quantisation = Quantisation.NONE

    def of(self, size: ModelSize) -> int:
        """Tokens of the longest sequence on this model. A `longest_tokens` of 0 means the model's context."""
        return min(self.longest_tokens or size.context_tokens, size.context_tokens)


@dataclass(frozen=True, slots=True)
class Fit:
    """`engine_count` engines, each over `tensor_parallel` GPUs (0: on the CPU) and with `sequences` sequences. GPUs left over
    stay idle. `cache_tokens`: capacity of one engine's KV cache. `loads_base`: the base checkpoint may be loaded into memory
    before it is known whether it is needed."""

    engine_count: int
    tensor_parallel: int
    sequences: int
    sequence_tokens: int
    cache_tokens: int
    reason: str
    loads_base: bool = True

    @property
    def whole_sequences(self) -> int:
        """How many sequences of full length fit at once; if all are that long, the rest wait for room."""
        return min(self.sequences, self.cache_tokens // self.sequence_tokens)


def handover_bytes(published_bytes: int) -> int:
    """Host and shared memory that a worker needs while it loads a keyframe, besides its engine's own weights."""
    return int(HANDOVER_SHARE * published_bytes) + HANDOVER_BYTES


def longest_sequence(prompt_tokens_max: int, new_tokens_max: int, turns_max: int = 1) -> int:
    return prompt_tokens_max + new_tokens_max * turns_max


# ---- the model


SIZE_KEY = "echo2_size"
"""The field of the learner's model config that holds the `ModelSize` counted on the model's own shapes."""
DENSE = ("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "smollm3")
"""Families whose parameters a formula counts, for a planner without torch; tests compare it with the models."""


def exact_positions(positions: int, rope: object, model_type: str) -> int:
    """How many of a model's positions learner and engines rotate alike, by its rotary embeddings (one, or one a kind of layer):
    beyond them a longrope's factors depend on the sequence. ConfigError where no engine does; Hunyuan calls dynamic what is fixed
    by its alpha."""
    rotary = rope if isinstance(rope, Mapping) else {}
    ropes = [each for each in rotary.values() if isinstance(each, Mapping)] or [rotary]
    is_fixed = model_type.startswith("hunyuan")
    if any(each.get("rope_type") == "dynamic" and not (is_fixed and each.get("alpha")) for each in ropes):
        raise ConfigError(
            f"model_type {model_type}, rope_type: dynamic rotates cached keys again, which no engine here does"
        )
    longropes = [each for each in ropes if each.get("rope_type") == "longrope"]
    return min([positions, *(int(each["original_max_position_embeddings"]) for each in longropes)])


def model_size(config: Mapping[str, object]) -> ModelSize:
    """A model's size: the learner's count in its config, or by formula. Raises ConfigError, naming the field or the family."""
    size = config.get(SIZE_KEY)
    if isinstance(size, Mapping):
        try:
            return ModelSize(**{str(name): int(value) for name, value in size.items()})  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model config, {SIZE_KEY}: expected a model's size, got {size}: {error}") from None
    model_type = str(config.get("model_type", ""))
    if model_type not in DENSE:
        raise ConfigError(
            f"model config: expected the size of model_type {model_type!r} to be counted on the model itself, which takes "
            "transformers here"
        )
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", heads)
    width = _number(config, "head_dim", hidden // max(1, heads))
    vocabulary, rows = _number(config, "vocab_size"), _number(config, "intermediate_size")
    is_gemma = model_type.startswith("gemma")
    attention = hidden * width * (heads + 2 * kv_heads) + heads * width * hidden
    if model_type == "qwen2" or config.get("attention_bias"):
        attention += width * (heads + 2 * kv_heads) + (hidden if config.get("attention_bias") else 0)
    norms = (4 if is_gemma else 2) * hidden
    norms += 2 * width if model_type in ("qwen3", "gemma3_text") else 0
    mlp = 3 * hidden * rows + ((2 * rows + hidden) if config.get("mlp_bias") else 0)
    ends = vocabulary * hidden * (1 if config.get("tie_word_embeddings", is_gemma) else 2) + hidden
    return ModelSize(
        parameters=layers * (attention + norms + mlp) + ends,
        kv_values_per_token=2 * layers * kv_heads * width,
        context_tokens=_number(config, "max_position_embeddings"),
        head_count=heads,
        kv_head_count=kv_heads,
        layer_count=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        mlp_width=rows,
        has_head_norms=model_type in ("qwen3", "gemma3_text"),
        head_width=width,
        linear_parameters=layers * hidden * (2 * width * (heads + kv_heads) + 3 * rows),
    )


def size_by_billions(known: Mapping[str, ModelSize], billions: float) -> ModelSize:
    """Guesses a size from the parameter count alone: the nearest known shape, its KV cache scaled by the square root of the
    ratio."""
    near = min(known.values(), key=lambda size: max(size.billions / billions, billions / size.billions))
    ratio = billions / near.billions
    cache = near.kv_values_per_token * (1.0 if 0.8 <= ratio <= 1.25 else ratio**0.5)
    return ModelSize(
        int(billions * 1e9), int(cache), near.context_tokens, near.head_count, near.kv_head_count,
        near.layer_count, near.hidden, near.vocabulary, mlp_width=near.mlp_width, has_head_norms=near.has_head_norms,
        linear_parameters=int(near.linear_parameters * billions / near.billions),
    )  # fmt: skip


def _number(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default != 0):
        raise ConfigError(f"model config, {name}: expected a positive number, got {value!r}")
    return value


# ---- the machine


def worker_fit(
    size: ModelSize,
    gpu_memory_bytes: Sequence[int],
    memory_bytes: int,
    run: RunLengths,
    published_bytes: int = 0,
) -> Fit:
    """Fits a worker on one machine: on its GPUs, or on its CPU if it has no GPU that the engine can use."""
    if gpu_memory_bytes:
        return gpu_fit(size, gpu_memory_bytes, run)
    return cpu_fit(size, memory_bytes, run, published_bytes)


def gpu_fit(size: ModelSize, gpu_memory_bytes: Sequence[int], run: RunLengths) -> Fit:
    """Chooses engines for these GPUs: few GPUs per engine, as long as enough sequences fit beside the weights. Separate engines
    need no exchange per layer, and a lost GPU takes down only one. But an engine whose weights leave room for few sequences
    reads its weights for few tokens. So this takes the width with the largest `_worth`, the smallest of equals. Widths are
    powers of two that divide the heads. Raises ResourceError if the model does not fit."""
    if not gpu_memory_bytes:
        raise ConfigError("layout: expected at least one GPU, got none")
    count, least, longest = len(gpu_memory_bytes), min(gpu_memory_bytes), run.of(size)
    fits = [
        Fit(count // width, width, _sequences(tokens, longest, SEQUENCES_MAX, run), longest, tokens, "")
        for width in _widths(size, count)
        if (tokens := gpu_cache_tokens(size, width * least, run.quantisation)) >= longest
    ]
    if not fits:
        raise ResourceError(_gpu_refusal(size, count, least, run))
    best = max(fits, key=lambda fit: (_worth(fit), -fit.tensor_parallel))
    each = "one GPU" if best.tensor_parallel == 1 else f"{best.tensor_parallel} GPUs"
    masters = best.engine_count * size.masters_bytes(run.quantisation)
    beside = f", {format_bytes(masters)} of masters in the host's memory" if masters else ""
    reason = (
        f"{format_bytes(size.card_bytes(run.quantisation))} of weights and {best.cache_tokens} tokens of cache on {each} of "
        f"{format_bytes(least)}: {counted(best.engine_count, 'engine')} of "
        f"{best.sequences} sequences, {best.whole_sequences} of them at the full {longest} tokens{beside}"
    )
    return Fit(best.engine_count, best.tensor_parallel, best.sequences, longest, best.cache_tokens, reason)


def gpu_cache_tokens(size: ModelSize, memory_bytes: int, quantisation: Quantisation = Quantisation.NONE) -> int:
    """KV cache capacity beside the weights, in tokens; negative if the weights do not fit."""
    beside = int(GPU_MEMORY_SHARE * memory_bytes - size.card_bytes(quantisation))
    return beside // (GPU_BYTES * size.kv_values_per_token)


def cpu_fit(size: ModelSize, memory_bytes: int, run: RunLengths, published_bytes: int = 0) -> Fit:
    """Fits the embedded engine on this machine. `published_bytes`: size of the copy kept for applying deltas; 0: that of
    bf16 weights. Raises ResourceError if the model does not fit."""
    width = run.quantisation.cpu_bytes
    longest, each, weights = run.of(size), width * size.kv_values_per_token, width * size.parameters
    held = weights + (published_bytes or 2 * size.parameters) + CPU_PROCESS_BYTES
    beside = memory_bytes - held
    tokens = int(CPU_CACHE_SHARE * beside) // each
    if tokens < longest:
        raise ResourceError(_cpu_refusal(size, memory_bytes, held, longest, run, tokens))
    paying = max(SEQUENCES_CPU, min(SEQUENCES_CPU_MAX, CPU_OVERHEAD_PARAMETERS // size.parameters))
    sequences = _sequences(tokens, longest, paying, run)
    tokens = min(tokens, sequences * longest)
    return Fit(
        1, 0, sequences, longest, tokens,
        f"{format_bytes(held)} of weights and code leave {format_bytes(beside)} of memory: {sequences} sequences of up to "
        f"{longest} tokens",
    )  # fmt: skip


def _sequences(cache_tokens: int, longest: int, most: int, run: RunLengths) -> int:
    count = min(most, FILL * cache_tokens // longest)
    return min(count, run.sequences_cap) if run.sequences_cap else count


def _worth(fit: Fit) -> float:
    """Proportional to tokens/s, as long as reading the weights dominates a step."""
    return fit.engine_count * spread_speed(fit.tensor_parallel) * min(fit.sequences, SEQUENCES_WANTED)


def spread_speed(gpu_count: int) -> float:
    """Speed of an engine over `gpu_count` GPUs relative to one GPU; 1 on a CPU."""
    return float(max(1, gpu_count) * WIDER_SHARE ** (max(1, gpu_count).bit_length() - 1))


def _widths(size: ModelSize, count: int) -> list[int]:
    def divides(width: int) -> bool:
        return size.head_count % width == 0 and (size.kv_head_count % width == 0 or width % size.kv_head_count == 0)

    return [width for width in (1 << power for power in range(count.bit_length())) if divides(width)]


def _gpu_refusal(size: ModelSize, count: int, least: int, run: RunLengths) -> str:
    """Error text: what does not fit, and what would fit instead."""
    longest, weight_bytes = run.of(size), size.card_bytes(run.quantisation)
    cache_bytes = GPU_BYTES * size.kv_values_per_token * longest

    def tokens_on(width: int) -> int:
        return gpu_cache_tokens(size, width * least, run.quantisation)

    needed = int((weight_bytes + cache_bytes) / GPU_MEMORY_SHARE) + 1
    widths = [width for width in _widths(size, 1 << 6) if tokens_on(width) >= longest]
    would = [f"one GPU of {format_bytes(needed)}"]
    would += [f"{widths[0]} such GPUs"] if widths else []
    own_widths = _widths(size, count)
    tokens = max(map(tokens_on, own_widths))
    would += [f"sequences of at most {tokens} tokens (sampling.max_new_tokens)"] if tokens > 1 else []
    rounded = gpu_cache_tokens(size, own_widths[-1] * least, Quantisation.FP8)
    if rounded >= longest and run.quantisation is not Quantisation.FP8:
        would.append("rounded weights (worker.quantisation fp8)")
    return (
        f"GPUs: expected weights of {format_bytes(weight_bytes)} and one sequence of {longest} tokens "
        f"({format_bytes(cache_bytes)}) to fit {GPU_MEMORY_SHARE:.0%} of {count} x {format_bytes(least)} in equal parts "
        f"of {size.head_count} heads, they do not; what would fit: {'; '.join(would)}"
    )


def _cpu_refusal(size: ModelSize, memory_bytes: int, held: int, longest: int, run: RunLengths, tokens: int) -> str:
    needed = held + int(run.quantisation.cpu_bytes * size.kv_values_per_token * longest / CPU_CACHE_SHARE)
    would = [f"{format_bytes(needed)} of memory"]
    would += [f"sequences of at most {tokens} tokens (sampling.max_new_tokens)"] if tokens > 1 else []
    return (
        f"memory: expected room for one sequence of {longest} tokens in {CPU_CACHE_SHARE:.0%} of what "
        f"{format_bytes(held)} of weights and code leave, this machine has {format_bytes(memory_bytes)}; what would fit: "
        f"{'; '.join(would)}"
    )


# Memory and disk that a learner needs: its state exactly, its activations estimated for one micro-batch.
#
# Pure. The state is bf16 or float32 weights, float32 masters, both moments of AdamW, gradients and the published copies.
# `echo2 plan`, `echo2 doctor` and the learner itself use the sizes of checkpoints, the number of versions kept for audits and
# the memory of rollouts from here.
# The estimate of activations counts what a layer keeps for its backward pass; `benchmarks.bench_scale` compares the sum with a
# real process.

PROCESS_BYTES = 448 << 20  # code, tokenizer, tasks, sockets; torch and transformers alone take 0.3 GB
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
AUDIT_CHANGED_SHARE = 0.02  # share of the weights that a version changes at learning rates of 1e-6 to 1e-5
AUDIT_BYTES_OF_CHANGE = 6  # index and value of a changed weight
AUDIT_BOUNDS = 2
"""Audits keep the versions of this many staleness bounds, at most one per step: a rollout is audited within one bound."""
ROLLOUT_TOKEN_BYTES = 100
"""Host bytes per token of a rollout in flight or waiting for its step: ID, log-probabilities, sender, journal."""
REFERENCE_BYTES_CPU, REFERENCE_BYTES_GPU = 4, 2
"""Bytes per parameter of the base model that the KL penalty uses as reference."""
ADAPTER_BASE_BYTES_CPU, ADAPTER_BASE_BYTES_GPU = 6, 2
"""Bytes per parameter of an adapter's base model: on a CPU float32, plus bf16 while it is read; on a GPU bf16."""
NF4_BYTES = 1 / 2 + 2 / 64  # bytes per parameter of a base's linear layers in nf4: a code, and a scale for each 64
NF4_WORK_BYTES = 6  # bytes per parameter of the layer whose weight is being made from its codes (weights/precision)
LOGIT_COPIES = 5
"""Of one slice of the head: logits, their distance from the largest, its exponential, and the gradient in two forms."""
HEAD_GRADIENTS = 3  # gradients the size of the whole head: one slice's, the sum of those before, and the sum of both
LOGIT_BYTES_CPU, LOGIT_BYTES_GPU = 64 << 20, 256 << 20  # of one block of logits; larger blocks are no faster
ROW_WIDTHS = 4
"""Length of a row of packed sequences over the model's width, so that attention costs about as much as the linear layers."""
MASK_BYTES = 8  # bytes per pair of positions in a row, while the mask is built and then used by all layers
CHECKPOINTING_FROM_BYTES = 6 << 30
"""With more activations than this, gradient checkpointing is worth a third more time."""
TOKEN_BUDGET_MAX, TOKEN_BUDGET_MAX_CPU, TOKEN_BUDGET_MIN = 16_384, 4_096, 1_024
"""Tokens of a micro-batch: more do not make a device faster, fewer leave it idle between kernels."""
COPY_GPUS_MAX = 64  # most GPUs tried for one copy of the state, when the GPU count is not given


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
        return adapter_parameters(size, self.adapter_rank) if self.adapter_rank else size.parameters

    def published_bytes(self, size: ModelSize) -> int:
        return self.published_value_bytes * self.trained_parameters(size)


NO_RUN = LearnerRun()  # for when only the model is known; audits keep the versions of the default staleness bound


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
    """The largest power of two, in tokens, whose micro-batch fits in memory beside the state and holds the run's longest
    sequence. `memory_bytes`: per GPU, or of the host if `gpu_count` is 0. A CPU gains nothing from large micro-batches, so
    there the budget must also not need checkpointing."""
    least, budget = max(TOKEN_BUDGET_MIN, longest), TOKEN_BUDGET_MAX if gpu_count else TOKEN_BUDGET_MAX_CPU
    while budget >= 2 * least and not _is_good_budget(size, budget, memory_bytes, gpu_count, run):
        budget //= 2
    return budget


def _is_good_budget(size: ModelSize, budget: int, memory_bytes: int, gpu_count: int, run: LearnerRun) -> bool:
    checkpointing = checkpointing_of("auto", size, budget, 2 if gpu_count else 4)
    if checkpointing is not Checkpointing.OFF and not gpu_count:
        return False
    memory = learner_memory(size, budget, checkpointing, gpu_count=gpu_count, run=run)
    return memory.device_bytes <= GPU_MEMORY_SHARE * memory_bytes


def fewest_gpus(
    size: ModelSize,
    token_budget: int,
    gpu_memory_bytes: int,
    run: LearnerRun = NO_RUN,
    asked: bool | Literal["auto", "selective"] = "auto",
) -> int:
    """The fewest GPUs on which a learner of this model fits: `run.replicas` times the smallest power of two that holds one copy of
    the state, at most `COPY_GPUS_MAX` per copy, even if that is not enough. `asked`: `learner.gradient_checkpointing`."""
    checkpointing, alone = checkpointing_of(asked, size, token_budget, 2), replace(run, replicas=1)
    for power in range(COPY_GPUS_MAX.bit_length()):
        memory = learner_memory(size, token_budget, checkpointing, gpu_count=1 << power, run=alone)
        if memory.device_bytes <= GPU_MEMORY_SHARE * gpu_memory_bytes:
            return run.replicas << power
    return run.replicas * COPY_GPUS_MAX


def learner_memory(
    size: ModelSize, token_budget: int, checkpointing: Checkpointing, *, gpu_count: int, run: LearnerRun = NO_RUN
) -> LearnerMemory:
    """Memory and disk of a learner on `gpu_count` GPUs, or on the CPU for 0, which keeps everything in host memory. There are
    `run.replicas` copies of the state; the GPUs of one copy share it evenly. Each rank keeps its own rows on its host, whichever
    copy it belongs to. The disk holds one copy."""
    trained = run.trained_parameters(size)
    bytes_each = AUDIT_CHANGED_SHARE * AUDIT_BYTES_OF_CHANGE * audit_versions(run.staleness_bound)
    audit = int(bytes_each * size.parameters) if run.is_audited and not run.adapter_rank else 0
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
REPLAY_S = 900.0  # most seconds that a restart spends on retraining, because workers' deliveries wait for it
STEPS_MAX = 20  # more would lose more of a run of few steps than checkpoints cost
CHECKPOINT_BYTES_PER_S = 5e9
"""Prior of the copy rate from one GPU or CPU into unpinned host memory, until the first checkpoint is measured."""


def steps_between(checkpoint_s: float, train_s: float, step_s: float) -> int:
    """The interval in steps. All times in seconds: `train_s` of a step without waiting, `step_s` with it."""
    if train_s < 1e-9:  # whose square may be 0
        return STEPS_MAX
    cheapest = math.sqrt(2.0 * checkpoint_s * KILLED_EVERY_S / (train_s * max(train_s, step_s)))
    return max(1, int(min(cheapest, REPLAY_S / train_s, STEPS_MAX)))

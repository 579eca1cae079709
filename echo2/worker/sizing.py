"""How large a model is, how many sequences fit beside it, and how several GPUs are shared out. Pure arithmetic.

From a transformers config alone, before any weight is here. Guarantees: the parameter count of the dense and
mixture-of-experts shapes that the engines know is exact; what does not fit is refused with what it would need.
Leaves to others: measuring the machine (runtime/machine), building engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo2.base.errors import ConfigError, ResourceError
from echo2.base.units import format_bytes

PUBLISHED_BYTES = 2  # of a bf16 parameter
CPU_BYTES = 4  # the embedded engine computes in float32
SLOTS_CPU_MAX = 32
"""More sequences on one thread give few more tokens and make each rollout that much later."""
SLOTS_GPU_MAX = 256
CACHE_SHARE_CPU = 0.5
"""Of the memory that is left beside the weights; the other half is the machine's."""
WEIGHTS_SHARE_GPU = 0.6
"""A GPU that weights fill further has too little room for caches."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """`kv_values_per_token`: keys and values of all layers."""

    parameters: int
    kv_values_per_token: int
    context_tokens: int
    head_count: int
    kv_head_count: int

    @property
    def published_bytes(self) -> int:
        return PUBLISHED_BYTES * self.parameters


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """`engine_count` engines over `tensor_parallel` GPUs each; GPUs left over stay idle."""

    engine_count: int
    tensor_parallel: int
    reason: str


def model_size(config: Mapping[str, object]) -> ModelSize:
    """Of a decoder-only transformer in transformers' words; ConfigError names a field that is missing or wrong."""
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", heads)
    width = _number(config, "head_dim", hidden // max(1, heads))
    vocabulary = _number(config, "vocab_size")
    attention = hidden * width * (heads + 2 * kv_heads) + heads * width * hidden
    model_type = str(config.get("model_type", ""))
    if model_type == "qwen2" or config.get("attention_bias"):
        attention += width * (heads + 2 * kv_heads) + (hidden if config.get("attention_bias") else 0)
    norms = 2 * hidden + (2 * width if model_type.startswith("qwen3") else 0)
    experts = _number(config, "num_experts", 0)
    if experts:
        mlp = hidden * experts + experts * 3 * hidden * _number(config, "moe_intermediate_size")
    else:
        rows = _number(config, "intermediate_size")
        mlp = 3 * hidden * rows + ((2 * rows + hidden) if config.get("mlp_bias") else 0)
    ends = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2) + hidden
    return ModelSize(
        parameters=layers * (attention + norms + mlp) + ends,
        kv_values_per_token=2 * layers * kv_heads * width,
        context_tokens=_number(config, "max_position_embeddings"),
        head_count=heads,
        kv_head_count=kv_heads,
    )


def cpu_slots(size: ModelSize, memory_bytes: int, context_tokens: int = 0) -> int:
    """Sequences that the embedded engine holds at full length in its share of the memory beside the weights."""
    beside = memory_bytes - (CPU_BYTES + PUBLISHED_BYTES) * size.parameters
    context = context_tokens or size.context_tokens
    each = CPU_BYTES * size.kv_values_per_token * context
    fitting = int(CACHE_SHARE_CPU * beside) // each
    if fitting < 1:
        raise ResourceError(
            f"memory: expected room for one sequence of {context} tokens ({format_bytes(each)}) in "
            f"{CACHE_SHARE_CPU:.0%} of what the weights leave, got {format_bytes(max(0, beside))}; a smaller "
            "context_tokens needs less"
        )
    return min(SLOTS_CPU_MAX, fitting)


def gpu_slots(size: ModelSize, memory_bytes: int, memory_share: float = 0.9, context_tokens: int = 0) -> int:
    """Sequences for which vLLM is told to plan. Its cache is paged, so half of the full length each is enough."""
    beside = memory_share * memory_bytes - size.published_bytes
    each = PUBLISHED_BYTES * size.kv_values_per_token * (context_tokens or size.context_tokens)
    return max(1, min(SLOTS_GPU_MAX, int(2 * beside / each)))


def gpu_layout(size: ModelSize, gpu_memory_bytes: Sequence[int]) -> GpuLayout:
    """One engine per GPU where the weights fit one; else as few GPUs an engine as hold them, of the same size each.

    Separate engines need no exchange per layer and lose one GPU at a time, so tensor parallelism is for what does not
    fit. It divides attention heads and matrices, so only powers of two that divide the heads come into question.
    """
    if not gpu_memory_bytes:
        raise ConfigError("layout: expected at least one GPU, got none")
    count, least = len(gpu_memory_bytes), min(gpu_memory_bytes)
    room = WEIGHTS_SHARE_GPU * least
    for width in (1 << power for power in range(count.bit_length())):
        divides = size.head_count % width == 0 and (size.kv_head_count % width == 0 or width % size.kv_head_count == 0)
        if divides and size.published_bytes <= width * room:
            engines = count // width
            each = "one GPU" if width == 1 else f"{width} GPUs"
            return GpuLayout(
                engines,
                width,
                f"{format_bytes(size.published_bytes)} of weights fit {WEIGHTS_SHARE_GPU:.0%} of {each} of "
                f"{format_bytes(least)}: {engines} engine{'s' if engines > 1 else ''}",
            )
    raise ResourceError(
        f"GPUs: expected weights of {format_bytes(size.published_bytes)} to fit {WEIGHTS_SHARE_GPU:.0%} of "
        f"{count} x {format_bytes(least)} in equal parts of {size.head_count} heads, they do not"
    )


def _number(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default != 0):
        raise ConfigError(f"model config, {name}: expected a positive number, got {value!r}")
    return value

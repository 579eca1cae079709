"""What every part of the GPU's benchmark is told, and the rows that it gives back."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `value` None: it was not measured, and `why` says why."""

    name: str
    value: float | None
    unit: str
    target: float | None = None
    better: str = "lower"
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields if self.why else {name: value for name, value in fields.items() if name != "why"}


def not_measured(name: str, unit: str, why: str, better: str = "lower") -> Row:
    return Row(name, None, unit, None, better, why)


@dataclass(frozen=True, slots=True)
class Setup:
    """`is_small`: shapes that a CPU does in seconds, so that it is known to run."""

    device: torch.device
    is_small: bool
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        """That the learner computes in here."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def free_bytes(self) -> int:
        """Of the device; of a CPU as good as none is wanted."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 34

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], times: int = 5, warm_ups: int = 2) -> float:
        """Median over `times` calls, the device's work included, after calls that compile."""
        found = []
        for number in range(warm_ups + times):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            if number >= warm_ups:
                found.append(time.perf_counter() - began)
        return statistics.median(found)

    def matmul_flops(self) -> float:
        """Operations a second of a large matrix product in the learner's dtype: the bound that a step is compared with."""
        side = 256 if self.is_small else 8192
        a, b = (torch.randn(side, side, device=self.device, dtype=self.dtype) for _ in range(2))
        return 2 * side**3 / self.seconds(lambda: a @ b)


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's shape, with random weights."""

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    is_tied: bool

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        ends = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return ends + self.layers * (attention + 3 * self.hidden * self.intermediate)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of what is published, norms left out."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            place = f"model.layers.{layer}"
            found |= {
                f"{place}.self_attn.q_proj.weight": (wide, self.hidden),
                f"{place}.self_attn.k_proj.weight": (narrow, self.hidden),
                f"{place}.self_attn.v_proj.weight": (narrow, self.hidden),
                f"{place}.self_attn.o_proj.weight": (self.hidden, wide),
                f"{place}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{place}.mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{place}.mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        if not self.is_tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found


SMALL = Shape("small", 512, 64, 192, 2, 4, 2, 16, True)
QWEN3_06B = Shape("Qwen3-0.6B", 151_936, 1024, 3072, 28, 16, 8, 128, True)
QWEN3_4B = Shape("Qwen3-4B", 151_936, 2560, 9728, 36, 32, 8, 128, True)
QWEN3_8B = Shape("Qwen3-8B", 151_936, 4096, 12_288, 36, 32, 8, 128, False)


def saved_model(shape: Shape, folder: Path) -> Path:
    """A folder in Hugging Face layout with random bf16 weights; made once."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target = folder / shape.name
    if (target / "config.json").is_file():
        return target
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=40_960, tie_word_embeddings=shape.is_tied,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # 4 B random numbers take a CPU a minute
            model = Qwen3ForCausalLM(config)
        model.save_pretrained(target)
    finally:
        torch.set_default_dtype(before)
    return target


def write_rows(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")

"""The embedded engine in float32 and bf16 at SmolLM2's shape beside transformers' `generate` in both, by scene.

Random weights and prompts; each scene asks all four for the same tokens. Tokens are counted per CPU second of this process, prefill
among them, start-up not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.worker_scene import Ask, Row, Staged, keyframe, row
from benchmarks.worker_speed import by_generate, drained
from echo2.base.rollout import SamplingParams
from echo2.cost_model.sizing import Quantisation
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.engine import GenerateRequest, SwapMode

CONFIG: dict[str, object] = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SCENES = {"batch 32": (32, 1, 32, 48), "shared prompts": (4, 8, 512, 24), "prompts of 2,048": (4, 1, 2048, 16)}
"""By name: prompts, completions of each, tokens of a prompt and of a completion."""
TARGET = 1.2  # of the better of transformers' two


def asked(prompts: int, each: int, width: int, count: int) -> list[Ask]:
    rng = random.Random(0)
    return [
        ask for _ in range(prompts) for ask in [Ask([rng.randrange(49152) for _ in range(width)], count)] * each
    ]  # fmt: skip


def by_engine(base: Staged, asks: Sequence[Ask], quantisation: Quantisation) -> float:
    async def run() -> float:
        engine = EmbeddedEngine(CONFIG, slot_count=len(asks), quantisation=quantisation)
        await engine.start()
        await engine.swap(base, SwapMode.KEEP_KV)
        began = time.process_time()
        for number, ask in enumerate(asks):
            params = SamplingParams(max_new_tokens=ask.count, seed=number)
            engine.submit(GenerateRequest(f"r{number}", tuple(ask.prompt), (), params, str(ask.prompt[:8])))
        tokens = await drained(engine, len(asks))
        used_s = time.process_time() - began
        await engine.stop()
        return tokens / used_s

    return asyncio.run(run())


def narrow(is_quick: bool) -> list[Row]:
    """Tokens per CPU second, the best of some rounds."""
    torch.manual_seed(0)
    wide = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), attn_implementation="sdpa").float().eval()
    base, half = keyframe(wide), torch.bfloat16
    rows: list[Row] = []
    print(
        f"{'scene':<20} {'ours':>8} {'ours bf16':>10} {'generate':>9} {'gen. bf16':>10} {'ratio':>6}   (tokens/CPU s)"
    )
    for name, scene in SCENES.items():
        asks, best = asked(*scene), [0.0] * 4
        for _ in range(1 if is_quick else 2):
            speeds = [by_engine(base, asks, each) for each in (Quantisation.NONE, Quantisation.BF16)]
            speeds += [by_generate(wide.to(dtype), asks, len(asks)) for dtype in (half, torch.float32)]
            best = [max(pair) for pair in zip(best, speeds, strict=True)]
        ours, ours_half, of_half, of_wide = best
        ratio = max(ours, ours_half) / max(of_half, of_wide)
        print(f"{name:<20} {ours:>8.1f} {ours_half:>10.1f} {of_wide:>9.1f} {of_half:>10.1f} {ratio:>6.2f}", flush=True)
        for whose, value in (
            ("embedded", ours), ("embedded bf16", ours_half), ("generate", of_wide), ("generate bf16", of_half)
        ):  # fmt: skip
            rows.append(row(f"SmolLM2's shape, {name}: {whose}, tokens/CPU s", value, "tokens/s", None, "higher"))
        rows.append(row(f"SmolLM2's shape, {name}: ratio to the better generate", ratio, "x", TARGET, "higher"))
    return rows

"""Speed of the embedded engine against transformers, what swaps cost, and what streaming costs.

One model, one thread, random weights, prompts and lengths drawn from a seed and the same for all. Tokens are counted
per CPU second of this process, because other work on the machine moves wall time more; only tokens that were asked
for count (`generate` computes more: it waits for the longest of a batch).

    python -m benchmarks.bench_worker [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.broadcast.staged import TensorUpdate
from echo2.worker.engine import GenerateRequest, SwapMode
from echo2.worker.runtime.daemon import PUMP_PAUSE_S
from echo2.worker.runtime.engines.embedded import EmbeddedEngine
from echo2.worker.runtime.engines.loop import HOLD_STEPS, StepLoop, Swap
from echo2.worker.runtime.engines.outbox import Outbox, SampledToken
from echo2.worker.runtime.engines.shape import read_shape
from echo2.worker.runtime.engines.weights import LiveWeights
from echo2.worker.runtime.make_engine import LINGER_S

RESULTS = Path(__file__).parent / "results" / "worker.json"
CONTEXT_TOKENS = 512
CONFIG: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    count: int


@dataclass(frozen=True)
class Staged:
    version: Version
    parent: Version | None
    tensors: list[TensorUpdate]

    def updates(self) -> Iterator[TensorUpdate]:
        return iter(self.tensors)


def asks(count: int, seed: int = 0) -> list[Ask]:
    """Mixed lengths: prompts of 8 to 48 tokens; half of the completions short, half up to 128 tokens."""
    rng = random.Random(seed)
    return [
        Ask(
            [rng.randrange(8192) for _ in range(rng.randint(8, 48))],
            rng.choice((rng.randint(8, 48), rng.randint(8, 128))),
        )
        for _ in range(count)
    ]


def make_model(attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), attn_implementation=attention).float().eval()
    )


def keyframe(model: torch.nn.Module) -> Staged:
    return Staged(
        Version(0),
        None,
        [
            TensorUpdate(
                n,
                "bfloat16",
                tuple(t.shape),
                None,
                t.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1),
            )
            for n, t in model.named_parameters()
        ],
    )


def delta(base: Staged, version: int, share: float = 0.015) -> Staged:
    """A change of `share` of all elements by one unit in the last place."""
    rng = np.random.default_rng(version)
    updates = []
    for tensor in base.tensors:
        places = np.flatnonzero(rng.random(len(tensor.bits)) < share).astype(np.int64)
        updates.append(
            TensorUpdate(tensor.name, tensor.dtype, tensor.shape, places, tensor.bits[places] ^ np.uint16(version & 1))
        )
    return Staged(Version(version), Version(version - 1), updates)


def requests(asked: list[Ask], prefix: str = "r") -> list[GenerateRequest]:
    return [
        GenerateRequest(f"{prefix}{i}", tuple(a.prompt), (), SamplingParams(max_new_tokens=a.count), f"{prefix}{i}")
        for i, a in enumerate(asked)
    ]


def by_generate(model: torch.nn.Module, asked: list[Ask], batch: int) -> float:
    """Tokens per CPU second of `generate` over batches in the order asked, padded on the left."""
    began = time.process_time()
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        width = max(len(a.prompt) for a in part)
        ids = torch.tensor([[0] * (width - len(a.prompt)) + a.prompt for a in part])
        mask = torch.tensor([[0] * (width - len(a.prompt)) + [1] * len(a.prompt) for a in part])
        longest = max(a.count for a in part)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0)
    return sum(a.count for a in asked) / (time.process_time() - began)


def by_continuous_batching(model: torch.nn.Module, asked: list[Ask], batch: int) -> float:
    """Tokens per CPU second of transformers' continuous batching, its start-up not counted."""
    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    limits = ContinuousBatchingConfig(page_size=32, num_blocks=batch * 8, max_batch_tokens=256)
    tokens = 0
    with model.continuous_batching_context_manager(config, continuous_batching_config=limits) as manager:
        began = time.process_time()
        for number, ask in enumerate(asked):
            manager.add_request(ask.prompt, request_id=f"r{number}", max_new_tokens=ask.count)
        for _ in asked:
            result = manager.get_result(timeout=120)
            if result is None:
                raise RuntimeError("transformers' continuous batching gave no result within 120 s")
            tokens += len(result.generated_tokens)
        return tokens / (time.process_time() - began)


class Nowhere(Outbox):
    """Takes tokens and keeps none: the loop alone is measured."""

    def put(self, tokens: list[SampledToken]) -> None:
        return


def by_bare_loop(base: Staged, asked: list[Ask], batch: int) -> float:
    """Tokens per CPU second of the step loop in this thread, with nobody to stream to; start-up not counted."""
    weights = LiveWeights(read_shape(CONFIG))
    loop = StepLoop(weights, batch, CONTEXT_TOKENS, Nowhere())
    with torch.inference_mode():
        loop.warm_up()
        loop.swap(Swap(base.version, None, weights.checked(base), SwapMode.KEEP_KV))
        loop.run_commands()
        began = time.process_time()
        for request in requests(asked):
            loop.submit(request)
        while loop.stats().running_sequences + loop.stats().waiting_sequences:
            loop.step()
        return loop.stats().sampled_tokens / (time.process_time() - began)


async def drained(engine: EmbeddedEngine, count: int) -> int:
    tokens = 0
    while count:
        for chunk in await engine.next_chunks():
            tokens += len(chunk.token_ids)
            count -= chunk.finish_reason is not FinishReason.UNFINISHED
        await asyncio.sleep(PUMP_PAUSE_S)  # as the worker does
    return tokens


def by_engine(base: Staged, asked: list[Ask], batch: int) -> tuple[float, float]:
    """Tokens per CPU second of the whole engine, streaming included, start-up not; and streaming's share of the CPU.

    Streaming is all that threads beside the engine's spend, and what the engine's spends on handing tokens over.
    """

    async def run() -> tuple[float, float]:
        engine = EmbeddedEngine(CONFIG, slot_count=batch, linger_s=LINGER_S)
        await engine.start()
        await engine.swap(base, SwapMode.KEEP_KV)
        handing_s, put = [0.0], engine._outbox.put

        def timed_put(sampled: list[SampledToken]) -> None:
            began = time.thread_time()
            put(sampled)
            handing_s[0] += time.thread_time() - began

        engine._outbox.put = timed_put  # type: ignore[method-assign]
        engine_began = await asyncio.wrap_future(engine._loop.call(time.thread_time))
        began = time.process_time()
        for request in requests(asked):
            engine.submit(request)
        tokens = await drained(engine, len(asked))
        used_s = time.process_time() - began
        engine_s = await asyncio.wrap_future(engine._loop.call(time.thread_time)) - engine_began
        await engine.stop()
        return tokens / used_s, 1.0 - (engine_s - handing_s[0]) / used_s

    return asyncio.run(run())


class Load:
    """Keeps a loop's slots busy with groups that share a prompt, completions of mixed lengths as everywhere here."""

    def __init__(self, loop: StepLoop, group_size: int) -> None:
        self._loop = loop
        self._group_size = group_size
        self._groups = 0

    def step(self, count: int) -> float:
        """CPU seconds of so many steps."""
        began = time.process_time()
        for _ in range(count):
            if self._loop.stats().waiting_sequences < self._group_size:
                self._submit()
            self._loop.step()
        return time.process_time() - began

    def _submit(self) -> None:
        self._groups += 1
        asked = asks(self._group_size, seed=self._groups)
        for index, ask in enumerate(asked):
            sampling = SamplingParams(max_new_tokens=ask.count)
            key = f"g{self._groups}"
            self._loop.submit(GenerateRequest(f"{key}/{index}", tuple(asked[0].prompt), (), sampling, key))


def swap_share(base: Staged, mode: SwapMode, swaps: int, interval_s: float, group_size: int = 8) -> float:
    """Share of CPU that a swap every `interval_s` takes from generation, with 32 slots full of mixed lengths.

    The steps from the swap's request on, less what their tokens cost between swaps: standing still, slots that stand
    empty before a swap, and recomputing caches together.
    """
    weights = LiveWeights(read_shape(CONFIG))
    loop = StepLoop(weights, 32, CONTEXT_TOKENS, Nowhere())
    load = Load(loop, group_size)
    extra_s = 0.0
    with torch.inference_mode():
        loop.warm_up()
        loop.swap(Swap(base.version, None, weights.checked(base), SwapMode.KEEP_KV))
        loop.run_commands()
        for version in range(1, swaps + 1):
            change = delta(base, version)
            scatters = weights.checked(change)
            plain_s, plain_tokens = 0.0, loop.stats().sampled_tokens
            while plain_s < interval_s:
                plain_s += load.step(4)
            plain_tokens = loop.stats().sampled_tokens - plain_tokens
            began = time.process_time()
            loop.swap(Swap(change.version, change.parent, scatters, mode))
            loop.run_commands()
            tokens = loop.stats().sampled_tokens
            load.step(3 * HOLD_STEPS)
            spent_s = time.process_time() - began
            extra_s += spent_s - (loop.stats().sampled_tokens - tokens) * plain_s / plain_tokens
            assert loop.version == version, "the swap took effect within the steps measured"
    return extra_s / swaps / interval_s


def kept_cache_error(base: Staged, model: torch.nn.Module, swaps: int) -> float:
    """Mean error, in nats, of raw log-probabilities after `swaps` changes with the cache kept, 32 sequences.

    Each token is judged by the full forward under the version that it carries.
    """
    weights = LiveWeights(read_shape(CONFIG))
    box = Outbox()
    loop = StepLoop(weights, 32, CONTEXT_TOKENS, box)
    asked = asks(32)
    got: dict[str, list[tuple[int, float, int]]] = {f"r{i}": [] for i in range(32)}

    def collect() -> None:
        for chunk in asyncio.run(box.take()):
            got[chunk.request_id] += zip(chunk.token_ids, chunk.raw_logprobs, [chunk.version] * 999, strict=False)

    errors = []
    judge = copy.deepcopy(model)
    with torch.inference_mode():
        loop.warm_up()
        loop.swap(Swap(base.version, None, weights.checked(base), SwapMode.KEEP_KV))
        loop.run_commands()
        for request in requests([Ask(ask.prompt, 400) for ask in asked]):
            loop.submit(request)
        _steps(loop, 32)
        for version in range(1, swaps + 1):
            change = delta(base, version)
            loop.swap(Swap(change.version, change.parent, weights.checked(change), SwapMode.KEEP_KV))
            loop.run_commands()
            _steps(loop, 16)
        collect()
        for name, parameter in judge.named_parameters():
            parameter.copy_(weights.tensors[name])
        for number, ask in enumerate(asked):
            tokens = [token for token, _, _ in got[f"r{number}"]]
            logits = judge(torch.tensor([ask.prompt + tokens])).logits[0, len(ask.prompt) - 1 : -1]
            exact = torch.log_softmax(logits, dim=-1)
            for at, (token, raw, version) in enumerate(got[f"r{number}"]):
                if version == swaps:
                    errors.append(abs(float(exact[at, token]) - raw))
    return sum(errors) / len(errors)


def _steps(loop: StepLoop, count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        loop.step()
    return time.process_time() - began


def row(name: str, value: float, unit: str, target: float | None, better: str) -> dict[str, object]:
    return {"name": name, "value": round(value, 4), "unit": unit, "target": target, "better": better}


def compare(batches: list[int], rounds: int) -> list[dict[str, object]]:
    model, paged = make_model("sdpa"), make_model("sdpa")
    base = keyframe(model)
    rows = []
    print("tokens per CPU second; ratio: ours / generate; streaming: its share of the CPU")
    print(f"{'batch':>6} {'ours':>9} {'bare':>9} {'generate':>9} {'hf cont.':>9} {'ratio':>6} {'streaming':>9}")
    for batch in batches:
        asked = asks(max(4, 2 * batch))
        best = {"ours": 0.0, "bare": 0.0, "generate": 0.0, "paged": 0.0}
        shares = []
        for _ in range(rounds):
            speed, share = by_engine(base, asked, batch)
            best["ours"] = max(best["ours"], speed)
            shares.append(share)
            best["bare"] = max(best["bare"], by_bare_loop(base, asked, batch))
            best["generate"] = max(best["generate"], by_generate(model, asked, batch))
        best["paged"] = by_continuous_batching(paged, asked[:batch], batch)
        ratio, streaming = best["ours"] / best["generate"], statistics.median(shares)
        print(
            f"{batch:>6} {best['ours']:>9.0f} {best['bare']:>9.0f} {best['generate']:>9.0f} {best['paged']:>9.0f} "
            f"{ratio:>6.2f} {streaming:>9.1%}"
        )
        rows.append(row(f"embedded tokens/CPU s, batch {batch}", best["ours"], "tokens/s", None, "higher"))
        rows.append(row(f"generate tokens/CPU s, batch {batch}", best["generate"], "tokens/s", None, "higher"))
        rows.append(row(f"continuous batching tokens/CPU s, batch {batch}", best["paged"], "tokens/s", None, "higher"))
        rows.append(row(f"ratio to generate, batch {batch}", ratio, "x", 3.0 if batch == 32 else None, "higher"))
        if batch == 32:
            rows.append(row("streaming overhead, batch 32", streaming, "share", 0.03, "lower"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="batches 8 and 32 once, 2 swaps; writes no results")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows = compare([8, 32] if quick else [1, 8, 32, 64], 1 if quick else 3)
    base = keyframe(make_model("sdpa"))
    for mode, group_size in ((SwapMode.KEEP_KV, 8), (SwapMode.RECOMPUTE_KV, 8), (SwapMode.RECOMPUTE_KV, 1)):
        share = swap_share(base, mode, 2 if quick else 6, 2.0, group_size)
        name = f"time lost to swaps every 2 s, {mode.value}, groups of {group_size}"
        print(f"{name}: {share:.2%} (target <= 3%)")
        rows.append(row(name, share, "share", 0.03, "lower"))
    error = kept_cache_error(base, make_model("sdpa"), 2 if quick else 6)
    print(f"mean error of log-probabilities with the cache kept over {2 if quick else 6} swaps: {error:.1e} nats")
    rows.append(row("mean error with the cache kept over 6 swaps", error, "nats", None, "lower"))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if not quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

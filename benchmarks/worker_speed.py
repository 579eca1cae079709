"""Speed of the embedded engine against transformers, and what streaming costs.

Prompts and lengths are the same for all. Tokens are counted per CPU second of this process, because other work on the
machine moves wall time more; only tokens that were asked for count (`generate` computes more: it waits for the longest of
a batch).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.worker_scene import (
    CONFIG,
    CONTEXT_TOKENS,
    Ask,
    Nowhere,
    Row,
    Staged,
    asks,
    keyframe,
    make_model,
    requests,
    row,
)
from echo2.base.rollout import FinishReason
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.embedded.forward import CachedDecoder
from echo2.worker.engines.embedded.live_weights import LiveWeights, read_shape
from echo2.worker.engines.embedded.loop import LiveSwap, StepLoop
from echo2.worker.engines.engine import SwapMode
from echo2.worker.engines.outbox import LINGER_S, Outbox, SampledToken
from echo2.worker.generation import PUMP_PAUSE_S


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


def by_bare_loop(base: Staged, asked: list[Ask], batch: int) -> float:
    """Tokens per CPU second of the step loop in this thread, with nobody to stream to; start-up not counted."""
    weights = LiveWeights(read_shape(CONFIG))
    loop = StepLoop(weights, partial(CachedDecoder, weights), batch, CONTEXT_TOKENS, Nowhere())
    with torch.inference_mode():
        loop._forward.warm_up()
        loop.swap(LiveSwap(base.version, None, weights.checked(base), SwapMode.KEEP_KV))
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
        engine = EmbeddedEngine(CONFIG, slot_count=batch, outbox=Outbox(linger_s=LINGER_S))
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


def speed(is_quick: bool) -> list[Row]:
    """Tokens per CPU second at each batch size, the best of some rounds; streaming's share at batch 32."""
    batches, rounds = ([8, 32], 1) if is_quick else ([1, 8, 32, 64], 3)
    model, paged = make_model("sdpa"), make_model("sdpa")
    base = keyframe(model)
    rows: list[Row] = []
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
            rows.append(row("streaming overhead, batch 32", streaming, "share", 0.03))
    return rows

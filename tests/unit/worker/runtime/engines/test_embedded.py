"""What the embedded engine promises beyond the contract: reproducible streams, back-pressure, an orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from echo2.base.errors import ConfigError, EngineError
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.worker.engine import GenerateRequest, SwapMode
from echo2.worker.runtime.engines.embedded import EmbeddedEngine
from echo2.worker.runtime.engines.forward import CachedDecoder
from echo2.worker.runtime.engines.loop import LiveSwap, StepLoop
from echo2.worker.runtime.engines.outbox import Outbox, SampledToken
from echo2.worker.runtime.engines.shape import read_shape
from echo2.worker.runtime.engines.weights import LiveWeights
from tests.contract.engine_rig import keyframe_of, make_versions, tiny_config

CONFIG = tiny_config("qwen3")
BASE = keyframe_of(make_versions(CONFIG)[0], 0)
PROMPT = (5, 6, 7, 8)
_T = TypeVar("_T")


def run(body: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(asyncio.wait_for(body, 60))


def request(name: str, count: int = 30, done: Sequence[int] = ()) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.2, top_p=0.95, max_new_tokens=count, seed=4)
    return GenerateRequest(name, PROMPT, tuple(done), sampling, name)


async def collect(engine: EmbeddedEngine, *names: str) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {name: [] for name in names}
    left = set(names)
    while left:
        for chunk in await engine.next_chunks():
            if chunk.request_id in tokens:
                tokens[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is not FinishReason.UNFINISHED:
                left.discard(chunk.request_id)
    return tokens


async def said(engine: EmbeddedEngine, name: str, prompt: Sequence[int]) -> tuple[int, ...]:
    """The whole of one turn."""
    engine.submit(replace(request(name, 12), prompt_token_ids=tuple(prompt)))
    return (*prompt, *(await collect(engine, name))[name])


def test_six_turns_are_those_of_an_engine_that_computes_each_anew() -> None:
    async def played(*, keeps: bool) -> tuple[tuple[int, ...], int]:
        engine = EmbeddedEngine(CONFIG, slot_count=2)
        await engine.start()
        await engine.swap(BASE, SwapMode.RECOMPUTE_KV)
        tokens: tuple[int, ...] = PROMPT
        for turn in range(5):
            tokens = (*await said(engine, f"turn{turn}", tokens), 3, 4)
            if not keeps:
                engine._loop._table.weights_changed(keep_kv=False)  # the same weights, with nothing left in the cache
        counts = engine.stats()
        await engine.stop()
        assert counts.prompt_tokens == counts.prefilled_tokens + counts.shared_prompt_tokens
        return tokens, counts.prefilled_tokens

    (with_cache, prefilled), (without, all_prefilled) = run(played(keeps=True)), run(played(keeps=False))
    assert with_cache == without
    assert prefilled < all_prefilled / 5


async def generated(*requests: GenerateRequest, slot_count: int = 4) -> dict[str, list[int]]:
    engine = EmbeddedEngine(CONFIG, slot_count=slot_count)
    await engine.start()
    for one in requests:
        engine.submit(one)
    await engine.swap(BASE, SwapMode.RECOMPUTE_KV)
    tokens = await collect(engine, *(one.request_id for one in requests))
    await engine.stop()
    return tokens


def test_a_sequence_is_the_same_alone_and_in_any_batch() -> None:
    alone = run(generated(request("mine")))["mine"]
    others = [request(f"other{index}", count=10 + 7 * index) for index in range(6)]
    for slot_count in (1, 3, 8):
        assert run(generated(*others, request("mine"), slot_count=slot_count))["mine"] == alone


def test_a_continuation_on_another_worker_goes_on_in_the_same_random_stream() -> None:
    whole = run(generated(request("mine")))["mine"]
    for cut in (1, 13, 29):
        assert run(generated(request("mine", done=whole[:cut])))["mine"] == whole[cut:]


def test_the_seed_alone_chooses_the_stream() -> None:
    other = request("c")
    other = replace(other, sampling=replace(other.sampling, seed=5))
    tokens = run(generated(request("a"), request("b"), other))
    assert tokens["a"] == tokens["b"] != tokens["c"]


def test_a_slowed_engine_takes_that_much_longer() -> None:
    async def body() -> None:
        engine = EmbeddedEngine(CONFIG, slot_count=2, slowdown=4.0)
        await engine.start()
        await engine.swap(BASE, SwapMode.RECOMPUTE_KV)
        began = time.monotonic()
        engine.submit(request("slow"))
        await collect(engine, "slow")
        took_s = time.monotonic() - began
        # The pause after the last step is not waited for; all others are.
        assert took_s > 3.0 * engine.stats().decode_s * 0.9
        await engine.stop()

    run(body())


def test_stop_ends_with_sequences_running_and_consumers_waiting() -> None:
    async def body() -> None:
        engine = EmbeddedEngine(CONFIG, slot_count=2)
        await engine.start()
        waiting = asyncio.create_task(engine.next_chunks())
        engine.submit(request("never begun"))
        await engine.stop()
        assert await waiting == []
        assert await engine.next_chunks() == []
        with pytest.raises(EngineError, match="stopped"):
            engine.submit(request("too late"))
        with pytest.raises(EngineError, match="stopped"):
            await engine.swap(BASE, SwapMode.KEEP_KV)

    run(body())


def test_nothing_is_sampled_while_the_outbox_is_full() -> None:
    async def body() -> None:
        engine = EmbeddedEngine(CONFIG, slot_count=4, outbox=Outbox(20))
        await engine.start()
        await engine.swap(BASE, SwapMode.RECOMPUTE_KV)
        names = [f"r{index}" for index in range(4)]
        for name in names:
            engine.submit(request(name, count=60))
        while engine.stats().sampled_tokens < 20:
            await engine.fingerprint(1)  # commands are obeyed also when the box is full
        await engine.fingerprint(1)
        assert engine.stats().sampled_tokens < 20 + 4
        tokens = await collect(engine, *names)
        assert all(len(tokens[name]) == 60 for name in names)
        await engine.stop()

    run(body())


def test_outbox_joins_tokens_of_one_version_and_ends_with_its_failure() -> None:
    async def body() -> None:
        box = Outbox()
        box.bind(asyncio.get_running_loop(), lambda: None)

        def token(name: str, version: int, token_id: int) -> SampledToken:
            return SampledToken(name, version, FinishReason.UNFINISHED, token_id, -1.0, -2.0)  # type: ignore[arg-type]

        box.put([token("a", 1, 10), token("b", 1, 20)])
        box.put([token("a", 1, 11), token("a", 2, 12)])
        chunks = await box.take()
        assert [(c.request_id, c.token_ids, c.version) for c in chunks] == [
            ("a", (10, 11), 1),
            ("a", (12,), 2),
            ("b", (20,), 1),
        ]
        waiting = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.close(EngineError("the reason"))
        with pytest.raises(EngineError, match="the reason"):
            await waiting

    run(body())


def test_growing_sequences_linger_in_the_outbox_and_an_end_leaves_alone() -> None:
    async def body() -> None:
        box = Outbox(linger_s=30.0)
        box.bind(asyncio.get_running_loop(), lambda: None)

        def token(name: str = "a", reason: FinishReason = FinishReason.UNFINISHED) -> SampledToken:
            return SampledToken(name, Version(1), reason, 7, -1.0, -2.0)

        taking = asyncio.create_task(box.take())
        box.put([token()])
        assert [chunk.token_ids for chunk in await taking] == [(7,)], "the first after a pause need not wait"
        taking = asyncio.create_task(box.take())
        box.put([token(), token("b")])
        box.put([token(), token("b")])
        await asyncio.wait([taking], timeout=0.05)
        assert not taking.done()
        box.put([token("a", FinishReason.LENGTH)])
        assert [(chunk.request_id, chunk.token_ids) for chunk in await taking] == [("a", (7, 7, 7))]
        taking = asyncio.create_task(box.take())
        await asyncio.wait([taking], timeout=0.05)
        assert not taking.done(), "an end hurries nobody else"
        box.close()
        assert [(chunk.request_id, chunk.token_ids) for chunk in await taking] == [("b", (7, 7))]
        brief = Outbox(linger_s=0.01)
        brief.bind(asyncio.get_running_loop(), lambda: None)
        for _ in range(2):
            brief.put([token()])
            assert len(await brief.take()) == 1, "after a while growing ones leave too"
        brief.put([token()])
        brief.close()
        assert len(await brief.take()) == 1 and await brief.take() == []

    run(body())


def test_a_swap_waits_a_few_steps_for_sequences_about_to_end_and_admits_nothing_meanwhile() -> None:
    weights = LiveWeights(read_shape(CONFIG))
    box = Outbox()
    loop = StepLoop(weights, partial(CachedDecoder, weights), 2, 64, box)

    def swap(version: int, mode: SwapMode = SwapMode.RECOMPUTE_KV) -> None:
        staged = dataclasses.replace(BASE, version=Version(version))
        loop.swap(LiveSwap(staged.version, None, weights.checked(staged), mode))
        loop.run_commands()

    async def tokens() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for chunk in await box.take():
            found.setdefault(chunk.request_id, []).extend([chunk.version] * len(chunk.token_ids))
        return found

    with torch.inference_mode():
        swap(0)
        for name, count in (("short", 6), ("long", 50), ("next", 4)):
            loop.submit(request(name, count))
        loop.step()
        swap(1)
        assert loop.version == 0
        for _ in range(4):
            loop.step()
            assert loop.version == 0
        loop.step()
        assert loop.version == 1, "as soon as the short one has ended"
        loop.step()
        assert asyncio.run(tokens()) == {"short": [0] * 6, "long": [0] * 6 + [1], "next": [1]}
        swap(2, SwapMode.KEEP_KV)
        assert loop.version == 2, "kept caches cost nothing, so nothing is waited for"
        loop.step()
        loop.step()
        swap(3)
        loop.step()
        assert loop.version == 3, "the other one ended"
        swap(4)
        assert loop.version == 4, "what is left runs on for longer than a swap waits"


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="context_tokens"):
        EmbeddedEngine(CONFIG, context_tokens=10_000)
    with pytest.raises(ConfigError, match="slowdown"):
        EmbeddedEngine(CONFIG, slowdown=0.5)
    with pytest.raises(EngineError, match="slots"):
        EmbeddedEngine(CONFIG, slot_count=0)

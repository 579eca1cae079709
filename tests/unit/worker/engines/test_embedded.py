"""What the embedded engine promises beyond the contract: reproducible streams, back-pressure, an orderly end."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from echo2.base.errors import ConfigError, EngineError
from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
from echo2.worker.engines.embedded.forward import CachedDecoder, Products, _by_onednn
from echo2.worker.engines.embedded.live_weights import LiveWeights, read_shape
from echo2.worker.engines.embedded.loop import LiveSwap, StepLoop, draw
from echo2.worker.engines.embedded.slots import BlockPool, Fill
from echo2.worker.engines.engine import GenerateRequest, SwapMode
from echo2.worker.engines.outbox import Outbox, SampledToken
from echo2.worker.machine import memory_used_bytes
from tests.contract.engine_rig import keyframe_of, make_versions, tiny_config

CONFIG = tiny_config("qwen3")
BASE = keyframe_of(make_versions(CONFIG)[0], 0)
PROMPT = (5, 6, 7, 8)


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
    engine.submit(replace(request(name, 12), prompt_token_ids=tuple(prompt)))
    return (*prompt, *(await collect(engine, name))[name])


async def test_six_turns_are_those_of_an_engine_that_computes_each_anew() -> None:
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

    (with_cache, prefilled), (without, all_prefilled) = await played(keeps=True), await played(keeps=False)
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


async def test_a_sequence_is_the_same_alone_in_any_batch_and_as_another_workers_continuation() -> None:
    alone = (await generated(request("mine")))["mine"]
    others = [request(f"other{index}", count=10 + 7 * index) for index in range(6)]
    for slot_count, cut in ((1, 0), (3, 29), (8, 13)):
        continued = await generated(*others, request("mine", done=alone[:cut]), slot_count=slot_count)
        assert alone[:cut] + continued["mine"] == alone


async def test_stop_ends_with_sequences_running_and_consumers_waiting() -> None:
    engine = EmbeddedEngine(CONFIG, slot_count=2)
    await engine.start()
    waiting = asyncio.create_task(engine.next_chunks())
    engine.submit(request("never begun"))
    await engine.stop()
    assert await waiting == []
    assert await engine.next_chunks() == []
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(request("too late"))
    await engine.abort("too late")  # unknown, as it was refused
    with pytest.raises(EngineError, match="stopped"):
        await engine.swap(BASE, SwapMode.KEEP_KV)
    for option, wrong in (("context_tokens", 10_000), ("slowdown", 0.5), ("slot_count", 0)):
        with pytest.raises((ConfigError, EngineError), match=option.removesuffix("_count")):
            EmbeddedEngine(CONFIG, **{option: wrong})


async def test_nothing_is_sampled_while_the_outbox_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.worker.engines.outbox.TOKENS_MAX", 20)
    engine = EmbeddedEngine(CONFIG, slot_count=4, outbox=Outbox())
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


async def test_tokens_are_joined_in_the_outbox_growing_sequences_linger_and_an_end_leaves_alone() -> None:
    def token(name: str = "a", reason: FinishReason = FinishReason.UNFINISHED, version: int = 1) -> SampledToken:
        return SampledToken(name, Version(version), reason, 7, -1.0, -2.0)

    box = Outbox(linger_s=30.0)
    box.bind(asyncio.get_running_loop(), lambda: None)

    async def taken() -> list[tuple[str, int, int, bool]]:
        chunks, end = await box.take(), FinishReason.LENGTH
        return [(c.request_id, len(c.token_ids), c.version, c.finish_reason is end) for c in chunks]

    async def lingering() -> asyncio.Task[list[tuple[str, int, int, bool]]]:
        taking = asyncio.create_task(taken())
        await asyncio.wait([taking], timeout=0.05)
        assert not taking.done()
        return taking

    box.put([token(), token("b")])
    assert await taken() == [("a", 1, 1, False), ("b", 1, 1, False)], "the first after a pause need not wait"
    box.put([token(), token("b")])
    box.put([token(), token(version=2), token("b")])
    taking = await lingering()
    box.put([token("a", FinishReason.LENGTH, 2)])
    assert await taking == [("a", 2, 1, False), ("a", 2, 2, True)]
    taking = await lingering()  # an end hurries nobody else
    box.close(EngineError("the reason"))
    assert await taking == [("b", 2, 1, False)]
    with pytest.raises(EngineError, match="the reason"):
        await taken()
    box = Outbox(linger_s=0.01)
    box.bind(asyncio.get_running_loop(), lambda: None)
    for _ in range(2):
        box.put([token()])
        assert len(await taken()) == 1, "after a while growing ones leave too"
    box.close()
    assert await taken() == []


def test_a_swap_waits_a_few_steps_for_sequences_about_to_end_and_admits_nothing_meanwhile() -> None:
    weights = LiveWeights(read_shape(CONFIG))
    box = Outbox()
    loop = StepLoop(weights, partial(CachedDecoder, weights), 2, 64, box)

    def swap(version: int, mode: SwapMode = SwapMode.RECOMPUTE_KV) -> None:
        staged = replace(BASE, version=Version(version))
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


SLOTS, CONTEXT = 16, 8192


def test_a_few_tokens_in_many_slots_of_a_long_context_take_a_few_pages() -> None:
    config = tiny_config("qwen3", head_dim=64, num_key_value_heads=4, max_position_embeddings=CONTEXT)
    weights = LiveWeights(read_shape(config))
    blocks = BlockPool(SLOTS, CONTEXT)
    decoder = CachedDecoder(weights, blocks)
    with torch.inference_mode():
        decoder.warm_up()
        before = memory_used_bytes()
        for slot in range(SLOTS):
            assert blocks.reserve(slot, 8)
        decoder.fill([Fill(slot, 0, (1, 2, 3, 4, 5, 6, 7)) for slot in range(SLOTS)])
        decoder.decode([8] * SLOTS, list(range(SLOTS)), [7] * SLOTS)
    assert memory_used_bytes() - before < 12 << 20, "a page for each slot, head and layer is 768 MiB"


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
)


@settings(deadline=None, max_examples=40)
@given(params=st.lists(PARAMS, min_size=1, max_size=6), seed=st.integers(0, 10**6), number=st.floats(0, 1 - 2**-53))
def test_a_row_does_not_depend_on_its_neighbours(params: list[SamplingParams], seed: int, number: float) -> None:
    logits = torch.randn(len(params), 17, generator=torch.Generator().manual_seed(seed)) * 4
    together = draw(logits, params, [number] * len(params))
    for row, one in enumerate(params):
        alone = draw(logits[row : row + 1], [one], [number])
        _, logprob, raw = together[row]
        assert [(token, sampled) for token, sampled, _ in alone] == [together[row][:2]]
        assert -math.inf < logprob <= 0 and raw <= 0, "only a token that can be drawn is drawn"
    drawn = draw(logits[:1].repeat(801, 1), params[:1] * 801, [(i + 0.5) / 801 for i in range(801)])
    by_token = {token: logprob for token, logprob, _ in drawn}
    shares = Counter(token for token, _, _ in drawn)
    assert all(abs(shares[token] / 801 - math.exp(logprob)) < 2 / 801 for token, logprob in by_token.items())


def test_whichever_library_multiplies_gives_the_same_product() -> None:
    products, weights = Products(), [torch.randn(96, 64), torch.randn(64, 96)]
    with torch.inference_mode():
        products.choose(weights)
        for count, weight in itertools.product((1, 3, 8, 40, 300), weights):
            rows, bias = torch.randn(count, weight.shape[1]), torch.randn(weight.shape[0])
            expected = (rows.double() @ weight.double().T + bias).float()
            for found in (products.product(rows, weight, bias), _by_onednn(rows, weight, bias)):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

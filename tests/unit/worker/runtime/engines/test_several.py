"""Several engines behind one door: where groups go, and what a swap that fails on one of them leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from echo2.base.errors import ConfigError, EngineError
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.base.staged import StagedVersion
from echo2.worker.engine import GenerateRequest, SwapMode
from echo2.worker.runtime.engines.embedded import EmbeddedEngine
from echo2.worker.runtime.engines.several import NO_FINGERPRINT, SeveralEngines
from tests.contract.engine_rig import delta_of, keyframe_of, make_versions, tiny_config

CONFIG = tiny_config("qwen3")
MODELS = make_versions(CONFIG)
_T = TypeVar("_T")


class FailsOnce(EmbeddedEngine):
    """Refuses its next swap when told to, as an engine whose process is short of memory would."""

    fails = False

    async def swap(self, staged: StagedVersion, mode: SwapMode) -> float:
        if self.fails:
            self.fails = False
            raise EngineError(f"version {staged.version}: no memory")
        return await super().swap(staged, mode)


def run(test: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(asyncio.wait_for(test, 60))


def request(name: str, group: str, count: int = 40) -> GenerateRequest:
    return GenerateRequest(name, (1, 2, 3), (), SamplingParams(max_new_tokens=count), group)


def test_a_group_stays_together_and_new_groups_go_where_there_is_room() -> None:
    async def body() -> None:
        engines = [EmbeddedEngine(CONFIG, slot_count=8) for _ in range(2)]
        both = SeveralEngines(engines)
        await both.start()
        for group in "abc":
            for index in range(2):
                both.submit(request(f"{group}{index}", group))
        await both.swap(keyframe_of(MODELS[0], 0), SwapMode.RECOMPUTE_KV)
        both.submit(request("a2", "a"))
        with pytest.raises(EngineError, match="expected a new id"):
            both.submit(request("a2", "b"))
        for engine in engines:
            await engine.fingerprint(1)  # commands are obeyed in order: what was submitted is counted by now
        sizes = [engine.stats().running_sequences + engine.stats().waiting_sequences for engine in engines]
        ended = 0
        while ended < 7:
            ended += sum(chunk.finish_reason is not FinishReason.UNFINISHED for chunk in await both.next_chunks())
        assert both.stats().sampled_tokens == 7 * 40
        assert sorted(sizes) == [2, 5] or sum(sizes) < 7, "a, c on one engine and b on the other"
        both.submit(request("a2", "a", 1))  # ids are free again after their end
        await both.stop()

    run(body())


def test_a_swap_that_fails_on_one_engine_is_seen_and_whole_tensors_repair_it() -> None:
    async def body() -> None:
        steady, failing = EmbeddedEngine(CONFIG, slot_count=2), FailsOnce(CONFIG, slot_count=2)
        both = SeveralEngines([steady, failing])
        await both.start()
        await both.swap(keyframe_of(MODELS[0], 0), SwapMode.RECOMPUTE_KV)
        before = await both.fingerprint(5)
        failing.fails = True
        with pytest.raises(EngineError, match="engine 1 of 2: version 1: no memory"):
            await both.swap(delta_of(MODELS[0], MODELS[1], 0, 1), SwapMode.RECOMPUTE_KV)
        assert both.version is None
        assert await both.fingerprint(5) == NO_FINGERPRINT
        await both.swap(keyframe_of(MODELS[1], 1), SwapMode.RECOMPUTE_KV)
        assert both.version == 1
        assert await both.fingerprint(5) == await steady.fingerprint(5) != before
        await both.stop()

    run(body())


def test_no_engine_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        SeveralEngines([])

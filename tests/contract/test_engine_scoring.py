"""The scoring part of the contract of `worker.engine.Engine`: exact numbers under the live version and those kept before it,
from tokens alone, while generation goes on as if nothing had been asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from echo2.base.errors import EngineError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import SamplingParams
from echo2.scoring.columns import scores_of
from echo2.scoring.request import ScoreRequest, Stretch, TokenScores
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engine import SwapMode
from tests.contract.engine_rig import VOCAB_COUNT, Rig, refused, rounded_to_int8, tiny_config
from tests.contract.test_engine import KINDS, LONG, TOLERANCE, make_engine

FILTERED = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, stop_token_ids=(3, 9))
PLAIN = SamplingParams(stop_token_ids=(3,))
TOKENS = tuple(int(token) for token in np.random.default_rng(1).integers(0, VOCAB_COUNT, 90))


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    kind, model_type = request.param
    as_run = rounded_to_int8 if kind == "embedded-int8" else lambda model: model
    made = Rig(kind, tiny_config(model_type), lambda config: make_engine(kind, config), as_run)
    yield made
    made.close()


def stretch(version: int, first: int, count: int) -> Stretch:
    return Stretch(Version(version), first, count, GroupId("g"), 0)


def judged(rig: Rig, one: Stretch, sampling: SamplingParams) -> TokenScores:
    tokens, prompt = TOKENS[one.first : one.stop], TOKENS[: one.first]
    logprobs = rig.raw_logprobs(int(one.version), prompt, tokens)
    return scores_of(logprobs.float(), torch.tensor(tokens), sampling)


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_scores_are_those_of_the_version_named_and_generation_is_as_if_nothing_was_asked(
    rig: Rig,
    sampling: SamplingParams,
) -> None:
    async def body() -> None:
        alone = await rig.generate(rig.request((4, 5, 6), LONG))
        for version in (1, 2):
            await rig.engine.swap(rig.delta(version), SwapMode.RECOMPUTE_KV)
        assert {0, 1, 2} <= rig.engine.scorable
        key = 7
        live = await rig.engine.fingerprint(key)
        assert live == fingerprint({n: p.bfloat16() for n, p in rig.models[2].named_parameters()}, key)
        before = await rig.generate(rig.request((4, 5, 6), LONG))
        running = rig.submit(rig.request((4, 5, 6), LONG))
        asked = (stretch(0, 7, 60), stretch(2, 1, 89), stretch(1, 30, 1))
        found = await rig.engine.score(ScoreRequest("s", TOKENS, sampling, asked))
        await rig.finish(running)
        for one, scores in zip(asked, found, strict=True):
            for name, told, expected in zip(
                TokenScores.__slots__, scores.columns, judged(rig, one, sampling).columns, strict=True
            ):
                far = np.abs(np.maximum(told, -30.0) - np.maximum(expected, -30.0)).max()
                assert far < 10 * TOLERANCE, (name, one, far)
        if rig.engine.draws_by_seed:  # else no two requests draw the same
            assert running.token_ids == before[0].token_ids and running.token_ids != alone[0].token_ids
        assert await rig.engine.fingerprint(key) == live, "the live weights are back to the bit"

    rig.run(body)


def test_a_version_that_is_not_kept_and_tokens_that_cannot_be_are_refused(rig: Rig) -> None:
    async def body() -> None:
        unknown = ScoreRequest("s", TOKENS, PLAIN, (stretch(77, 3, 4),))
        await refused(rig.engine.score(unknown), EngineError)
        await refused(rig.engine.score(ScoreRequest("s", (1, VOCAB_COUNT), PLAIN, (stretch(0, 1, 1),))), EngineError)
        await refused(rig.engine.score(ScoreRequest("s", (1,) * 999, PLAIN, (stretch(0, 1, 1),))), EngineError)

    rig.run(body)


def test_what_is_kept_is_bounded_and_whole_tensors_are_steps_too(rig: Rig) -> None:
    """A version that overtook others arrives whole; what changed since the one before is kept all the same."""

    async def body() -> None:
        await rig.engine.swap(rig.keyframe(1), SwapMode.RECOMPUTE_KV)
        assert {0, 1} <= rig.engine.scorable
        (found,) = await rig.engine.score(ScoreRequest("s", TOKENS, PLAIN, (stretch(0, 5, 20),)))
        assert np.abs(found.logprobs - judged(rig, stretch(0, 5, 20), PLAIN).logprobs).max() < 10 * TOLERANCE

    rig.run(body)


def test_a_caller_that_gives_up_on_its_scores_leaves_the_engine_as_it_is(rig: Rig) -> None:
    """Whether the thread had begun with them or not."""

    async def body() -> None:
        (alone,) = await rig.generate(rig.request((4, 5, 6), LONG))
        running = rig.submit(rig.request((4, 5, 6), LONG))
        for pause_s in (0.0, 0.0, 0.001, 0.01):
            asked = asyncio.create_task(rig.engine.score(ScoreRequest("s", TOKENS, PLAIN, (stretch(0, 5, 20),))))
            await asyncio.sleep(pause_s)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await rig.finish(running)
        assert running.token_ids == alone.token_ids or not rig.engine.draws_by_seed
        assert await rig.engine.score(ScoreRequest("s", TOKENS, PLAIN, (stretch(0, 5, 20),)))

    rig.run(body)

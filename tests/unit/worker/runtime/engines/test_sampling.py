"""Drawing tokens: each row stands alone, filters follow their definition."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.noise import uniform
from echo2.base.rollout import SamplingParams
from echo2.worker.runtime.engines.sampling import draw

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
)


@settings(deadline=None, max_examples=80)
@given(params=st.lists(PARAMS, min_size=1, max_size=6), seed=st.integers(0, 10**6), number=st.floats(0, 1 - 2**-53))
def test_a_row_does_not_depend_on_its_neighbours(params: list[SamplingParams], seed: int, number: float) -> None:
    logits = torch.randn(len(params), 17, generator=torch.Generator().manual_seed(seed)) * 4
    together = draw(logits, params, [number] * len(params))
    for row, one in enumerate(params):
        alone = draw(logits[row : row + 1], [one], [number])
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.logprobs == [together.logprobs[row]]
        assert math.isfinite(together.logprobs[row]), "only a token that can be drawn is drawn"
        assert together.logprobs[row] <= 0 and together.raw_logprobs[row] <= 0


@settings(deadline=None, max_examples=60)
@given(params=PARAMS, seed=st.integers(0, 10**6))
def test_drawn_probabilities_add_up_to_one(params: SamplingParams, seed: int) -> None:
    count = 4001
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(seed)).repeat(count, 1)
    drawn = draw(logits, [params] * count, [(i + 0.5) / count for i in range(count)])
    by_token = dict(zip(drawn.token_ids, drawn.logprobs, strict=True))
    for token, logprob in by_token.items():
        assert abs(drawn.token_ids.count(token) / count - math.exp(logprob)) < 2 / count
    assert sum(math.exp(logprob) for logprob in by_token.values()) > 1 - 11 * 2 / count


def test_top_k_keeps_k_and_top_p_keeps_the_smallest_set() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def support(params: SamplingParams) -> set[int]:
        return set(draw(logits.repeat(200, 1), [params] * 200, [i / 200 for i in range(200)]).token_ids)

    assert support(SamplingParams(top_k=2)) == {0, 1}
    assert support(SamplingParams(top_p=0.79)) == {0, 1}
    assert support(SamplingParams(top_p=0.81)) == {0, 1, 2}
    assert support(SamplingParams(top_p=0.01)) == {0}
    assert support(SamplingParams(temperature=0.0)) == {0}


def test_uniform_numbers_fill_the_interval_evenly_and_streams_differ() -> None:
    numbers = [uniform(12345, position) for position in range(5000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    tenths = [sum(int(number * 10) == tenth for number in numbers) for tenth in range(10)]
    assert max(abs(count - 500) for count in tenths) < 5 * math.sqrt(450)
    assert len(set(numbers) | {uniform(12346, position) for position in range(5000)}) == 10_000

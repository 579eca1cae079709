"""The contract of `worker.engine.Engine`, for every engine: embedded by default, vLLM by its marker."""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from echo2.base.errors import EchoError, EngineError
from echo2.base.ids import Version
from echo2.base.rng import uniform
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.base.staged import TensorUpdate
from echo2.weights.fingerprint import fingerprint
from echo2.worker.engines.engine import Engine, SwapMode
from tests.contract.engine_rig import CONTEXT_TOKENS, VOCAB_COUNT, Collected, Rig, Staged, refused, tiny_config

TOLERANCE = 1e-4
RECOMPUTED_TOLERANCE = 1e-5
SHORT = SamplingParams(max_new_tokens=24, seed=5)
LONG = SamplingParams(max_new_tokens=160, seed=5)
KINDS = [
    pytest.param(("embedded", "qwen3"), id="embedded-qwen3"),
    pytest.param(("embedded", "llama"), id="embedded-llama", marks=pytest.mark.soak),  # test_families plays it at lag 0
    pytest.param(("several", "qwen3"), id="several-qwen3"),
    pytest.param(("embedded-general", "gemma3_text"), id="embedded-general-gemma3", marks=pytest.mark.soak),
    pytest.param(("embedded-general", "qwen3_moe"), id="embedded-general-qwen3-moe"),
    pytest.param(("vllm", "qwen3"), id="vllm-qwen3", marks=pytest.mark.vllm),
    pytest.param(("vllm", "llama"), id="vllm-llama", marks=pytest.mark.vllm),
    pytest.param(("vllm", "qwen3_moe"), id="vllm-qwen3-moe", marks=pytest.mark.vllm),
    pytest.param(("vllm-2-ranks", "qwen3"), id="vllm-2-ranks-qwen3", marks=pytest.mark.vllm),
    pytest.param(("vllm-drafts", "qwen3"), id="vllm-drafts-qwen3", marks=pytest.mark.vllm),
]


def make_engine(kind: str, config: dict[str, object]) -> Engine:
    if kind.startswith(("embedded", "several")):
        from echo2.worker.engines.embedded.embedded_engine import EmbeddedEngine
        from echo2.worker.engines.making import SeveralEngines

        if kind == "several":
            return SeveralEngines([EmbeddedEngine(config, slot_count=8) for _ in range(2)])
        return EmbeddedEngine(config, slot_count=8)
    from echo2.worker.engines.vllm.vllm_engine import VllmEngine

    gpus = (0, 1) if kind == "vllm-2-ranks" else ()
    return VllmEngine(config, slot_count=8, gpus=gpus, draft_tokens=3 if kind == "vllm-drafts" else 0)


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    kind, model_type = request.param
    made = Rig(kind, tiny_config(model_type), lambda config: make_engine(kind, config))
    yield made
    made.close()


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCAB_COUNT) for _ in range(rng.randint(1, 20))) for _ in range(count)]


def sampling_logprobs(raw_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The sampling distribution, by its definition."""
    scaled = torch.log_softmax(raw_V.double() / params.temperature, dim=-1)
    order = scaled.argsort(descending=True)
    kept = order[: params.top_k or len(order)]
    probs = scaled[kept].softmax(dim=-1)
    kept = kept[(probs.cumsum(-1) - probs) < params.top_p]
    out = torch.full_like(scaled, -torch.inf)
    out[kept] = scaled[kept] - torch.logsumexp(scaled[kept], 0)
    return out


async def test_logprobs_agree_with_the_full_forward_for_more_sequences_than_slots_and_siblings_differ(rig: Rig) -> None:
    sampled = dataclasses.replace(SHORT, temperature=0.8, top_k=30, top_p=0.9)
    shared = prompts(1, seed=3)[0] + (1, 2, 3, 4)
    siblings = [rig.request(shared, dataclasses.replace(LONG, seed=seed), prefix="group") for seed in range(12)]
    requests = [
        rig.request(prompt, dataclasses.replace(sampled, max_new_tokens=4 + 5 * i))
        for i, prompt in enumerate(prompts(14))
    ]
    before = rig.engine.stats().sampled_tokens
    found = await rig.generate(*requests, *siblings)
    assert rig.engine.stats().sampled_tokens - before == sum(len(s.token_ids) for s in found)
    for request, got in zip([*requests, *siblings], found, strict=True):
        assert len(got.token_ids) == request.sampling.max_new_tokens and set(got.versions) == {0}
        assert rig.worst(request.prompt_token_ids, got) < TOLERANCE
    for request, got in zip(requests, found, strict=False):
        judged = rig.raw_logprobs(0, request.prompt_token_ids, got.token_ids)
        for at, token in enumerate(got.token_ids):
            assert abs(float(sampling_logprobs(judged[at], sampled)[token]) - got.logprobs[at]) < TOLERANCE
    assert len({tuple(sibling.token_ids) for sibling in found[len(requests) :]}) == len(siblings)


def chi_squared_is_small(drawn: Counter[int], expected_V: torch.Tensor) -> bool:
    """Below mean + 5 sigma of a chi-squared with that many degrees of freedom: fails by chance about once in a million."""
    likely = [token for token in range(VOCAB_COUNT) if expected_V[token] >= 5]
    total = sum((drawn[t] - float(expected_V[t])) ** 2 / float(expected_V[t]) for t in likely)
    return total < len(likely) + 5 * math.sqrt(2 * len(likely))


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 1.7, "top_k": 12}, {"temperature": 0.9, "top_p": 0.6}],
    ids=["plain", "hot", "top-p"],
)
async def test_tokens_follow_the_distribution_and_are_picked_by_their_seed(rig: Rig, filters: dict[str, float]) -> None:
    """What a learner relies on that tests them: the same tokens also for a sequence that goes on elsewhere, beside others."""
    sampling = dataclasses.replace(SHORT, **filters)  # type: ignore[arg-type]
    if not rig.engine.draws_by_seed:
        count, prompt, params = 1200, (3, 1, 4), dataclasses.replace(sampling, max_new_tokens=1)
        requests = [rig.request(prompt, dataclasses.replace(params, seed=seed), prefix="same") for seed in range(count)]
        drawn = Counter(sequence.token_ids[0] for sequence in await rig.generate(*requests))
        expected = sampling_logprobs(rig.raw_logprobs(0, prompt, (0,))[0], params).exp()
        assert all(expected[token] > 0 for token in drawn) and chi_squared_is_small(drawn, count * expected)
        return
    seeded = prompts(1, seed=14)[0]
    others = [rig.request(other, LONG) for other in prompts(3, seed=15)]
    (whole,) = await rig.generate(rig.request(seeded, sampling))
    rest, *_ = await rig.generate(rig.request(seeded, sampling, done=whole.token_ids[:9]), *others)
    assert whole.token_ids[:9] + rest.token_ids == whole.token_ids
    for place, token in enumerate(whole.token_ids):
        raw_V = rig.raw_logprobs(0, seeded, whole.token_ids[: place + 1])[place]
        chances_V = sampling_logprobs(raw_V, sampling).exp()
        below = float(chances_V[:token].sum())
        assert below - TOLERANCE <= uniform(sampling.seed, place) <= below + float(chances_V[token]) + TOLERANCE


@pytest.mark.vllm
def test_second_tokens_follow_the_distribution_where_the_prompt_invites_a_guess() -> None:
    rig = Rig("vllm-drafts", tiny_config("qwen3"), lambda config: make_engine("vllm-drafts", config))
    count = 800
    params = SamplingParams(max_new_tokens=2, temperature=0.7)
    # Ends in 7, after which the prompt knows 40 tokens, and one more after each of those: a guess at the second token.
    guesses = {first: (5 * first + 3) % VOCAB_COUNT for first in range(40)}
    prompt = (*(token for first, guess in guesses.items() for token in (7, first, guess)), 7)

    async def body() -> None:
        requests = [rig.request(prompt, dataclasses.replace(params, seed=seed), prefix="same") for seed in range(count)]
        drawn = [tuple(sequence.token_ids) for sequence in await rig.generate(*requests)]
        after = {
            first: sampling_logprobs(rig.raw_logprobs(0, prompt, (first, 0))[1], params).exp()
            for first in {pair[0] for pair in drawn}
        }
        chances = [float(after[first][guesses[first]]) for first, _ in drawn if first in guesses]
        guessed = sum(second == guesses.get(first) for first, second in drawn)
        assert len(chances) > count / 4, "many second tokens could be guessed"
        assert abs(guessed - sum(chances)) < 5 * math.sqrt(sum(chances) + 1)
        expected = torch.stack([after[first] for first, _ in drawn]).sum(0)
        assert chi_squared_is_small(Counter(second for _, second in drawn), expected)

    rig.run(body)
    rig.close()


async def test_greedy_takes_the_likeliest_and_sequences_stop_at_a_stop_token_or_their_budget(rig: Rig) -> None:
    prompt = prompts(1, seed=5)[0]
    (free,) = await rig.generate(rig.request(prompt, dataclasses.replace(SHORT, temperature=0.0)))
    assert free.token_ids == rig.raw_logprobs(0, prompt, free.token_ids).argmax(dim=-1).tolist()
    assert free.logprobs == [0.0] * len(free.token_ids)
    stop = free.token_ids[-1]
    until = free.token_ids.index(stop) + 1
    stopping = dataclasses.replace(SHORT, temperature=0.0, stop_token_ids=(stop,))
    full = dataclasses.replace(SHORT, max_new_tokens=CONTEXT_TOKENS - len(prompt))
    stopped, filled = await rig.generate(rig.request(prompt, stopping), rig.request(prompt, full))
    assert free.finish_reason is filled.finish_reason is FinishReason.LENGTH
    assert (stopped.finish_reason, stopped.token_ids) == (FinishReason.STOP, free.token_ids[:until])
    assert len(prompt) + len(filled.token_ids) == CONTEXT_TOKENS


def all_grew(sequences: list[Collected], before: list[int]) -> bool:
    return all(len(sequence.token_ids) > count for sequence, count in zip(sequences, before, strict=True))


async def test_recomputed_cache_makes_new_tokens_exact_under_the_new_weights(rig: Rig) -> None:
    asked = [*prompts(5, seed=6), (1, 2, 3), (1, 2, 3), (1, 2, 3)]
    sequences = [rig.submit(rig.request(prompt, LONG, prefix=str(prompt))) for prompt in asked]
    for version in (1, 2):
        before = [len(sequence.token_ids) for sequence in sequences]
        await rig.wait(partial(all_grew, sequences, before))
        await rig.engine.swap(rig.delta(version), SwapMode.RECOMPUTE_KV)
        assert rig.engine.version == version
    await rig.finish(*sequences)
    for prompt, sequence in zip(asked, sequences, strict=True):
        assert sequence.versions == sorted(sequence.versions)
        assert set(sequence.versions) == {0, 1, 2}
        assert rig.worst(prompt, sequence) < RECOMPUTED_TOLERANCE


async def test_kept_cache_goes_on_at_once_and_new_sequences_are_exact(rig: Rig) -> None:
    prompt = prompts(1, seed=8)[0] + (5, 6)
    running = [rig.submit(rig.request(prompt, LONG, prefix="kept")) for _ in range(3)]
    await rig.wait(lambda: all(len(sequence.token_ids) > 5 for sequence in running))
    await rig.engine.swap(rig.delta(1), SwapMode.KEEP_KV)
    fresh = rig.submit(rig.request(prompt, LONG, prefix="kept"))
    await rig.finish(*running, fresh)
    assert set(fresh.versions) == {1}
    assert rig.worst(prompt, fresh) < TOLERANCE
    for sequence in running:
        assert set(sequence.versions) == {0, 1}
        assert len(sequence.token_ids) == LONG.max_new_tokens


async def test_finish_first_lets_running_sequences_end_under_the_old_weights(rig: Rig) -> None:
    running = [rig.submit(rig.request(prompt, LONG)) for prompt in prompts(4, seed=9)]
    await rig.wait(lambda: all(sequence.token_ids for sequence in running))
    await rig.engine.swap(rig.delta(1), SwapMode.FINISH_FIRST)
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in running) or rig.kind.startswith("embedded")
    (later,) = await rig.generate(rig.request((1, 2), SHORT))
    await rig.finish(*running)
    assert {version for sequence in running for version in sequence.versions} == {0}
    assert set(later.versions) == {1}


async def test_an_aborted_sequence_gives_back_its_tokens_and_resumes_under_another_version(rig: Rig) -> None:
    prompt = prompts(1, seed=10)[0]
    request = rig.request(prompt, LONG)
    first = rig.submit(request)
    await rig.wait(lambda: len(first.token_ids) > 10)
    await rig.engine.abort(request.request_id)
    await rig.finish(first)
    assert first.finish_reason is FinishReason.ABORTED
    assert rig.worst(prompt, first) < TOLERANCE
    await rig.engine.swap(rig.delta(1), SwapMode.KEEP_KV)
    (rest,) = await rig.generate(rig.request(prompt, LONG, done=first.token_ids))
    assert len(first.token_ids) + len(rest.token_ids) == LONG.max_new_tokens
    assert set(rest.versions) == {1}
    assert rig.worst(prompt, rest, done=first.token_ids) < TOLERANCE


async def test_a_waiting_sequence_can_be_aborted_and_unknown_ids_are_ignored(rig: Rig) -> None:
    requests = [rig.request(prompt, LONG) for prompt in prompts(20, seed=11)]
    sequences = [rig.submit(request) for request in requests]
    await rig.engine.abort("nobody")
    for request in reversed(requests):  # the waiting ones first, or they would be seated in freed slots
        await rig.engine.abort(request.request_id)
        await rig.engine.abort(request.request_id)
    await rig.finish(*sequences)
    assert sequences[-1].finish_reason is FinishReason.ABORTED
    assert sequences[-1].token_ids == []


def _broken(rig: Rig, how: str) -> Staged:
    tensors = sorted(rig.delta(1).tensors, key=lambda update: len(update.bits))
    good = dataclasses.replace(rig.delta(1), tensors=tensors)  # the tensor that changes most comes last
    last = tensors[-1]
    replaced: dict[str, TensorUpdate] = {
        "unknown name": dataclasses.replace(last, name="model.layers.9.mlp.up_proj.weight"),
        "shape": dataclasses.replace(last, shape=(*last.shape, 1)),
        "dtype": dataclasses.replace(last, dtype="float32", bits=last.bits.astype(np.uint32)),
        "past the end": dataclasses.replace(last, indices=last.indices + (1 << 40)),
        "unsorted": dataclasses.replace(last, indices=np.zeros_like(last.indices)),
        "too few values": dataclasses.replace(last, bits=last.bits[:-1]),
    }
    if how == "other base":
        return dataclasses.replace(good, parent=Version(5))
    if how == "missing tensor":
        return dataclasses.replace(rig.keyframe(1), tensors=rig.keyframe(1).tensors[:-1])
    if how == "twice":
        return dataclasses.replace(good, tensors=[*good.tensors, last])
    return dataclasses.replace(good, tensors=[*good.tensors[:-1], replaced[how]])


HOWS = (
    "unknown name", "shape", "dtype", "past the end", "unsorted", "too few values", "other base", "missing tensor", "twice",
)  # fmt: skip


async def test_a_failed_swap_leaves_the_old_version_live(rig: Rig) -> None:
    before = await rig.engine.fingerprint(11)
    prompt = prompts(1, seed=12)[0]
    for how in HOWS:
        running = rig.submit(rig.request(prompt, SHORT))
        await refused(rig.engine.swap(_broken(rig, how), SwapMode.RECOMPUTE_KV), EngineError)
        assert rig.engine.version == 0 and await rig.engine.fingerprint(11) == before, how
        await rig.finish(running)
        assert rig.worst(prompt, running) < TOLERANCE, how


async def test_fingerprint_is_that_of_the_published_weights_bit_for_bit(rig: Rig) -> None:
    assert await rig.engine.fingerprint(99) == fingerprint(rig.published(0), 99)
    await rig.engine.swap(rig.delta(1), SwapMode.RECOMPUTE_KV)
    assert await rig.engine.fingerprint(99) == fingerprint(rig.published(1), 99)
    await rig.engine.swap(rig.keyframe(2), SwapMode.RECOMPUTE_KV)
    assert await rig.engine.fingerprint(7) == fingerprint(rig.published(2), 7) != fingerprint(rig.published(1), 7)
    expected = rig.published(2)
    name, tensor = next(iter(expected.items()))
    odd = np.array([0x7FC1, 0x8000, 0xFF80, 0x0001], np.uint16)  # not a number and negative zero among them
    update = TensorUpdate(name, "bfloat16", tuple(tensor.shape), np.arange(4, dtype=np.int64), odd)
    await rig.engine.swap(Staged(Version(3), Version(2), [update]), SwapMode.RECOMPUTE_KV)
    tensor.view(torch.int16).reshape(-1)[:4] = torch.from_numpy(odd.view(np.int16))
    assert await rig.engine.fingerprint(3) == fingerprint(expected, 3)


async def test_bad_requests_are_refused_at_once_and_ids_can_be_used_again_after_their_end(rig: Rig) -> None:
    good = rig.request((1, 2), SHORT)
    bad = [
        dataclasses.replace(good, prompt_token_ids=()),
        dataclasses.replace(good, prompt_token_ids=(0, VOCAB_COUNT)),
        dataclasses.replace(good, prompt_token_ids=(-1,)),
        dataclasses.replace(good, prompt_token_ids=(1,) * CONTEXT_TOKENS),
        dataclasses.replace(good, sampling=dataclasses.replace(SHORT, max_new_tokens=CONTEXT_TOKENS - 1)),
        dataclasses.replace(good, token_ids=(1,) * SHORT.max_new_tokens),
        dataclasses.replace(good, token_ids=(4,), sampling=dataclasses.replace(SHORT, stop_token_ids=(4,))),
    ]
    if rig.kind.startswith("vllm"):  # which raises one to 0.01 and refuses the other
        bad += [dataclasses.replace(good, sampling=dataclasses.replace(SHORT, temperature=t)) for t in (1e-3, 2.0)]
        object.__setattr__(bad[-1].sampling, "temperature", 2.5)
    for request in bad:
        with pytest.raises(EchoError, match=good.request_id):
            rig.engine.submit(request)
    for _ in range(2):
        running = rig.submit(good)
        with pytest.raises(EchoError, match=good.request_id):
            rig.engine.submit(good)
        await rig.finish(running)
        assert len(running.token_ids) == SHORT.max_new_tokens
    stats = rig.engine.stats()
    assert (stats.running_sequences, stats.waiting_sequences) == (0, 0)

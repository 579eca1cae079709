"""Which tokens are scored under which version, behind which cache, by which random numbers; which rollouts are looked at."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rng import rollout_seed, turn_seed, uniform
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.audit import (
    DAY_S,
    MEASURED_TOKENS,
    WAITING_MAX,
    AuditDraw,
    Bets,
    Evidence,
    Habits,
    KindNoise,
    Passage,
    Piece,
    TokenScores,
    examine,
    passage_of,
    pieces_of,
)
from echo2.learner.auditor import Auditor
from echo2.learner.rollouts.groups import Insertion, SentTokens, TrainGroup
from tests.patience import WAIT_S

A, B = PeerId("a"), PeerId("b")
SEED = 77
Senders = list[tuple[PeerId, int]]


def rollout_of(spans: list[tuple[int, int]], index: int) -> Rollout:
    count = sum(length for _, length in spans)
    numbers = tuple(-float(n) for n in range(count))
    token_ids = tuple(range(100, 100 + count))
    version_spans = tuple(VersionSpan(Version(version), length) for version, length in spans)
    return Rollout(GroupId("g"), index, token_ids, numbers, numbers, version_spans, FinishReason.STOP)


def group_of(
    spans: list[tuple[int, int]], senders: Senders, said: tuple[Insertion, ...] = (), index: int = 0
) -> TrainGroup:
    sent = tuple(SentTokens(peer, count) for peer, count in senders)
    spec = GroupSpec(GroupId("g"), (5, 6), 4, SamplingParams(seed=SEED), 0)
    return TrainGroup(spec, 0, (rollout_of(spans, index),), (1.0,), (said,) if said else (), (sent,))


def passage(
    spans: list[tuple[int, int]],
    senders: Senders,
    keeps: bool = False,
    said: tuple[Insertion, ...] = (),
    index: int = 0,
) -> Passage:
    return passage_of(group_of(spans, senders, said, index), 0, lambda peer: Habits(True, keeps and peer == A))


def test_the_numbers_of_each_turn_begin_anew_and_are_those_that_its_lease_gave() -> None:
    one = passage([(4, 3), (6, 4)], [(A, 7)], said=(Insertion(3, (40,)), Insertion(5, ())), index=2)
    seeds = [rollout_seed(SEED, 2), rollout_seed(turn_seed(SEED, 2, 1), 0), rollout_seed(turn_seed(SEED, 2, 2), 0)]
    expected = [uniform(seeds[0], n) for n in range(3)] + [uniform(seed, n) for seed in seeds[1:] for n in range(2)]
    assert one.uniforms.tolist() == expected
    assert one.token_ids == (5, 6, 100, 101, 102, 40, 103, 104, 105, 106)
    assert one.places.tolist() == [2, 3, 4, 6, 7, 8, 9]


class Watched:
    """A `Scorer` of versions 4 and 6 whose scores are the version, and what it was asked."""

    is_of_trainer, versions = True, [Version(4), Version(6)]

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int | None]] = []

    def keep(self, version: Version, tensors: object) -> None: ...

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]:
        self.asked += [(version, piece.start, cached) for _, piece in asked]
        return [TokenScores(*[np.full(piece.stop - piece.start, float(version))] * 8) for _, piece in asked]


def test_each_version_is_loaded_once_and_caches_are_handed_on() -> None:
    scorer = Watched()
    (found,) = examine([passage([(2, 2), (4, 3), (6, 1)], [(A, 6)])], scorer)
    assert [(one.piece.version, one.exact.logprobs[0]) for one in found] == [(4, 4.0), (6, 6.0)]
    assert found[0].claimed.tolist() == [-2.0, -3.0, -4.0] and len(found[0].uniforms) == 3
    scorer.asked.clear()
    examine([passage([(4, 3), (6, 1)], [(A, 4)], keeps=True)], scorer)
    assert scorer.asked == [(4, 0, 0), (6, 3, 4)], "the last token of a piece is not in the cache yet"
    assert examine([passage([(2, 3), (6, 1)], [(A, 4)], keeps=True)], scorer) == [[]], (
        "nothing is known behind a lost cache"
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=5),
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 4)), max_size=5),
    st.lists(st.integers(0, 12), max_size=3, unique=True),
    st.booleans(),
)
def test_pieces_are_cut_wherever_a_token_differs_from_the_one_before(
    spans: list[tuple[int, int]], senders: Senders, turns: list[int], keeps: bool
) -> None:
    """Token by token, which for long rollouts takes too long."""
    versions = [version for version, count in spans for _ in range(count)]
    peers = [peer for peer, count in senders for _ in range(count)]
    said = tuple(Insertion(position, ()) for position in sorted(turns))
    end = min(len(versions), len(peers))
    pieces = pieces_of(group_of(spans, senders, said), 0, lambda peer: Habits(peer == B, keeps))
    assert [n for piece in pieces for n in range(piece.start, piece.stop)] == list(range(end))
    for piece in pieces:
        own = range(piece.start, piece.stop)
        assert {versions[n] for n in own} == {piece.version} and {peers[n] for n in own} == {piece.worker}
        assert not set(turns) & set(own[1:]) and piece.draws_by_seed == (piece.worker == B)
    for before, piece in itertools.pairwise(pieces):
        assert piece.keeps_cache == (keeps and piece.start not in turns and before.worker == piece.worker)


# ---- which rollouts


def trained(worker: PeerId, is_long: bool) -> Passage:
    return passage([(2, 60 if is_long else 3)], [(worker, 60 if is_long else 3)])


def considered(draw: AuditDraw, worker: PeerId, one: Passage, draws_by_seed: bool = True) -> None:
    if draw.falls_on(worker, draws_by_seed=draws_by_seed):
        draw.add(worker, one)


def test_every_worker_and_every_length_is_audited_also_when_the_audit_is_far_behind() -> None:
    draw, long, short = AuditDraw(1.0, random.Random(1)), {}, {}
    for worker in (A, B):
        long[worker], short[worker] = trained(worker, True), trained(worker, False)
    seen: Counter[tuple[PeerId, bool]] = Counter()
    looked: Counter[tuple[PeerId, bool]] = Counter()
    for _ in range(60):
        for number in range(40):
            worker, is_long = (A if number % 8 else B), number % 20 == 0
            seen[worker, is_long] += 1
            considered(draw, worker, (long if is_long else short)[worker])
        for worker, one in draw.take(120):  # about a third of what is drawn
            looked[worker, len(one.places) > 3] += 1
            draw.on_audit(worker, len(one.places))
    assert len(draw.waiting) <= WAITING_MAX and draw.given_up > 0
    shares = {kind: looked[kind] / seen[kind] for kind in seen}
    assert len(shares) == 4 and min(shares.values()) >= 0.1, shares
    assert max(draw.unaudited.values()) <= 0.9


def test_a_worker_that_cannot_draw_by_its_seeds_is_audited_more_often() -> None:
    draw, counts = AuditDraw(0.1, random.Random(2)), Counter[PeerId]()
    rollouts = {worker: trained(worker, False) for worker in (A, B)}
    for number in range(4000):
        worker = A if number % 2 else B
        considered(draw, worker, rollouts[worker], draws_by_seed=worker == A)
        for drawn, _ in draw.take(1 << 20) if draw.waiting else ():
            counts[drawn] += number > 2000
            draw.on_audit(drawn, 3)
    assert 2.0 < counts[B] / counts[A] < 4.5


def test_what_could_not_be_scored_is_counted_and_a_released_worker_is_a_newcomer() -> None:
    draw = AuditDraw(0.01, random.Random(3))
    considered(draw, A, trained(A, True))
    draw.take(1)
    draw.on_audit(A, 0)
    assert draw.given_up == 1
    for _ in range(200):
        considered(draw, A, trained(A, True))
    assert 30 <= len(draw.waiting) < 60, "all of its first tokens, and then few"
    assert draw.unaudited == {A: 1.0}, "what was given up is not audited"
    draw.forget(A)
    assert not draw.waiting
    considered(draw, A, trained(A, True))
    assert len(draw.waiting) == 1


def test_who_was_audited_least_comes_first() -> None:
    draw, one = AuditDraw(1.0, random.Random(4)), trained(B, False)
    for _ in range(9):
        considered(draw, B, one)
    for worker, _ in draw.take(1 << 20):
        draw.on_audit(worker, 3)
    for worker in (*[B] * 9, A):
        considered(draw, worker, trained(worker, False))
    assert draw.take(1)[0][0] == A


# ---- the bets, on engines made up for them

TOKENS, VOCABULARY = 50, 12


def piece_of(rng: np.random.Generator, noise_nats: float, *, heavy: bool = False, picks: str = "leased") -> Evidence:
    """A piece of an engine whose logits are off by noise. It picks by the `leased` number, by `others`, or `near` it: anywhere
    in the band that noise of 0.05 nats could explain at most."""
    scores = rng.normal(0.0, 1.5, (TOKENS, VOCABULARY))
    size = noise_nats * (rng.choice([0.5, 4.0], (TOKENS, 1), p=[0.95, 0.05]) if heavy else 1.0)
    logs, off = (
        values - np.logaddexp.reduce(values, -1, keepdims=True)
        for values in (scores, scores + size * rng.standard_normal(scores.shape))
    )
    numbers = rng.random(TOKENS)
    used = numbers
    if picks == "others":
        used = rng.random(TOKENS)
    if picks == "near":
        used = np.clip(numbers + 0.3 * np.sqrt(numbers * (1 - numbers)) * rng.uniform(-1, 1, TOKENS), 0.0, 1.0 - 1e-9)
    taken, pick = (
        (np.exp(values).cumsum(-1) / np.exp(values).sum(-1, keepdims=True) <= by[:, None]).sum(-1)
        for values, by in ((off, used), (logs, numbers))
    )
    rows, chances = np.arange(TOKENS), np.exp(logs)
    sums = np.concatenate([np.zeros((TOKENS, 1)), chances.cumsum(-1)], -1)
    squares = np.concatenate([np.zeros((TOKENS, 1)), np.square(chances).cumsum(-1)], -1)
    spreads = np.sqrt((1 - sums) ** 2 * squares + sums**2 * (squares[:, -1:] - squares))
    drawn = logs[rows, taken]
    exact = TokenScores(
        drawn, drawn, (chances * logs).sum(-1), (taken == pick).astype(float),
        sums[rows, pick], sums[rows, pick + 1], spreads[rows, pick], spreads[rows, pick + 1],
    )  # fmt: skip
    return Evidence(Piece(A, Version(2), 0, TOKENS, draws_by_seed=True), off[rows, taken], exact, numbers)


def others(kind: str, nats: float, count: int = 4) -> KindNoise:
    noise, rng = KindNoise(), np.random.default_rng(0)
    for number in range(count):
        noise.observe(PeerId(f"other{number}"), kind, nats * rng.standard_normal(MEASURED_TOKENS))
    return noise


def accused(noise_nats: float, kind: str, noise: KindNoise, pieces: int = 200, **how: Any) -> tuple[int, Bets]:
    """Tokens until the worker is accused (0: it is not), and its bets."""
    rng, bets = np.random.default_rng(7), Bets(0.0)
    for _ in range(pieces):
        evidence = piece_of(rng, noise_nats, **how)
        bets.observe(evidence, kind, noise)
        noise.observe(A, kind, evidence.claimed - evidence.exact.logprobs)
        if bets.accusation is not None:
            return bets.tokens, bets
    return 0, bets


@pytest.mark.parametrize(
    ("nats", "kind", "heavy", "is_known"),
    [
        (0.0, "vllm none", False, True),
        (0.002, "vllm none", True, False),
        (0.05, "vllm none", True, True),
        (0.05, "vllm none", False, False),
        (0.28, "vllm fp8", True, True),
    ],
)
def test_an_honest_engine_is_accused_of_nothing_whatever_the_noise_of_its_kind(
    nats: float, kind: str, heavy: bool, is_known: bool
) -> None:
    tokens, bets = accused(nats, kind, others(kind, nats) if is_known else KindNoise(), heavy=heavy)
    assert not tokens, bets.accusation


def test_an_engine_off_by_more_than_its_kind_is_found_and_by_less_is_not() -> None:
    assert accused(0.05, "embedded none", others("embedded none", 0.002))[0]
    assert not accused(0.05, "embedded none", others("embedded none", 0.03))[0], "its card may be another one"
    assert not accused(0.05, "embedded none", others("vllm none", 0.002))[0], "another kind's noise says nothing of it"
    _, bets = accused(0.2, "embedded none", others("embedded none", 0.09))
    assert bets.log_wealths["numbers"] > 100, "what is measured of a kind widens nothing beyond its prior"


def test_one_liar_cannot_widen_what_is_measured_of_its_kind() -> None:
    noise = others("embedded none", 0.002, count=3)
    noise.observe(PeerId("liar"), "embedded none", np.full(MEASURED_TOKENS, 0.09))
    assert accused(0.05, "embedded none", noise)[0]


@pytest.mark.parametrize("own_noise", [0.0, 0.045])
def test_a_worker_that_draws_anywhere_inside_its_noise_is_found(own_noise: float) -> None:
    """Its numbers are honest, or have the noise that is allowed: its misses come more often than such noise explains."""
    for noise in (others("embedded none", 0.03), KindNoise()):
        tokens, bets = accused(own_noise, "embedded none", noise, picks="near")
        assert 0 < tokens <= 1500, bets.log_wealths
        assert bets.accusation is not None and "than its noise explains" in bets.accusation.text


def test_tokens_of_other_random_numbers_are_found_for_certain_whatever_is_measured() -> None:
    tokens, bets = accused(0.0, "embedded none", KindNoise(), picks="others")
    assert tokens and bets.accusation is not None and bets.accusation.is_certain, bets.log_wealths
    noise = KindNoise()
    noise.observe(A, "embedded none", np.full(MEASURED_TOKENS, 50.0))
    assert noise.of_worker(A) == pytest.approx(0.8), "no token counts as more than a cap"


def test_the_evidence_of_a_day_is_not_carried_over_and_lifted_noise_is_not_bet_on() -> None:
    noise = others("embedded none", 0.002)
    _, bets = accused(0.05, "embedded none", noise)
    assert bets.accusation is not None and not bets.accusation.is_certain
    bets.expire(DAY_S)
    assert bets.accusation is None and not bets.tokens
    excused, rng = Bets(0.0, excuses_noise=True), np.random.default_rng(1)
    for _ in range(60):
        excused.observe(piece_of(rng, 0.05), "embedded none", noise)
    assert excused.accusation is None


# ---- the auditor


class Off(Watched):
    """Scores that are `nats` off what the worker claims; a call takes `takes_s`."""

    def __init__(self, nats: float, takes_s: float = 0.0) -> None:
        super().__init__()
        self.nats, self.takes_s, self.at_s = nats, takes_s, list[float]()

    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]:
        self.at_s.append(time.monotonic())
        time.sleep(self.takes_s)
        claimed = [passage.claimed[piece.start : piece.stop] for passage, piece in asked]
        return [TokenScores(one + self.nats, *[np.zeros(len(one))] * 6, np.ones(len(one))) for one in claimed]


class Workers:
    """A worker whose engine cannot draw by seeds, and what it is accused of."""

    def __init__(self) -> None:
        self.accused: list[bool] = []

    def habits_of(self, peer_id: PeerId) -> Habits:
        return Habits(kind="embedded none")

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None:
        self.accused.append(is_certain)


async def look(auditor: Auditor, count: int, expected: int) -> None:
    """Hands the auditor rollouts of one worker, of which it scores as many as expected."""
    expected += auditor.counts.rollouts
    auditor.consider([group_of([(4, TOKENS)], [(A, TOKENS)])] * count)
    async with asyncio.timeout(WAIT_S):
        while auditor.counts.rollouts < expected:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert auditor.counts.rollouts == expected


def fail(error: BaseException) -> None:
    raise error


def test_who_is_accused_is_not_looked_at_until_it_is_taken_back_and_then_afresh() -> None:
    async def scene() -> None:
        scorer, workers = Off(5.0), Workers()
        auditor = Auditor(1.0, random.Random(0), workers, fail)
        auditor.begin(scorer, ThreadPoolExecutor(1), lambda: True)
        await look(auditor, 5, 5)
        assert workers.accused == [True], "made up, and told once"
        await look(auditor, 5, 0)
        auditor.release(A)
        scorer.nats = 0.0
        await look(auditor, 5, 5)
        assert workers.accused == [True], "what was held against it is gone"
        scorer.nats = 0.4  # noise, not made up
        await look(auditor, 30, 30)
        assert workers.accused == [True, False], "only noise is excused, and it was not yet"
        auditor.release(A)
        await look(auditor, 30, 30)
        assert workers.accused == [True, False]
        auditor.close()

    asyncio.run(scene())


def test_the_trainers_thread_is_left_to_training_between_two_turns() -> None:
    async def scene() -> None:
        scorer = Off(0.0, takes_s=0.02)
        auditor = Auditor(1.0, random.Random(0), Workers(), fail)
        auditor.begin(scorer, ThreadPoolExecutor(1), lambda: False)
        await look(auditor, 3, 3)
        assert len(scorer.at_s) == 2 and scorer.at_s[1] - scorer.at_s[0] > 0.15
        auditor.close()

    asyncio.run(scene())

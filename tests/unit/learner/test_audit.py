"""Which rollouts are scored, by which weights, caches and random numbers; who is found out and who is left alone."""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from benchmarks import audit_workers as made
from echo2.base.errors import StateError
from echo2.base.ids import PeerId, Version
from echo2.base.rng import rollout_seed, turn_seed, uniform, uniforms
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams
from echo2.learner.audit import WAITING_MAX, AuditDraw, Auditor, Habits, Passage, Scorer, examine, passage_of, pieces_of
from echo2.learner.bets import DAY_S, MEASURED_TOKENS, Bets, Evidence, KindNoise, Piece, TokenScores, honest_misses
from echo2.learner.rollouts.groups import Insertion, TrainGroup
from echo2.learner.training.model import PolicyModel
from echo2.learner.training.scoring import KeptVersions, VersionScorer, cache_name, rows_by_name
from echo2.learner.training.team import Team
from echo2.learner.training.trainer import Trainer
from echo2.worker.engines.embedded.loop import draw
from tests.contract.engine_rig import fp8_rows, rounded_to_fp8
from tests.patience import WAIT_S
from tests.unit.learner.made import Spans, config_of, group_of, rollout_of
from tests.unit.learner.tiny import make_tiny_model

A, B = PeerId("a"), PeerId("b")
SEED = 77
Senders = list[tuple[PeerId, int]]


def audited(spans: Spans, senders: Senders, said: tuple[Insertion, ...] = (), index: int = 0) -> TrainGroup:
    """One rollout whose tokens are 100, 101, ..., with log-probabilities 0, -1, ..."""
    count = sum(length for _, length in spans)
    rollout = rollout_of(range(100, 100 + count), index, spans=spans, logprobs=[-float(n) for n in range(count)])
    return group_of((5, 6), [rollout], [1.0], said=[said] if said else (), senders=senders, seed=SEED)


def passage(spans: Spans, senders: Senders, keeps: bool = False, **how: Any) -> Passage:
    return passage_of(audited(spans, senders, **how), 0, lambda peer: Habits(True, keeps and peer == A))


def test_the_numbers_of_each_turn_begin_anew_and_are_those_that_its_lease_gave() -> None:
    one = passage([(4, 3), (6, 4)], [(A, 7)], said=(Insertion(3, (40,)), Insertion(5, ())), index=2)
    seeds = [rollout_seed(SEED, 2), rollout_seed(turn_seed(SEED, 2, 1), 0), rollout_seed(turn_seed(SEED, 2, 2), 0)]
    expected = [uniform(seeds[0], n) for n in range(3)] + [uniform(seed, n) for seed in seeds[1:] for n in range(2)]
    assert one.uniforms.tolist() == expected
    assert one.token_ids == (5, 6, 100, 101, 102, 40, 103, 104, 105, 106)
    assert one.places.tolist() == [2, 3, 4, 6, 7, 8, 9]


class Watched:
    """A `Scorer` of versions 4 and 6 whose scores are the version, or `nats` off what is claimed, in `takes_s`."""

    is_of_trainer, versions = True, [Version(4), Version(6)]

    def __init__(self, nats: float | None = None, takes_s: float = 0.0) -> None:
        self.nats, self.takes_s = nats, takes_s
        self.asked: list[tuple[int, int, int | None]] = []
        self.at_s: list[float] = []
        self.threads: set[str] = set()

    def keep(self, version: Version, tensors: object) -> None: ...

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]:
        self.asked += [(version, piece.start, cached) for _, piece in asked]
        self.threads.add(threading.current_thread().name.partition("_")[0])
        self.at_s.append(time.monotonic())
        time.sleep(self.takes_s)
        claimed = [passage.claimed[piece.start : piece.stop] for passage, piece in asked]
        if self.nats is None:
            return [TokenScores(*[np.full(len(one), float(version))] * 8) for one in claimed]
        return [TokenScores(one + self.nats, *[np.zeros(len(one))] * 6, np.ones(len(one))) for one in claimed]


def test_each_version_is_loaded_once_and_caches_are_handed_on() -> None:
    scorer = Watched()
    (found,) = examine([passage([(2, 2), (4, 3), (6, 1)], [(A, 6)])], scorer)
    assert [(one.piece.version, one.exact.logprobs[0]) for one in found] == [(4, 4.0), (6, 6.0)]
    assert found[0].claimed.tolist() == [-2.0, -3.0, -4.0] and len(found[0].uniforms) == 3
    scorer.asked.clear()
    examine([passage([(4, 3), (6, 1)], [(A, 4)], keeps=True)], scorer)
    assert scorer.asked == [(4, 0, 0), (6, 3, 4)], "the last token of a piece is not in the cache yet"
    lost = examine([passage([(2, 3), (6, 1)], [(A, 4)], keeps=True)], scorer)
    assert lost == [[]], "nothing is known behind a lost cache"


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=5),
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 4)), min_size=1, max_size=5),
    st.lists(st.integers(0, 12), max_size=3, unique=True),
    st.booleans(),
)
def test_pieces_are_cut_by_token(spans: list[tuple[int, int]], senders: Senders, turns: list[int], keeps: bool) -> None:
    """Token by token, which for long rollouts takes too long."""
    versions = [version for version, count in spans for _ in range(count)]
    peers = [peer for peer, count in senders for _ in range(count)]
    said = tuple(Insertion(position, ()) for position in sorted(turns))
    pieces = pieces_of(audited(spans, senders, said), 0, lambda peer: Habits(peer == B, keeps))
    assert [n for piece in pieces for n in range(piece.start, piece.stop)] == [*range(min(len(versions), len(peers)))]
    for piece in pieces:
        own = range(piece.start, piece.stop)
        assert {versions[n] for n in own} == {piece.version} and {peers[n] for n in own} == {piece.worker}
        assert not set(turns) & set(own[1:]) and piece.draws_by_seed == (piece.worker == B)
    for before, piece in itertools.pairwise(pieces):
        assert piece.keeps_cache == (keeps and piece.start not in turns and before.worker == piece.worker)


# ---- which rollouts


def considered(draw: AuditDraw, worker: PeerId, count: int = 3, draws_by_seed: bool = True) -> None:
    if draw.falls_on(worker, draws_by_seed=draws_by_seed):
        draw.add(worker, passage([(2, count)], [(worker, count)]))


def test_every_worker_and_every_length_is_audited_also_when_the_audit_is_far_behind() -> None:
    draw = AuditDraw(1.0, random.Random(1))
    seen: Counter[tuple[PeerId, bool]] = Counter()
    looked: Counter[tuple[PeerId, bool]] = Counter()
    for _ in range(60):
        for number in range(40):
            worker, is_long = (A if number % 8 else B), number % 20 == 0
            seen[worker, is_long] += 1
            considered(draw, worker, 60 if is_long else 3)
        for worker, one in draw.take(120):  # about a third of what is drawn
            looked[worker, len(one.places) > 3] += 1
            draw.on_audit(worker, len(one.places))
    assert len(draw.waiting) <= WAITING_MAX and draw.given_up > 0
    shares = {kind: looked[kind] / seen[kind] for kind in seen}
    assert len(shares) == 4 and min(shares.values()) >= 0.1, shares
    assert max(draw.unaudited.values()) <= 0.9


def test_a_worker_that_cannot_draw_by_its_seeds_is_audited_more_often_and_the_least_audited_first() -> None:
    draw, counts = AuditDraw(0.1, random.Random(2)), Counter[PeerId]()
    for number in range(4000):
        considered(draw, A if number % 2 else B, draws_by_seed=number % 2 == 1)
        for drawn, _ in draw.take(1 << 20) if draw.waiting else ():
            counts[drawn] += number > 2000
            draw.on_audit(drawn, 3)
    assert 2.0 < counts[B] / counts[A] < 4.5
    every = AuditDraw(1.0, random.Random(4))
    for worker in (*[B] * 9, A):
        considered(every, worker)
    for _ in range(9):
        every.on_audit(B, 3)
    assert every.take(1)[0][0] == A


def test_what_could_not_be_scored_is_counted_and_a_released_worker_is_a_newcomer() -> None:
    draw = AuditDraw(0.01, random.Random(3))
    considered(draw, A, 60)
    draw.take(1)
    draw.on_audit(A, 0)
    assert draw.given_up == 1
    for _ in range(200):
        considered(draw, A, 60)
    assert 30 <= len(draw.waiting) < 60, "all of its first tokens, and then few"
    assert draw.unaudited == {A: 1.0}, "what was given up is not audited"
    draw.forget(A)
    assert not draw.waiting
    considered(draw, A)
    assert len(draw.waiting) == 1


# ---- the bets, on engines made up for them

PIECE_TOKENS, VOCABULARY = 50, 12


def piece_of(rng: np.random.Generator, noise_nats: float, *, heavy: bool = False, picks: str = "leased") -> Evidence:
    """A piece of an engine whose logits are off by noise. It picks by the `leased` number, by `others`, or `near` it: anywhere
    in the band that noise of 0.05 nats could explain at most."""
    scores = rng.normal(0.0, 1.5, (PIECE_TOKENS, VOCABULARY))
    size = noise_nats * (rng.choice([0.5, 4.0], (PIECE_TOKENS, 1), p=[0.95, 0.05]) if heavy else 1.0)
    logs, off = (
        values - np.logaddexp.reduce(values, -1, keepdims=True)
        for values in (scores, scores + size * rng.standard_normal(scores.shape))
    )
    numbers = rng.random(PIECE_TOKENS)
    used = numbers
    if picks == "others":
        used = rng.random(PIECE_TOKENS)
    if picks == "near":
        off_by = 0.3 * np.sqrt(numbers * (1 - numbers)) * rng.uniform(-1, 1, PIECE_TOKENS)
        used = np.clip(numbers + off_by, 0.0, 1.0 - 1e-9)
    taken, pick = (
        (np.exp(values).cumsum(-1) / np.exp(values).sum(-1, keepdims=True) <= by[:, None]).sum(-1)
        for values, by in ((off, used), (logs, numbers))
    )
    rows, chances = np.arange(PIECE_TOKENS), np.exp(logs)
    sums = np.concatenate([np.zeros((PIECE_TOKENS, 1)), chances.cumsum(-1)], -1)
    squares = np.concatenate([np.zeros((PIECE_TOKENS, 1)), np.square(chances).cumsum(-1)], -1)
    spreads = np.sqrt((1 - sums) ** 2 * squares + sums**2 * (squares[:, -1:] - squares))
    drawn = logs[rows, taken]
    exact = TokenScores(
        drawn, drawn, (chances * logs).sum(-1), (taken == pick).astype(float),
        sums[rows, pick], sums[rows, pick + 1], spreads[rows, pick], spreads[rows, pick + 1],
    )  # fmt: skip
    return Evidence(Piece(A, Version(2), 0, PIECE_TOKENS, draws_by_seed=True), off[rows, taken], exact, numbers)


def accused(noise_nats: float, kind: str, noise: KindNoise, pieces: int = 200, **how: Any) -> tuple[int, Bets]:
    """Tokens until the worker is accused (0: it is not), and its bets."""
    rng, bets = np.random.default_rng(7), Bets(0.0, how.pop("is_excused", False))
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
        (0.28, "vllm fp8", True, True),
    ],
)
def test_honest_noise_is_accused_of_nothing(nats: float, kind: str, heavy: bool, is_known: bool) -> None:
    tokens, bets = accused(nats, kind, made.fleet_noise(kind, nats) if is_known else KindNoise(), heavy=heavy)
    assert not tokens, bets.accusation


def test_an_engine_off_by_more_than_its_kind_is_found_and_by_less_is_not() -> None:
    assert accused(0.05, "embedded none", made.fleet_noise("embedded none", 0.002))[0]
    assert not accused(0.05, "embedded none", made.fleet_noise("embedded none", 0.03))[0], "its card may be another one"
    assert not accused(0.05, "embedded none", made.fleet_noise("vllm none", 0.002))[0], (
        "another kind's noise says nothing of it"
    )
    _, bets = accused(0.2, "embedded none", made.fleet_noise("embedded none", 0.09))
    assert bets.log_wealths["numbers"] > 100, "what is measured of a kind widens nothing beyond its prior"
    noise = made.fleet_noise("embedded none", 0.002, count=3)
    noise.observe(PeerId("liar"), "embedded none", np.full(MEASURED_TOKENS, 0.09))
    assert accused(0.05, "embedded none", noise)[0], "one liar does not widen it either"


@pytest.mark.parametrize("own_noise", [0.0, 0.045])
def test_a_worker_that_draws_anywhere_inside_its_noise_is_found(own_noise: float) -> None:
    """Its numbers are honest, or have the noise that is allowed: its misses come more often than such noise explains."""
    for noise in (made.fleet_noise("embedded none", 0.03), KindNoise()):
        tokens, bets = accused(own_noise, "embedded none", noise, picks="near")
        assert 0 < tokens <= 1500, bets.log_wealths
        assert bets.accusation is not None and "than its noise explains" in bets.accusation.text


def test_tokens_of_other_random_numbers_are_found_for_certain_whatever_is_measured() -> None:
    tokens, bets = accused(0.0, "embedded none", KindNoise(), picks="others")
    assert tokens and bets.accusation is not None and bets.accusation.is_certain, bets.log_wealths
    noise = KindNoise()
    noise.observe(A, "embedded none", np.full(MEASURED_TOKENS, 50.0))
    assert noise.of_worker(A) == pytest.approx(0.8), "no token counts as more than a cap"


def test_an_honest_miss_is_as_likely_as_noise_without_a_lean_can_make_it_at_both_edges() -> None:
    """Gauss's inequality for one side, written once more; edges at 0.2 and 0.6, moved by 0.05 and 0.025 root mean square."""
    numbers = np.array([0.2, 0.24, 0.3, 0.4, 0.57, 0.6])
    edges, spreads = [np.full(6, x) for x in (0.2, 0.6)], [np.full(6, x) for x in (0.5, 0.25)]
    exact = TokenScores(*[np.zeros(6)] * 4, *edges, *spreads)

    def tail(deviations: float) -> float:
        return 0.5 * (1 - deviations / 3**0.5) if deviations < 2 / 3**0.5 else 0.5 * 4 / 9 / deviations**2

    expected = [tail((number - 0.2) / 0.05) + tail((0.6 - number) / 0.025) for number in numbers]
    assert honest_misses(exact, numbers, 0.1) == pytest.approx(expected, rel=2e-3)


def test_bets_on_misses_are_fair_at_the_most_that_noise_explains() -> None:
    """The mean of a factor is 1 if a token misses with that chance; a liar's wealth grows at once."""
    rng, grew = np.random.default_rng(1), 0
    for _ in range(40):
        low, number, high = np.sort(rng.random(3))
        piece, after = Piece(A, Version(0), 0, 1, draws_by_seed=True), []
        for picked in (0.0, 1.0):
            exact = TokenScores(*[np.array([x]) for x in (-1.0, -1.0, -1.0, picked, low, high, 0.2, 0.2)])
            bets = Bets(0.0)
            bets.observe(Evidence(piece, np.array([-1.0]), exact, np.array([number])), "embedded none", KindNoise())
            after.append(bets.log_wealths)
        for bet, sigma, least in (("draw", 0.15, 1e-4), ("choice", 0.2, 1 / 32)):
            chance = max(least, float(honest_misses(exact, np.array([number]), sigma)[0]))
            missed, hit = (np.exp(wealths[bet]) for wealths in after)
            assert chance * missed + (1 - chance) * hit == pytest.approx(1.0) and missed >= hit
            grew += missed > 2
    assert grew > 30


def test_the_evidence_of_a_day_is_not_carried_over_and_lifted_noise_is_not_bet_on() -> None:
    _, bets = accused(0.05, "embedded none", made.fleet_noise("embedded none", 0.002))
    assert bets.accusation is not None and not bets.accusation.is_certain
    assert bets.of_day(DAY_S - 1.0) is bets
    bets = bets.of_day(DAY_S)
    assert bets.accusation is None and not bets.tokens
    assert not accused(0.05, "embedded none", made.fleet_noise("embedded none", 0.002), is_excused=True)[0]


# ---- the auditor


class Workers:
    """A worker whose engine cannot draw by seeds, and what it is accused of."""

    def __init__(self) -> None:
        self.accused: list[bool] = []

    def habits_of(self, peer_id: PeerId) -> Habits:
        return Habits(kind="embedded none")

    def accuse(self, peer_id: PeerId, reason: str, *, is_certain: bool) -> None:
        self.accused.append(is_certain)


def new_auditor(scorer: Watched, workers: Workers, *, is_trainer_idle: bool) -> Auditor:
    def fail(error: BaseException) -> None:
        raise error

    auditor = Auditor(config_of("none", audit_share=1.0), random.Random(0), workers, fail)
    auditor.begin(scorer, ThreadPoolExecutor(1, "trainer"), lambda: is_trainer_idle)
    return auditor


async def look(auditor: Auditor, count: int, expected: int) -> None:
    """Hands the auditor rollouts of one worker, of which it scores as many as expected."""
    expected += auditor.counts.rollouts
    auditor.consider([audited([(4, PIECE_TOKENS)], [(A, PIECE_TOKENS)])] * count)
    async with asyncio.timeout(WAIT_S):
        while auditor.counts.rollouts < expected:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert auditor.counts.rollouts == expected


def test_what_is_audited_follows_the_options_and_of_an_adapter_nothing_is() -> None:
    made = [
        Auditor(config_of("none", lora_rank=rank, audit_share=0.5), random.Random(0), Workers(), print)
        for rank in (0, 4)
    ]
    assert [(auditor.is_on, auditor.draw.share) for auditor in made] == [(True, 0.5), (False, 0.0)]
    assert made[0].versions_max > config_of("none").staleness.bound, "all that a rollout of the run may name"


async def test_who_is_accused_is_not_looked_at_until_it_is_taken_back_and_then_afresh() -> None:
    scorer, workers = Watched(5.0), Workers()
    auditor = new_auditor(scorer, workers, is_trainer_idle=True)
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
    scorer.is_of_trainer = False
    scorer.threads.clear()
    await look(auditor, 30, 30)
    assert workers.accused == [True, False] and scorer.threads == {"audit"}
    await auditor.close()


async def test_the_trainers_thread_is_left_to_training_between_two_turns() -> None:
    scorer = Watched(0.0, takes_s=0.02)
    auditor = new_auditor(scorer, Workers(), is_trainer_idle=False)
    await look(auditor, 3, 3)
    assert len(scorer.at_s) == 2 and scorer.at_s[1] - scorer.at_s[0] > 0.15
    assert scorer.threads == {"trainer"}, "nobody else may use its model meanwhile"
    await auditor.close()


PROMPT = (5, 6, 7)
SAMPLED = 40
Snapshots = dict[int, dict[str, torch.Tensor]]


def model_with_history(
    tmp_path: Path, changed: float = 1.0, is_own: bool = False, weights_dtype: str = "bfloat16"
) -> tuple[PolicyModel, Scorer, Snapshots]:
    """A policy that was published at 0, 2 and 4, and has moved on. `changed`: the share of weights that each step changes;
    `is_own`: scored by the model that trains, else by a copy."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = str(make_tiny_model(tmp_path / "model"))
    model = PolicyModel(path, weights_dtype, torch.device("cpu"), 1.0)
    scorer: Scorer
    if is_own:
        scorer = Team(Trainer(model, config_of(path))).scorer(2, Version(0))
    else:
        scorer = VersionScorer(PolicyModel(path, weights_dtype, torch.device("cpu"), 1.0).hf_model, versions_max=2)
    snapshots: Snapshots = {}
    for version in (0, 2, 4):
        snapshots[version] = dict(model.snapshot())
        scorer.keep(Version(version), snapshots[version])
        with torch.no_grad():
            for master in model.masters:
                master.add_(0.1 * torch.randn_like(master) * (torch.rand_like(master) < changed))
        model.round_to_policy()
    return model, scorer, snapshots


def honestly_sampled(
    model: PolicyModel, snapshots: Snapshots, spans: list[tuple[int, int]], sampling: SamplingParams, keeps_cache: bool
) -> Passage:
    """As an honest worker samples, which computes its cache anew at each change of versions, or keeps it."""
    own: Any = model.hf_model
    numbers = uniforms(rollout_seed(sampling.seed, 0), SAMPLED).tolist()
    token_ids: list[int] = []
    logprobs: list[float] = []
    raw: list[float] = []
    cache, cached = None, 0
    for version, count in spans:
        own.load_state_dict({**own.state_dict(), **snapshots[version]})
        if not keeps_cache:
            cache, cached = None, 0
        for _ in range(count):
            text = [*PROMPT, *token_ids]
            with torch.no_grad():
                out = own(input_ids=torch.tensor([text[cached:]]), use_cache=True, **{cache_name(): cache})
            cache, cached = out[cache_name()], len(text)
            ((token, drawn, plain),) = draw(out.logits[0, -1:].float(), [sampling], [numbers[len(token_ids)]])
            token_ids.append(token)
            logprobs.append(drawn)
            raw.append(plain)
    rollout = rollout_of(token_ids, spans=spans, logprobs=logprobs, reason=FinishReason.LENGTH)
    rollout = replace(rollout, raw_logprobs=tuple(raw))
    made = replace(group_of(PROMPT, [rollout]), spec=GroupSpec(rollout.group_id, PROMPT, 1, sampling, 0))
    return passage_of(made, 0, lambda peer: Habits(True, keeps_cache))


PLAIN = SamplingParams(max_new_tokens=SAMPLED, stop_token_ids=(1,), seed=9)


def found_by(scorer: Scorer, passages: list[Passage]) -> list[list[Evidence]]:
    with scorer.turn():
        return examine(passages, scorer)


FILTERED = replace(PLAIN, temperature=0.8, top_k=12, top_p=0.7)


@pytest.mark.parametrize(
    ("sampling", "keeps_cache", "changed", "is_own", "weights_dtype"),
    [
        (PLAIN, True, 1.0, True, "bfloat16"),
        (FILTERED, False, 0.05, True, "bfloat16"),
        (replace(PLAIN, top_p=0.8), True, 0.05, True, "float32"),
        (PLAIN, False, 0.05, False, "bfloat16"),
        (FILTERED, True, 1.0, False, "bfloat16"),
    ],
)
def test_tokens_are_scored_as_they_were_sampled(
    tmp_path: Path, sampling: SamplingParams, keeps_cache: bool, changed: float, is_own: bool, weights_dtype: str
) -> None:
    """Under their own versions, behind the cache that their engine had, and by the numbers of their lease."""
    model, scorer, snapshots = model_with_history(tmp_path, changed, is_own, weights_dtype)
    spans = [(2, SAMPLED // 2), (4, SAMPLED // 2)]
    seeded = [replace(sampling, seed=seed) for seed in range(2)]
    passages = [honestly_sampled(model, snapshots, spans, each, keeps_cache) for each in seeded]
    model.load_masters({name: master + 1e-3 for name, master in model.masters_by_name().items()})
    trained = {name: p.detach().clone() for name, p in model.hf_model.named_parameters()}
    all_found = found_by(scorer, passages) + found_by(scorer, passages)  # in two turns
    assert all(torch.equal(p, trained[name]) for name, p in model.hf_model.named_parameters()), "what trains is back"
    for found in all_found:
        assert [e.piece.version for e in found] == [2, 4]
        for evidence in found:
            exact = evidence.exact
            assert exact.logprobs == pytest.approx(evidence.claimed, abs=2e-5)
            assert np.all(exact.picked == 1.0)
            assert np.all((evidence.uniforms >= exact.low) & (evidence.uniforms <= exact.high))
            assert exact.high - exact.low == pytest.approx(np.exp(exact.drawn), abs=1e-5)
            assert np.all((exact.low_spread >= 0.0) & (exact.low_spread**2 <= exact.low * (1 - exact.low) + 1e-9))


def test_only_the_newest_versions_are_kept_whose_bits_are_those_that_were_published(tmp_path: Path) -> None:
    model, scorer, snapshots = model_with_history(tmp_path, changed=0.05)
    assert isinstance(scorer, VersionScorer)
    kept = scorer.kept
    with pytest.raises(StateError, match=r"version 5: expected tensors of the model that scores, got elsewhere"):
        scorer.keep(Version(5), {"elsewhere.weight": torch.zeros(1)})
    assert kept.versions == [2, 4]
    assert kept.held_bytes < 0.4 * sum(tensor.nbytes for tensor in snapshots[4].values())
    for version in (4, 2, 2, 4, 2):
        kept.load(Version(version))
        own = dict(scorer._policy.hf_model.named_parameters())
        assert all(torch.equal(own[name].bfloat16(), tensor) for name, tensor in snapshots[version].items())
    with pytest.raises(StateError, match="version 0: expected a kept version among 2, 4"):
        kept.load(Version(0))
    # Where all weights change, bytes bound how many are kept; another rank forgets what the first one tells it to.
    bounded, follows = (KeptVersions(rows_by_name(model.hf_model), 100, is_leader=leads) for leads in (True, False))
    for number in range(8):
        bounded.keep(Version(number), {name: t * (1 + number) for name, t in snapshots[2].items()})
        follows.keep(Version(number), snapshots[2 * (number % 3)])
    size = sum(tensor.nbytes for tensor in snapshots[0].values())
    assert bounded.versions[-1] == 7 and len(bounded.versions) < 8 and bounded.held_bytes <= 2 * size
    follows.forget_before(Version(6))
    assert follows.versions == [6, 7]


def test_versions_of_an_adapter_are_told_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = str(make_tiny_model(tmp_path / "model"))
    model = PolicyModel(path, "bfloat16", torch.device("cpu"), 1.0, lora_rank=2)
    scorer = VersionScorer(model.hf_model, 3, model)
    scorer.keep(Version(0), dict(model.snapshot()))
    with torch.no_grad():
        for master in model.masters:
            master.add_(0.5 * torch.randn_like(master))
    model.round_to_policy()
    scorer.keep(Version(1), dict(model.snapshot()))
    sampled = [group_of(PROMPT, [rollout_of((9, 10, 11), spans=[(version, 3)])]) for version in (1, 0)]
    passages = [passage_of(group, 0, lambda peer: Habits()) for group in sampled]
    (newer,), (older,) = found_by(scorer, passages)
    assert np.abs(newer.exact.logprobs - older.exact.logprobs).max() > 1e-4
    with pytest.raises(StateError, match=r"version 2: expected tensors of the model that scores, got elsewhere"):
        scorer.keep(Version(2), {"elsewhere.weight": torch.zeros(1)})


def test_greedy_answers_are_held_to_the_likeliest_token_and_honest_ones_pass(tmp_path: Path) -> None:
    """What an evaluation is answered by: tokens that were drawn, or are another model's, are found as such."""
    model, scorer, snapshots = model_with_history(tmp_path)
    greedy = replace(PLAIN, temperature=0.0)
    honest, liar = Bets(0.0), Bets(0.0)
    for seed in range(3):
        own = honestly_sampled(model, snapshots, [(4, SAMPLED)], replace(greedy, seed=seed), False)
        drawn = honestly_sampled(model, snapshots, [(4, SAMPLED)], replace(PLAIN, seed=seed), False)
        passages = [own, replace(drawn, sampling=greedy)]
        for bets, found in zip((honest, liar), found_by(scorer, passages), strict=True):
            for evidence in found:
                assert evidence.exact.logprobs == pytest.approx(evidence.claimed, abs=2e-5)
                bets.observe(evidence, "embedded none", KindNoise())
    assert honest.accusation is None
    assert liar.accusation is not None and liar.accusation.bet == "sums"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> made.Bench:
    return made.make_bench(tmp_path_factory.mktemp("audit"))


def test_honest_workers_of_another_dtype_and_batch_size_are_left_alone(bench: made.Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert made.watched(bench, made.honest(bench, dtype), 6)[2] is None, dtype
    assert made.watched(bench, made.honest(bench, siblings=1), 3)[2] is None
    assert made.watched(bench, made.honest_over_a_swap(bench), 6)[2] is None
    own_numbers = made.best_of(bench, made.by_reward, tries=1)
    assert made.watched(bench, own_numbers, 4, habits=Habits(False, kind="vllm none"))[2] is None


@pytest.mark.soak
def test_a_worker_that_rounds_to_fp8_as_vllm_can_is_left_alone_among_its_kind(bench: made.Bench) -> None:
    """Weights by row, and what they are multiplied with by token, as its kernels for fp8 do; the rest in bf16."""
    engine = rounded_to_fp8(made.engine_of(bench, made.NEWEST)).bfloat16()
    for name, module in engine.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, given: (by_token(given[0]),))
    make, habits = partial(fp8_rollouts, engine), Habits(True, kind="vllm fp8")
    held, _, accusation = made.watched(bench, make, 40, habits=habits)
    assert accusation is None and 0.01 < held.noise_nats < 0.03
    assert made.watched(bench, make, 40, habits=habits, noise=made.fleet_noise("vllm fp8", held.noise_nats))[2] is None
    _, _, accusation = made.watched(bench, make, 60, noise=made.fleet_noise("embedded none", 0.002))
    assert accusation is not None and not accusation.is_certain, "one that says it does not round is set aside"


def by_token(values_BTC: torch.Tensor) -> torch.Tensor:
    codes, scales = fp8_rows(values_BTC.flatten(0, 1))
    return (codes.float() * scales).to(values_BTC.dtype).view(values_BTC.shape)


def fp8_rollouts(engine: Any, group: int) -> list[Rollout]:
    return made.sampled([(engine, made.NEWEST, made.TOKENS)], group, made.leased_numbers(group))


@dataclass(frozen=True, slots=True)
class Lie:
    """What a worker does, the bets that find it among so many rollouts, and whether for certain. `is_known`: whether noise was
    measured of others of its kind."""

    make: Callable[[made.Bench], made.Maker]
    bets: tuple[str, ...]
    rollouts_max: int
    is_certain: bool | None = None
    is_known: bool = False


TOKENS_CHOSEN, ANY = ("draw", "choice"), ("numbers", "fabrication", "draw", "choice", "sums")
LIES = {
    "the version before": Lie(lambda bench: made.one_behind(bench, torch.bfloat16), ANY, 80, is_known=True),
    "made up numbers": Lie(made.fabricated, ("fabrication",), 64, is_certain=True),
    "cut short": Lie(made.cut_short, TOKENS_CHOSEN, 100),
    "copies": Lie(made.copied, TOKENS_CHOSEN, 100),
    "memorised": Lie(made.memorised, TOKENS_CHOSEN, 100),
    "behind a version": Lie(made.dishonest_tail, TOKENS_CHOSEN, 100),
    "greedy": Lie(lambda bench: made.altered(bench, None, coldness=8.0), TOKENS_CHOSEN, 100),
    "best of four": Lie(lambda bench: made.best_of(bench, made.by_reward), TOKENS_CHOSEN, 100),
    "4 bits": Lie(lambda bench: made.altered(bench, made.quantised(4)), ANY, 160, is_certain=False, is_known=True),
    "perturbed by a tenth": Lie(lambda bench: made.altered(bench, made.perturbed(0.1)), ANY, 160, is_certain=False, is_known=True),
    "an older version's tokens, numbers recomputed": Lie(lambda bench: made.others_tokens(bench, made.PREVIOUS), ("draw",), 160),
    "best of four within the largest noise": Lie(lambda bench: made.near_misses(bench, 0.6, tries=4), ANY, 60),
    "the same, of a known kind": Lie(lambda bench: made.near_misses(bench, 0.6, tries=4), ANY, 60, is_known=True),
    "one of a token's two numbers forged": Lie(made.forged_raw, ("intake",), 1),
    "one token": Lie(made.one_token, ("intake",), 1),
    "the version before, in float32": Lie(made.one_behind, ANY, 160, is_known=True),
    "tokens of two versions behind": Lie(lambda bench: made.others_tokens(bench, made.OLDEST), ANY, 160, is_known=True),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*[*LIES][:-2], *(pytest.param(name, marks=pytest.mark.soak) for name in [*LIES][-2:])]
)
def test_a_worker_that_does_not_sample_from_what_it_claims_is_found_out(bench: made.Bench, name: str) -> None:
    lie = LIES[name]
    _, rollouts, accusation = made.watched(
        bench, lie.make(bench), 20, noise=made.fleet_noise("embedded none", 0.002) if lie.is_known else None
    )
    assert accusation is not None and accusation.bet in lie.bets and rollouts <= lie.rollouts_max
    assert lie.is_certain in (None, accusation.is_certain)

"""The sequential test on numbers made for it: honest workers stay unaccused, each kind of cheat is named."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from echo2.base.errors import ConfigError
from echo2.base.ids import PeerId, Version
from echo2.learner.audit import NOTHING, Evidence, Piece
from echo2.learner.suspicion import DAY_S, Accusation, Suspicion, SuspicionConfig
from echo2.scoring.request import FLOOR_NATS, TokenScores

VOCABULARY = 12
PIECE_TOKENS = 50


def evidence(
    rng: random.Random,
    noise: Callable[[], float],
    shift_nats: float = 1e-3,
    behind: bool = False,
    coldness: float = 1.0,
    numbers: str = "own",
) -> Evidence:
    """A piece of a worker. `behind`: it samples, and claims numbers, under the version before, `shift_nats` away. `numbers`:
    it draws by its `own` random numbers and says so; by `others` than it says; by the numbers of its lease, `leased`; or by them
    under the version before, `older`, with numbers recomputed under the one named."""
    rows = []
    for _ in range(PIECE_TOKENS):
        scores = [rng.gauss(0, 1.5) for _ in range(VOCABULARY)]
        logs = _log_softmax(scores)
        before = _log_softmax([x + rng.gauss(0, shift_nats) for x in scores])
        own = before if behind or numbers == "older" else logs
        number, leased = rng.random(), rng.random()
        sums = list(itertools.accumulate(math.exp(coldness * x) for x in own))
        if numbers in ("leased", "older"):  # by an engine whose every number is off by its noise
            off = [math.exp(x + noise()) for x in own]
            sums, number = list(itertools.accumulate(off)), leased
        token = min(bisect.bisect_right(sums, number * sums[-1]), VOCABULARY - 1)
        chances = [math.exp(x) for x in logs]
        expected = sum(p * max(x, FLOOR_NATS) for p, x in zip(chances, logs, strict=True))
        claimed = min(0.0, (logs if numbers == "older" else own)[token] + noise())
        below = [sum(math.exp(x) for x in row[:token]) for row in (logs, before)]
        rows.append((logs[token], before[token], expected, claimed, leased, *below, sum(p * p for p in chances)))
    exact, before_T, expected_T, claimed_T, leased_T, below_T, before_below, collisions = np.array(rows).T
    never = np.zeros(PIECE_TOKENS)
    scores_T = TokenScores(exact, exact, expected_T, never, never, below_T, collisions)
    previous_T = TokenScores(before_T, before_T, expected_T, never, never, before_below, collisions)
    piece = Piece(PeerId("w"), Version(2), 0, PIECE_TOKENS)
    return Evidence(piece, claimed_T, scores_T, previous_T, True, NOTHING if numbers == "own" else leased_T)


def _log_softmax(scores: list[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in scores))
    return [x - total for x in scores]


def tokens_until_accused(make: Callable[[], Evidence], limit: int) -> tuple[int, str]:
    suspicion = Suspicion(SuspicionConfig(), 0.0)
    while suspicion.tokens < limit:
        suspicion.observe(make())
        if (accusation := suspicion.accusation) is not None:
            return suspicion.tokens, accusation.bet
    return limit, ""


def heavy_tailed(rng: random.Random, size: float) -> float:
    return size * rng.gauss(0, 1) * (5.0 if rng.random() < 0.02 else 0.7)


@pytest.mark.parametrize("noise_nats", [0.0, 1e-6, 1e-3, 0.02])
@pytest.mark.parametrize("shift_nats", [1e-4, 1e-2, 0.3])
def test_honest_workers_of_any_precision_are_not_accused(noise_nats: float, shift_nats: float) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        found = tokens_until_accused(lambda r=rng: evidence(r, lambda: heavy_tailed(r, noise_nats), shift_nats), 10_000)  # type: ignore[misc]
        assert found == (10_000, "")


def test_false_alarms_are_as_rare_as_promised() -> None:
    """At a level that can be counted: of 200 honest workers watched for 1,500 tokens at 5 %, at most 10 and a margin."""
    accused = 0
    for seed in range(200):
        rng = random.Random(seed)
        suspicion = Suspicion(SuspicionConfig(false_alarms_per_day=0.05), 0.0)
        while suspicion.tokens < 1500 and suspicion.accusation is None:
            suspicion.observe(evidence(rng, lambda r=rng: r.gauss(0, 0.02), 0.05))  # type: ignore[misc]
        accused += suspicion.accusation is not None
    assert accused <= 10 + 6, "10 expected at most; 6 is two standard deviations"


@pytest.mark.parametrize(
    ("noise_nats", "shift_nats", "limit"), [(1e-6, 1e-3, 1000), (0.01, 0.005, 4000), (1e-6, 0.3, 1000)]
)
def test_a_worker_one_version_behind_is_found_out(noise_nats: float, shift_nats: float, limit: int) -> None:
    rng = random.Random(1)
    tokens, bet = tokens_until_accused(
        lambda: evidence(rng, lambda: rng.gauss(0, noise_nats), shift_nats, behind=True), limit
    )
    assert tokens < limit and bet in ("version", "noise")


def test_numbers_that_are_too_far_off_are_found_out() -> None:
    rng = random.Random(2)
    assert tokens_until_accused(lambda: evidence(rng, lambda: rng.gauss(0, 0.15)), 2000)[1] == "noise"
    assert tokens_until_accused(lambda: evidence(rng, lambda: rng.uniform(-3, 0)), 2000)[1] == "fabrication"


def watched(suspicion: Suspicion, make: Callable[[], Evidence], tokens: int = 2000) -> Accusation | None:
    while suspicion.tokens < tokens and suspicion.accusation is None:
        suspicion.observe(make())
    return suspicion.accusation


@pytest.mark.parametrize(
    ("make", "is_certain"),
    [
        (lambda rng: evidence(rng, lambda: rng.gauss(0, 0.15)), False),
        (lambda rng: evidence(rng, lambda: rng.gauss(0, 0.4)), False),
        (lambda rng: evidence(rng, lambda: rng.uniform(-3, 0)), True),
        (lambda rng: evidence(rng, lambda: 0.0, 0.3, behind=True), True),
        (lambda rng: evidence(rng, lambda: 0.0, coldness=3.0), True),
    ],
)
def test_a_finding_is_certain_unless_it_rests_on_noise_alone(
    make: Callable[[random.Random], Evidence], is_certain: bool
) -> None:
    rng = random.Random(7)
    accusation = watched(Suspicion(SuspicionConfig(), 0.0), lambda: make(rng), 6000)
    assert accusation is not None and accusation.is_certain is is_certain
    assert "nats off, root mean square, 0.05 are allowed" in accusation.text


def test_whose_noise_was_excused_is_accused_of_other_things_only() -> None:
    rng = random.Random(8)
    noisy = Suspicion(SuspicionConfig(), 0.0, excuses_noise=True)
    assert watched(noisy, lambda: evidence(rng, lambda: rng.gauss(0, 0.15)), 5000) is None
    noisy.expire(DAY_S + 1)
    assert noisy.excuses_noise, "also on the next day"
    assert watched(noisy, lambda: evidence(rng, lambda: rng.uniform(-3, 0))) is not None


@pytest.mark.parametrize("coldness", [3.0, 1.5, 0.6])
def test_tokens_that_are_no_draw_are_found_out_though_their_numbers_are_honest(coldness: float) -> None:
    rng = random.Random(3)
    assert tokens_until_accused(lambda: evidence(rng, lambda: 0.0, coldness=coldness), 6000)[1] == "draw"


def with_stops(rng: random.Random, chance: float, true_chance: float) -> Evidence:
    made = evidence(rng, lambda: 0.0)
    stopped = np.array([float(rng.random() < true_chance) for _ in range(PIECE_TOKENS)])
    return replace(made, exact=replace(made.exact, stop_chances=np.full(PIECE_TOKENS, chance), stopped=stopped))


@pytest.mark.parametrize(("true_chance", "bet"), [(0.02, ""), (0.1, "length"), (0.0, "length")])
def test_completions_that_end_too_soon_or_too_late_are_found_out(true_chance: float, bet: str) -> None:
    rng = random.Random(6)
    assert tokens_until_accused(lambda: with_stops(rng, 0.02, true_chance), 5000)[1] == bet


def test_copies_are_found_out() -> None:
    suspicion = Suspicion(SuspicionConfig(), 0.0)
    for _ in range(4):
        suspicion.observe_copies(math.exp(20.0))
    accusation = suspicion.accusation
    assert accusation is not None and accusation.bet == "copies" and "copies of one another" in accusation.text


@pytest.mark.parametrize("noise_nats", [0.0, 1e-3, 0.02, 0.05, 0.2])
def test_tokens_that_the_leases_numbers_pick_accuse_nobody_of_choosing(noise_nats: float) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        suspicion = Suspicion(SuspicionConfig(), 0.0, excuses_noise=True)
        while suspicion.tokens < 10_000:
            suspicion.observe(evidence(rng, lambda r=rng: heavy_tailed(r, noise_nats), numbers="leased"))  # type: ignore[misc]
            assert max(suspicion.log_wealths[bet] for bet in ("choice", "older")) < 3.0


@pytest.mark.parametrize("shift_nats", [0.003, 0.02, 0.1])
@pytest.mark.parametrize("noise_nats", [0.0, 1e-3, 0.02])
def test_engines_whose_noise_flips_picks_do_not_look_like_an_older_version(
    noise_nats: float, shift_nats: float
) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        suspicion = Suspicion(SuspicionConfig(), 0.0)
        while suspicion.tokens < 20_000:
            suspicion.observe(evidence(rng, lambda r=rng: heavy_tailed(r, noise_nats), shift_nats, numbers="leased"))  # type: ignore[misc]
            assert suspicion.log_wealths["older"] < 3.0


@pytest.mark.parametrize(
    ("shift_nats", "noise_nats", "limit"), [(0.01, 0.0, 10_000), (0.05, 0.01, 4000), (0.3, 0.0, 500)]
)
def test_tokens_of_an_older_version_with_recomputed_numbers_are_found_out(
    shift_nats: float, noise_nats: float, limit: int
) -> None:
    rng = random.Random(4)
    tokens, bet = tokens_until_accused(
        lambda: evidence(rng, lambda: rng.gauss(0, noise_nats), shift_nats, numbers="older"), limit
    )
    assert tokens < limit and bet in ("older", "choice")


@pytest.mark.parametrize("share", [1.0, 0.3, 0.05])
def test_tokens_that_other_numbers_picked_are_found_out(share: float) -> None:
    """Though their numbers are honest and they are draws of the version named; also where only some rollouts are chosen."""
    rng = random.Random(9)
    pieces = itertools.count(1)
    tokens, bet = tokens_until_accused(
        lambda: evidence(
            rng, lambda: rng.gauss(0, 1e-3), numbers="others" if next(pieces) * share % 1 < share else "leased"
        ),
        50 * PIECE_TOKENS,
    )
    assert bet == "choice" and tokens <= max(4, 1.2 / share) * PIECE_TOKENS


def test_a_day_later_nothing_is_held_against_it() -> None:
    rng = random.Random(5)
    suspicion = Suspicion(SuspicionConfig(), 100.0)
    for _ in range(40):
        suspicion.observe(evidence(rng, lambda: rng.gauss(0, 0.5)))
    assert suspicion.accusation is not None
    suspicion.expire(100.0 + DAY_S - 1)
    assert suspicion.accusation is not None
    suspicion.expire(100.0 + DAY_S)
    assert suspicion.accusation is None and suspicion.tokens == 0 and suspicion.since == 100.0 + DAY_S


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="noise between 0 and 10 nats, got 0"):
        SuspicionConfig(noise_nats=0)
    with pytest.raises(ConfigError, match="false alarms between 0 and 1 a day, got 1"):
        SuspicionConfig(false_alarms_per_day=1)

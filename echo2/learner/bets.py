"""Is a worker's rollout what an honest engine makes of its lease? The learner's own scores of its tokens are bet on.

Guarantees: an honest worker is accused with probability at most `FALSE_ALARMS_A_DAY`, however often one looks and whichever
rollouts are drawn; nothing that a worker claims widens what it is allowed beyond the prior of a kind of engine.

Three bets run for each worker. Each starts with a wealth of 1 that does not grow on average while the worker is honest, so that
their mean reaches 1/alpha with probability at most alpha (Ville's inequality).

- *numbers* (version or noise): the claimed log-probabilities are those of the version named, but for the noise of their kind of
  engine (`KindNoise`). Bets on the mean square of the differences.
- *draw*: each token is the one that the lease's random number picks. The number lies between two edges of the cumulative
  distribution; an engine's noise moves an edge `e` by at most `sigma * sqrt(e * (1 - e))`, root mean square (Cauchy-Schwarz). The
  noise has no lean and small deviations are likelier than large ones, so Gauss's inequality bounds the chance that it moves an
  edge over the number. The bet is that misses come more often. Without seeds (engines that draft), and for greedy answers, the bet
  is on the sum of log-probabilities, whose mean is known.
- *choice*: the same for a whole piece of a rollout, with more noise than any kind has: its tokens were drawn by other numbers.

How far honest engines differ is measured, not proven; what rests on it alone is not certain (`Accusation.is_certain`), so it can
be undone, and a person decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from echo2.base.ids import PeerId, Version

FALSE_ALARMS_A_DAY = 1e-6  # one honest worker in a million worker-days
DAY_S = 86_400.0  # then the bets begin anew
FLOOR_NATS = -12.0
"""Floor for log-probabilities when a token's likelihood is judged, so that a single token has bounded weight."""
WORKERS_MAX = 16_384  # some kilobytes each, of a whole fleet

Column = npt.NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of consecutive tokens under one version. `logprobs`: the log-probabilities that training uses (nats). Under the
    sampling distribution: `drawn`, the token's log-probability; `expected`, the mean of max(log-probability, FLOOR_NATS); `picked`,
    whether the random number picks this token (0 or 1); `low`, `high`: the edges of the token that it picks in the cumulative
    distribution; `low_spread`, `high_spread`: how far a nat of noise that is independent from token to token moves them."""

    logprobs: Column
    drawn: Column
    expected: Column
    picked: Column
    low: Column
    high: Column
    low_spread: Column
    high_spread: Column


@dataclass(frozen=True, slots=True)
class Piece:
    """Sampled tokens `start` to `stop - 1` of a rollout, which `worker` reported as sampled by `version`. `keeps_cache`: the
    piece continues with the KV cache of the piece before it."""

    worker: PeerId
    version: Version
    start: int
    stop: int
    keeps_cache: bool = False
    draws_by_seed: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """The claimed and the recomputed scores of a piece. `uniforms`: the random numbers of its tokens."""

    piece: Piece
    claimed: Column
    exact: TokenScores
    uniforms: Column


def bounded_entry(table: dict[PeerId, T], worker: PeerId, make: Callable[[], T]) -> T:
    """The worker's entry; a new one takes the place of the one that was asked for longest ago where the table is full."""
    entry = table.pop(worker, None)
    table[worker] = make() if entry is None else entry
    if len(table) > WORKERS_MAX:
        del table[next(iter(table))]
    return table[worker]


# ---- noise

NOISE_PRIOR_NATS = {"fp8": 0.4}
NOISE_PRIOR_OTHERS_NATS = 0.1
"""By precision: the noise that is allowed to an engine of a kind that has not been measured yet, and the most that a measured kind
is allowed. On SmolLM2-135M bf16 is 0.05 off, fp8 0.28 (docs/vllm.md); larger models less."""
NOISE_MIN_NATS = 2e-3
"""The least noise that is allowed: next to none is measured of float32 engines, and rounding alone would then be evidence."""
MEASURED_TOKENS = 200  # tokens after which a worker's noise is known well enough to count
MEASURED_WORKERS = 3
"""Others of its kind that must be known before their noise is the measure for a worker: with three, one liar cannot move the
median beyond honest ones."""
NOISE_CAP = 8.0  # differences beyond this many times the allowed noise count as this many


@dataclass(slots=True)
class _Measured:
    kind: str
    squares: float = 0.0
    tokens: int = 0

    @property
    def nats(self) -> float:
        return math.sqrt(self.squares / self.tokens) if self.tokens >= MEASURED_TOKENS else math.inf


def noise_prior(kind: str) -> float:
    return next((nats for name, nats in NOISE_PRIOR_NATS.items() if name in kind), NOISE_PRIOR_OTHERS_NATS)


@dataclass(slots=True)
class KindNoise:
    """How far the log-probabilities of each kind of engine are from the learner's, as the learner measures it: root mean square,
    the median over the workers of the kind. What a worker is allowed is measured on the others."""

    _workers: dict[PeerId, _Measured] = field(default_factory=dict)

    def observe(self, worker: PeerId, kind: str, differences: Column) -> None:
        measured = bounded_entry(self._workers, worker, lambda: _Measured(kind))
        if measured.kind != kind:
            measured = self._workers[worker] = _Measured(kind)
        capped = np.minimum(np.abs(differences), NOISE_CAP * noise_prior(kind))
        measured.squares += float(capped @ capped)
        measured.tokens += len(differences)

    def of_kind(self, worker: PeerId, kind: str) -> float | None:
        """The noise of the other workers of this kind; None if too few are known."""
        others = [
            measured.nats
            for peer, measured in self._workers.items()
            if peer != worker and measured.kind == kind and measured.nats < math.inf
        ]
        if len(others) < MEASURED_WORKERS:
            return None
        return min(noise_prior(kind), max(NOISE_MIN_NATS, statistics.median(others)))

    def of_worker(self, worker: PeerId) -> float:
        """The worker's own noise; infinite while too little is known."""
        measured = self._workers.get(worker)
        return max(NOISE_MIN_NATS, measured.nats) if measured is not None else math.inf

    def forget(self, worker: PeerId) -> None:
        self._workers.pop(worker, None)


# ---- the bets

NUMBERS_FACTOR = 3.0
"""A worker's numbers may be this many times as far off as those of the others of its kind: its card may be another one."""
DRAW_FACTOR = 1.5
"""The noise that *draw* assumes, as a multiple of what was measured of the kind, or of the worker if that is less."""
FABRICATED_FACTOR = 5.0  # numbers further off than this many times the prior of their kind are no noise
CHOICE_FACTOR, CHOICE_MISSES = 2.0, 1.0 / 32.0
"""The noise that *choice* assumes, as a multiple of the prior of the kind, and a floor for the misses that it grants."""
UNCERTAIN_TOKENS = 600  # an uncertain finding waits for this many tokens, because *choice* may still tell more
ROUNDING = 1e-5  # how far sums of probabilities over a vocabulary differ by rounding alone
MISS_MIN, MISS_MAX = 1e-4, 0.5
"""Bounds of a token's chance of an honest miss; beyond the upper one a token says nothing."""
NOISE_STAKES = (0.5, 2.0, 8.0, 24.0)  # below NOISE_CAP squared, as `Mixture.bet` asks; within ln 4 of the best of them
SUM_STAKES = (0.02, 0.1, 0.4, 0.9, -0.02, -0.1, -0.4, -0.9)  # both signs, since sums can be too large or too small
MISS_ODDS = (2.0, 5.0)  # alternatives that *draw* bets on: near misses this many times as often (in odds)
MISS_SHARES = (1e-3, 1e-2, 0.1, 0.5)  # and this share of the tokens taken from elsewhere
CHOICE_STAKES = (0.02, 0.2, 0.9)
"""Alternatives that *choice* bets on: shares of a worker's pieces that were selected instead of drawn."""


@dataclass(frozen=True, slots=True)
class Accusation:
    """`bet`: the bet that grew most. `is_certain`: the evidence suffices without what rests on measured noise."""

    bet: str
    text: str
    is_certain: bool


class Mixture:
    """Bets on one bounded quantity with several stakes. `log_wealth`: logarithm of their mean wealth."""

    def __init__(self, stakes: Sequence[float]) -> None:
        self._stakes = stakes
        self._logs = [0.0] * len(stakes)

    def bet(self, excess: Column) -> None:
        """Places one bet per element of `excess`, whose mean is at most 0 for an honest worker. Every stake times every element
        must be above -1."""
        self.add(float(np.log1p(stake * excess).sum()) for stake in self._stakes)

    def add(self, logs: Iterable[float]) -> None:
        """Multiplies each stake's wealth by a factor, whose mean is at most 1 for an honest worker; given are its logarithms."""
        self._logs = [log + more for log, more in zip(self._logs, logs, strict=True)]

    @property
    def log_wealth(self) -> float:
        return log_mean(self._logs)


@dataclass(slots=True)
class Bets:
    """The evidence against one worker since `since` (seconds); reset every day. `excuses_noise`: a person has judged this worker's
    noise to be harmless, so what rests on measured noise is not bet on."""

    since: float
    excuses_noise: bool = False
    tokens: int = 0
    misses: int = 0
    granted_misses: float = 0.0
    _squares: float = 0.0
    _noise: Mixture = field(default_factory=lambda: Mixture(NOISE_STAKES))
    _fabrication: Mixture = field(default_factory=lambda: Mixture(NOISE_STAKES))
    _sums: Mixture = field(default_factory=lambda: Mixture(SUM_STAKES))
    _draw: Mixture = field(default_factory=lambda: Mixture((*MISS_ODDS, *MISS_SHARES)))
    _choice: Mixture = field(default_factory=lambda: Mixture(CHOICE_STAKES))

    def observe(self, evidence: Evidence, kind: str, noise: KindNoise) -> None:
        """Places all bets on one piece; `noise` knows only earlier ones."""
        worker, exact = evidence.piece.worker, evidence.exact
        prior, measured = noise_prior(kind), noise.of_kind(worker, kind)
        differences = evidence.claimed - exact.logprobs
        self.tokens += len(differences)
        self._squares += float(differences @ differences)
        limit = prior if measured is None else min(prior, NUMBERS_FACTOR * measured)
        if not self.excuses_noise:
            self._noise.bet(_square_excess(differences, limit))
        self._fabrication.bet(_square_excess(differences, FABRICATED_FACTOR * prior))
        is_greedy = not exact.high_spread.any()
        if is_greedy or not evidence.piece.draws_by_seed:
            self._sums.bet((np.maximum(exact.drawn, FLOOR_NATS) - exact.expected) / -FLOOR_NATS)
            return
        sigma = DRAW_FACTOR * min(prior if measured is None else measured, noise.of_worker(worker))
        if not self.excuses_noise:
            self._bet_on_misses(exact, evidence.uniforms, sigma)
        self._bet_on_choice(exact, evidence.uniforms, CHOICE_FACTOR * prior)

    def _bet_on_misses(self, exact: TokenScores, numbers: Column, sigma: float) -> None:
        """Likelihood ratios of the misses seen, against the most that noise explains."""
        chances = np.maximum(MISS_MIN, honest_misses(exact, numbers, sigma))
        counted = chances <= MISS_MAX
        chances, missed = chances[counted], exact.picked[counted] < 0.5
        self.misses += int(missed.sum())
        self.granted_misses += float(chances.sum())
        ratios = [np.where(missed, odds, 1.0) / (1.0 + (odds - 1.0) * chances) for odds in MISS_ODDS]
        ratios += [np.where(missed, 1.0 + share * (1.0 / chances - 1.0), 1.0 - share) for share in MISS_SHARES]
        self._draw.add(float(np.log(ratio).sum()) for ratio in ratios)

    def _bet_on_choice(self, exact: TokenScores, numbers: Column, sigma: float) -> None:
        """Likelihood ratio of the misses seen, if the piece's tokens were drawn by other random numbers. Each piece stakes only a
        share of the wealth, because a worker may select only some of its rollouts."""
        chances = np.maximum(CHOICE_MISSES, honest_misses(exact, numbers, sigma))
        others = 0.9 * (1.0 - (exact.high - exact.low))
        counted = others > 2.0 * chances
        chances, others, missed = chances[counted], others[counted], exact.picked[counted] < 0.5
        evident = float(np.log(np.where(missed, others / chances, (1.0 - others) / (1.0 - chances))).sum())
        self._choice.add(float(np.logaddexp(math.log1p(-stake), math.log(stake) + evident)) for stake in CHOICE_STAKES)

    @property
    def log_wealths(self) -> dict[str, float]:
        """By what is wrong; `fabrication` and `sums` are parts of *numbers* and *draw* that do not rest on measured noise."""
        return {
            "numbers": self._noise.log_wealth,
            "fabrication": self._fabrication.log_wealth,
            "draw": self._draw.log_wealth,
            "sums": self._sums.log_wealth,
            "choice": self._choice.log_wealth,
        }

    @property
    def noise_nats(self) -> float:
        """Root mean square of claimed minus exact log-probability over all tokens seen."""
        return math.sqrt(self._squares / max(1, self.tokens))

    def of_day(self, now: float) -> Bets:
        """This evidence, or none yet where a day is over, so that `FALSE_ALARMS_A_DAY` holds for each day."""
        return self if now - self.since < DAY_S else Bets(now, self.excuses_noise)

    @property
    def accusation(self) -> Accusation | None:
        """The accusation, if the evidence suffices, else None. An uncertain one also needs `UNCERTAIN_TOKENS`."""
        wealths, needed = self.log_wealths, -math.log(FALSE_ALARMS_A_DAY)
        evidence = log_mean(list(wealths.values()))
        certain = {name: log if name in CERTAIN else -math.inf for name, log in wealths.items()}
        is_certain = log_mean(list(certain.values())) >= needed
        if evidence < needed or not (is_certain or self.tokens >= UNCERTAIN_TOKENS):
            return None
        bet = max(wealths, key=lambda name: certain[name] if is_certain else wealths[name])
        text = (
            f"{_TEXTS[bet]} (evidence {evidence:.1f} nats in {self.tokens} tokens; its log-probabilities are {self.noise_nats:.3g} "
            f"nats off, root mean square; {self.misses} tokens are not those of its leases' numbers, at most "
            f"{self.granted_misses:.1f} by noise)"
        )
        return Accusation(bet, text, is_certain)


CERTAIN = ("fabrication", "sums", "choice")
_TEXTS = {
    "numbers": "its log-probabilities are further from those of the version that it claims than its kind of engine makes them",
    "fabrication": "its log-probabilities are not those of the version that it claims",
    "draw": "its tokens differ from those that the random numbers of its leases pick more often than its noise explains",
    "sums": "its tokens are no draw from the version that it claims",
    "choice": "its tokens are not those that the random numbers of its leases pick",
}


def honest_misses(exact: TokenScores, numbers: Column, sigma: float) -> Column:
    """The largest chance of an honest engine with noise `sigma` to take another token than the one that the number picks."""
    chances: Column = np.zeros(len(numbers))
    for spreads, distances in ((exact.low_spread, numbers - exact.low), (exact.high_spread, exact.high - numbers)):
        deviations = np.maximum(0.0, distances - ROUNDING) / (sigma * spreads + 1e-12)
        chances += np.where(  # Gauss's inequality, one side
            deviations < 2.0 / math.sqrt(3.0),
            0.5 - deviations / (2.0 * math.sqrt(3.0)),
            2.0 / 9.0 / np.maximum(1.0, deviations) ** 2,
        )
    return np.minimum(1.0, chances)


def _square_excess(differences: Column, limit: float) -> Column:
    excess: Column = np.minimum(1.0, (differences / (NOISE_CAP * limit)) ** 2) - NOISE_CAP**-2
    return excess


def log_mean(logs: Sequence[float]) -> float:
    """Logarithm of the mean of `exp(logs)`, without overflow."""
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(log - largest) for log in logs) / len(logs))

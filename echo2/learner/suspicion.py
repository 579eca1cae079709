"""A sequential test for each worker: are its rollouts what it claims they are?

Guarantees: an honest worker is accused with probability at most `false_alarms_per_day` per day, however often the test is
evaluated and whichever rollouts are sampled when; the number of tokens needed to find a cheat falls with the square of what
it changed. Leaves to others: the numbers (audit), what happens to an accused worker.

The test bets against honesty (Ville's inequality; Wald 1945 for likelihood ratios, Waudby-Smith and Ramdas 2024
for bounded means). Each bet starts with a wealth of 1, which does not grow on average while the worker is honest. So the mean
wealth of all bets reaches 1/alpha with probability at most alpha. Each of the eight bets is against one property of honest
workers:

- *noise*: the mean square of claimed minus exact log-probability is at most `noise_nats` squared. Catches altered and
  coarsely quantised models.
- *fabrication*: the same with `FABRICATION` times `noise_nats`. Catches made-up numbers.
- *version*: noise leans towards the previous version by no more than chance (correlation below 0.1). The bet projects
  the differences onto the shift between the two versions. Catches a worker that stayed on the old version, even if
  the shift is smaller than its noise, down to `SHIFT_MIN` of it.
- *draw*: tokens are drawn from the version named, so the sum of their log-probabilities has a known mean. Catches greedy,
  cold, repeated and forged tokens with honest numbers.
- *length*: completions end as often as the version named implies. Catches truncated completions, and ends that are delayed.
- *copies*: siblings are drawn independently. Catches completions delivered twice.
- *choice*: each token is the one picked by the lease's random number for its position. The number lies in the token's
  interval of the cumulative distribution, or outside it by at most `CHOICE_SIGMAS` times what the worker's own noise moves the
  interval's edge, except for at most a share `CHOICE_MISSES` of the tokens (Chebyshev's inequality gives less than half of
  that). Catches any selection among samples, by whatever rule, and tokens of another version. Only for workers that claim to
  draw by their seeds.
- *older*: if the random number picks different tokens under the version named and under an older one, the worker's token is
  the older version's no more often than its own noise explains. Noise of `sigma` moves the edge between the two tokens
  by `x` with probability at most `sigma`^2 / (`sigma`^2 + `x`^2) (Cantelli), and at most `OLDER_LEAN`, because noise leans to
  no version. Catches tokens of an older version whose numbers were recomputed under the one named, even if the versions
  differ by less than honest noise. For the same workers as *choice*.

How much honest engines differ is the only assumption here that depends on kernels and cards. So a finding that rests on
*noise* alone is not certain (`Accusation.is_certain`): its consequence can be undone, and a person decides. A finding that rests
on *version* is not certain either, while the previous version explains less than three quarters of the worker's differences:
perturbed weights lean that way too, because any disturbance makes a model less sure, and so may an engine's noise. A
finding is certain if the mean of all bets reaches 1/alpha even with these uncertain bets counted as lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from echo2.base.errors import ConfigError
from echo2.learner.audit import Evidence
from echo2.scoring.request import FLOOR_NATS, Column, TokenScores

DAY_S = 86_400.0
NOISE_STAKES = (0.5, 2.0, 8.0, 24.0)
DRAW_STAKES = (0.02, 0.1, 0.4, 0.9, -0.02, -0.1, -0.4, -0.9)
STOP_FACTORS = (3.0, 20.0, 0.3)
"""Alternatives that *length* bets on: a cheat ends its sequences this many times as often as it should."""
STOP_CHANCE_MAX = 0.9
COPY_STAKE = 0.01
CHOICE_SIGMAS = 6.0
CHOICE_MISSES = 1.0 / 16.0
CHOICE_STAKES = (0.02, 0.2, 0.9)
"""Alternatives that *choice* bets on: shares of a worker's rollouts that were selected instead of drawn."""
CHOICE_ROUNDING = 1e-5
CHOICE_SIGMA_MIN, CHOICE_SIGMA_MAX = 0.004, 0.5
"""Bounds, in nats, of the noise that *choice* and *older* assume for a worker."""
NOISE_CAP = 8.0
"""Differences beyond this many `noise_nats` count as this many."""
LEARN_TOKENS = 200
"""Tokens needed to know a worker's own noise well enough to bet on its version."""
FABRICATION = 10.0
UNCERTAIN_TOKENS = 600
"""An uncertain finding waits for this many tokens, because the other bets may still tell what kind of noise it is."""
EXPLAINED_MIN = 0.75
"""The share of a worker's squared differences that the previous version must explain for a *version* finding to be certain."""
SIGMA_MIN = 1e-7
OLDER_LEAN = 0.6
OLDER_CHANCE_MIN = 0.02
OLDER_STAKES = (0.05, 0.3, 0.9)
"""Alternatives that *older* bets on: shares of a worker's tokens that an older version drew."""
SHIFT_MIN = 0.2
"""*version* does not bet if the two versions differ by less than this share of the worker's noise: the noise of another
precision is a fixed function of the tokens, and may by chance lean a little towards the previous version."""


@dataclass(frozen=True, slots=True)
class SuspicionConfig:
    """`noise_nats`: root mean square by which honest engines, of any precision and batch size, may differ from the learner.
    `false_alarms_per_day`: the largest probability per day that an honest worker is accused."""

    noise_nats: float = 0.05
    false_alarms_per_day: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 < self.noise_nats < 10:
            raise ConfigError(f"audit: expected noise between 0 and 10 nats, got {self.noise_nats}")
        if not 0 < self.false_alarms_per_day < 1:
            raise ConfigError(f"audit: expected false alarms between 0 and 1 a day, got {self.false_alarms_per_day}")


@dataclass(frozen=True, slots=True)
class Accusation:
    """`bet`: the bet that grew most. `evidence`: natural logarithm of the mean bet. `is_certain`: the evidence suffices without
    the uncertain bets."""

    bet: str
    evidence: float
    tokens: int
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
        for number, stake in enumerate(self._stakes):
            self._logs[number] += float(np.log1p(stake * excess).sum())

    @property
    def log_wealth(self) -> float:
        return log_mean(self._logs)


@dataclass(slots=True)
class Suspicion:
    """The evidence against one worker since `since` (seconds); reset every day.

    `excuses_noise`: a person has judged this worker's noise to be harmless; the *noise* bet is not placed.
    """

    config: SuspicionConfig
    since: float
    excuses_noise: bool = False
    tokens: int = 0
    _noise: Mixture = field(default_factory=lambda: Mixture(NOISE_STAKES))
    _fabrication: Mixture = field(default_factory=lambda: Mixture(NOISE_STAKES))
    _draw: Mixture = field(default_factory=lambda: Mixture(DRAW_STAKES))
    _stops: list[float] = field(default_factory=lambda: [0.0] * len(STOP_FACTORS))
    _choice: list[float] = field(default_factory=lambda: [0.0] * len(CHOICE_STAKES))
    _next_older: Mixture = field(default_factory=lambda: Mixture(OLDER_STAKES))
    _far_older: Mixture = field(default_factory=lambda: Mixture(OLDER_STAKES))
    _version: float = 0.0
    _copies: float = 0.0
    # Sums over tokens with scores under the next older version: squared differences, squared shifts, their products, count.
    _squares: float = 0.0
    _shift_squares: float = 0.0
    _products: float = 0.0
    _counted: int = 0
    _all_squares: float = 0.0  # squared differences of all tokens

    def observe(self, evidence: Evidence) -> None:
        """Places all bets on one piece."""
        exact = evidence.exact
        differences = evidence.claimed - exact.logprobs
        self.tokens += len(differences)
        shares = (differences / (NOISE_CAP * self.config.noise_nats)) ** 2
        if not self.excuses_noise:
            self._noise.bet(np.minimum(1.0, shares) - NOISE_CAP**-2)
        self._fabrication.bet(np.minimum(1.0, shares / FABRICATION**2) - NOISE_CAP**-2)
        self._all_squares += float(differences @ differences)
        if evidence.older is not None and evidence.is_next_older:
            self._bet_on_version(differences, evidence.older.logprobs - exact.logprobs)
        self._draw.bet((np.maximum(exact.drawn, FLOOR_NATS) - exact.expected) / -FLOOR_NATS)
        self._bet_on_stops(exact.stop_chances, exact.stopped)
        if len(evidence.uniforms):
            sigma = min(CHOICE_SIGMA_MAX, max(CHOICE_SIGMA_MIN, 2.0 * self.noise_nats))
            self._bet_on_choice(exact, evidence.uniforms, sigma)
            if evidence.older is not None:
                older = self._next_older if evidence.is_next_older else self._far_older
                older.bet(_older_excess(exact, evidence.older, evidence.uniforms, sigma))

    def observe_copies(self, likelihood: float) -> None:
        """Places the *copies* bet. `likelihood`: from `audit.copies`."""
        self._copies += math.log1p(COPY_STAKE * (min(likelihood, 1e12) - 1.0))

    def _bet_on_version(self, differences: Column, shifts: Column) -> None:
        """Wald's likelihood ratio for a shift by the difference of the two versions, in Gaussian noise of the worker's own size.

        Shift and noise are clipped at one and three standard deviations, because only the direction matters. The sums are
        updated after the bet, so that each bet uses only earlier tokens.
        """
        is_clear = self._shift_squares >= SHIFT_MIN**2 * self._squares and self._counted >= LEARN_TOKENS
        if is_clear:
            sigma = math.sqrt(2.0 * self._squares / self._counted + SIGMA_MIN**2)
            towards = np.clip(shifts / sigma, -1.0, 1.0)
            noise = np.clip(differences / sigma, -3.0, 3.0)
            self._version += float((towards * noise - towards * towards / 2.0).sum())
        self._squares += float(differences @ differences)
        self._shift_squares += float(shifts @ shifts)
        self._products += float(differences @ shifts)
        self._counted += len(differences)

    def _bet_on_stops(self, chances: Column, stopped: Column) -> None:
        """Likelihood ratios of the ends observed, for each alternative of `STOP_FACTORS`."""
        chances = np.clip(chances, 1e-9, STOP_CHANCE_MAX)
        for number, factor in enumerate(STOP_FACTORS):
            others = np.minimum(factor * chances, STOP_CHANCE_MAX)
            ratios = np.where(stopped > 0, others / chances, (1.0 - others) / (1.0 - chances))
            self._stops[number] += float(np.log(ratios).sum())

    def _bet_on_choice(self, exact: TokenScores, numbers: Column, sigma: float) -> None:
        """Likelihood ratio of the misses observed, if the piece's tokens were drawn by other random numbers. Each piece stakes
        only a share of the wealth, because a worker may select only some of its rollouts."""
        low, high = _part(exact)
        edges = np.where(numbers < low, low, high)
        allowed = CHOICE_SIGMAS * sigma * np.sqrt(edges * (1.0 - edges)) + CHOICE_ROUNDING
        misses = np.maximum(low - numbers, numbers - high) > allowed
        chances = 0.8 * (
            1.0 - exact.collisions
        )  # probability of a miss by other numbers, less what the allowance hides
        ratios = np.where(misses, chances / CHOICE_MISSES, (1.0 - chances) / (1.0 - CHOICE_MISSES))
        evident = float(np.log(ratios[chances > 2.0 * CHOICE_MISSES]).sum())
        for number, stake in enumerate(CHOICE_STAKES):
            self._choice[number] += float(np.logaddexp(math.log1p(-stake), math.log(stake) + evident))

    def expire(self, now: float) -> None:
        """Resets the evidence after a day, so that `false_alarms_per_day` holds for each day."""
        if now - self.since >= DAY_S:
            self.__init__(self.config, now, self.excuses_noise)  # type: ignore[misc]

    @property
    def log_wealths(self) -> dict[str, float]:
        return {
            "noise": self._noise.log_wealth,
            "fabrication": self._fabrication.log_wealth,
            "version": self._version,
            "draw": self._draw.log_wealth,
            "length": log_mean(self._stops),
            "copies": self._copies,
            "choice": log_mean(self._choice),
            "older": log_mean([self._next_older.log_wealth, self._far_older.log_wealth]),
        }

    @property
    def noise_nats(self) -> float:
        """Root mean square of claimed minus exact log-probability over all tokens seen."""
        return math.sqrt(self._all_squares / max(1, self.tokens))

    @property
    def evidence(self) -> float:
        """Natural logarithm of the mean bet; 0 at the start."""
        return log_mean(list(self.log_wealths.values()))

    @property
    def accusation(self) -> Accusation | None:
        """The accusation, if the evidence suffices, else None. An uncertain one also needs `UNCERTAIN_TOKENS`."""
        evidence, needed = self.evidence, -math.log(self.config.false_alarms_per_day)
        if evidence < needed:
            return None
        wealths = self.log_wealths
        explained = self._products**2 >= EXPLAINED_MIN * self._squares * self._shift_squares
        uncertain = {"noise"} if explained else {"noise", "version"}
        is_certain = log_mean([-math.inf if name in uncertain else log for name, log in wealths.items()]) >= needed
        if not is_certain and self.tokens < UNCERTAIN_TOKENS:
            return None
        bet = max(wealths, key=lambda name: wealths[name] if name not in uncertain or not is_certain else -math.inf)
        text = (
            f"{_TEXTS[bet]} (evidence {evidence:.1f} nats in {self.tokens} tokens; its log-probabilities are {self.noise_nats:.3g} "
            f"nats off, root mean square, {self.config.noise_nats:g} are allowed)"
        )
        return Accusation(bet, evidence, self.tokens, text, is_certain)


_TEXTS = {
    "noise": "its log-probabilities are further from those of the version that it claims than honest engines should be",
    "fabrication": "its log-probabilities are not those of the version that it claims",
    "version": "its log-probabilities lean to the version before the one that it claims",
    "draw": "its tokens are no draw from the version that it claims",
    "length": "its completions end where the version that it claims would not end them",
    "copies": "its completions of a prompt are copies of one another",
    "choice": "its tokens are not those that the random numbers of its leases pick, as it says of its engine",
    "older": "its tokens are those that the random numbers of its leases pick under an older version than it claims",
}


def _part(scores: TokenScores) -> tuple[Column, Column]:
    """Each token's interval of the cumulative distribution: lower and upper edge."""
    return scores.below, np.minimum(1.0, scores.below + np.exp(scores.drawn))


def _older_excess(exact: TokenScores, older: TokenScores, numbers: Column, sigma: float) -> Column:
    """The excess for *older*, of tokens that the random number picks under exactly one of the two versions. The deciding edge
    lies between the two picks, so its distance from the number is the same whichever of them the worker took."""
    (low, high), (old_low, old_high) = _part(exact), _part(older)
    is_named, is_older = (low <= numbers) & (numbers < high), (old_low <= numbers) & (numbers < old_high)
    is_above = np.where(is_older, numbers >= high, numbers >= old_high)
    edges = np.where(is_above, high, low)
    distances = np.maximum(0.0, np.abs(edges - numbers) - CHOICE_ROUNDING)
    variances = sigma**2 * edges * (1.0 - edges)
    chances = np.clip(variances / (variances + distances**2 + 1e-300), OLDER_CHANCE_MIN, OLDER_LEAN)
    excess: Column = np.where(is_older, 1.0 / chances - 1.0, -1.0)[is_named != is_older]
    return excess


def log_mean(logs: Sequence[float]) -> float:
    """Logarithm of the mean of `exp(logs)`, without overflow."""
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(log - largest) for log in logs) / len(logs))

"""The audit: is a worker's rollout what an honest engine makes of its lease? The learner scores some rollouts again and bets.

Guarantees: an honest worker is accused with probability at most `FALSE_ALARMS_A_DAY`, however often one looks and whichever
rollouts are drawn; nothing that a worker claims widens what it is allowed beyond the prior of a kind of engine. Leaves to others:
keeping versions and running the forward pass (training/scoring), what happens to an accused worker
(auditor, learner).

A rollout is scored whole. Every token is scored under the version that its span names, with the KV cache that an honest engine
had there: it prefills again when it takes over a rollout, when a turn begins and, unless its worker says that it keeps the cache,
when the version changes. Three bets run for each worker. Each starts with a wealth of 1 that does not grow on average while the
worker is honest, so that their mean reaches 1/alpha with probability at most alpha (Ville's inequality).

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

import itertools
import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from echo2.base.ids import PeerId, Version
from echo2.base.rng import rollout_seed, turn_seed, uniforms
from echo2.base.rollout import Rollout, SamplingParams
from echo2.learner.rollouts.groups import TrainGroup

FALSE_ALARMS_A_DAY = 1e-6  # one honest worker in a million worker-days
DAY_S = 86_400.0  # then the bets begin anew
FLOOR_NATS = -12.0
"""Floor for log-probabilities when a token's likelihood is judged, so that a single token has bounded weight."""
WORKERS_MAX = 16_384  # some kilobytes each; of more workers the oldest is forgotten

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


# ---- what is scored


@dataclass(frozen=True, slots=True)
class Habits:
    """What a worker claims about its engine. `draws_by_seed`: each token is picked by the random number that the lease's seed
    gives for its position. `keeps_cache`: sequences keep their KV cache when the weights change. `kind`: engine and precision."""

    draws_by_seed: bool = False
    keeps_cache: bool = False
    kind: str = ""


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
class Passage:
    """A rollout as its engines read it. `token_ids`: all tokens, from prompt, environment and policy. `places`: int64, the
    indices of the sampled tokens in `token_ids`. `uniforms`: float64, the random number that the seed gives for each sampled
    token."""

    rollout: Rollout
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    places: npt.NDArray[np.int64]
    uniforms: Column
    pieces: tuple[Piece, ...]

    @property
    def claimed(self) -> Column:
        return np.asarray(self.sampling.trained_logprobs(self.rollout.logprobs, self.rollout.raw_logprobs))


@dataclass(frozen=True, slots=True)
class Evidence:
    """The claimed and the recomputed scores of a piece. `uniforms`: the random numbers of its tokens."""

    piece: Piece
    claimed: Column
    exact: TokenScores
    uniforms: Column


class Scorer(Protocol):
    """Scores tokens under the published `versions` (ascending) that it keeps. `is_of_trainer`: it uses the model that trains, so
    call it only on the trainer's thread; else it needs its own thread. `keep`, of a snapshot that is never changed in place, may
    be called from a different thread. `turn`: all scoring takes place in it; versions kept at its start stay until its end.
    `score`, with `cached`: keep the KV cache of the one piece that is asked, which continues that of the call before with this
    many tokens (0: it begins one)."""

    @property
    def is_of_trainer(self) -> bool: ...
    @property
    def versions(self) -> list[Version]: ...
    def keep(self, version: Version, tensors: Mapping[str, Any]) -> None: ...
    def turn(self) -> AbstractContextManager[None]: ...
    def score(
        self, version: Version, asked: Sequence[tuple[Passage, Piece]], cached: int | None = None
    ) -> list[TokenScores]: ...


def passage_of(group: TrainGroup, member: int, habits_of: Callable[[PeerId], Habits]) -> Passage:
    """Builds the passage of rollout `member` of a training group. Takes milliseconds for a long rollout."""
    rollout = group.rollouts[member]
    insertions = group.insertions[member] if group.insertions else ()
    text, sampled_at = group.text_of(member)
    prompt = group.spec.prompt_token_ids
    seed, starts = group.spec.sampling.seed, [0, *(said.position for said in insertions), len(rollout.token_ids)]
    seeds = [rollout_seed(seed, rollout.index)]
    seeds += [rollout_seed(turn_seed(seed, rollout.index, turn + 1), 0) for turn in range(len(insertions))]
    turns = zip(seeds, itertools.pairwise(starts), strict=True)
    return Passage(
        rollout,
        group.spec.sampling,
        (*prompt, *text),
        np.asarray(sampled_at, dtype=np.int64) + len(prompt),
        np.concatenate([uniforms(own, stop - start) for own, (start, stop) in turns]),
        pieces_of(group, member, habits_of),
    )


def pieces_of(group: TrainGroup, member: int, habits_of: Callable[[PeerId], Habits]) -> tuple[Piece, ...]:
    """Cuts rollout `member` wherever its version, its worker or its turn changes."""
    versions = [(span.count, span.version) for span in group.rollouts[member].version_spans]
    peers = [(sent.token_count, sent.peer_id) for sent in group.senders[member]]
    version_ends, peer_ends = (list(itertools.accumulate(count for count, _ in runs)) for runs in (versions, peers))
    turns = [insertion.position for insertion in (group.insertions[member] if group.insertions else ())]
    end = min(version_ends[-1], peer_ends[-1]) if versions and peers else 0
    cuts = sorted(cut for cut in {*version_ends, *peer_ends, *turns} if 0 < cut < end)
    pieces: list[Piece] = []
    for start, stop in itertools.pairwise([0, *cuts, end] if end else [0]):
        (_, version), (_, peer) = versions[bisect_right(version_ends, start)], peers[bisect_right(peer_ends, start)]
        goes_on = start > 0 and start not in turns and pieces[-1].worker == peer
        keeps = goes_on and habits_of(peer).keeps_cache
        pieces.append(Piece(peer, version, start, stop, keeps, habits_of(peer).draws_by_seed))
    return tuple(pieces)


def examine(passages: Sequence[Passage], scorer: Scorer) -> list[list[Evidence]]:
    """Scores the passages within a turn of `scorer`; returns, for each, the evidence of the pieces whose version it keeps.

    Pieces that continue no cache are scored version by version, so each version is loaded once. A chain of pieces that share a
    cache is scored only if all its versions are kept.
    """
    kept = scorer.versions
    evidence: list[list[Evidence]] = [[] for _ in passages]
    alone: list[tuple[int, Piece]] = []

    def add(number: int, piece: Piece, exact: TokenScores) -> None:
        own, passage = slice(piece.start, piece.stop), passages[number]
        evidence[number].append(Evidence(piece, passage.claimed[own], exact, passage.uniforms[own]))

    for number, passage in enumerate(passages):
        for chain in _chains(passage.pieces):
            if len(chain) == 1:
                alone += [(number, piece) for piece in chain if piece.version in kept]
            elif all(piece.version in kept for piece in chain):
                cached = 0
                for piece in chain:
                    (exact,) = scorer.score(piece.version, [(passage, piece)], cached)
                    add(number, piece, exact)
                    cached = int(passage.places[piece.stop - 1])
    for version in kept:
        asked = [(number, piece) for number, piece in alone if piece.version == version]
        scored = scorer.score(version, [(passages[number], piece) for number, piece in asked]) if asked else []
        for (number, piece), exact in zip(asked, scored, strict=True):
            add(number, piece, exact)
    return evidence


def _chains(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Splits pieces into chains: a piece, then the pieces that continue its KV cache."""
    chain: list[Piece] = []
    for piece in pieces:
        if chain and not piece.keeps_cache:
            yield chain
            chain = []
        chain.append(piece)
    if chain:
        yield chain


# ---- which rollouts

NEWCOMER_TOKENS = 2048
"""All rollouts of a worker are audited until this many of its tokens were drawn."""
OWN_NOISE_FACTOR = 3.0
"""A worker that says it cannot draw by its seeds is audited this many times as often."""
WAITING_MAX = 256  # passages that wait to be scored; `AuditDraw.add` says which are given up beyond it
WAITING_TOKENS_MAX = 1 << 20  # bounds their memory: 128 rollouts of 8,192 tokens
SEEN_MIN = 64
"""A worker's unaudited share is reported once it has this many rollouts."""


@dataclass(slots=True)
class _Account:
    """One worker's rollouts: `seen`, complete ones; `audited`; `tokens` drawn for audit."""

    seen: int = 0
    audited: int = 0
    tokens: int = 0

    @property
    def share(self) -> float:
        """Audited share of the rollouts; smoothed, so that among workers without audits the one with most rollouts is first."""
        return (self.audited + 1.0) / (self.seen + 1.0)


@dataclass(slots=True)
class AuditDraw:
    """Chooses which rollouts to audit, after they were reported. All of a worker's rollouts are drawn with the same probability.
    The queue is bounded; if it is full, the worker with the largest audited share gives up one of its rollouts, and the one next
    audited is of the worker with the smallest: which of its rollouts is chance, so no worker gains by when it sends what.

    `share`: the share of rollouts to audit, for a worker that draws by its seeds. `rng`: must be unpredictable to workers.
    `given_up`: rollouts drawn but not audited, because the queue was full or their versions are not kept any longer."""

    share: float
    rng: random.Random
    given_up: int = 0
    waiting: list[tuple[PeerId, Passage]] = field(default_factory=list)
    _accounts: dict[PeerId, _Account] = field(default_factory=dict)

    def falls_on(self, worker: PeerId, *, draws_by_seed: bool) -> bool:
        """Counts a complete rollout; returns whether to audit it. If so, the caller `add`s it."""
        account = self._account(worker)
        account.seen += 1
        chance = self.share * (1.0 if draws_by_seed else OWN_NOISE_FACTOR)
        return account.tokens < NEWCOMER_TOKENS or self.rng.random() < chance

    def add(self, worker: PeerId, passage: Passage) -> None:
        """Queues a rollout for which `falls_on` returned True, at a random place; drops others while the queue is too long."""
        self._account(worker).tokens += len(passage.places)
        self.waiting.insert(self.rng.randrange(len(self.waiting) + 1), (worker, passage))
        while len(self.waiting) > WAITING_MAX or self.waiting_tokens > WAITING_TOKENS_MAX:
            self.waiting.remove(max(self.waiting, key=lambda drawn: self._account(drawn[0]).share))
            self.given_up += 1

    def take(self, tokens_max: int) -> list[tuple[PeerId, Passage]]:
        """Takes rollouts from the queue: least audited worker first, up to `tokens_max` tokens, at least one rollout."""
        taken: list[tuple[PeerId, Passage]] = []
        for drawn in sorted(self.waiting, key=lambda drawn: self._account(drawn[0]).share):
            tokens_max -= len(drawn[1].token_ids)
            if taken and tokens_max < 0:
                break
            taken.append(drawn)
        self.waiting = [drawn for drawn in self.waiting if not any(drawn is one for one in taken)]
        return taken

    def on_audit(self, worker: PeerId, tokens: int) -> None:
        """Counts a rollout as audited if `tokens` of it were scored; with 0 (its versions are not kept), as given up."""
        self._account(worker).audited += tokens > 0
        self.given_up += tokens == 0

    def forget(self, worker: PeerId) -> None:
        """Makes the worker a newcomer, and drops its queued rollouts."""
        self._accounts.pop(worker, None)
        self.waiting = [drawn for drawn in self.waiting if drawn[0] != worker]

    @property
    def waiting_tokens(self) -> int:
        return sum(len(passage.token_ids) for _, passage in self.waiting)

    @property
    def unaudited(self) -> dict[PeerId, float]:
        """Share of each worker's rollouts that was not audited, for workers with at least `SEEN_MIN` rollouts."""
        known = {worker: account for worker, account in self._accounts.items() if account.seen >= SEEN_MIN}
        return {worker: 1.0 - account.audited / account.seen for worker, account in known.items()}

    def _account(self, worker: PeerId) -> _Account:
        return bounded_entry(self._accounts, worker, _Account)


def bounded_entry(table: dict[PeerId, T], worker: PeerId, make: Callable[[], T]) -> T:
    """The worker's entry; a new one takes the place of the oldest where the table is full."""
    if worker not in table:
        if len(table) >= WORKERS_MAX:
            del table[next(iter(table))]
        table[worker] = make()
    return table[worker]


# ---- noise

NOISE_PRIOR_NATS = {"fp8": 0.4}
NOISE_PRIOR_OTHERS_NATS = 0.1
"""By precision: the noise that is allowed to an engine of a kind that has not been measured yet, and the most that a measured kind
is allowed. On SmolLM2-135M bf16 is 0.05 off, fp8 0.28 (docs/vllm.md); larger models less."""
NOISE_MIN_NATS = 2e-3
"""The least noise that is allowed: next to none is measured of float32 engines, and rounding alone would then be evidence."""
MEASURED_TOKENS = 200
"""Tokens after which a worker's noise is known well enough to count."""
MEASURED_WORKERS = 3
"""Others of its kind that must be known before their noise is the measure for a worker: with three, one liar cannot move the
median beyond honest ones."""
NOISE_CAP = 8.0
"""Differences beyond this many times the allowed noise count as this many."""


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
            one.nats
            for peer, one in self._workers.items()
            if peer != worker and one.kind == kind and one.nats < math.inf
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
FABRICATED_FACTOR = 5.0
"""Numbers further off than this many times the prior of their kind are no noise."""
CHOICE_FACTOR, CHOICE_MISSES = 2.0, 1.0 / 32.0
"""The noise that *choice* assumes, as a multiple of the prior of the kind, and a floor for the misses that it grants."""
UNCERTAIN_TOKENS = 600
"""An uncertain finding waits for this many tokens, because *choice* may still tell more."""
ROUNDING = 1e-5
"""How far sums of probabilities over a vocabulary differ by rounding alone."""
MISS_MIN, MISS_MAX = 1e-4, 0.5
"""Bounds of a token's chance of an honest miss; beyond the upper one a token says nothing."""
NOISE_STAKES = (0.5, 2.0, 8.0, 24.0)  # below NOISE_CAP squared, as `Mixture.bet` asks; within ln 4 of the best of them
SUM_STAKES = (0.02, 0.1, 0.4, 0.9, -0.02, -0.1, -0.4, -0.9)  # both signs, since sums can be too large or too small
MISS_ODDS = (2.0, 5.0)
"""Alternatives that *draw* bets on: near misses this many times as often (in odds)."""
MISS_SHARES = (1e-3, 1e-2, 0.1, 0.5)
"""And this share of the tokens taken from elsewhere."""
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
        told = chances <= MISS_MAX
        chances, missed = chances[told], exact.picked[told] < 0.5
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
        told = others > 2.0 * chances
        chances, others, missed = chances[told], others[told], exact.picked[told] < 0.5
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

    def expire(self, now: float) -> None:
        """Resets the evidence after a day, so that `FALSE_ALARMS_A_DAY` holds for each day."""
        if now - self.since >= DAY_S:
            self.__init__(now, self.excuses_noise)  # type: ignore[misc]

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

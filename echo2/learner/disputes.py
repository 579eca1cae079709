"""Collects scorers' numbers about rollouts until the learner's own numbers decide: suspicion of authors, trust in scorers.

Guarantees: no worker is accused on another worker's word alone. Scorers' numbers feed the same eight bets as the learner's
would, in a separate account for each author. Once that account makes honesty less likely than `DISPUTE_CHANCE`, the learner
scores the rollouts that the suspicion rests on, as far as they are kept, and the author's next `WATCH_TOKENS` drawn tokens.
A scorer is judged by rollouts that the learner scored too: disputed ones, and known answers, which the scorer cannot tell
from other leases (scorings). An honest scorer, like an honest author, is accused with at most the daily probability of
`SuspicionConfig`. Leaves to others: verdicts on authors by the learner's numbers (suspicion), leases (scorings).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from echo2.base.ids import PeerId
from echo2.learner.audit import Evidence, copies
from echo2.learner.scorings import SUSPICION, AccuseScorer, Action, Look, LookSelf
from echo2.learner.suspicion import (
    DAY_S,
    NOISE_CAP,
    NOISE_STAKES,
    UNCERTAIN_TOKENS,
    Accusation,
    Mixture,
    Suspicion,
    SuspicionConfig,
    log_mean,
)
from echo2.scoring.request import FLOOR_NATS, Column, TokenScores

DISPUTE_CHANCE = 1e-3
"""Probability per day that an honest author is disputed by chance."""
WATCH_TOKENS = 8192
"""Tokens of a suspect that the learner scores itself after a dispute: enough for the slowest bet with the rollout lengths of
small runs."""
TELLINGS_TOKENS_MAX = 1 << 18
"""Tokens whose scorers' numbers are kept, all authors together, at about 110 bytes each; the oldest are dropped first."""
WORKERS_MAX = 16_384
LOOKS_MAX, OWN_MAX = 4096, 256
FALSE = 5.0
"""A scorer is certainly dishonest if its numbers are off by this many times what is allowed for honest engines."""
_SPREAD = np.array([1.0, 1.0, 4.0, 0.5, 1.0, 0.5, 1.0])
"""For each column of `TokenScores`, the largest root-mean-square change caused by a noise of one nat."""


@dataclass(slots=True)
class ScorerTrust:
    """The evidence against a scorer since `since` (seconds); reset every day. `excuses_noise`: skip the noise bet."""

    config: SuspicionConfig
    since: float
    excuses_noise: bool = False
    tokens: int = 0
    _noise: Mixture = field(default_factory=lambda: Mixture(NOISE_STAKES))
    _fabrication: Mixture = field(default_factory=lambda: Mixture(NOISE_STAKES))

    def observe(self, told: TokenScores, exact: TokenScores) -> None:
        """Compares the scorer's and the learner's numbers of the same tokens under the same version."""
        squares = _differences(told, exact) / (NOISE_CAP * self.config.noise_nats) ** 2
        self.tokens += len(squares)
        if not self.excuses_noise:
            self._noise.bet(np.minimum(1.0, squares) - NOISE_CAP**-2)
        self._fabrication.bet(np.minimum(1.0, squares / FALSE**2) - NOISE_CAP**-2)

    @property
    def accusation(self) -> Accusation | None:
        """The accusation, if the evidence suffices, else None. An uncertain one also needs `UNCERTAIN_TOKENS`."""
        needed, certain = -math.log(self.config.false_alarms_per_day), self._fabrication.log_wealth - math.log(2.0)
        evidence = log_mean([self._noise.log_wealth, self._fabrication.log_wealth])
        if evidence < needed or (certain < needed and self.tokens < UNCERTAIN_TOKENS):
            return None
        text = (
            "its scores of others' rollouts are not those of the versions named "
            f"(evidence {evidence:.1f} nats in {self.tokens} tokens)"
        )
        return Accusation("scoring", evidence, self.tokens, text, certain >= needed)


def _differences(told: TokenScores, exact: TokenScores) -> Column:
    """For each token, the largest squared difference of any column, each column scaled to nats of noise by `_SPREAD`."""
    pairs = zip(told.columns, exact.columns, strict=True)
    apart = np.array([np.maximum(one, FLOOR_NATS) - np.maximum(other, FLOOR_NATS) for one, other in pairs])
    found: Column = ((apart / _SPREAD[:, None]) ** 2).max(axis=0)
    return found


@dataclass(frozen=True, slots=True)
class _Telling:
    """A scorer's numbers for one rollout."""

    look: Look
    scorer: PeerId
    evidence: tuple[Evidence, ...]

    @property
    def tokens(self) -> int:
        return sum(len(one.claimed) for one in self.evidence)


@dataclass(slots=True)
class DisputeCounts:
    """Counts since the process began."""

    disputes: int = 0
    false_scorers: int = 0


@dataclass(slots=True)
class Disputes:
    """The accounts of authors and scorers. `watched`: how many tokens of each suspect the learner still has to score itself."""

    config: SuspicionConfig
    counts: DisputeCounts = field(default_factory=DisputeCounts)
    watched: dict[PeerId, int] = field(default_factory=dict)
    _told: dict[PeerId, Suspicion] = field(default_factory=dict)
    _trust: dict[PeerId, ScorerTrust] = field(default_factory=dict)
    _tellings: OrderedDict[int, _Telling] = field(default_factory=OrderedDict)
    _own: OrderedDict[int, tuple[Evidence, ...]] = field(default_factory=OrderedDict)
    _asked: dict[int, None] = field(default_factory=dict)
    _tokens: int = 0
    _excused: set[PeerId] = field(default_factory=set)

    def is_watched(self, workers: Iterable[PeerId]) -> bool:
        return any(worker in self.watched for worker in workers)

    def told(self, look: Look, scorer: PeerId, evidence: tuple[Evidence, ...], now: float) -> list[Action]:
        """Takes a scorer's numbers; returns the rollouts to score again and the scorers to accuse. `now`: seconds."""
        own = self._own.pop(look.number, None)
        self._keep(_Telling(look, scorer, evidence))
        actions = self._compared(look.number, own, now) if own is not None else []
        for one in evidence:
            self._account(one.piece.worker, now).observe(one)
        likelihood = copies(look.drawn.passage, evidence)
        if likelihood is not None:
            self._account(look.drawn.worker, now).observe_copies(likelihood)
        for worker in sorted({one.piece.worker for one in evidence}):
            if self._told[worker].evidence >= -math.log(DISPUTE_CHANCE):
                actions += self._disputed(worker)
        return actions

    def asked(self, look: Look) -> None:
        """Notes that the learner will score this rollout, so that a dispute does not request it again."""
        self._asked[look.number] = None
        if len(self._asked) > LOOKS_MAX:
            del self._asked[next(iter(self._asked))]

    def proven(self, look: Look, evidence: tuple[Evidence, ...], now: float) -> list[Action]:
        """Takes the learner's numbers of a rollout and compares them with the scorer's, if those are known."""
        for worker in {one.piece.worker for one in evidence} & self.watched.keys():
            self.watched[worker] -= sum(len(one.claimed) for one in evidence if one.piece.worker == worker)
            if self.watched[worker] <= 0:
                del self.watched[worker]
        if look.number in self._tellings:
            return self._compared(look.number, evidence, now)
        if evidence:
            self._own[look.number] = evidence
            while len(self._own) > OWN_MAX:
                self._own.popitem(last=False)
        return []

    def forget(self, worker: PeerId, excuses_noise: bool) -> None:
        """The worker was readmitted: resets its accounts. `excuses_noise`: stop betting on its noise."""
        self._told.pop(worker, None)
        self._trust.pop(worker, None)
        self.watched.pop(worker, None)
        if excuses_noise:
            self._excused.add(worker)

    # ---- authors

    def _account(self, worker: PeerId, now: float) -> Suspicion:
        if worker not in self._told and len(self._told) >= WORKERS_MAX:
            del self._told[next(iter(self._told))]
        account = self._told.setdefault(worker, Suspicion(self.config, now, worker in self._excused))
        account.expire(now)
        return account

    def _disputed(self, worker: PeerId) -> list[Action]:
        """Opens a dispute: the learner scores the rollouts that speak against the author, and those drawn from it next."""
        self.counts.disputes += 1
        del self._told[worker]
        self.watched[worker] = WATCH_TOKENS
        rests_on = [
            telling.look
            for number, telling in self._tellings.items()
            if number not in self._asked and any(one.piece.worker == worker for one in telling.evidence)
        ]
        return [LookSelf(look, SUSPICION) for look in rests_on]

    # ---- scorers

    def _keep(self, telling: _Telling) -> None:
        self._tellings[telling.look.number] = telling
        self._tokens += telling.tokens
        while self._tokens > TELLINGS_TOKENS_MAX and len(self._tellings) > 1:
            _, oldest = self._tellings.popitem(last=False)
            self._tokens -= oldest.tokens

    def _compared(self, number: int, own: Sequence[Evidence], now: float) -> list[Action]:
        """Compares the scorer's numbers with the learner's (`own`); accuses the scorer if they differ too much."""
        telling = self._tellings[number]
        trust = self._trust.setdefault(telling.scorer, self._fresh(telling.scorer, now))
        if now - trust.since >= DAY_S:
            trust = self._trust[telling.scorer] = self._fresh(telling.scorer, now)
        exact = {one.piece.start: one for one in own}
        for one in telling.evidence:
            known = exact.get(one.piece.start)
            if known is None:
                continue
            trust.observe(one.exact, known.exact)
            if one.older is not None and known.older is not None and one.older_version == known.older_version:
                trust.observe(one.older, known.older)
        accusation = trust.accusation
        if accusation is None:
            return []
        self.counts.false_scorers += 1
        return [AccuseScorer(telling.scorer, accusation)]

    def _fresh(self, worker: PeerId, now: float) -> ScorerTrust:
        return ScorerTrust(self.config, now, worker in self._excused)

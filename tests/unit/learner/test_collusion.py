"""A third of a fleet that bears out one another's forged numbers, loud and quiet: the roles that decide, over many seeds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from echo2.base.ids import LeaseId, PeerId, Version
from echo2.learner.audit import NOTHING, Evidence, Piece
from echo2.learner.audit_draw import DrawnPassage
from echo2.learner.disputes import Disputes
from echo2.learner.scorings import (
    AccuseScorer,
    Action,
    LeaseScoring,
    Look,
    LookAt,
    LookSelf,
    ScorerCame,
    ScorerGone,
    ScoresCame,
    Scorings,
    TokensDelivered,
    Told,
    VersionKept,
)
from echo2.learner.suspicion import Suspicion, SuspicionConfig
from echo2.scoring.request import TokenScores
from tests.unit.learner.test_disputes import TOKENS, look, scores

WORKERS, MATES, LOOKS_MAX = 9, 3, 1500
NAMES = tuple(PeerId(f"w{number}") for number in range(WORKERS))
LIARS = NAMES[:MATES]
C = (MATES - 1) / (WORKERS - 1)
"""What a liar's mates delivered, of what all others did."""


@dataclass
class Fleet:
    """Every worker's rollouts are looked at in turn; `accused`: after how many looks at rollouts of liars each."""

    seed: int
    quiet_nats: float
    shields: bool
    accused: dict[PeerId, int] = field(default_factory=dict)
    shielded: int = 0
    looks: dict[PeerId, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))

    def __post_init__(self) -> None:
        config = SuspicionConfig()
        self.rng, self.numbers = random.Random(self.seed), np.random.default_rng(self.seed)
        self.scorings, self.disputes = Scorings(random.Random(self.seed + 1), 1.0), Disputes(config)
        self.suspicions = {name: Suspicion(config, 0.0) for name in NAMES}
        self.claims: dict[str, TokenScores] = {}
        self.scorings.handle(VersionKept(Version(4)), 0.0)
        for name in NAMES:
            self.scorings.handle(TokensDelivered(name, 10_000), 0.0)
            self.scorings.handle(ScorerCame(name, frozenset({Version(4)})), 0.0)

    def run(self) -> None:
        for number in range(LOOKS_MAX):
            if all(liar in self.accused for liar in LIARS):
                return
            author = self.rng.choice([name for name in NAMES if name not in self.accused])
            truth = scores(self.numbers, 0.005)
            lie = self.numbers.exponential(self.quiet_nats, TOKENS) if author in LIARS else np.zeros(TOKENS)
            self.claims[str(number)] = replace(truth, logprobs=truth.logprobs - lie)
            self.looks[author] += 1
            passage = replace(look(number).drawn.passage, pieces=(Piece(author, Version(4), 0, TOKENS),))
            drawn = DrawnPassage(author, str(number), passage, 0.0)
            is_own = self.disputes.is_watched([author])
            self._do(self.scorings.handle(LookAt(drawn, is_own, 1), 0.0))
            self.scorings.handle(TokensDelivered(self.rng.choice(NAMES), TOKENS), 0.0)

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case LeaseScoring(worker, request):
                    told = self._scored(worker, request.request_id)
                    came = ScoresCame(worker, LeaseId(request.request_id), (told,) * len(request.stretches))
                    self._do(self.scorings.handle(came, 0.0))
                case Told(one, scorer, evidence):
                    self._do(self.disputes.told(one, scorer, self._evidence(one, evidence[0].exact), 0.0))
                case LookSelf(one):
                    self.disputes.asked(one)
                    found = self._evidence(one, scores(self.numbers, 0.005))
                    suspicion = self.suspicions[one.drawn.worker]
                    suspicion.observe(found[0])
                    if suspicion.accusation is not None:
                        self._accuse(one.drawn.worker)
                    self._do(self.disputes.proven(one, found, 0.0))
                case AccuseScorer(worker):
                    self._accuse(worker)

    def _scored(self, worker: PeerId, lease_id: str) -> TokenScores:
        drawn = self.scorings._open[LeaseId(lease_id)].look.drawn
        truth = scores(self.numbers, 0.005)
        if not (self.shields and worker in LIARS and drawn.worker in LIARS):
            return truth
        self.shielded += 1
        return replace(truth, logprobs=self.claims[drawn.kind].logprobs)

    def _evidence(self, one: Look, told: TokenScores) -> tuple[Evidence, ...]:
        piece = Piece(one.drawn.worker, Version(4), 0, TOKENS)
        return (Evidence(piece, self.claims[one.drawn.kind].logprobs, told, None, False, NOTHING),)

    def _accuse(self, worker: PeerId) -> None:
        self.accused.setdefault(worker, self.looks[worker])
        self._do(self.scorings.handle(ScorerGone(worker), 0.0))


def mean_looks(nats: float, shields: bool, seeds: Iterable[int]) -> float:
    """Of rollouts of a liar, until it is accused."""
    counts = []
    for seed in seeds:
        fleet = Fleet(seed, nats, shields)
        fleet.run()
        assert not set(fleet.accused) - set(LIARS), f"seed {seed}: an honest worker is accused"
        assert set(fleet.accused) == set(LIARS), f"seed {seed}: {fleet.accused}, shielded {fleet.shielded}"
        counts += fleet.accused.values()
    return float(np.mean(counts))


@pytest.mark.parametrize("nats", [0.5, 0.1, 0.07], ids=["loud", "quiet", "barely"])
def test_mates_that_are_a_third_of_the_fleet_delay_what_finds_them_and_no_more(nats: float) -> None:
    """A lie that takes k rollouts alone takes k / (1 - 15/16 c) with mates, and everyone who bears it out falls, too."""
    seeds = range(8)
    alone, together = mean_looks(nats, False, seeds), mean_looks(nats, True, seeds)
    assert together <= 1.25 * alone / (1 - 15 / 16 * C) + 1.0

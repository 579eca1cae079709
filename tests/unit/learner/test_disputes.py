"""Scorers' words start disputes and end none: authors and scorers are accused by the learner's numbers alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.audit import NOTHING, Evidence, Habits, Piece, passage_of
from echo2.learner.audit_draw import DrawnPassage
from echo2.learner.batch import TrainGroup
from echo2.learner.disputes import Disputes, ScorerTrust
from echo2.learner.episodes import SentTokens
from echo2.learner.scorings import SUSPICION, AccuseScorer, Look, LookSelf
from echo2.learner.suspicion import SuspicionConfig
from echo2.scoring.request import TokenScores

AUTHOR, SCORER = PeerId("author"), PeerId("scorer")
TOKENS = 64


def look(number: int) -> Look:
    numbers = (-0.7,) * TOKENS
    spans = (VersionSpan(Version(4), TOKENS),)
    rollout = Rollout(GroupId(f"g{number}"), 0, tuple(range(TOKENS)), numbers, numbers, spans, FinishReason.STOP)
    spec = GroupSpec(GroupId(f"g{number}"), (5,), 1, SamplingParams(), 0)
    group = TrainGroup(spec, 0, (rollout,), (1.0,), (), ((SentTokens(AUTHOR, TOKENS),),))
    return Look(number, DrawnPassage(AUTHOR, "kind", passage_of(group, 0, lambda peer: Habits()), 0.0))


def scores(rng: np.random.Generator, noise: float = 0.0) -> TokenScores:
    """Of an honest distribution over two tokens, off by some noise."""
    exact = np.full(TOKENS, np.log(0.5)) + noise * rng.standard_normal(TOKENS)
    nothing = np.zeros(TOKENS)
    return TokenScores(
        exact,
        exact,
        np.full(TOKENS, np.log(0.5)),
        nothing,
        nothing,
        0.5 + 0.4 * noise * rng.random(TOKENS),
        0.5 + nothing,
    )


def evidence(claimed: TokenScores | np.ndarray, told: TokenScores) -> tuple[Evidence, ...]:
    numbers = claimed.logprobs if isinstance(claimed, TokenScores) else claimed
    return (Evidence(Piece(AUTHOR, Version(4), 0, TOKENS), numbers, told, None, False, NOTHING),)


def test_an_honest_author_and_honest_scorers_are_never_disputed_nor_accused() -> None:
    rng, disputes = np.random.default_rng(1), Disputes(SuspicionConfig())
    for number in range(400):
        truth, own = look(number), scores(rng, 0.01)
        claimed = scores(rng, 0.02)
        assert not disputes.told(truth, SCORER, evidence(claimed, own), float(number))
        if number % 4 == 0:
            disputes.asked(truth)
            assert not disputes.proven(truth, evidence(claimed, scores(rng, 0.01)), float(number))
    assert not disputes.watched and not disputes.counts.disputes


def test_what_speaks_against_an_author_goes_to_the_learner_with_all_that_it_rests_on() -> None:
    """And what is drawn of it next; the scorer's word alone accuses nobody."""
    rng, disputes = np.random.default_rng(2), Disputes(SuspicionConfig())
    lied = scores(rng).logprobs - 0.055  # too small to be seen in one rollout
    asked: list[LookSelf] = []
    for number in range(200):
        actions = disputes.told(
            look(number), SCORER, evidence(lied + 0.02 * rng.standard_normal(TOKENS), scores(rng)), 0.0
        )
        assert all(isinstance(action, LookSelf) and action.reason == SUSPICION for action in actions)
        asked += [action for action in actions if isinstance(action, LookSelf)]
        if asked:
            break
    assert len(asked) == number + 1 > 1 and disputes.is_watched([AUTHOR]) and disputes.counts.disputes == 1
    for action in asked:
        disputes.asked(action.look)
        assert not disputes.proven(action.look, evidence(lied, scores(rng, 0.01)), 0.0), "the scorer was right"
    while disputes.is_watched([AUTHOR]):
        number += 1
        disputes.proven(look(number), evidence(lied, scores(rng)), 0.0)


def false(rng: np.random.Generator, kind: str) -> TokenScores:
    exact = scores(rng)
    match kind:
        case "random":
            return TokenScores(*[-3.0 * rng.random(TOKENS)] * 3, *[rng.random(TOKENS)] * 4)
        case "constant":
            return TokenScores(*[np.zeros(TOKENS)] * 7)
        case "below":  # whatever the author's random numbers ask for
            return replace(exact, below=rng.random(TOKENS))
        case "expected":
            return replace(exact, expected=exact.expected - 8.0)
        case _:
            raise AssertionError(kind)


def test_a_scorer_that_makes_up_any_of_its_numbers_is_found_by_known_answers() -> None:
    rng = np.random.default_rng(3)
    for kind in ("random", "constant", "below", "expected"):
        for told_first in (True, False):
            disputes, found = Disputes(SuspicionConfig()), []
            for number in range(4):
                one, claimed, truth = look(number), scores(rng, 0.01), scores(rng, 0.01)
                disputes.asked(one)
                if told_first:
                    disputes.told(one, SCORER, evidence(claimed, false(rng, kind)), 0.0)
                    found += disputes.proven(one, evidence(claimed, truth), 0.0)
                else:
                    disputes.proven(one, evidence(claimed, truth), 0.0)
                    found += disputes.told(one, SCORER, evidence(claimed, false(rng, kind)), 0.0)
                if any(isinstance(action, AccuseScorer) for action in found):
                    break
            accused = [action for action in found if isinstance(action, AccuseScorer)]
            assert accused and accused[0].worker == SCORER and accused[0].accusation.is_certain, kind


def test_a_scorer_that_is_a_little_off_is_a_matter_for_a_person() -> None:
    rng, trust = np.random.default_rng(4), ScorerTrust(SuspicionConfig(), 0.0)
    for _ in range(40):
        trust.observe(scores(rng, 0.2), scores(rng))
    assert trust.accusation is not None and not trust.accusation.is_certain
    excused = ScorerTrust(SuspicionConfig(), 0.0, excuses_noise=True)
    for _ in range(40):
        excused.observe(scores(rng, 0.2), scores(rng))
    assert excused.accusation is None


def test_what_is_kept_of_tellings_is_bounded() -> None:
    from echo2.learner.disputes import TELLINGS_TOKENS_MAX

    rng, disputes = np.random.default_rng(5), Disputes(SuspicionConfig())
    count = TELLINGS_TOKENS_MAX // TOKENS
    for number in range(count + 50):
        disputes.told(look(number), SCORER, evidence(scores(rng, 0.01), scores(rng)), 0.0)
    assert disputes._tokens <= TELLINGS_TOKENS_MAX and len(disputes._tellings) == count

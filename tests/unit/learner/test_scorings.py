"""Who scores what: drawn by weight and never its author, known answers among them, late ones asked again, a bounded share."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner import scorings as scorings_module
from echo2.learner.audit import Habits, Passage, passage_of
from echo2.learner.audit_draw import DrawnPassage
from echo2.learner.batch import TrainGroup
from echo2.learner.episodes import Insertion, SentTokens
from echo2.learner.scorings import (
    ASKED_AGAIN_S,
    BURST_TOKENS,
    DECLINED_MAX,
    EXCUSED_MAX,
    KNOWN_ANSWER,
    LEASE_S,
    NO_SCORER,
    OPEN_MAX,
    SILENT_MAX,
    SUSPICION,
    TRIES_MAX,
    VERIFIED_FIRST,
    VERIFIED_SHARE,
    WEIGHT_MIN,
    AccuseScorer,
    Action,
    LeaseScoring,
    LookAt,
    LookSelf,
    ScorerCame,
    ScorerGone,
    ScoresCame,
    Scorings,
    ScoringTick,
    TokensDelivered,
    Told,
    VersionKept,
)
from echo2.scoring.request import ScoreRequest, TokenScores

A, B, C, D = (PeerId(name) for name in "abcd")
VERSIONS = frozenset(map(Version, (2, 4, 6)))


def passage(
    author: PeerId = A, keeps: bool = False, spans: tuple[tuple[int, int], ...] = ((4, 3), (6, 4)), turns: bool = False
) -> Passage:
    count = sum(length for _, length in spans)
    numbers = tuple(-0.5 for _ in range(count))
    versions = tuple(VersionSpan(Version(version), length) for version, length in spans)
    tokens = tuple(range(100, 100 + count))
    rollout = Rollout(GroupId("g"), 1, tokens, numbers, numbers, versions, FinishReason.STOP)
    spec = GroupSpec(GroupId("g"), (5, 6), 4, SamplingParams(seed=77), 0)
    said = ((Insertion(5, (40, 41)),),) if turns else ()
    group = TrainGroup(spec, 0, (rollout,), (1.0,), said, ((SentTokens(author, count),),))
    return passage_of(group, 0, lambda peer: Habits(True, keeps))


def drawn(author: PeerId = A, **more: bool) -> DrawnPassage:
    return DrawnPassage(author, "kind", passage(author, **more), 0.0)


def scorings(weights: dict[PeerId, int], share: float = 0.3, seed: int = 1) -> Scorings:
    made = Scorings(random.Random(seed), share)
    for version in sorted(VERSIONS):
        made.handle(VersionKept(version), 0.0)
    for worker, tokens in weights.items():
        made.handle(TokensDelivered(worker, tokens), 0.0)
        if worker != A:
            made.handle(ScorerCame(worker, VERSIONS), 0.0)
    return made


def lease_of(actions: list[Action]) -> LeaseScoring:
    (found,) = [action for action in actions if isinstance(action, LeaseScoring)]
    return found


def scored(request: ScoreRequest, value: float = -0.5) -> tuple[TokenScores, ...]:
    return tuple(TokenScores(*[np.full(stretch.count, value)] * 7) for stretch in request.stretches)


def answer(made: Scorings, lease: LeaseScoring, now: float = 1.0) -> list[Action]:
    return made.handle(ScoresCame(lease.worker, LeaseId(lease.request.request_id), scored(lease.request)), now)


def test_a_lease_names_tokens_and_versions_and_nothing_of_whose_they_are() -> None:
    lease = lease_of(scorings({A: 100, B: 100, C: 100}).handle(LookAt(drawn(turns=True), False, 1), 0.0))
    request = lease.request
    assert request.token_ids == (5, 6, 100, 101, 102, 103, 104, 40, 41, 105, 106)
    told = [(s.version, s.first, s.count, s.prefix_key, s.position) for s in request.stretches]
    assert told == [
        (4, 2, 3, "g", 0), (2, 2, 3, "g", 0), (6, 5, 2, "g", 3), (4, 5, 2, "g", 3), (6, 9, 2, "g.1.1", 0), (4, 9, 2, "g.1.1", 0),
    ]  # fmt: skip
    assert request.sampling.seed == 0, "the random numbers are the learner's to compare with"
    assert request.read_tokens == 5 + 5 + 7 + 7 + 11 + 11


def test_scorers_are_drawn_by_what_they_delivered_and_never_score_their_own() -> None:
    made = scorings({A: 100, B: 100, C: 300, D: 600})
    found: Counter[PeerId] = Counter()
    for _ in range(4000):
        lease = lease_of(made.handle(LookAt(drawn(B), False, 1), 0.0))
        found[lease.worker] += 1
        answer(made, lease)
    assert set(found) == {C, D} and found[D] / 4000 == pytest.approx(2 / 3, abs=0.03)


def test_a_newcomer_without_deliveries_scores_nothing_however_many_names_it_has() -> None:
    made = scorings({A: 100, B: 100})
    for number in range(50):
        made.handle(ScorerCame(PeerId(f"x{number}"), VERSIONS), 0.0)
    for _ in range(200):
        lease = lease_of(made.handle(LookAt(drawn(), False, 1), 0.0))
        assert lease.worker == B
        answer(made, lease)


def test_the_learner_scores_itself_where_too_few_keep_the_versions() -> None:
    made = scorings({A: 100, B: 100, C: 300})
    made.handle(ScorerCame(C, frozenset({Version(8)})), 0.0)
    (action,) = made.handle(LookAt(drawn(), False, 1), 0.0)
    assert isinstance(action, LookSelf) and action.reason == NO_SCORER, "B delivered a quarter of what the others did"
    made.handle(ScorerCame(C, VERSIONS), 0.0)
    assert lease_of(made.handle(LookAt(drawn(), False, 1), 0.0))
    for one, reason in ((LookAt(drawn(), True, 1), SUSPICION), (LookAt(drawn(keeps=True), False, 1), NO_SCORER)):
        (action,) = made.handle(one, 0.0)
        assert isinstance(action, LookSelf) and action.reason == reason


def test_a_sixteenth_and_the_first_of_each_scorer_are_known_answers() -> None:
    made = scorings({A: 100, B: 100})
    known = []
    for _ in range(4000):
        actions = made.handle(LookAt(drawn(), False, 1), 0.0)
        known.append(any(isinstance(action, LookSelf) and action.reason == KNOWN_ANSWER for action in actions))
        answer(made, lease_of(actions))
    assert all(known[:VERIFIED_FIRST])
    assert sum(known) / 4000 == pytest.approx(VERIFIED_SHARE, abs=0.015)


def test_the_share_of_rollouts_that_colluders_score_for_one_another_is_within_its_bound() -> None:
    """Two of six, and the worst case: half of the honest workers keep none of the versions."""
    names = [PeerId(f"w{n}") for n in range(6)]
    for able, bound in ((names, 0.2), (names[:4], 0.2 / WEIGHT_MIN)):
        made = Scorings(random.Random(3), 1.0)
        made.handle(VersionKept(Version(4)), 0.0)
        made.handle(VersionKept(Version(6)), 0.0)
        for name in names:
            made.handle(TokensDelivered(name, 10_000), 0.0)
            made.handle(ScorerCame(name, VERSIONS if name in able else frozenset({Version(9)})), 0.0)
        shielded = 0
        for _ in range(3000):
            lease = lease_of(made.handle(LookAt(drawn(names[0]), False, 1), 0.0))
            shielded += lease.worker == names[1]
            made.handle(ScoresCame(lease.worker, LeaseId(lease.request.request_id), scored(lease.request)), 0.0)
            made.handle(TokensDelivered(names[2], 100), 0.0)
        assert 0.0 < shielded / 3000 <= bound + 0.03


def test_an_answer_is_evidence_of_what_was_claimed() -> None:
    made = scorings({A: 100, B: 100})
    actions = made.handle(LookAt(drawn(), False, 2), 0.0)
    (told,) = [one for one in answer(made, lease_of(actions)) if isinstance(one, Told)]
    assert told.scorer == B and [(one.piece.version, one.older_version) for one in told.evidence] == [(4, 2), (6, 2)]
    assert [one.is_next_older for one in told.evidence] == [True, False]
    assert told.evidence[0].claimed.tolist() == [-0.5] * 3 and len(told.evidence[0].uniforms) == 3
    assert not answer(made, lease_of(actions)), "a second answer changes nothing"


@pytest.mark.parametrize("is_empty", [False, True], ids=["scores", "handed back"])
def test_what_another_worker_says_of_a_lease_is_not_heard_and_the_lease_stands(is_empty: bool) -> None:
    made = scorings({A: 100, B: 100, C: 100})
    lease = lease_of(made.handle(LookAt(drawn(), False, 1), 0.0))
    scores = () if is_empty else scored(lease.request, -9.0)
    for other in {A, B, C, D} - {lease.worker}:
        assert not made.handle(ScoresCame(other, LeaseId(lease.request.request_id), scores), 0.5)
    assert made.waiting == 1 and not made.counts.answered
    (told,) = [one for one in answer(made, lease) if isinstance(one, Told)]
    assert told.scorer == lease.worker and made.waiting == 0


def test_what_is_late_or_given_back_goes_to_another_and_then_to_the_learner() -> None:
    made = scorings({A: 100, B: 100, C: 100, D: 100})
    actions, now, seen = made.handle(LookAt(drawn(), False, 1), 0.0), 0.0, []
    for _ in range(TRIES_MAX):
        lease = lease_of(actions)
        seen.append(lease.worker)
        now += LEASE_S
        assert not made.handle(ScoringTick(), now - 1.0)
        actions = made.handle(ScoringTick(), now)
        assert not answer(made, lease), "too late"
    assert all(one != other for one, other in itertools.pairwise(seen))
    (last,) = actions
    assert isinstance(last, LookSelf) and last.reason == NO_SCORER
    lease = lease_of(made.handle(LookAt(drawn(), False, 1), now))
    empty = ScoresCame(lease.worker, LeaseId(lease.request.request_id), ())
    assert lease_of(made.handle(empty, now)).worker != lease.worker, "it has moved on"
    assert lease_of(made.handle(LookAt(drawn(), False, 1), now))
    for worker in (B, C):
        made.handle(ScorerGone(worker), now)
    assert {action.worker for action in made.handle(ScorerGone(D), now) if isinstance(action, LeaseScoring)} == set()


def test_a_scorer_that_samples_and_never_answers_is_accused_and_one_that_stands_still_is_not() -> None:
    for samples, accused in ((True, 1), (False, 0)):
        made, now, found = scorings({A: 100, B: 100}), 0.0, 0
        for _ in range(SILENT_MAX + 4):
            made.handle(LookAt(drawn(), False, 1), now)
            made.handle(TokensDelivered(B, 10 if samples else 0), now)
            now += LEASE_S
            found += sum(isinstance(action, AccuseScorer) for action in made.handle(ScoringTick(), now))
        assert found == accused


@pytest.mark.parametrize("nothing", [(), (TokenScores(*[np.zeros(1)] * 7),)], ids=["empty", "of another size"])
def test_a_scorer_that_hands_every_lease_back_is_asked_no_more(nothing: tuple[TokenScores, ...]) -> None:
    made = scorings({A: 100, B: 100})
    for _ in range(DECLINED_MAX):
        lease = lease_of(made.handle(LookAt(drawn(), False, 1), 0.0))
        made.handle(ScoresCame(B, LeaseId(lease.request.request_id), nothing), 0.0)
    (action,) = made.handle(LookAt(drawn(), False, 1), 0.0)
    assert isinstance(action, LookSelf) and action.reason == NO_SCORER
    assert made.has_room, "the learner scores all itself"
    made.handle(ScorerCame(C, VERSIONS), 0.0)
    made.handle(TokensDelivered(C, 200), 0.0)
    assert lease_of(made.handle(LookAt(drawn(), False, 1), 0.0)).worker == C, "others are asked as before"
    made.handle(ScorerGone(B), 0.0)
    for now, is_asked in ((ASKED_AGAIN_S - 1.0, False), (ASKED_AGAIN_S, True)):
        made.handle(ScorerCame(B, VERSIONS), now)
        leased = [one for one in made.handle(LookAt(drawn(C), False, 1), now) if isinstance(one, LeaseScoring)]
        assert bool(leased) == is_asked, "a new stream changes nothing, time does"


def moving_on(made: Scorings, version: int, keeps: bool) -> LeaseScoring:
    """B, which keeps this version and the one before, is asked for both; without `keeps` it says that the older one is gone."""
    made.handle(VersionKept(Version(version)), 0.0)
    made.handle(TokensDelivered(B, 100), 0.0)
    made.handle(ScorerCame(B, frozenset(map(Version, (version - 2, version - 1, version)))), 0.0)
    spans = ((version - 1, 3), (version, 4))
    lease = lease_of(made.handle(LookAt(DrawnPassage(A, "kind", passage(spans=spans), 0.0), False, 1), 0.0))
    if not keeps:
        made.handle(ScorerCame(B, frozenset({Version(version)})), 0.0)
        made.handle(ScoresCame(B, LeaseId(lease.request.request_id), ()), 0.0)
    return lease


def test_a_scorer_that_moves_on_hands_back_what_it_likes_if_it_answers_now_and_then() -> None:
    made = scorings({A: 100, B: 100})
    for round_ in range(3):
        for version in range(DECLINED_MAX + 2):
            moving_on(made, 10 + 100 * round_ + 3 * version, keeps=False)
        assert answer(made, moving_on(made, 90 + 100 * round_, keeps=True))


def test_a_scorer_that_moves_on_from_every_lease_is_asked_no_more() -> None:
    made = scorings({A: 100, B: 100})
    for version in range(EXCUSED_MAX):
        moving_on(made, 10 + 3 * version, keeps=False)
    made.handle(ScorerCame(B, VERSIONS), 0.0)
    assert_scored_by_learner(made.handle(LookAt(drawn(), False, 1), 0.0))
    assert made.has_room


def test_versions_that_a_scorer_took_back_to_hand_a_lease_back_are_not_asked_of_it_again() -> None:
    made = scorings({A: 100, B: 100})
    lease = lease_of(made.handle(LookAt(drawn(), False, 1), 0.0))
    made.handle(ScorerCame(B, frozenset({Version(6)})), 0.0)
    made.handle(ScoresCame(B, LeaseId(lease.request.request_id), ()), 0.0)
    made.handle(ScorerCame(B, VERSIONS), 0.0)
    assert_scored_by_learner(made.handle(LookAt(drawn(), False, 1), 0.0))
    made.handle(ScorerGone(B), 0.0)
    made.handle(ScorerCame(B, VERSIONS), 0.0)
    assert_scored_by_learner(made.handle(LookAt(drawn(), False, 1), 0.0))
    six = DrawnPassage(A, "kind", passage(spans=((6, 3),)), 0.0)
    assert lease_of(made.handle(LookAt(six, False, 1), 0.0)).worker == B, "what it kept all along is asked of it"


def assert_scored_by_learner(actions: list[Action]) -> None:
    (action,) = actions
    assert isinstance(action, LookSelf) and action.reason == NO_SCORER


def test_a_scorer_that_comes_anew_after_each_lease_is_accused_as_one_that_stays_silent() -> None:
    for samples, accused in ((True, 1), (False, 0)):
        made, now, found, leased = scorings({A: 100, B: 100}), 0.0, 0, 0
        while leased < SILENT_MAX:
            for action in made.handle(LookAt(drawn(), False, 1), now):
                leased += isinstance(action, LeaseScoring)
            made.handle(ScorerGone(B), now)
            made.handle(ScorerCame(B, VERSIONS), now)
            made.handle(TokensDelivered(B, 10 if samples else 0), now)
            now += 1.0
            found += sum(isinstance(action, AccuseScorer) for action in made.handle(ScoringTick(), now))
        found += sum(isinstance(action, AccuseScorer) for action in made.handle(ScoringTick(), now + LEASE_S))
        assert found == accused
        assert now >= LEASE_S * (SILENT_MAX / OPEN_MAX - 1), "what it left counts as open: it gets no more that way"


def test_scores_of_a_stream_that_has_ended_come_too_late() -> None:
    made = scorings({A: 100, B: 100, C: 100})
    lease = lease_of(made.handle(LookAt(drawn(), False, 1), 0.0))
    (other,) = {B, C} - {lease.worker}
    assert lease_of(made.handle(ScorerGone(lease.worker), 0.0)).worker == other, "it goes to another at once"
    made.handle(ScorerCame(lease.worker, VERSIONS), 0.0)
    assert not answer(made, lease) and made.waiting == 1


def test_the_first_leases_of_a_scorer_are_known_answers_once_and_not_on_each_stream() -> None:
    made, known = scorings({A: 100, B: 100}), 0
    for _ in range(200):
        actions = made.handle(LookAt(drawn(), False, 1), 0.0)
        known += any(isinstance(action, LookSelf) for action in actions)
        answer(made, lease_of(actions))
        made.handle(ScorerGone(B), 0.0)
        made.handle(ScorerCame(B, VERSIONS), 0.0)
    assert known < 40, "two, and a sixteenth of the others"


def test_what_was_handed_back_or_left_is_counted_for_who_scores_it_and_for_nobody_else() -> None:
    made = scorings({A: 100, B: 100, C: 100})
    lease = lease_of(made.handle(LookAt(drawn(), False, 1), 0.0))
    read = lease.request.read_tokens
    again = lease_of(made.handle(ScoresCame(lease.worker, LeaseId(lease.request.request_id), ()), 0.0))
    assert made.counts.read_tokens == read
    third = lease_of(made.handle(ScorerGone(again.worker), 0.0))
    assert third.worker == lease.worker and made.counts.read_tokens == read
    assert not made.handle(ScoringTick(), LEASE_S - 1.0)
    (last,) = made.handle(ScorerGone(third.worker), 0.0)
    assert isinstance(last, LookSelf) and not made.counts.read_tokens


def test_records_are_kept_of_so_many_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorings_module, "SCORERS_MAX", 3)
    made = scorings({A: 100})
    for number in range(6):
        worker = PeerId(f"w{number}")
        made.handle(TokensDelivered(worker, 1000 * 4**number), 0.0)
        made.handle(ScorerCame(worker, VERSIONS), 0.0)
        assert lease_of(made.handle(LookAt(drawn(), False, 1), 0.0)).worker == worker
        made.handle(ScorerGone(worker), 0.0)
        assert len(made._records) <= 3


def test_a_lease_handed_back_is_no_answer_between_two_that_go_without_one() -> None:
    made, now, found = scorings({A: 100, B: 100}), 0.0, 0
    for _ in range(SILENT_MAX):
        lease = lease_of(made.handle(LookAt(drawn(), False, 1), now))
        if now == LEASE_S * 4:
            made.handle(ScoresCame(B, LeaseId(lease.request.request_id), ()), now)
            made.handle(LookAt(drawn(), False, 1), now)
        made.handle(TokensDelivered(B, 10), now)
        now += LEASE_S
        found += sum(isinstance(action, AccuseScorer) for action in made.handle(ScoringTick(), now))
    assert found == 1


def test_workers_read_no_more_than_their_share_and_no_scorer_is_flooded() -> None:
    made = scorings({A: 100, B: 100}, share=0.25)
    made.handle(TokensDelivered(A, 100_000), 0.0)
    while made.has_room and made.counts.read_tokens < made.counts.delivered_tokens:
        lease = lease_of(made.handle(LookAt(drawn(), False, 1), 0.0))
        answer(made, lease)
    read = made.counts.read_tokens
    assert read == pytest.approx(0.25 * made.counts.delivered_tokens + BURST_TOKENS, abs=100)
    made.handle(TokensDelivered(A, 100_000), 0.0)
    for _ in range(OPEN_MAX):
        assert made.has_room
        made.handle(LookAt(drawn(), False, 1), 0.0)
    assert not made.has_room, "it holds as many as it may"
    assert scorings({A: 1}).has_room and scorings({A: 1, B: 1}, share=0.0).has_room, "the learner scores all itself"

"""Which tokens are scored under which version, behind which cache, by which random numbers; which rollouts are looked at."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.noise import rollout_seed, turn_seed, uniform, uniforms
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, VersionSpan
from echo2.learner.audit import Habits, Passage, Piece, copies, examined, passage_of, pieces_of
from echo2.learner.audit_draw import WAITING_MAX, AuditDraw, DrawnPassage, kind_of
from echo2.learner.batch import TrainGroup
from echo2.learner.episodes import Insertion, SentTokens
from echo2.scoring.request import TokenScores

A, B = PeerId("a"), PeerId("b")
SEED = 77
Senders = list[tuple[PeerId, int]]


def rollout_of(spans: list[tuple[int, int]], index: int = 0, tokens: tuple[int, ...] = ()) -> Rollout:
    count = sum(length for _, length in spans)
    numbers = tuple(-float(n) for n in range(count))
    token_ids = tokens or tuple(range(100, 100 + count))
    version_spans = tuple(VersionSpan(Version(version), length) for version, length in spans)
    return Rollout(GroupId("g"), index, token_ids, numbers, numbers, version_spans, FinishReason.STOP)


def passage(
    spans: list[tuple[int, int]],
    senders: Senders,
    keeps: bool = False,
    said: tuple[Insertion, ...] = (),
    index: int = 0,
) -> Passage:
    rollout = rollout_of(spans, index)
    sent = tuple(SentTokens(peer, count) for peer, count in senders)
    spec = GroupSpec(GroupId("g"), (5, 6), 4, SamplingParams(seed=SEED), 0)
    group = TrainGroup(spec, 0, (rollout,), (1.0,), (said,) if said else (), (sent,))
    return passage_of(group, 0, lambda peer: Habits(True, keeps and peer == A))


def shape(of: Passage) -> list[tuple[PeerId, int, int, int, bool]]:
    return [(p.worker, p.version, p.start, p.stop, p.keeps_cache) for p in of.pieces]


def test_a_rollout_is_examined_whole_cut_where_version_sender_or_turn_changes() -> None:
    whole = passage([(4, 3), (6, 4)], [(A, 5), (B, 2)])
    assert shape(whole) == [(A, 4, 0, 3, False), (A, 6, 3, 5, False), (B, 6, 5, 7, False)]
    kept = passage([(4, 3), (6, 4)], [(A, 5), (B, 2)], keeps=True)
    assert [p.keeps_cache for p in kept.pieces] == [False, True, False], "another worker begins with a cache of its own"
    turns = passage([(4, 3), (6, 4)], [(A, 7)], keeps=True, said=(Insertion(3, (40, 41)), Insertion(5, ())))
    assert shape(turns) == [(A, 4, 0, 3, False), (A, 6, 3, 5, False), (A, 6, 5, 7, False)]
    assert turns.token_ids == (5, 6, 100, 101, 102, 40, 41, 103, 104, 105, 106)
    assert turns.places.tolist() == [2, 3, 4, 7, 8, 9, 10]


def test_the_numbers_of_each_turn_begin_anew_and_are_those_that_its_lease_gave() -> None:
    one = passage([(4, 3), (6, 4)], [(A, 7)], said=(Insertion(3, (40,)), Insertion(5, ())), index=2)
    seeds = [rollout_seed(SEED, 2), rollout_seed(turn_seed(SEED, 2, 1), 0), rollout_seed(turn_seed(SEED, 2, 2), 0)]
    expected = [uniform(seeds[0], n) for n in range(3)] + [uniform(seed, n) for seed in seeds[1:] for n in range(2)]
    assert one.uniforms.tolist() == expected
    assert uniforms(2**63 - 5, 300).tolist() == [uniform(2**63 - 5, n) for n in range(300)]


def column(value: float, count: int) -> np.ndarray:
    return np.full(count, value)


def test_each_version_is_loaded_once_the_one_before_is_asked_too_and_caches_are_handed_on() -> None:
    asked: list[tuple[int, int, object]] = []

    def score(version: Version, passage: Passage, piece: Piece, cache: object | None) -> tuple[TokenScores, object]:
        asked.append((version, piece.start, cache))
        exact = column(float(version), piece.stop - piece.start)
        return TokenScores(exact, exact, *[column(0.0, len(exact))] * 5), f"after {version}:{piece.stop}"

    whole = passage([(2, 2), (4, 3), (6, 1)], [(A, 6)])
    (found,) = examined([whole], [Version(4), Version(6)], score)
    assert [version for version, _, _ in asked] == sorted(version for version, _, _ in asked)
    assert [
        (e.piece.version, e.exact.logprobs[0], e.older.logprobs.tolist() if e.older is not None else []) for e in found
    ] == [
        (4, 4.0, []),
        (6, 6.0, [4.0]),
    ]
    assert found[0].claimed.tolist() == [-2.0, -3.0, -4.0] and len(found[0].uniforms) == 3
    asked.clear()
    (found,) = examined([passage([(4, 3), (6, 1)], [(A, 4)], keeps=True)], [Version(4), Version(6)], score)
    assert asked == [(4, 0, None), (4, 3, "after 4:3"), (6, 3, "after 4:3")]
    (found,) = examined([passage([(2, 3), (6, 1)], [(A, 4)], keeps=True)], [Version(4), Version(6)], score)
    assert found == [], "behind a cache of a version that is not kept nothing is known"


def test_copies_count_for_as_much_as_they_were_unlikely() -> None:
    group_rollouts = tuple(rollout_of([(2, 3)], n, t) for n, t in enumerate([(1, 2, 3), (1, 2, 3), (1, 2, 4)]))
    spec = GroupSpec(GroupId("g"), (5,), 3, SamplingParams(), 0)
    senders = ((SentTokens(A, 3),), (SentTokens(A, 3),), (SentTokens(A, 3),))
    group = TrainGroup(spec, 0, group_rollouts, (1.0,) * 3, (), senders)

    def value(member: int) -> float | None:
        one = passage_of(group, member, lambda peer: Habits())
        exact = TokenScores(*[column(-1.0, 3)] * 7)
        return copies(one, examined([one], [Version(2)], lambda *_: (exact, None))[0])

    assert value(0) == pytest.approx(math.exp(3.0) / 2) and value(2) == 0.0
    assert copies(passage_of(group, 0, lambda peer: Habits()), []) is None


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
    rollout = rollout_of(spans)
    spec = GroupSpec(GroupId("g"), (5, 6), 4, SamplingParams(seed=SEED), 0)
    sent = tuple(SentTokens(peer, count) for peer, count in senders)
    group = TrainGroup(spec, 0, (rollout,), (1.0,), (said,), (sent,))
    pieces = pieces_of(group, 0, lambda peer: Habits(peer == B, keeps))
    assert [n for piece in pieces for n in range(piece.start, piece.stop)] == list(range(end))
    for piece in pieces:
        own = range(piece.start, piece.stop)
        assert {versions[n] for n in own} == {piece.version} and {peers[n] for n in own} == {piece.worker}
        assert not set(turns) & set(own[1:]) and piece.draws_by_seed == (piece.worker == B)
        starts = [position for position in sorted(turns) if position <= piece.start]
        assert (piece.turn, piece.turn_start) == (len(starts), starts[-1] if starts else 0)
    for before, piece in itertools.pairwise(pieces):
        is_turn, is_other = piece.start in turns, before.worker != piece.worker
        assert is_turn or is_other or before.version != piece.version, "cut for a reason"
        assert piece.keeps_cache == (keeps and not is_turn and not is_other)


# ---- which are looked at


def trained(worker: PeerId, number: int, is_long: bool) -> DrawnPassage:
    one = passage([(2, 60 if is_long else 3)], [(worker, 60 if is_long else 3)])
    return DrawnPassage(worker, kind_of(one.rollout, len(one.pieces)), one, float(number))


def considered(draw: AuditDraw, one: DrawnPassage, draws_by_seed: bool) -> None:
    if draw.falls_on(one.worker, one.kind, draws_by_seed):
        draw.add(one)


def test_every_kind_of_a_workers_rollouts_is_looked_at_also_when_the_audit_is_far_behind() -> None:
    """It sends what it would hide when the queue is full: the share is even over workers, and over what each can choose."""
    draw = AuditDraw(1.0, random.Random(1))
    seen: Counter[tuple[PeerId, str]] = Counter()
    looked: Counter[tuple[PeerId, str]] = Counter()
    for step in range(120):
        for number in range(40):
            one = trained(A if number % 8 else B, step, is_long=number % 20 == 0)
            seen[one.worker, one.kind] += 1
            considered(draw, one, draws_by_seed=True)
        for one in draw.take(120):  # about a third of what is drawn
            looked[one.worker, one.kind] += 1
            draw.looked_at(one, len(one.passage.places))
    assert len(draw.waiting) <= WAITING_MAX and draw.given_up > 0
    shares = {kind: looked[kind] / seen[kind] for kind in seen}
    assert len(shares) >= 3 and min(shares.values()) >= 0.1, shares
    assert max(draw.unaudited.values()) <= 0.9


def test_what_is_looked_at_first_says_nothing_of_how_a_workers_rollouts_end() -> None:
    """A learner that scores one rollout at a time is behind a newcomer at first: a bet on ends must not be one on the order."""
    ended = 0
    for seed in range(40):
        draw = AuditDraw(1.0, random.Random(seed))
        for number in range(96):  # five in eight go on to the limit, the others end in a dozen ways
            kind = "length" if number % 8 < 5 else f"stop/{number // 8}"
            considered(draw, dataclasses.replace(trained(A, number, is_long=False), kind=kind), draws_by_seed=True)
        for _ in range(16):
            (one,) = draw.take(0)
            draw.looked_at(one, len(one.passage.places))
            ended += one.kind != "length"
    assert abs(ended / (40 * 16) - 3 / 8) < 0.08


def test_who_says_that_it_cannot_draw_by_its_seeds_is_looked_at_more_often() -> None:
    draw = AuditDraw(0.1, random.Random(2))
    counts: Counter[PeerId] = Counter()
    for number in range(4000):
        worker = A if number % 2 else B
        considered(draw, trained(worker, number, False), draws_by_seed=worker == A)
        for one in draw.take(1 << 20):
            counts[one.worker] += number > 3000
            draw.looked_at(one, 3)
    assert 2.0 < counts[B] / counts[A] < 4.5


def test_what_could_not_be_looked_at_is_counted_and_a_released_worker_is_a_newcomer() -> None:
    draw = AuditDraw(0.01, random.Random(3))
    considered(draw, trained(A, 0, True), True)
    (one,) = draw.take(1)
    draw.looked_at(one, 0)
    assert draw.given_up == 1
    for number in range(200):
        considered(draw, trained(A, number, True), True)
    assert 30 <= len(draw.waiting) < 60, "all of its first tokens, and then few"
    draw.forget(A)
    assert not draw.waiting
    considered(draw, trained(A, 0, True), True)
    assert len(draw.waiting) == 1

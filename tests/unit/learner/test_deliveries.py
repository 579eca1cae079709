"""What the coordinator is told of workers: what came of them and passed, and when."""

from __future__ import annotations

import pytest

from echo2.base.ids import GroupId, PeerId
from echo2.learner import deliveries
from echo2.learner.deliveries import HEARD_S, NEWS_S, TELL_S, Deliveries, DeliveryTally
from echo2.learner.episodes import NOBODY, SentTokens

A, B = PeerId("a"), PeerId("b")
G = GroupId("g")


def test_rollouts_are_heard_of_for_some_seconds_and_each_counts_once() -> None:
    one = Deliveries()
    assert one.take(0.0) == (), "the first word is that nothing came"
    for index in (0, 1, 1, 1):
        one.heard(A, G, index)
    assert one.take(NEWS_S - 0.01) is None
    assert one.take(NEWS_S) == (DeliveryTally(A, 2, 0.0),), "a worker that was silent before is news"
    one.heard(A, G, 2)
    assert one.take(2 * NEWS_S) is None, "more of a worker that is known is not"
    assert one.take(NEWS_S + TELL_S) == (DeliveryTally(A, 3, 0.0),)
    assert one.take(NEWS_S + HEARD_S + 0.1) == (DeliveryTally(A, 1, 0.0),)
    assert one.take(NEWS_S + TELL_S + HEARD_S + 0.2) == ()


def test_an_admitted_rollout_counts_for_its_workers_by_their_share_of_its_tokens() -> None:
    one = Deliveries()
    one.admitted((SentTokens(A, 30), SentTokens(B, 90), SentTokens(A, 0)))
    one.admitted((SentTokens(A, 5),))
    one.admitted((SentTokens(NOBODY, 5),))
    assert one.take(0.0) == (DeliveryTally(A, 0, pytest.approx(1.25)), DeliveryTally(B, 0, pytest.approx(0.75)))
    assert one.take(TELL_S) == (), "told once"


def test_nobody_is_not_told_of() -> None:
    one = Deliveries()
    one.heard(NOBODY, G, 0)
    assert one.take(0.0) == ()


def test_proven_is_who_had_a_rollout_admitted_and_of_those_the_last_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deliveries, "WORKERS_MAX", 3)
    told = Deliveries()
    told.heard(PeerId("heard"), GroupId("g"), 0)
    for name in ("a", "b", "c", "a", "d"):
        told.admitted([SentTokens(PeerId(name), 4)])
    assert [name for name in ("heard", "a", "b", "c", "d") if told.is_proven(PeerId(name))] == ["a", "c", "d"]

"""Who is refused again and again is accused; who is refused now and then is not."""

from __future__ import annotations

from echo2.base.ids import PeerId
from echo2.learner.untruths import UNTRUTHS_MAX, Untruths

LIAR, HONEST = PeerId("liar"), PeerId("honest")


def test_a_worker_that_is_refused_again_and_again_is_accused_once() -> None:
    untruths = Untruths()
    for _ in range(UNTRUTHS_MAX - 1):
        untruths.told(LIAR, "expected published versions up to 7, got 57")
    assert untruths.take() == []
    for _ in range(5):
        untruths.told(LIAR, "expected published versions up to 7, got 57")
    accused = untruths.take()
    assert [peer for peer, _ in accused] == [LIAR] and "got 57" in accused[0][1]
    assert untruths.take() == []


def test_what_is_admitted_outweighs_what_is_refused_now_and_then() -> None:
    untruths = Untruths()
    for _ in range(20 * UNTRUTHS_MAX):
        untruths.told(HONEST, "a slip")
        untruths.admitted(HONEST)
    assert untruths.take() == []


def test_who_is_taken_back_begins_anew() -> None:
    untruths = Untruths()
    for _ in range(UNTRUTHS_MAX):
        untruths.told(LIAR, "a lie")
    untruths.take()
    untruths.forget(LIAR)
    for _ in range(UNTRUTHS_MAX):
        untruths.told(LIAR, "another")
    assert len(untruths.take()) == 1

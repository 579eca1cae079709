"""Workers whose completions hold up the scorers stand out beside the others."""

from __future__ import annotations

from echo2.base.ids import PeerId
from echo2.learner.holding import HELD_MIN, Holding

BOMBER, HONEST = PeerId("bomber"), PeerId("honest")


def test_one_that_sends_bombs_is_told_of_once() -> None:
    holding = Holding()
    assert not any(holding.scored(HONEST, 0.01, is_held=False) for _ in range(100))
    told = [holding.scored(BOMBER, 2.0, is_held=True) for _ in range(3 * HELD_MIN)]
    assert [text is not None for text in told].index(True) == HELD_MIN - 1
    assert sum(text is not None for text in told) == 1
    assert "16 of its 16 recent completions held up their scorer, for 32 s in all" in str(told[HELD_MIN - 1])
    assert (holding.completions_held, holding.seconds_held) == (48, 96.0)


def test_a_policy_that_writes_bombs_by_itself_makes_nobody_guilty() -> None:
    holding = Holding()
    for number in range(2000):
        for worker in (HONEST, BOMBER):
            assert holding.scored(worker, 1.0, is_held=number % 4 == 0) is None


def test_the_first_or_only_worker_is_not_compared_with_nobody() -> None:
    holding = Holding()
    assert not any(holding.scored(BOMBER, 2.0, is_held=True) for _ in range(500))


def test_a_worker_that_is_taken_back_begins_anew() -> None:
    holding = Holding()
    for _ in range(100):
        holding.scored(HONEST, 0.01, is_held=False)
    assert [holding.scored(BOMBER, 2.0, is_held=True) for _ in range(HELD_MIN)][-1]
    holding.forget(BOMBER)
    assert [holding.scored(BOMBER, 2.0, is_held=True) for _ in range(HELD_MIN)][-1]


def test_accounts_are_of_the_recent_past() -> None:
    holding = Holding()
    for _ in range(100_000):
        holding.scored(HONEST, 0.0, is_held=False)
    for _ in range(20_000):
        holding.scored(BOMBER, 0.0, is_held=False)
    texts = [holding.scored(BOMBER, 2.0, is_held=True) for _ in range(200)]
    assert any(texts), "a good past does not pay for long"

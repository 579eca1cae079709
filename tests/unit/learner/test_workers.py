"""What is known of each worker: deliveries, impossible reports, completions that block their scorers; and failures in a row."""

from __future__ import annotations

import pytest

from echo2.base.ids import GroupId, PeerId
from echo2.learner.rollouts import workers
from echo2.learner.rollouts.groups import NOBODY, SentTokens
from echo2.learner.rollouts.workers import (
    ALONE_TIMES,
    HEARD_S,
    HELD_MIN,
    IMPOSSIBLE_MAX,
    NEWS_S,
    SHOWN_FROM,
    TELL_S,
    DeliveryTally,
    FailureStreak,
    SenderRecords,
)

LIAR, HONEST, BOMBER = PeerId("liar"), PeerId("honest"), PeerId("bomber")
A, B, G = PeerId("a"), PeerId("b"), GroupId("g")


def scored(records: SenderRecords, authors: list[PeerId], times: int, *, is_held: bool) -> int | None:
    """Of so many completions of these authors, at which they are accused; None if they are not."""
    before = len(records.accused)
    for number in range(times):
        records.on_scored(authors, 2.0 if is_held else 0.01, is_held)
        if len(records.accused) > before:
            return number + 1
    return None


def test_who_sends_impossible_reports_again_and_again_is_accused_once_and_who_delivers_as_much_is_not() -> None:
    records = SenderRecords()
    for problem in ("got 57", "another"):
        records.accused.clear()
        for _ in range(IMPOSSIBLE_MAX + 5):
            records.on_impossible(LIAR, problem)
            records.on_impossible(HONEST, "a slip")
            records.on_admission([SentTokens(HONEST, 2)], HONEST)
        (accusation,) = records.accused
        assert accusation.peer_id == LIAR and accusation.is_certain and problem in accusation.reason
        records.forgive(LIAR)


def test_who_blocks_scorers_far_more_often_than_others_is_accused_once_until_it_is_forgiven() -> None:
    records = SenderRecords()
    for number in (1, 2):
        assert scored(records, [HONEST], 100, is_held=False) is None
        assert scored(records, [BOMBER], 100, is_held=True) == HELD_MIN
        assert scored(records, [BOMBER], 100, is_held=True) is None and len(records.accused) == number
        assert "16 of its 16 recent completions held up their scorer, for 32 s in all" in records.accused[-1].reason
        records.forgive(BOMBER)
    assert records.completions_held == 2 * (HELD_MIN + 100) == records.seconds_held / 2


def test_a_policy_that_blocks_scorers_by_itself_makes_nobody_guilty() -> None:
    records = SenderRecords()
    for _ in range(500):
        for worker in (HONEST, BOMBER):
            assert scored(records, [worker], 1, is_held=True) is scored(records, [worker], 3, is_held=False) is None
    assert scored(SenderRecords(), [BOMBER], 500, is_held=True) is None, "nobody to compare it with"


def test_a_good_past_does_not_pay_for_long() -> None:
    records = SenderRecords()
    scored(records, [HONEST], 20_000, is_held=False)
    scored(records, [BOMBER], 20_000, is_held=False)
    assert scored(records, [BOMBER], 200, is_held=True)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("partners", [1, 4])
def test_a_shared_completion_is_charged_to_whoever_has_such_more_often(begins: bool, partners: int) -> None:
    records = SenderRecords()
    names = [PeerId(f"honest {number}") for number in range(partners)]
    assert records.likeliest([BOMBER, names[0]]) == names[0], "of unknown ones the last"
    for number in range(2 * HELD_MIN):
        for name in names:
            assert scored(records, [name], 10, is_held=False) is None
        partner = names[number % partners]
        scored(records, [BOMBER, partner] if begins else [partner, BOMBER], 1, is_held=True)
    assert [accusation.peer_id for accusation in records.accused] == [BOMBER]
    for order in ([BOMBER, names[0]], [names[0], BOMBER]):
        assert records.likeliest(order) == BOMBER, "whose rewards wait"


def test_rollouts_are_heard_of_for_some_seconds_and_each_counts_once() -> None:
    records = SenderRecords()
    records.on_tokens(NOBODY, G, 0)
    assert records.take_deliveries(0.0) == (), "the first report is that nothing came"
    for index in (0, 1, 1, 1):
        records.on_tokens(A, G, index)
    assert records.take_deliveries(NEWS_S - 0.01) is None
    assert records.take_deliveries(NEWS_S) == (DeliveryTally(A, 2, 0.0),), "a worker that was silent before is news"
    records.on_tokens(A, G, 2)
    assert records.take_deliveries(2 * NEWS_S) is None, "more of a worker that is known is not"
    assert records.take_deliveries(NEWS_S + TELL_S) == (DeliveryTally(A, 3, 0.0),)
    assert records.take_deliveries(NEWS_S + HEARD_S + 0.1) == (DeliveryTally(A, 1, 0.0),)
    assert records.take_deliveries(NEWS_S + TELL_S + HEARD_S + 0.2) == ()


def test_an_admitted_rollout_counts_for_its_workers_by_their_share_of_its_tokens() -> None:
    records = SenderRecords()
    records.on_admission((SentTokens(A, 30), SentTokens(B, 90), SentTokens(A, 0)), B)
    records.on_admission((SentTokens(A, 5),), A)
    records.on_admission((SentTokens(NOBODY, 5),), NOBODY)
    shares = (DeliveryTally(A, 0, pytest.approx(1.25)), DeliveryTally(B, 0, pytest.approx(0.75)))
    assert records.take_deliveries(0.0) == shares
    assert records.take_deliveries(TELL_S) == (), "reported once"


def test_proven_is_who_had_a_rollout_admitted_and_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORKERS_MAX", 3)
    records = SenderRecords()
    records.on_tokens(PeerId("heard"), G, 0)
    for name in ("a", "b", "c", "a", "d"):
        records.on_admission([SentTokens(PeerId(name), 4)], PeerId(name))
    assert [name for name in ("heard", "a", "b", "c", "d") if records.is_proven(PeerId(name))] == ["a", "c", "d"]


# ---- failures in a row


@pytest.mark.parametrize(("rollouts_per_step", "limit"), [(4, 64), (1000, 2000)])
def test_a_run_ends_after_as_many_failures_as_two_steps_have_and_no_success_between(
    rollouts_per_step: int, limit: int
) -> None:
    streak = FailureStreak("rewards", rollouts_per_step)
    for number in range(limit - 1):
        assert (streak.text == "") == (number < SHOWN_FROM)
        assert not streak.on_failure("KeyError: 1")
    streak.on_success()
    texts = [streak.on_failure("TypeError: odd" if number == 3 else f"KeyError: {number}") for number in range(limit)]
    assert not any(texts[:-1]) and texts[-1] == (
        f"expected rewards that succeed, got {limit} rewards failed one after another, {limit - 1} of them like this: "
        f"KeyError: {limit - 1}"
    )


def test_one_worker_among_several_ends_nothing_by_what_it_sends() -> None:
    streak = FailureStreak("rewards", 4)
    streak.on_success("honest")
    assert not any(streak.on_failure("ValueError: junk", "bad") for _ in range(64 * ALONE_TIMES - 1))
    streak.on_success("honest")
    assert not any(streak.on_failure("ValueError: junk", "bad") for _ in range(64))
    assert streak.on_failure("ValueError: junk", "honest"), "the others meet it too"
    only = FailureStreak("rewards", 4)
    only.on_success("only")
    assert any(only.on_failure("ValueError: junk", "only") for _ in range(64)), "the only worker counts as all"

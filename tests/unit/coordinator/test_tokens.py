"""Join tokens and the rate at which they may be tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.clock import Pace
from echo2.base.errors import BadToken, LimitExceeded, MalformedMessage, NotAllowed
from echo2.base.ids import PeerId
from echo2.coordinator.fleet.tokens import HELLO_WITHIN_S, SILENT_MAX, USES_DEFAULT, TokenBook

SECRET = "s" * 43


def book(lifetime_s: float = 60.0, use_limit: int = 0) -> TokenBook:
    made = TokenBook(tokens_max=2)
    made.create(SECRET, "worker", "mine", lifetime_s, use_limit, now=0.0)
    return made


def test_unknown_expired_used_up_revoked_and_foreign_role_are_told_apart_and_no_secret_is_kept() -> None:
    assert SECRET not in repr(book())
    with pytest.raises(BadToken, match="does not know; ask for a new link"):
        book().redeem("t" * 43, "worker", PeerId("a"), 1.0)
    with pytest.raises(NotAllowed, match="role worker"):
        book().redeem(SECRET, "learner", PeerId("a"), 1.0)
    with pytest.raises(BadToken, match="expired 5 s ago"):
        book(10.0).redeem(SECRET, "worker", PeerId("a"), 15.0)
    used = book(use_limit=1)
    used.redeem(SECRET, "worker", PeerId("a"), 1.0)
    used.redeem(SECRET, "worker", PeerId("a"), 1.0)
    with pytest.raises(BadToken, match="used 1 of 1 times"):
        used.redeem(SECRET, "worker", PeerId("b"), 1.0)
    used.revoke(next(iter(used.tokens)))
    with pytest.raises(BadToken, match="revoked"):
        used.redeem(SECRET, "worker", PeerId("a"), 1.0)


def test_who_says_no_hello_is_forgotten_and_one_that_says_it_late_takes_a_use_again() -> None:
    made = book(10 * HELLO_WITHIN_S, use_limit=1)
    token_id = made.redeem(SECRET, "worker", PeerId("a"), 1.0).token_id
    with pytest.raises(BadToken, match="used 1 of 1 times"):
        made.redeem(SECRET, "worker", PeerId("b"), HELLO_WITHIN_S)
    made.redeem(SECRET, "worker", PeerId("b"), HELLO_WITHIN_S + 1.0)
    assert made.tokens[token_id].peers == {"b"}
    with pytest.raises(BadToken, match="no use left: ask for a new link"):
        made.greet(token_id, PeerId("a"))
    made.greet(token_id, PeerId("b"))
    with pytest.raises(BadToken, match="used 1 of 1 times"):
        made.redeem(SECRET, "worker", PeerId("c"), 5 * HELLO_WITHIN_S)


def test_whoever_enrols_without_end_is_kept_in_bounds_and_written_once_each_and_honest_ones_still_join() -> None:
    made = book()
    token_id = made.redeem(SECRET, "worker", PeerId("honest"), 1.0).token_id
    made.greet(token_id, PeerId("honest"))
    for number in range(3 * SILENT_MAX):
        made.changed_peers.clear()
        made.redeem(SECRET, "worker", PeerId(f"p{number}"), 2.0)
        assert len(made.changed_peers) <= 2, "it, and one that is forgotten"
    assert len(made.tokens[token_id].peers) == SILENT_MAX + 1
    made.redeem(SECRET, "worker", PeerId("late"), 3.0)
    made.greet(token_id, PeerId("late"))
    assert {"honest", "late"} <= made.tokens[token_id].peers


def test_a_token_without_a_limit_admits_a_stated_number() -> None:
    made = book()
    (token,) = made.tokens.values()
    token.peers = {PeerId(f"p{number}") for number in range(USES_DEFAULT)}
    with pytest.raises(BadToken, match="used 10000 of 10000 times"):
        made.redeem(SECRET, "worker", PeerId("a"), 1.0)
    made.redeem(SECRET, "worker", PeerId("p7"), 1.0)


def test_a_wish_out_of_range_is_refused_and_so_is_one_token_too_many() -> None:
    made = book()
    for role, lifetime_s, limit in (("king", 1.0, 0), ("worker", 0.0, 0), ("worker", 1e12, 0), ("worker", 1.0, -1)):
        with pytest.raises(MalformedMessage):
            made.create("u" * 43, role, "", lifetime_s, limit, 0.0)
    made.create("u" * 43, "worker", "", 1.0, 0, 0.0)
    with pytest.raises(LimitExceeded):
        made.create("v" * 43, "worker", "", 1.0, 0, 0.0)


@given(pauses=st.lists(st.floats(0, 2), max_size=100))
def test_no_more_pass_than_the_burst_and_the_rate_allow_and_no_caller_starves_another(pauses: list[float]) -> None:
    limiter, now, passed = Pace(per_s=2.0, burst=5), 0.0, 0
    for pause_s in pauses:
        now += pause_s
        wait_s = limiter.wait_s("x", now)
        passed += wait_s == 0.0
        assert wait_s <= 0.5 + 1e-6
    assert passed <= 5 + 2.0 * now + 1e-6
    assert limiter.wait_s("another", now) == 0.0


def test_after_a_long_pause_a_burst_passes_and_no_more() -> None:
    pace = Pace(per_s=2.0, burst=5)
    assert pace.wait_s("x", 0.0) == 0.0
    assert [pace.wait_s("x", 1000.0) == 0.0 for _ in range(6)] == [True] * 5 + [False]

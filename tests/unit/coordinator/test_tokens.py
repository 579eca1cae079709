"""Join tokens and the rate at which they may be tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import BadToken, LimitExceeded, MalformedMessage, NotAllowed
from echo2.base.ids import PeerId
from echo2.coordinator.tokens import RateLimiter, TokenBook

SECRET = "s" * 43


def book(lifetime_s: float = 60.0, use_limit: int = 0) -> TokenBook:
    made = TokenBook(tokens_max=2)
    made.create(SECRET, "worker", "mine", lifetime_s, use_limit, now=0.0)
    return made


def test_secret_is_not_kept() -> None:
    assert SECRET not in repr(book())


def test_unknown_expired_used_up_revoked_and_foreign_role_are_told_apart() -> None:
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


@pytest.mark.parametrize(
    ("role", "lifetime_s", "limit"), [("king", 1.0, 0), ("worker", 0.0, 0), ("worker", 1e12, 0), ("worker", 1.0, -1)]
)
def test_wish_out_of_range_is_refused(role: str, lifetime_s: float, limit: int) -> None:
    with pytest.raises(MalformedMessage):
        book().create("u" * 43, role, "", lifetime_s, limit, 0.0)


def test_number_of_tokens_has_a_limit() -> None:
    made = book()
    made.create("u" * 43, "worker", "", 1.0, 0, 0.0)
    with pytest.raises(LimitExceeded):
        made.create("v" * 43, "worker", "", 1.0, 0, 0.0)


@given(pauses=st.lists(st.floats(0, 2), max_size=100))
def test_no_more_pass_than_the_burst_and_the_rate_allow(pauses: list[float]) -> None:
    limiter, now, passed = RateLimiter(per_s=2.0, burst=5), 0.0, 0
    for pause_s in pauses:
        now += pause_s
        passed += limiter.take("x", now) == 0.0
    assert passed <= 5 + 2.0 * now + 1e-6


def test_one_caller_does_not_starve_another() -> None:
    limiter = RateLimiter(per_s=1.0, burst=1)
    assert limiter.take("a", 0.0) == 0.0
    assert limiter.take("a", 0.5) == pytest.approx(0.5)
    assert limiter.take("b", 0.5) == 0.0

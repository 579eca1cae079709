import pytest
from hypothesis import given, strategies as st

from echo2.base.ids import GroupId, Step, Version
from echo2.base.rollout import VersionSpan
from echo2.staleness.rule import Ledger, is_admissible, may_begin

NUMBERS = st.integers(0, 10_000)


@given(step=NUMBERS, version=NUMBERS, bound=st.integers(0, 64))
def test_rule_is_version_at_least_step_minus_bound(step: int, version: int, bound: int) -> None:
    assert is_admissible(Step(step), Version(version), bound) == (version >= step - bound)


def test_a_group_that_would_be_too_old_is_not_begun() -> None:
    assert may_begin(Version(8), 10, 2)
    assert not may_begin(Version(7), 10, 2)


def test_ledger_refuses_a_second_training() -> None:
    ledger = Ledger(staleness_bound=2)
    ledger.record(GroupId("g"), Step(3), [VersionSpan(Version(1), 5)])
    with pytest.raises(AssertionError, match="already"):
        ledger.record(GroupId("g"), Step(4), [VersionSpan(Version(4), 5)])


def test_ledger_refuses_an_over_stale_token_and_counts_by_lag() -> None:
    ledger = Ledger(staleness_bound=2)
    ledger.record(GroupId("a"), Step(3), [VersionSpan(Version(1), 5), VersionSpan(Version(3), 2)])
    with pytest.raises(AssertionError, match="over the bound"):
        ledger.record(GroupId("b"), Step(4), [VersionSpan(Version(1), 5)])
    assert ledger.histogram() == {0: 2, 2: 5}
    assert ledger.over_stale_tokens() == 0
    ledger.forget_before(Step(4))
    assert not ledger.is_trained(GroupId("a"))

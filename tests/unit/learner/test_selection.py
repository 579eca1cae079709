"""The cap on groups in flight, contrast and its bounded refilling, the overlong ramp, and what counts as hopeless."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import ConfigError
from echo2.learner.rollouts.selection import DROPPED_MAX_RATIO, GroupRules, OverlongShaping, PruningRule

RULES = st.builds(
    lambda groups, n, bound: GroupRules(bound, groups * n, n, 50),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(0, 16),
)


@given(rules=RULES, planned=st.none() | st.integers(0, 10_000))
def test_the_cap_is_between_one_batch_and_as_many_as_stay_fresh(rules: GroupRules, planned: int | None) -> None:
    cap = rules.cap_groups(planned)
    assert rules.groups_per_step <= cap <= rules.groups_per_step * (rules.staleness_bound + 1)
    if planned and rules.rollouts_per_step <= planned <= rules.rollouts_per_step * (rules.staleness_bound + 1):
        assert cap == planned // rules.rollouts_per_group


def test_without_a_plan_two_batches_are_in_flight() -> None:
    assert GroupRules(4, 192, 8, 50).cap_groups(None) == 48
    assert GroupRules(0, 192, 8, 50).cap_groups(None) == 24


@given(rewards=st.lists(st.floats(-1, 1), max_size=5), dropped=st.integers(0, 20))
def test_equal_rewards_are_dropped_until_the_step_has_dropped_its_share(rewards: list[float], dropped: int) -> None:
    rules = GroupRules(4, 8, 2, 50, drops_equal_rewards=True)
    has_contrast = len(rewards) > 1 and max(rewards) - min(rewards) > 1e-6
    assert rules.drops(rewards, dropped) == (not has_contrast and dropped < DROPPED_MAX_RATIO * 4)
    assert not GroupRules(4, 8, 2, 50).drops(rewards, 0), "off by default"


@given(st.integers(0, 400))
def test_overlong_shaping_is_a_ramp_over_the_buffer(tokens: int) -> None:
    shaped = OverlongShaping(limit_tokens=300, buffer_tokens=100).shaped(1.0, tokens)
    assert shaped == pytest.approx(1.0 - min(1.0, max(0.0, (tokens - 200) / 100)))
    with pytest.raises(ConfigError, match="overlong"):
        OverlongShaping(10, 20)


RULE = PruningRule(loop_tokens=24, loop_repeats=4, period_max=6, window_tokens=10, logprob_floor=-3.0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.lists(st.integers(0, 50), max_size=10))
def test_a_phrase_repeated_word_for_word_is_a_loop_whatever_came_before(phrase: list[int], before: list[int]) -> None:
    token_ids = before + phrase * 24
    assert RULE.is_hopeless(token_ids, [0.0] * len(token_ids))


@given(st.lists(st.integers(0, 50), min_size=24, max_size=24, unique=True))
def test_text_without_repeats_is_no_loop(token_ids: list[int]) -> None:
    assert not RULE.is_hopeless(token_ids, [-1.0] * 24)


def test_a_long_stretch_of_unlikely_tokens_is_lost_and_a_short_one_is_not() -> None:
    assert RULE.is_hopeless(range(10), [-3.5] * 10)
    assert not RULE.is_hopeless(range(9), [-9.0] * 9)
    assert not RULE.is_hopeless(range(20), [-9.0] * 10 + [-1.0] * 10)


def test_a_group_keeps_enough_rollouts() -> None:
    assert [PruningRule(keep_min_fraction=0.5).may_prune(8, pruned) for pruned in (0, 3, 4)] == [True, True, False]

"""Selection: contrast, bounded refilling, the overlong ramp, and what counts as hopeless."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import ConfigError
from echo2.learner.selection import (
    DynamicSampling,
    GroupVerdict,
    Hopeless,
    OverlongShaping,
    PruningRule,
    has_contrast,
)


def test_groups_without_contrast_are_dropped_until_the_step_has_dropped_its_share() -> None:
    rule = DynamicSampling(groups_per_step=4, dropped_max_ratio=1.5)
    verdicts = [rule.verdict([1.0, 1.0], dropped) for dropped in range(8)]
    assert verdicts == [GroupVerdict.DROP] * 6 + [GroupVerdict.TRAIN_ANYWAY] * 2
    assert all(rule.verdict([1.0, 0.0], dropped) is GroupVerdict.TRAIN for dropped in range(8))
    assert DynamicSampling(4, 0.0).verdict([1.0, 1.0], 0) is GroupVerdict.TRAIN_ANYWAY


@given(st.lists(st.floats(-1, 1), max_size=5))
def test_contrast_means_that_two_rewards_differ(rewards: list[float]) -> None:
    assert has_contrast(rewards) == (len(rewards) > 1 and max(rewards) - min(rewards) > 1e-6)


@given(st.integers(0, 400))
def test_overlong_shaping_is_a_ramp_over_the_buffer(tokens: int) -> None:
    shaped = OverlongShaping(limit_tokens=300, buffer_tokens=100, penalty=0.5).shaped(1.0, tokens)
    assert 0.5 <= shaped <= 1.0
    assert shaped == pytest.approx(1.0 - 0.5 * min(1.0, max(0.0, (tokens - 200) / 100)))


RULE = PruningRule(loop_tokens=24, loop_repeats=4, period_max=6, window_tokens=10, logprob_floor=-3.0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.lists(st.integers(0, 50), max_size=10))
def test_a_phrase_repeated_word_for_word_is_a_loop_whatever_came_before(phrase: list[int], before: list[int]) -> None:
    token_ids = before + phrase * 24
    assert RULE.reason(token_ids, [0.0] * len(token_ids)) is Hopeless.LOOP


@given(st.lists(st.integers(0, 50), min_size=24, max_size=24, unique=True))
def test_text_without_repeats_is_no_loop(token_ids: list[int]) -> None:
    assert RULE.reason(token_ids, [-1.0] * 24) is None


def test_a_long_stretch_of_unlikely_tokens_is_lost_and_a_short_one_is_not() -> None:
    assert RULE.reason(range(10), [-3.5] * 10) is Hopeless.LOST
    assert RULE.reason(range(9), [-9.0] * 9) is None
    assert RULE.reason(range(20), [-9.0] * 10 + [-1.0] * 10) is None


def test_a_group_keeps_enough_rollouts() -> None:
    assert [PruningRule(keep_min_fraction=0.5).may_prune(8, pruned) for pruned in (0, 3, 4)] == [True, True, False]


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="dynamic sampling"):
        DynamicSampling(0)
    with pytest.raises(ConfigError, match="overlong"):
        OverlongShaping(10, 20)
    with pytest.raises(ConfigError, match="pruning"):
        PruningRule(loop_tokens=0)

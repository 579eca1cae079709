from __future__ import annotations

from echo2.weights.container import CodecSetting
from echo2.weights.policy import SettingCost, choose_setting, parents_to_publish


def test_edges_are_few_and_reach_no_farther_than_asked() -> None:
    assert parents_to_publish(0, 64) == ()
    assert parents_to_publish(1, 64) == (0,)
    assert parents_to_publish(12, 64) == (11, 10, 8)
    assert parents_to_publish(64, 16) == (63, 62, 60, 56, 48)
    assert sum(len(parents_to_publish(v, 1024)) for v in range(1, 1025)) < 2.1 * 1024


def test_the_setting_follows_uplink_and_cores() -> None:
    costs = {
        CodecSetting.FAST: SettingCost(0.009 * 16e9, 2e9, 3e9),
        CodecSetting.DENSE: SettingCost(0.006 * 16e9, 0.7e9, 0.8e9),
    }
    slow, why = choose_setting(costs, 16 * 10**9, 5e6, 8, 2)
    assert slow is CodecSetting.DENSE
    assert "sending" in why
    quick, why = choose_setting(costs, 16 * 10**9, 1e9, 8, 2)
    assert quick is CodecSetting.FAST
    assert "decoding" in why

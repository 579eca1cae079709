from __future__ import annotations

from echo2.learner.publishing.schedule import SettingChoice, encode_cores
from echo2.weights import CodecSetting

WEIGHTS = 16 * 10**9


def test_a_slow_uplink_takes_dense_and_a_quick_one_fast() -> None:
    choice = SettingChoice()
    assert not choice.choose(WEIGHTS, 0.0)
    assert choice.setting is CodecSetting.FAST and "not known" in choice.reason
    assert choice.choose(WEIGHTS, 2e6)
    assert choice.setting is CodecSetting.DENSE and "sending" in choice.reason
    assert choice.choose(WEIGHTS, 1e9)
    assert choice.setting is CodecSetting.FAST


def test_what_was_measured_counts_and_a_small_gain_changes_nothing() -> None:
    choice = SettingChoice()
    choice.choose(WEIGHTS, 40e6)
    before = choice.setting
    assert before is CodecSetting.FAST, "190 MB at 40 MB/s take less than the 7.3 s of dense decoding"
    choice.encoded(CodecSetting.FAST, WEIGHTS, WEIGHTS // 20, 10.0)
    assert choice.choose(WEIGHTS, 20e6), "five per cent changed: sending takes 40 s, dense is worth its decoding"
    choice.encoded(CodecSetting.DENSE, WEIGHTS, WEIGHTS // 34, 20.0)
    for rate in (20.5e6, 21e6, 21.5e6):
        assert not choice.choose(WEIGHTS, rate)


def test_a_trainer_on_the_cpu_keeps_its_cores() -> None:
    assert encode_cores("cpu", 64) == 1
    assert encode_cores("cuda", 64) == 3
    assert encode_cores("cuda", 1) == 1

"""Chooses the codec setting for deltas: the configured one, else the best for this network and this machine.

Guarantees: the rule is `choose_setting` of weights/policy. Its inputs (sizes, rates) come from `make bench-delta` until the
first delta was encoded, then from measurements. Leaves to others: measuring the uplink, encoding.
"""

from __future__ import annotations

from typing import Literal

from echo2.weights import CodecSetting
from echo2.weights.policy import SettingCost, choose_setting

SettingWish = Literal["auto", "fast", "dense"]

FIRST_SHARE = {CodecSetting.FAST: 0.0119, CodecSetting.DENSE: 0.0088}
"""A delta's size as a share of the full weights' bytes; used until the first delta was encoded."""
ENCODE_BYTES_PER_S = {CodecSetting.FAST: 6.2e9, CodecSetting.DENSE: 2.4e9}
DECODE_BYTES_PER_S = {CodecSetting.FAST: 7.1e9, CodecSetting.DENSE: 2.2e9}
"""Bytes of full weights per second and core. Measured, like the shares, at a learning rate of 3e-6, one step apart."""
WORKER_CORES = 1
"""A worker decodes in one thread: its other cores may be busy."""
ENCODE_CORES_MAX = 3
"""weights/encode codes this many blocks at a time: the one being consumed and two ahead."""


def encode_cores(device_type: str, cores: int) -> int:
    """Number of encoding threads: half of the cores, at most `ENCODE_CORES_MAX`. One if the model trains on the CPU, because
    more threads would slow the training."""
    return max(1, min(ENCODE_CORES_MAX, cores // 2)) if device_type != "cpu" else 1


class SettingChoice:
    """`setting`, `reason`: the latest choice. `cores`: number of encoding threads."""

    def __init__(self, wish: SettingWish = "auto", cores: int = 1) -> None:
        self.wish = wish
        self.cores = cores
        self.setting = CodecSetting.DENSE if wish == "dense" else CodecSetting.FAST
        self.reason = "nothing was published yet" if wish == "auto" else f"{wish}: asked for (broadcast.delta_setting)"
        self._share = dict(FIRST_SHARE)
        self._encode_bytes_per_s = dict(ENCODE_BYTES_PER_S)

    def encoded(self, setting: CodecSetting, weights_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """Records the size and duration of an encoded delta. The other setting's figures are scaled by the same factors, so
        that their proportions stay those of the benchmark."""
        if encoded_bytes <= 0 or seconds <= 0 or weights_bytes <= 0:
            return
        share, rate = encoded_bytes / weights_bytes, weights_bytes / seconds / self.cores
        for each in CodecSetting:
            self._share[each] = share * FIRST_SHARE[each] / FIRST_SHARE[setting]
            self._encode_bytes_per_s[each] = rate * ENCODE_BYTES_PER_S[each] / ENCODE_BYTES_PER_S[setting]

    def choose(self, weights_bytes: int, spread_bytes_per_s: float) -> bool:
        """Chooses the setting of the next delta; returns whether it changed. `spread_bytes_per_s`: the rate at which one
        artifact reaches all workers; 0 if it is not known yet."""
        if self.wish != "auto":
            return False
        before = self.setting
        if spread_bytes_per_s <= 0:
            self.setting, self.reason = CodecSetting.FAST, "fast: the uplink is not known yet"
        else:
            costs = {
                each: SettingCost(
                    self._share[each] * weights_bytes, self._encode_bytes_per_s[each], DECODE_BYTES_PER_S[each]
                )
                for each in CodecSetting
            }
            self.setting, why = choose_setting(
                costs, weights_bytes, spread_bytes_per_s, self.cores, WORKER_CORES, self.setting
            )
            self.reason = f"{why} ({spread_bytes_per_s:.3g} bytes/s to all workers, {self.cores} cores encode)"
        return self.setting is not before

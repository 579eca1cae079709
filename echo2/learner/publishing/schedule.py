"""When a version is published, and when a keyframe, a merged delta or a delta from the base goes with it.

Guarantees: a version is due kappa steps after the last; kappa is between 1 and S (1 if S is 0), because with a larger kappa the
newest version would exceed the staleness bound before the next one arrives.

Keyframes. A newcomer fetches the newest keyframe and the deltas after it. A keyframe of the newest version is due when those
deltas together exceed a keyframe's bytes, when a store has no room for one more like the last beside them, or when they number
`chain_max`. So a newcomer fetches at most about two keyframes' worth of bytes and applies at most about `chain_max` deltas.

Merged deltas. The n-th publication also gets a delta from the publication 2^j before it, for each 2^j that divides n. It is
merged from two halves that were published already. So a worker that is k publications behind needs at most 2 log2(k) + 1
pieces, while on average two deltas are kept for each version.

Deltas from the base. A worker that has the base checkpoint needs a delta from version 0 and the few deltas after it. At every
`BASE_REACH`-th publication, the newest delta from version 0 is merged with the merged delta that continues it. Each start of
the learner makes a new delta from the base, which it has loaded anyway.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.base.ids import Step, Version
from echo2.broadcast.artifact import FRAME_SHARE, store_bytes_for
from echo2.broadcast.route import BASE_SHARE_MAX
from echo2.config.run import StalenessSection
from echo2.weights import CodecSetting

MERGED_LAG_MAX = 64  # the most publications that a merged delta spans
BASE_REACH = 16
"""Publications between two deltas from the base: the learner's default for the length of a keyframe's chain, so that both
are renewed about equally often."""


@dataclass(slots=True)
class PublicationSchedule:
    """The newest version, and the size of the chain of deltas after the newest keyframe. `planned_kappa`: the coordinator's, used
    unless the user chose a shorter one; S - 1 until a plan arrives."""

    staleness: StalenessSection
    chain_max: int = 32
    newest: Version = field(default_factory=lambda: Version(0))
    planned_kappa: int | None = None
    keyframe_bytes: int = 0
    store_bytes: float = math.inf  # that artifacts may take
    delta_bytes: int = 0  # of the last one
    chain_bytes: int = 0
    chain_length: int = 0

    @property
    def kappa(self) -> int:
        bound = self.staleness.bound
        most = min(self.planned_kappa or bound, bound)  # the operator may have lowered S below the user's own period
        return max(1, min(self.staleness.kappa or self.planned_kappa or bound - 1, most))

    def is_due(self, step: Step) -> bool:
        return step - self.newest >= self.kappa

    def begin(self, version: Version) -> None:
        """Notes that `version` is being published. The next is due kappa steps after it, however long publishing takes."""
        assert version > self.newest, f"version {version} after {self.newest}"
        self.newest = version

    def delta_published(self, version: Version, delta_bytes: int, weights_bytes: int) -> None:
        assert version == self.newest, f"version {version}, begun was {self.newest}"
        self.store_bytes, self.delta_bytes = store_bytes_for(weights_bytes) / (1 + FRAME_SHARE), delta_bytes
        self.chain_bytes += delta_bytes
        self.chain_length += 1

    def keyframe_published(self, keyframe_bytes: int) -> None:
        self.keyframe_bytes = keyframe_bytes
        self.chain_bytes = self.chain_length = 0

    @property
    def is_keyframe_due(self) -> bool:
        is_long = self.chain_bytes > self.keyframe_bytes or self.chain_length >= self.chain_max
        has_room = self.keyframe_bytes + self.chain_bytes + self.delta_bytes <= self.store_bytes
        return self.chain_length > 0 and (is_long or not has_room)


@dataclass(frozen=True, slots=True)
class Merge:
    """A delta `parent` -> `version`, to be merged from `parent` -> `middle` and `middle` -> `version`."""

    parent: Version
    middle: Version
    version: Version


@dataclass(slots=True)
class MergeSchedule:
    """Which merged deltas go with a version. Counts publications from the version that this process found published."""

    _ordinal: int = 0
    _recent: deque[Version] = field(default_factory=lambda: deque(maxlen=MERGED_LAG_MAX + 1))

    def published(self, version: Version, parent: Version) -> list[Merge]:
        """The delta to `version` was published; returns the merges that are due, shortest span first. If `parent` is not the
        last version that it knows, it counts from `parent` again."""
        if not self._recent or self._recent[-1] != parent:
            self._ordinal = 0
            self._recent.clear()
            self._recent.append(parent)
        self._ordinal += 1
        self._recent.append(version)
        recent, merges, reach = self._recent, list[Merge](), 2
        while reach <= min(self._ordinal, MERGED_LAG_MAX) and self._ordinal % reach == 0:
            merges.append(Merge(recent[-1 - reach], recent[-1 - reach // 2], version))
            reach *= 2
        return merges


@dataclass(slots=True)
class BaseSchedule:
    """`at`: the target of the newest delta from version 0 that was begun; None: there is none, and none can be merged."""

    at: Version | None = field(default_factory=lambda: Version(0))

    def step(self, merges: Sequence[Merge]) -> Merge | None:
        """The delta from version 0 that is due with these `merges` (shortest first), as a merge of two halves, or None."""
        if self.at is None or len(merges) < BASE_REACH.bit_length() - 1:
            return None
        merge = merges[BASE_REACH.bit_length() - 2]
        if merge.parent != self.at:
            return None
        return Merge(Version(0), self.at, merge.version)

    def left(self, delta_bytes: int, keyframe_bytes: int) -> None:
        """The delta from the base was published. If it saves a newcomer too little, no more are made."""
        if delta_bytes > BASE_SHARE_MAX * keyframe_bytes:
            self.at = None


FIRST_SHARE = {CodecSetting.FAST: 0.0119, CodecSetting.DENSE: 0.0088}
"""A delta's size as a share of the full weights' bytes; used until the first delta was encoded."""
ENCODE_BYTES_PER_S = {CodecSetting.FAST: 6.2e9, CodecSetting.DENSE: 2.4e9}
DECODE_BYTES_PER_S = {CodecSetting.FAST: 7.1e9, CodecSetting.DENSE: 2.2e9}
"""Bytes of full weights per second and core. Measured, like the shares, at a learning rate of 3e-6, one step apart."""
STAY_SHARE = 0.9  # predictions are off by some percent; a setting must not flap with them
WORKER_CORES = 1  # a worker decodes in one thread: its other cores may be busy
ENCODE_CORES_MAX = 3  # weights/encode codes this many blocks at a time: the one being consumed and two ahead


def encode_cores(device_type: str, cores: int) -> int:
    """Number of encoding threads: half of the cores, at most `ENCODE_CORES_MAX`. One if the model trains on the CPU, because
    more threads would slow the training."""
    return max(1, min(ENCODE_CORES_MAX, cores // 2)) if device_type != "cpu" else 1


class SettingChoice:
    """`setting`, `reason`: the latest choice. `cores`: number of encoding threads."""

    def __init__(self, cores: int = 1) -> None:
        self.cores = cores
        self.setting = CodecSetting.FAST
        self.reason = "nothing was published yet"
        self._share = dict(FIRST_SHARE)
        self._encode_bytes_per_s = dict(ENCODE_BYTES_PER_S)

    def encoded(self, setting: CodecSetting, weights_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """Records the size and duration of an encoded delta. The other setting's figures are scaled by the same factors, so
        that their proportions stay those of the benchmark."""
        if seconds <= 0:  # in a simulator
            return
        share, rate = encoded_bytes / weights_bytes, weights_bytes / seconds / self.cores
        for each in CodecSetting:
            self._share[each] = share * FIRST_SHARE[each] / FIRST_SHARE[setting]
            self._encode_bytes_per_s[each] = rate * ENCODE_BYTES_PER_S[each] / ENCODE_BYTES_PER_S[setting]

    def choose(self, weights_bytes: int, spread_bytes_per_s: float) -> bool:
        """Chooses the setting of the next delta: the one whose slowest stage (encoding, sending, decoding; they overlap) finishes
        first, but a new one only if it takes less than `STAY_SHARE` of the current one's time. Returns whether it changed.
        `spread_bytes_per_s`: the rate at which one artifact reaches all workers; 0 if it is not known yet."""
        before = self.setting
        if spread_bytes_per_s <= 0:
            self.setting, self.reason = CodecSetting.FAST, "fast: the uplink is not known yet"
            return self.setting is not before
        slowest: dict[CodecSetting, tuple[float, str]] = {}
        for each in CodecSetting:
            slowest[each] = max(
                (weights_bytes / (self._encode_bytes_per_s[each] * self.cores), "encoding"),
                (self._share[each] * weights_bytes / spread_bytes_per_s, "sending"),
                (weights_bytes / (DECODE_BYTES_PER_S[each] * WORKER_CORES), "decoding"),
            )
        best = min(slowest, key=lambda each: slowest[each][0])
        if slowest[best][0] <= STAY_SHARE * slowest[before][0]:
            self.setting = best
        seconds, stage = slowest[self.setting]
        self.reason = (
            f"{self.setting.name.lower()}: {stage} takes {seconds:.3g} s, the other stages less "
            f"({spread_bytes_per_s:.3g} bytes/s to all workers, {self.cores} cores encode)"
        )
        return self.setting is not before

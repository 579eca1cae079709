"""When a version is published, and when a keyframe goes with it.

Guarantees: a version is due kappa steps after the last; kappa lies between 1 and S (1 when S is 0), because with a
larger one the newest version would be over the bound before the next comes. Leaves to others: encoding and sending
(runtime/publisher), choosing kappa (the user, else the coordinator's planner).

The keyframe rule. A joiner fetches the newest keyframe and the deltas behind it. A keyframe of the newest version is
made when those deltas together weigh more than `keyframe_share` of a keyframe, or when they are more than
`chain_max`: so a joiner never fetches more than (1 + share) keyframes nor applies a longer chain.

The merging rule. The n-th publication also gets a delta from the one 2^j before it where 2^j divides n, put together
from two halves that were published before. So whoever is k publications behind needs at most 2 log2(k) + 1 pieces.

The base rule. Who has the base checkpoint needs a delta from version 0 and the few behind it: at every `BASE_REACH`-th
publication the newest such delta is put together with the merged one that goes on from there. Each start makes one anew
from the base, which it has loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.base.ids import Step, Version
from echo2.weights.policy import BASE_SHARE_MAX, parents_to_publish

MERGED_LAG_MAX = 64
BASE_REACH = 16
"""As many publications as a keyframe's chain has by default: the delta from the base is renewed about as often."""
"""No merged delta spans more publications."""


@dataclass(frozen=True, slots=True)
class PublicationConfig:
    """`kappa` None: the coordinator's plan chooses, and S - 1 holds until it has."""

    staleness_bound: int
    kappa: int | None = None
    keyframe_share: float = 1.0
    chain_max: int = 32


@dataclass(slots=True)
class PublicationSchedule:
    """What was published last, and how heavy the chain behind the newest keyframe is."""

    config: PublicationConfig
    newest: Version = field(default_factory=lambda: Version(0))
    planned_kappa: int | None = None
    keyframe_bytes: int = 0
    chain_bytes: int = 0
    chain_length: int = 0

    @property
    def kappa(self) -> int:
        bound = self.config.staleness_bound
        wanted = self.config.kappa or self.planned_kappa or bound - 1
        return max(1, min(wanted, bound))

    def is_due(self, step: Step) -> bool:
        """Whether the weights after `step` optimiser steps are to be published."""
        return step - self.newest >= self.kappa

    def begin(self, version: Version) -> None:
        """The version is on its way; the next is due kappa steps after it, however long it takes to leave."""
        assert version > self.newest, f"version {version} after {self.newest}"
        self.newest = version

    def delta_published(self, version: Version, delta_bytes: int) -> None:
        """The delta to `version` has left."""
        assert version == self.newest, f"version {version}, begun was {self.newest}"
        self.chain_bytes += delta_bytes
        self.chain_length += 1

    def keyframe_published(self, version: Version, keyframe_bytes: int) -> None:
        self.newest = max(self.newest, version)
        self.keyframe_bytes = keyframe_bytes
        self.chain_bytes = self.chain_length = 0

    @property
    def is_keyframe_due(self) -> bool:
        over_bytes = self.chain_bytes > self.config.keyframe_share * self.keyframe_bytes
        return self.chain_length > 0 and (over_bytes or self.chain_length >= self.config.chain_max)


@dataclass(frozen=True, slots=True)
class Merge:
    """A delta `parent` -> `version` to be put together from those to and from `middle`."""

    parent: Version
    middle: Version
    version: Version


@dataclass(slots=True)
class MergeSchedule:
    """Which merged deltas go with a version. Counts from the version that this process found published."""

    _ordinal: int = 0
    _recent: deque[Version] = field(default_factory=lambda: deque(maxlen=MERGED_LAG_MAX + 1))

    def published(self, version: Version, parent: Version) -> list[Merge]:
        """The delta to `version` has left: what can be merged now, the shortest first."""
        if not self._recent or self._recent[-1] != parent:
            self._ordinal = 0
            self._recent.clear()
            self._recent.append(parent)
        self._ordinal += 1
        self._recent.append(version)
        reaches = [self._ordinal - before for before in parents_to_publish(self._ordinal, MERGED_LAG_MAX)]
        recent = self._recent
        return [Merge(recent[-1 - reach], recent[-1 - reach // 2], version) for reach in reaches if reach > 1]


@dataclass(slots=True)
class BaseSchedule:
    """To which version the newest delta from version 0 leads; None: none does, and none can be put together."""

    at: Version | None = field(default_factory=lambda: Version(0))

    def step(self, merges: Sequence[Merge], reach: int = BASE_REACH) -> Merge | None:
        """The delta from 0 that is due beside these merges, the shortest first, in two halves."""
        if self.at is None or len(merges) < reach.bit_length() - 1:
            return None
        merge = merges[reach.bit_length() - 2]
        if merge.parent != self.at:
            return None
        return Merge(Version(0), self.at, merge.version)

    def left(self, delta_bytes: int, keyframe_bytes: int) -> None:
        """How large it came out: one that saves a newcomer little is not made again."""
        if delta_bytes > BASE_SHARE_MAX * keyframe_bytes:
            self.at = None

"""Counts the leases that workers give up, by worker and by prompt. A worker that gives up more than honest workers do gets fewer.

A worker gives up a lease when it hands it back, says that the learner refused it, lets it expire, reconnects without it, claims to
have finished what the learner lacks, or is lost. Giving up does not get it a different sample, because the seed belongs to the
group; but it would let the worker pick the prompts that it works on. Two bounds, both wide enough for honest workers:

- *One by one*, while it keeps other leases: at most `PICKS_MAX` at once, and one more for each `FINISHED_PER_PICK` leases
  that the learner closes as complete. An honest worker that gives up one in a hundred by chance exceeds this less than
  once in a million leases; the test computes it.
- *All at once* (preemption, drain, crash, a lost link): what a worker gives up within `SETTLE_S`, ending with none, counts as one
  stop. At most `STOPS_MAX` stops at once, and one more every `STOP_EVERY_S`: preemptions come by time, not by leases.

A worker beyond a bound is given nothing for a time that doubles each time, unless all others are held back too. A prompt that
`PROMPT_WORKERS` workers gave up one by one is itself at fault and counts against none of them, until some worker finishes it.
A lease that ends while the learner is silent, or shortly after, counts against no worker. An evaluation is for one exact version:
a worker that hands back its leases and has a newer version within `MOVING_S` is charged for none of them, and gets no more leases
for the old version.

Guarantees: memory is bounded by the fleet and `PROMPTS_MAX`. Leaves to others: leases (lease_book), delivery (worth).
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from echo2.base.ids import PeerId, Version
from echo2.control.backoff import ceiling_s
from echo2.coordinator.lease_events import GroupPhase, OpenGroup
from echo2.coordinator.worth import TELLING_S_MAX

PICKS_MAX, FINISHED_PER_PICK = 4.0, 16
STOPS_MAX, STOP_EVERY_S = 4.0, 900.0
SETTLE_S = 5.0
"""Longer than a drain and its last reports take."""
PAUSE_S_MIN, PAUSE_S_MAX = 30.0, 1800.0
FORGIVEN_AFTER = 64
"""Number of finished leases that undo one doubling of the pause."""
PROMPT_WORKERS, PROMPTS_MAX = 3, 1024
MOVING_S = 60.0
"""Most seconds from handing back an evaluation to reporting a newer version live: loading takes seconds, longer on large models."""
NO_VERSION = Version(-1)
COMPLETE = "complete"
"""The reason with which the learner closes a group that it holds completely."""


class GivenUpWay(enum.Enum):
    """The ways to give up a lease."""

    HANDED_BACK = "handed back"
    REFUSED = "said to be refused"
    EXPIRED = "left to expire"
    MISSING = "missing when it came back"
    UNFINISHED = "said to be finished and not"
    LOST = "lost with it"


@dataclass(frozen=True, slots=True)
class Moving:
    """An evaluation that was handed back at the time `at`. `is_last`: the worker held no other lease then."""

    digest: str
    exact: Version
    at: float
    is_last: bool


@dataclass(slots=True)
class GivenUpRecord:
    """One worker's record. `picks`, `stops`: what counts against it now; `episode`: digests of the prompts given up since
    `began_at`; `moving`: evaluations handed back, which count unless it reports a newer version in time; `newest`: newest version
    that it has reported; `left`: newest version whose evaluations it handed back to move on.
    """

    granted: int = 0
    finished: int = 0
    ways: Counter[GivenUpWay] = field(default_factory=Counter)
    version: Version | None = None
    picks: float = 0.0
    stops: float = 0.0
    stopped_at: float = 0.0
    episode: list[str] = field(default_factory=list)
    moving: list[Moving] = field(default_factory=list)
    newest: Version = NO_VERSION
    left: Version = NO_VERSION
    began_at: float = 0.0
    is_stop: bool = False
    failures: int = 0
    finished_since: int = 0
    paused_at: float = 0.0
    paused_until: float = 0.0
    reason: str = ""

    @property
    def is_over_bound(self) -> bool:
        return self.picks > PICKS_MAX or self.stops > STOPS_MAX


@dataclass(slots=True)
class Prompt:
    """How often each worker gave up a prompt, and at which versions. `is_at_fault`: no worker is charged for it."""

    charges: Counter[PeerId] = field(default_factory=Counter)
    versions: Counter[Version | None] = field(default_factory=Counter)
    is_at_fault: bool = False


@dataclass(slots=True)
class GivenUp:
    """The records of all workers and prompts. `told_at`: when the learner last reported deliveries; `heard_since`: since when it
    has done so without a gap."""

    records: dict[PeerId, GivenUpRecord] = field(default_factory=dict)
    prompts: OrderedDict[str, Prompt] = field(default_factory=OrderedDict)
    told_at: float | None = None
    heard_since: float = 0.0
    _settling: set[PeerId] = field(default_factory=set)
    _paused: set[PeerId] = field(default_factory=set)

    # ---- what happens

    def told(self, now: float) -> None:
        """The learner sent a report."""
        if self.told_at is None or now - self.told_at > TELLING_S_MAX:
            self.heard_since = now
        self.told_at = now

    def granted(self, worker_id: PeerId, version: Version | None) -> None:
        """A worker got a lease. `version`: the one that it had when it asked; None if it did not ask."""
        record = self.records.setdefault(worker_id, GivenUpRecord())
        record.granted += 1
        if version is not None:
            record.version, record.newest = version, max(record.newest, version)

    def at_version(self, worker_id: PeerId, version: Version) -> None:
        """The worker reports its version as it asks for rollouts: excuses the evaluations of older versions that it handed back."""
        record = self.records.get(worker_id)
        if record is None:
            return
        record.newest = max(record.newest, version)
        left = [one.exact for one in record.moving if one.exact < record.newest]
        if left:
            record.left = max(record.left, *left)
            record.moving = [one for one in record.moving if one.exact >= record.newest]

    def may_evaluate(self, worker_id: PeerId, version: Version) -> bool:
        """Whether the worker may evaluate this version: not if it has handed back evaluations of it to move to a newer one."""
        record = self.records.get(worker_id)
        return record is None or (version > record.left and all(one.exact != version for one in record.moving))

    def gave_up(
        self, way: GivenUpWay, worker_id: PeerId, group: OpenGroup, since: float, held: int, now: float
    ) -> None:
        """A worker gave up a lease. `since`: time of the lease's last progress; `held`: leases that the worker still holds."""
        record = self.records.setdefault(worker_id, GivenUpRecord())
        record.ways[way] += 1
        is_heard = self.told_at is not None and now - self.told_at <= TELLING_S_MAX
        if not is_heard or since < self.heard_since:
            return
        exact = group.spec.exact_version
        if exact is not None and way is GivenUpWay.HANDED_BACK:
            record.moving.append(Moving(_digest(group), exact, now, held == 0))
            self.at_version(worker_id, record.newest)
            self._settling.add(worker_id)
            return
        if not record.episode:
            record.began_at, record.is_stop = now, False
        record.episode.append(_digest(group))
        record.is_stop |= held == 0
        self._settling.add(worker_id)

    def closed(self, group: OpenGroup, reason: str) -> None:
        """The learner closed a group. It counts as finished only if the learner holds it completely."""
        if reason != COMPLETE:
            return
        if self.prompts and (prompt := self.prompts.pop(_digest(group), None)) and prompt.is_at_fault:
            for giver, count in prompt.charges.items():  # the prompt is not at fault: it can be finished
                self.records[giver].picks += count
        record = self.records.get(group.last_worker) if group.last_worker is not None else None
        if record is None:
            return
        if group.phase is GroupPhase.QUEUED and (record.episode or record.moving):  # it handed back a whole group
            digest = _digest(group)
            record.moving = [one for one in record.moving if one.digest != digest]
            if digest in record.episode:
                record.episode.remove(digest)
        record.finished += 1
        record.finished_since += 1
        record.picks = max(0.0, record.picks - 1 / FINISHED_PER_PICK)
        if record.finished_since >= FORGIVEN_AFTER:
            record.failures, record.finished_since = max(0, record.failures - 1), 0

    # ---- what follows

    def judged(self, now: float) -> Iterator[str]:
        """Counts what workers gave up in episodes that are over. Yields messages for the operator."""
        self._paused = {worker_id for worker_id in self._paused if self.records[worker_id].paused_until > now}
        for worker_id in sorted(self._settling):
            record = self.records[worker_id]
            _stayed(record, now)
            if record.episode and now - record.began_at < SETTLE_S:
                continue
            if not record.moving:
                self._settling.discard(worker_id)
            if not record.episode:
                continue
            episode, record.episode = record.episode, []
            if record.is_stop and len(episode) > 1:
                record.stops = max(0.0, record.stops - (now - record.stopped_at) / STOP_EVERY_S) + 1
                record.stopped_at = now
            else:
                for digest in episode:
                    yield from self._charge(worker_id, record, digest)
            if record.is_over_bound:
                yield self._hold_back(worker_id, record, now)

    def _charge(self, worker_id: PeerId, record: GivenUpRecord, digest: str) -> Iterator[str]:
        prompt = self.prompts.setdefault(digest, Prompt())
        self.prompts.move_to_end(digest)
        while len(self.prompts) > PROMPTS_MAX:
            self.prompts.popitem(last=False)
        prompt.charges[worker_id] += 1
        prompt.versions[record.version] += 1
        if prompt.is_at_fault:
            return
        record.picks += 1
        if len(prompt.charges) >= PROMPT_WORKERS:
            prompt.is_at_fault = True
            for giver, count in prompt.charges.items():
                self.records[giver].picks = max(0.0, self.records[giver].picks - count)
            versions = ", ".join(f"{count} at version {version}" for version, count in prompt.versions.items())
            yield f"{len(prompt.charges)} workers gave up prompt {digest} ({versions}): held against none of them"

    def _hold_back(self, worker_id: PeerId, record: GivenUpRecord, now: float) -> str:
        pause_s = ceiling_s(record.failures, PAUSE_S_MIN, PAUSE_S_MAX)
        record.failures += 1
        record.paused_at, record.paused_until = now, now + pause_s
        self._paused.add(worker_id)
        if record.picks > PICKS_MAX:
            how, bound = "one by one while it goes on with others", f"one in {FINISHED_PER_PICK}"
        else:
            how, bound = "all at once, again and again", f"all in {STOP_EVERY_S / 60:.0f} minutes"
        record.picks, record.stops = min(record.picks, PICKS_MAX), min(record.stops, STOPS_MAX)
        ways = ", ".join(f"{count} {way.value}" for way, count in record.ways.most_common())
        record.reason = (
            f"it gives up leases {how} ({ways}; {record.finished} finished of {record.granted} granted), "
            f"more than {bound}"
        )
        return f"{worker_id} is given no leases for {pause_s:.0f} s: {record.reason}"

    def is_held_back(self, worker_id: PeerId, others: Collection[PeerId], now: float) -> bool:
        """Whether the worker is given nothing now. `others`: workers that could get its leases; if all are held back, none is."""
        record = self.records.get(worker_id)
        if record is None or not (now < record.paused_until or len(record.episode) > PICKS_MAX):
            return False
        return any(not self._is_paused(other, now) for other in others if other != worker_id)

    def held_back_of(self, workers: Collection[PeerId], now: float) -> set[PeerId]:
        """The workers that a pool must be planned without."""
        return {worker_id for worker_id in workers if self.is_held_back(worker_id, workers, now)}

    def held_back(self, now: float) -> list[tuple[PeerId, GivenUpRecord]]:
        """The paused workers and their records, for display to the operator."""
        return [
            (worker_id, self.records[worker_id])
            for worker_id in sorted(self._paused)
            if self._is_paused(worker_id, now)
        ]

    def _is_paused(self, worker_id: PeerId, now: float) -> bool:
        return worker_id in self._paused and now < self.records[worker_id].paused_until


def _stayed(record: GivenUpRecord, now: float) -> None:
    """Counts evaluations handed back more than `MOVING_S` ago without a newer version since like any other lease given up."""
    stayed = [one for one in record.moving if now - one.at >= MOVING_S]
    if not stayed:
        return
    if not record.episode:
        record.began_at, record.is_stop = stayed[0].at, False
    record.episode += [one.digest for one in stayed]
    record.is_stop |= stayed[-1].is_last
    record.moving = [one for one in record.moving if now - one.at < MOVING_S]


def _digest(group: OpenGroup) -> str:
    """A digest of the prompt, the same in every group."""
    return hashlib.sha256(array("Q", group.spec.prompt_token_ids).tobytes()).hexdigest()[:12]

"""What the learner knows of each worker: what it delivered, what of it was impossible, and how often it blocked its scorer.

The coordinator believes nothing about a worker's speed but the deliveries counted here: the number of its rollouts with new
tokens in the last `HEARD_S` seconds (a gauge), and of its rollouts admitted since the last report. If several workers sampled a
rollout, each is credited its share of the tokens.

A worker is accused of impossible reports if sixteen more of them came than rollouts of it were admitted: its leases go back to
the queue each time, and may stop the run. It is accused of blocking scorers (time, memory or output exhausted, or the scorer
killed) only in comparison with the others, because the policy may learn to write such completions, and then all honest workers
deliver them. A completion that one worker began and another finished is shared out in proportion to the rates of such
completions that they have: whoever makes them meets many partners, and a partner has completions of its own.

Guarantees: memory is bounded; counts of completions are halved from time to time, so that they reflect the recent past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.base.ids import GroupId, PeerId
from echo2.learner.bets import bounded_entry
from echo2.learner.rollouts.groups import NOBODY, SentTokens
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

IMPOSSIBLE_MAX = 16  # too many to be an accident of a worker that also delivers
HELD_MIN, TIMES_OTHERS, OTHERS_MIN, RECENT_MAX = 16, 8.0, 64, 4096
"""Accused from so many blocked scorers on, if their share is so many times the others', who had so many scored; halved above the
last."""
HEARD_S = 6.0  # much longer than any worker's report interval, so that every rollout in progress is counted
NEWS_S, TELL_S = 0.25, 1.0
"""Deliveries are reported every `TELL_S`; every `NEWS_S` while there are tokens of a worker that was not in the last report."""
ROLLOUTS_MAX = 1 << 20  # that are open at a time; the oldest are forgotten


@dataclass(slots=True)
class SenderRecord:
    """`impossible`: impossible reports less admitted rollouts, not below 0. `scored`, `held`, `held_s`: its recent completions,
    those that blocked their scorer, and for how long; of one with several authors, a share. `admitted`: since the last report."""

    is_proven: bool = False
    admitted: float = 0.0
    impossible: int = 0
    scored: float = 0.0
    held: float = 0.0
    held_s: float = 0.0
    is_accused: bool = False

    @property
    def held_rate(self) -> float:
        return (self.held + 1) / (self.scored + 1)


@dataclass(slots=True)
class SenderRecords:
    """`seconds_held`, `completions_held`: of blocked scorers, over all workers since the start. `accused`: not yet taken by the
    pool."""

    seconds_held: float = 0.0
    completions_held: int = 0
    accused: list[pb.WorkerAccused] = field(default_factory=list)
    _records: dict[PeerId, SenderRecord] = field(default_factory=dict)
    _fresh: set[tuple[PeerId, GroupId, int]] = field(default_factory=set)
    _last: dict[tuple[PeerId, GroupId, int], float] = field(default_factory=dict)  # seconds; oldest first
    _reported: set[PeerId] = field(default_factory=set)
    _reported_at: float = float("-inf")

    def _of(self, worker: PeerId) -> SenderRecord:
        return bounded_entry(self._records, worker, SenderRecord)

    def is_proven(self, worker: PeerId) -> bool:
        """Whether the worker has ever had a rollout admitted. Only the last `bets.WORKERS_MAX` are remembered."""
        return worker in self._records and self._records[worker].is_proven

    def forgive(self, worker: PeerId) -> None:
        record = self._of(worker)
        record.impossible, record.is_accused = 0, False
        record.scored = record.held = record.held_s = 0.0

    # ---- reports

    def on_tokens(self, worker: PeerId, group_id: GroupId, index: int) -> None:
        if worker != NOBODY and len(self._fresh) < ROLLOUTS_MAX:
            self._fresh.add((worker, group_id, index))

    def on_admission(self, senders: Sequence[SentTokens], reporter: PeerId) -> None:
        """A rollout passed admission. `senders`: which worker sent how many of its tokens. `reporter`: who sent the last ones."""
        total = sum(sent.token_count for sent in senders)
        for sent in senders:
            record = self._of(sent.peer_id)
            record.admitted += sent.token_count / total
            record.is_proven = True
        if reporter in self._records:
            record = self._of(reporter)
            record.impossible = max(0, record.impossible - 1)

    def on_impossible(self, worker: PeerId, problem: str) -> None:
        """A report that no honest worker makes was refused: accuses the worker if these are too many."""
        if worker == NOBODY:
            return
        record = self._of(worker)
        record.impossible += 1
        if record.impossible == IMPOSSIBLE_MAX:
            reason = f"{IMPOSSIBLE_MAX} of its reports could not be true, the last: {problem}"
            self.accused.append(pb.WorkerAccused(peer_id=worker, reason=reason, is_certain=True))

    def take_deliveries(self, now: float) -> list[pb.WorkerDelivered] | None:
        """Of all workers that delivered something, if a report is due at `now` (seconds), else None."""
        is_news = any(worker not in self._reported for worker, _, _ in self._fresh)
        if now - self._reported_at < (NEWS_S if is_news else TELL_S):
            return None
        for key in self._fresh:
            self._last.pop(key, None)
            self._last[key] = now
        self._fresh.clear()
        while self._last and (len(self._last) > ROLLOUTS_MAX or now - next(iter(self._last.values())) > HEARD_S):
            del self._last[next(iter(self._last))]
        rollouts = Counter(worker for worker, _, _ in self._last)
        admitted = {worker: record.admitted for worker, record in self._records.items() if record.admitted}
        for worker in admitted:
            self._records[worker].admitted = 0.0
        self._reported_at, self._reported = now, set(rollouts)
        return [
            pb.WorkerDelivered(peer_id=each, heard_rollouts=rollouts[each], admitted_rollouts=admitted.get(each, 0.0))
            for each in sorted(rollouts.keys() | admitted.keys())
        ]

    # ---- scoring

    def likeliest(self, authors: Sequence[PeerId]) -> PeerId:
        """The author of a completion that would most likely be to blame; the last one, if nothing is known."""
        return max(reversed(authors), key=lambda author: self._records.get(author, SenderRecord()).held_rate)

    def on_scored(self, authors: Sequence[PeerId], seconds: float, is_held: bool) -> None:
        """Counts a completion of these workers; accuses those that now first stand out."""
        records = {author: self._of(author) for author in authors}
        rates = {author: record.held_rate for author, record in records.items()}
        for record in records.values():
            record.scored += 1
            if record.scored > RECENT_MAX:
                record.scored, record.held, record.held_s = record.scored / 2, record.held / 2, record.held_s / 2
        if not is_held:
            return
        self.seconds_held += seconds
        self.completions_held += 1
        for author, record in records.items():
            share = rates[author] / sum(rates.values())
            record.held += share
            record.held_s += share * seconds
        for author in [author for author, record in records.items() if self._stands_out(author, record)]:
            record = records[author]
            record.is_accused = True
            reason = (
                f"rewards: {record.held:.0f} of its {record.scored:.0f} recent completions held up their scorer, for "
                f"{record.held_s:.0f} s in all; others' hardly do"
            )
            if author != NOBODY:
                self.accused.append(pb.WorkerAccused(peer_id=author, reason=reason, is_certain=False))

    def _stands_out(self, worker: PeerId, record: SenderRecord) -> bool:
        if record.is_accused or record.held < HELD_MIN:
            return False
        others = [other for name, other in self._records.items() if name != worker and not other.is_accused]
        scored, held = sum(other.scored for other in others), sum(other.held for other in others)
        return scored >= OTHERS_MIN and record.held / record.scored >= TIMES_OTHERS * (held + 1) / (scored + 1)


# ---- failures in a row

SHOWN_FROM = 8  # fewer failures in a row are not worth a line on the screen
ALONE_TIMES = 8  # a single worker among several may fail so many times longer before it ends the run
KINDS_MAX, SENDERS_MAX = 256, 1024  # cards and engines differ in dozens; names of senders are shown, not counted


@dataclass(slots=True)
class FailureStreak:
    """Failures one after another, of rewards or of agents' episodes: when they end the run, and with which cause. A success
    starts the count anew. `what`: plural of what fails. The limit is 64 failures or those of two steps, whichever is more; a
    single worker among several cannot end the run by what it sends, unless nobody else succeeds during `ALONE_TIMES` as many."""

    what: str
    rollouts_per_step: int
    count: int = 0
    message: str = ""
    _kinds: Counter[str] = field(default_factory=Counter)
    _senders: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)

    def on_success(self, sender: str = "") -> None:
        self.count = 0
        self._kinds.clear()
        self._senders.clear()
        if len(self._known) < SENDERS_MAX:
            self._known.add(sender)

    def on_failure(self, message: str, sender: str = "") -> str:
        """Counts a failure. Returns why the run should end, or an empty text."""
        self.count += 1
        kind = message.partition(":")[0]
        if kind in self._kinds or len(self._kinds) < KINDS_MAX:
            self._kinds[kind] += 1
        if kind == self._kinds.most_common(1)[0][0]:
            self.message = message
        for names in (self._known, self._senders):
            if len(names) < SENDERS_MAX:
                names.add(sender)
        is_alone = len(self._senders) == 1 and len(self._known) > 1
        if self.count < max(64, 2 * self.rollouts_per_step) * (ALONE_TIMES if is_alone else 1):
            return ""
        return f"expected {self.what} that succeed, got {self.text}"

    @property
    def text(self) -> str:
        """Describes the failures since the last success; empty for a few."""
        if self.count < SHOWN_FROM:
            return ""
        alike = self._kinds.most_common(1)[0][1]
        share = "all" if alike == self.count else f"{alike} of them"
        return f"{self.count} {self.what} failed one after another, {share} like this: {self.message}"

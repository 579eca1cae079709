"""Assigns the audited rollouts to scorers: scoring leases to workers, the rest to the learner.

    drawn --LookAt--> LeaseScoring --ScoresCame--> Told
              |          |  '--- late, handed back, gone: another worker, at most `TRIES_MAX` in all, then the learner
              |          '-- sometimes also LookSelf: a known answer, by which the scorer is judged
              '--> LookSelf: no worker may score it, or its author is under suspicion (disputes)

Guarantees:
- The scorer of a rollout is drawn after the whole rollout has arrived, with the learner's own random numbers, from workers
  that sampled none of it, each weighted by the tokens it has delivered. So workers that delivered a share c of what others
  did score a rollout with probability at most c / `WEIGHT_MIN`, whoever sampled it and however many identities they use.
- A scorer gets tokens and versions, but neither the author nor the claimed numbers.
- The learner also scores `VERIFIED_SHARE` of the leased rollouts, and each scorer's first ones; the lease does not show it.
- Workers read at most `tokens_share` times the tokens that were trained on, and a fixed burst.
- A scorer's record belongs to its peer ID, so a new stream does not reset it.
Leaves to others: which rollouts (audit_draw), what the numbers say (disputes, suspicion), the streams (runtime/scoring).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import LeaseId, PeerId, Version
from echo2.learner.audit import Evidence, Passage, evidence_of, older_of
from echo2.learner.audit_draw import DrawnPassage
from echo2.learner.episodes import TurnOf
from echo2.learner.suspicion import Accusation
from echo2.scoring.request import ScoreRequest, Stretch, TokenScores

VERIFIED_SHARE = 1.0 / 16.0
"""A scorer that lies in each of n scorings stays undetected with probability (15/16)^n: 5 % after 47, 0.2 % after 100. The cost is
a sixteenth of the learner scoring everything itself."""
VERIFIED_FIRST = 2
"""A scorer's first leases that are always checked, so that a new identity gets no unchecked lie."""
WEIGHT_MIN = 0.5
"""The workers able to score a rollout must have delivered at least this share of what all but its authors have. Otherwise, if few
workers keep its versions, a few colluders could claim to keep them and get all its scorings."""
LEASE_S = 120.0
TRIES_MAX = 3
"""Workers that are asked to score a rollout before the learner scores it."""
OPEN_MAX = 4
"""Open leases per worker. Leases of a stream that has ended count until they expire."""
BURST_TOKENS = 1 << 16
"""Tokens that workers may read beyond the share, because newcomers are audited more."""
LEASED_TOKENS_MAX = 1 << 16
"""Longest rollout that is leased: its scores make a message of less than 4 MB."""
SILENT_MAX = 16
"""A scorer that leaves this many leases in a row unanswered, while it samples, is accused."""
DECLINED_MAX = 16
"""A scorer that hands back this many leases in a row, although it still claims to keep the versions, is not asked any more."""
EXCUSED_MAX = 4 * DECLINED_MAX
"""The same limit for leases handed back because the scorer no longer keeps a version."""
ASKED_AGAIN_S = 600.0
"""A scorer is asked again this long after the last lease that it handed back: it may have restarted with room for versions."""
SCORERS_MAX = 16_384
GIVEN_UP_MAX = 256
WEIGHT_KEPT = 0.9
"""Decay of a worker's weight at each published version, so that a worker that has left soon counts for little."""
PUBLISHED_MAX = 256


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """A rollout to be scored again. `older`: for each version, the older version to compare with; None: the scorer's choice."""

    number: int
    drawn: DrawnPassage
    older: Mapping[Version, Version] | None = None


# ---- events


@dataclass(frozen=True, slots=True)
class VersionKept:
    """The version was published; workers may name it from now on."""

    version: Version


@dataclass(frozen=True, slots=True)
class TokensDelivered:
    """`tokens` of this worker were trained on."""

    worker: PeerId
    tokens: int


@dataclass(frozen=True, slots=True)
class ScorerCame:
    """A worker can score under these versions. Sent again whenever they change."""

    worker: PeerId
    versions: frozenset[Version]


@dataclass(frozen=True, slots=True)
class ScorerGone:
    """The worker stopped scoring, or is not trusted any more."""

    worker: PeerId


@dataclass(frozen=True, slots=True)
class LookAt:
    """A rollout was drawn for audit. `is_own`: the learner must score it itself. `steps_back`: how many versions back the older
    version is."""

    drawn: DrawnPassage
    is_own: bool
    steps_back: int


@dataclass(frozen=True, slots=True)
class ScoresCame:
    """The answer to a lease. Empty `scores`: the worker hands the lease back."""

    worker: PeerId
    lease_id: LeaseId
    scores: tuple[TokenScores, ...]


@dataclass(frozen=True, slots=True)
class ScoringTick:
    """Sent about every second; expires leases."""


Event = VersionKept | TokensDelivered | ScorerCame | ScorerGone | LookAt | ScoresCame | ScoringTick

# ---- actions


@dataclass(frozen=True, slots=True)
class LeaseScoring:
    worker: PeerId
    request: ScoreRequest
    within_s: float


@dataclass(frozen=True, slots=True)
class LookSelf:
    """The learner scores the rollout itself. `reason`: known answer | no scorer | suspicion."""

    look: Look
    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """A scorer's numbers for a rollout, paired with the author's claims."""

    look: Look
    scorer: PeerId
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class AccuseScorer:
    worker: PeerId
    accusation: Accusation


Action = LeaseScoring | LookSelf | Told | AccuseScorer

NO_SCORER, KNOWN_ANSWER, SUSPICION = "no scorer", "known answer", "suspicion"


@dataclass(slots=True)
class ScoringCounts:
    """Counts since the process began. `read_tokens`: read by workers' forward passes. Leases that were handed back, or whose
    stream ended, do not count, because the worker that scores the rollout next is counted."""

    leased: int = 0
    answered: int = 0
    unanswered: int = 0
    verified: int = 0
    read_tokens: int = 0
    delivered_tokens: int = 0


@dataclass(slots=True)
class _Record:
    """A worker's record over all its streams."""

    open: set[LeaseId] = field(default_factory=set)
    silent: int = 0  # leases unanswered since the last scores, while the worker sampled
    declined: int = 0  # leases handed back since the last scores, although it kept all versions
    excused: int = 0  # leases handed back since the last scores, because it no longer kept a version
    handed_back_at: float = 0.0
    given_up: frozenset[Version] = frozenset()  # versions that it gave up in this way; it is not asked for them again
    checked: int = 0

    @property
    def is_asked(self) -> bool:
        return self.declined < DECLINED_MAX and self.excused < EXCUSED_MAX

    @property
    def is_free(self) -> bool:
        return len(self.open) < OPEN_MAX and self.is_asked


@dataclass(slots=True)
class _Scorer:
    """A worker with an open stream. `versions`: those that it can be asked for."""

    versions: frozenset[Version]
    record: _Record


@dataclass(slots=True)
class _Open:
    """An open lease, which expires at `until` (seconds). `delivered_before`: the worker's delivered tokens when it was leased.
    `is_left`: its stream has ended and the rollout was handed on; the lease still counts until it expires."""

    look: Look
    worker: PeerId
    record: _Record
    request: ScoreRequest
    until: float
    delivered_before: int
    tries: int
    is_left: bool = False


@dataclass(slots=True)
class Scorings:
    """The scoring leases. `tokens_share`: tokens that workers may read, as a share of the tokens trained on; 0: the learner
    scores everything."""

    rng: random.Random
    tokens_share: float
    counts: ScoringCounts = field(default_factory=ScoringCounts)
    _published: list[Version] = field(default_factory=list)
    _scorers: dict[PeerId, _Scorer] = field(default_factory=dict)
    _records: dict[PeerId, _Record] = field(default_factory=dict)  # workers that had a lease, most recently leased last
    _weights: dict[PeerId, float] = field(default_factory=dict)
    _delivered: dict[PeerId, int] = field(default_factory=dict)
    _open: dict[LeaseId, _Open] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def has_room(self) -> bool:
        """Whether more rollouts may be handed out. True if no worker scores, because the learner then scores."""
        if not self._scorers or not self.tokens_share:
            return True
        limit = self.tokens_share * self.counts.delivered_tokens + BURST_TOKENS
        asked = [scorer.record for scorer in self._scorers.values() if scorer.record.is_asked]
        is_free = not asked or any(record.is_free for record in asked)
        return is_free and self.counts.read_tokens < limit

    @property
    def waiting(self) -> int:
        return sum(not one.is_left for one in self._open.values())

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case VersionKept(version):
                self._published = [*self._published, version][-PUBLISHED_MAX:]
                self._weights = {peer: WEIGHT_KEPT * weight for peer, weight in self._weights.items() if weight >= 1.0}
            case TokensDelivered(worker, tokens):
                self._deliver(worker, tokens)
            case ScorerCame(worker, versions):
                self._came(worker, versions, now)
            case ScorerGone(worker):
                return self._gone(worker, now)
            case LookAt(drawn, is_own, steps_back):
                return self._look(drawn, is_own, steps_back, now)
            case ScoresCame(worker, lease_id, scores):
                return self._scored(worker, lease_id, scores, now)
            case ScoringTick():
                return [action for lease_id in self._late(now) for action in self._unanswered(lease_id, now)]
        return []

    # ---- who scores

    def _deliver(self, worker: PeerId, tokens: int) -> None:
        self.counts.delivered_tokens += tokens
        if worker not in self._weights and len(self._weights) >= SCORERS_MAX:
            del self._weights[next(iter(self._weights))]
        self._weights[worker] = self._weights.get(worker, 0.0) + tokens
        self._delivered[worker] = self._delivered.get(worker, 0) + tokens
        if len(self._delivered) > SCORERS_MAX:
            del self._delivered[next(iter(self._delivered))]

    def _came(self, worker: PeerId, versions: frozenset[Version], now: float) -> None:
        scorer = self._scorers.get(worker)
        if scorer is None:
            if not versions or len(self._scorers) >= SCORERS_MAX:
                return
            scorer = self._scorers[worker] = _Scorer(versions, self._records.get(worker) or _Record())
        record = scorer.record
        if now >= record.handed_back_at + ASKED_AGAIN_S:
            record.declined = record.excused = 0
        scorer.versions = versions - record.given_up

    def _gone(self, worker: PeerId, now: float) -> list[Action]:
        """Hands the worker's open leases on at once. They stay on its record until they expire, as if it had stayed, so that
        reconnecting gains nothing."""
        scorer = self._scorers.pop(worker, None)
        left = [self._open[lease_id] for lease_id in sorted(scorer.record.open)] if scorer is not None else []
        left = [one for one in left if not one.is_left]
        for one in left:
            one.is_left = True
        return [action for one in left for action in self._handed_on(one, now)]

    def _able(self, passage: Passage, but: Collection[PeerId]) -> list[PeerId]:
        """Free workers that may score the passage, without those in `but`. Empty if all able workers together have delivered
        less than `WEIGHT_MIN` of what all but the authors have."""
        needed = {piece.version for piece in passage.pieces}
        authors = {piece.worker for piece in passage.pieces}
        others = sum(weight for worker, weight in self._weights.items() if worker not in authors)
        able = [
            worker
            for worker, scorer in self._scorers.items()
            if worker not in authors
            and self._weights.get(worker)
            and needed <= scorer.versions
            and scorer.record.is_asked
        ]
        if sum(self._weights[worker] for worker in able) < WEIGHT_MIN * others:
            return []
        return [worker for worker in able if worker not in but and self._scorers[worker].record.is_free]

    # ---- leases

    def _look(self, drawn: DrawnPassage, is_own: bool, steps_back: int, now: float) -> list[Action]:
        look = Look(next(self._numbers), drawn)
        if is_own:
            return [LookSelf(look, SUSPICION)]
        passage = drawn.passage
        is_large = len(passage.places) > LEASED_TOKENS_MAX or len(passage.token_ids) > LEASED_TOKENS_MAX
        if not self.tokens_share or is_large or any(piece.keeps_cache for piece in passage.pieces):
            return [LookSelf(look, NO_SCORER)]
        return self._leased(look, older_of(passage, self._published, steps_back), (), 0, now)

    def _leased(
        self, look: Look, wished: Mapping[Version, Version], but: Collection[PeerId], tries: int, now: float
    ) -> list[Action]:
        passage = look.drawn.passage
        able = self._able(passage, but)
        if not able:
            return [LookSelf(look, NO_SCORER)]
        (worker,) = self.rng.choices(able, [self._weights[one] for one in able])
        scorer = self._scorers[worker]
        record = self._recorded(worker, scorer)
        look = Look(look.number, look.drawn, _kept_older(passage, wished, scorer.versions))
        lease_id = LeaseId(f"s-{self.rng.getrandbits(64):016x}")
        request = request_of(lease_id, look)
        delivered = self._delivered.get(worker, 0)
        self._open[lease_id] = _Open(look, worker, record, request, now + LEASE_S, delivered, tries + 1)
        record.open.add(lease_id)
        self.counts.leased += 1
        self.counts.read_tokens += request.read_tokens
        actions: list[Action] = [LeaseScoring(worker, request, LEASE_S)]
        if not tries and (record.checked < VERIFIED_FIRST or self.rng.random() < VERIFIED_SHARE):
            record.checked += 1
            self.counts.verified += 1
            actions.append(LookSelf(look, KNOWN_ANSWER))
        return actions

    def _recorded(self, worker: PeerId, scorer: _Scorer) -> _Record:
        """Stores the worker's record, from its first lease on; a worker without a lease has nothing to record."""
        self._records.pop(worker, None)
        self._records[worker] = scorer.record
        if len(self._records) > SCORERS_MAX:
            del self._records[next(iter(self._records))]
        return scorer.record

    def _handed_on(self, one: _Open, now: float) -> list[Action]:
        """Hands on a lease that its worker does not score; the tokens count for the next scorer instead."""
        self.counts.read_tokens -= one.request.read_tokens
        return self._again(one, now)

    def _again(self, one: _Open, now: float) -> list[Action]:
        """Leases the rollout to another worker, or gives it to the learner after `TRIES_MAX` tries. The older version may
        change, because it must be one that the new scorer keeps."""
        if one.tries >= TRIES_MAX:
            return [LookSelf(one.look, NO_SCORER)]
        wished = one.look.older or {}
        return self._leased(one.look, wished, (one.worker,), one.tries, now)

    def _scored(self, worker: PeerId, lease_id: LeaseId, scores: tuple[TokenScores, ...], now: float) -> list[Action]:
        one = self._open.get(lease_id)
        if one is None or one.worker != worker or one.is_left:
            return []  # too late, or not this worker's lease
        del self._open[lease_id]
        record = one.record
        record.open.discard(lease_id)
        if not answers(one.request, scores):
            self._handed_back(one, bool(scores), now)
            return self._handed_on(one, now)
        record.silent = record.declined = record.excused = 0
        self.counts.answered += 1
        return [Told(one.look, worker, tuple(evidence_from(one.look, scores, self._published)))]

    def _handed_back(self, one: _Open, is_answer: bool, now: float) -> None:
        """Records a lease handed back. `is_answer`: scores came but did not match the request.

        An honest worker that has dropped a version first reports its new set of versions. It is held to that: a version that it
        gave up is never asked of it again. A lease handed back without such a reason counts as declined.
        """
        record = one.record
        missing = one.request.versions - self._scorers[one.worker].versions
        record.handed_back_at = now
        if is_answer or not missing:
            record.declined += 1
            return
        record.excused += 1
        record.given_up = frozenset(sorted(record.given_up | missing)[-GIVEN_UP_MAX:])

    def _late(self, now: float) -> list[LeaseId]:
        return [lease_id for lease_id, one in self._open.items() if now >= one.until]

    def _unanswered(self, lease_id: LeaseId, now: float) -> list[Action]:
        one = self._open.pop(lease_id)
        record = one.record
        record.open.discard(lease_id)
        self.counts.unanswered += 1
        # A worker that delivered tokens meanwhile is alive, so its silence counts against it.
        record.silent += self._delivered.get(one.worker, 0) > one.delivered_before
        actions = [] if one.is_left else self._again(one, now)
        if record.silent >= SILENT_MAX:
            record.silent = 0
            text = f"{SILENT_MAX} scorings in a row, which it says it does, went without an answer while it sampled"
            actions.append(AccuseScorer(one.worker, Accusation("scoring", 0.0, 0, text, False)))
        return actions


def _kept_older(
    passage: Passage, wished: Mapping[Version, Version], versions: Collection[Version]
) -> dict[Version, Version]:
    """For each version, the wished older version, or else the newest one before it that the scorer keeps."""
    found: dict[Version, Version] = {}
    for version in {piece.version for piece in passage.pieces}:
        at_most = [one for one in versions if one <= wished.get(version, Version(-1))]
        if at_most:
            found[version] = max(at_most)
    return found


def request_of(lease_id: LeaseId, look: Look) -> ScoreRequest:
    """Builds the request: each piece under its version, followed by the same piece under its older version, if it has one."""
    passage, older = look.drawn.passage, look.older or {}
    stretches = []
    for piece in passage.pieces:
        rollout, first = passage.rollout, int(passage.places[piece.start])
        group_id = TurnOf(rollout.group_id, rollout.index, piece.turn).group_id
        for version in (piece.version, older.get(piece.version)):
            if version is not None:
                count, position = piece.stop - piece.start, piece.start - piece.turn_start
                stretches.append(Stretch(version, first, count, group_id, position))
    end = max(stretch.stop for stretch in stretches)
    sampling = passage.sampling
    return ScoreRequest(str(lease_id), passage.token_ids[:end], sampling.without_seed(), tuple(stretches))


def answers(request: ScoreRequest, scores: Sequence[TokenScores]) -> bool:
    """Whether the scores have the number and the sizes that the request asks for."""
    return len(scores) == len(request.stretches) and all(
        len(column) == stretch.count
        for stretch, one in zip(request.stretches, scores, strict=True)
        for column in one.columns
    )


def evidence_from(look: Look, scores: Sequence[TokenScores], published: Sequence[Version]) -> Iterator[Evidence]:
    """Pairs the scores, in the order of `request_of`, with the claims."""
    passage, older, rest = look.drawn.passage, look.older or {}, iter(scores)
    for piece in passage.pieces:
        exact, before = next(rest), older.get(piece.version)
        yield evidence_of(passage, piece, exact, next(rest) if before is not None else None, before, published)

"""Who scores which rollout again: leases to workers that score, and what the learner scores itself.

    drawn --Look--> LeaseScoring --ScoresCame--> Told
              |          |  '--- late, handed back, gone: another worker, `TRIES_MAX` times, then the learner
              |          '-- and LookSelf beside it: a known answer, by which the scorer is judged
              '--> LookSelf: nobody may score it, or its worker is under suspicion (disputes)

Guarantees: who scores a rollout is drawn when all of it is in, by dice of the learner's own, from workers that sampled none of
it, each by what it has delivered: so workers that delivered a share c of what others did score a rollout with chance c /
`WEIGHT_MIN` at most, whoever sampled it and however many names they go by; a scorer is told tokens and versions, and neither
whose they are nor what was claimed of them; `VERIFIED_SHARE` of what is leased, and a scorer's first ones, are scored by the
learner too, and nothing in the lease says so; workers read at most `tokens_share` times the tokens that were sampled; what is known
of a scorer is its peer's, not its stream's, so that a new stream changes nothing of it. Leaves to others: which rollouts
(audit_draw), what the numbers say (disputes, suspicion), the streams (runtime/scoring).
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
"""A scorer that lies in each of n scorings stays unknown with chance (15/16)^n: 5 % after 47, 0.2 % after 100. For this the learner
scores a sixteenth of what it would score by itself."""
VERIFIED_FIRST = 2
"""Of a scorer that nobody has checked yet, so that a new name buys no free lie."""
WEIGHT_MIN = 0.5
"""Those who can score a rollout must have delivered so much of what all others have: where few keep its versions, a few could
say that they do."""
LEASE_S = 120.0
TRIES_MAX = 3
OPEN_MAX = 4
"""Leases of one worker at a time; those of a stream that has ended count until their time is over."""
BURST_TOKENS = 1 << 16
"""Read before anything is counted against the share, for newcomers are looked at more."""
LEASED_TOKENS_MAX = 1 << 16
"""Of one rollout: its scores are a message of less than 4 MB."""
SILENT_MAX = 16
DECLINED_MAX = 16
"""Leases in a row that a scorer hands back though it says that it keeps the versions: as if it had said that it does not score."""
EXCUSED_MAX = 4 * DECLINED_MAX
"""The same of leases that it hands back because it keeps a version no more."""
ASKED_AGAIN_S = 600.0
"""After the last lease that it handed back: it may have been started anew with room for versions."""
SCORERS_MAX = 16_384
GIVEN_UP_MAX = 256
WEIGHT_KEPT = 0.9
"""Of what was delivered, at each version: who has left soon counts for little."""
PUBLISHED_MAX = 256


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """A rollout to be scored again. `older`: with which version tokens of each are compared; None: whoever scores it chooses."""

    number: int
    drawn: DrawnPassage
    older: Mapping[Version, Version] | None = None


# ---- events


@dataclass(frozen=True, slots=True)
class VersionKept:
    """It was published, and may be named from now on."""

    version: Version


@dataclass(frozen=True, slots=True)
class TokensDelivered:
    """Tokens of this worker were trained on."""

    worker: PeerId
    tokens: int


@dataclass(frozen=True, slots=True)
class ScorerCame:
    """A worker scores tokens under these versions; repeated whenever they change."""

    worker: PeerId
    versions: frozenset[Version]


@dataclass(frozen=True, slots=True)
class ScorerGone:
    """It does not score any more, or is not believed any more."""

    worker: PeerId


@dataclass(frozen=True, slots=True)
class LookAt:
    """This was drawn. `is_own`: the learner is to score it itself. `steps_back`: of the older version."""

    drawn: DrawnPassage
    is_own: bool
    steps_back: int


@dataclass(frozen=True, slots=True)
class ScoresCame:
    """Empty: the worker could not, for it has moved on."""

    worker: PeerId
    lease_id: LeaseId
    scores: tuple[TokenScores, ...]


@dataclass(frozen=True, slots=True)
class ScoringTick:
    """Told every second or so."""


Event = VersionKept | TokensDelivered | ScorerCame | ScorerGone | LookAt | ScoresCame | ScoringTick

# ---- actions


@dataclass(frozen=True, slots=True)
class LeaseScoring:
    worker: PeerId
    request: ScoreRequest
    within_s: float


@dataclass(frozen=True, slots=True)
class LookSelf:
    """The learner scores it. `reason`: known answer | no scorer | suspicion."""

    look: Look
    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """What the scorer says of a rollout."""

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
    """Since the process began. `read_tokens`: by the forward passes of workers, without those of leases that were handed back or
    whose stream ended: another worker reads these, and is counted."""

    leased: int = 0
    answered: int = 0
    unanswered: int = 0
    verified: int = 0
    read_tokens: int = 0
    delivered_tokens: int = 0


@dataclass(slots=True)
class _Record:
    """Of a worker, over all its streams."""

    open: set[LeaseId] = field(default_factory=set)
    silent: int = 0  # leases without an answer since the last scores, though it sampled meanwhile
    declined: int = 0  # leases handed back since the last scores, without a reason
    excused: int = 0  # the same, with a reason
    handed_back_at: float = 0.0
    given_up: frozenset[Version] = frozenset()  # versions that were such a reason: it is not asked for them again
    checked: int = 0

    @property
    def is_asked(self) -> bool:
        return self.declined < DECLINED_MAX and self.excused < EXCUSED_MAX

    @property
    def is_free(self) -> bool:
        return len(self.open) < OPEN_MAX and self.is_asked


@dataclass(slots=True)
class _Scorer:
    """It has a stream now."""

    versions: frozenset[Version]
    record: _Record


@dataclass(slots=True)
class _Open:
    """`is_left`: its stream has ended, and another scores it; it is kept until its time is over."""

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
    """`tokens_share` 0: the learner scores everything."""

    rng: random.Random
    tokens_share: float
    counts: ScoringCounts = field(default_factory=ScoringCounts)
    _published: list[Version] = field(default_factory=list)
    _scorers: dict[PeerId, _Scorer] = field(default_factory=dict)
    _records: dict[PeerId, _Record] = field(
        default_factory=dict
    )  # of those that had a lease, the last to have one at the end
    _weights: dict[PeerId, float] = field(default_factory=dict)
    _delivered: dict[PeerId, int] = field(default_factory=dict)
    _open: dict[LeaseId, _Open] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def has_room(self) -> bool:
        """Whether workers may be given more to score; where nobody scores, the learner always has room."""
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
        """Its leases go to others at once. They stay on its record until their time is over, as they would had it stayed."""
        scorer = self._scorers.pop(worker, None)
        left = [self._open[lease_id] for lease_id in sorted(scorer.record.open)] if scorer is not None else []
        left = [one for one in left if not one.is_left]
        for one in left:
            one.is_left = True
        return [action for one in left for action in self._handed_on(one, now)]

    def _able(self, passage: Passage, but: Collection[PeerId]) -> list[PeerId]:
        """Who may score it; nobody, where they have delivered too little of what others have."""
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
        """Kept from its first lease on: a worker without one has nothing on record."""
        self._records.pop(worker, None)
        self._records[worker] = scorer.record
        if len(self._records) > SCORERS_MAX:
            del self._records[next(iter(self._records))]
        return scorer.record

    def _handed_on(self, one: _Open, now: float) -> list[Action]:
        """Of a lease that this worker does not score; what it would have read counts for whoever does."""
        self.counts.read_tokens -= one.request.read_tokens
        return self._again(one, now)

    def _again(self, one: _Open, now: float) -> list[Action]:
        """Another worker, or the learner; which older version it is compared with follows from who scores."""
        if one.tries >= TRIES_MAX:
            return [LookSelf(one.look, NO_SCORER)]
        wished = one.look.older or {}
        return self._leased(one.look, wished, (one.worker,), one.tries, now)

    def _scored(self, worker: PeerId, lease_id: LeaseId, scores: tuple[TokenScores, ...], now: float) -> list[Action]:
        one = self._open.get(lease_id)
        if one is None or one.worker != worker or one.is_left:
            return []  # too late
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
        """Versions change, and an honest worker then says so first. It is taken at its word: what it keeps no more it does not keep
        again. With no such reason a lease that is handed back only uses up the tries."""
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
        # One that samples all the while is there, and does not answer.
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
    """What was wished, or the newest before it that the scorer keeps."""
    found: dict[Version, Version] = {}
    for version in {piece.version for piece in passage.pieces}:
        at_most = [one for one in versions if one <= wished.get(version, Version(-1))]
        if at_most:
            found[version] = max(at_most)
    return found


def request_of(lease_id: LeaseId, look: Look) -> ScoreRequest:
    """Each piece under its version, and those that are compared with an older one under that too."""
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
    """Whether these are scores of what was asked for, as far as their sizes tell."""
    return len(scores) == len(request.stretches) and all(
        len(column) == stretch.count
        for stretch, one in zip(request.stretches, scores, strict=True)
        for column in one.columns
    )


def evidence_from(look: Look, scores: Sequence[TokenScores], published: Sequence[Version]) -> Iterator[Evidence]:
    """In the order of `request_of`."""
    passage, older, rest = look.drawn.passage, look.older or {}, iter(scores)
    for piece in passage.pieces:
        exact, before = next(rest), older.get(piece.version)
        yield evidence_of(passage, piece, exact, next(rest) if before is not None else None, before, published)

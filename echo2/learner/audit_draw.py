"""Chooses which rollouts to audit, with the learner's own random numbers, after the rollouts were reported.

Guarantees: a worker's rollouts are all drawn with the same probability, whatever their versions, turns, length and finish
reason. The queue of drawn rollouts is bounded in rollouts and tokens. If it overflows, the audit gives up rollouts of the
worker, and of the kind, of which it has audited the largest share. So a rollout escapes neither by being slow to score nor by
arriving when the queue is full. Which of a worker's queued rollouts is audited next is random and depends on nothing in the
rollout; otherwise the order would bias the bets on how rollouts end. A rollout that could not be audited counts against no
worker; the share is reported (`unaudited`).
Leaves to others: scoring (audit), the verdict (suspicion).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.base.rollout import Rollout
from echo2.learner.audit import Passage

NEWCOMER_TOKENS = 2048
"""All rollouts of a worker are audited until this many of its tokens were drawn."""
OWN_NOISE_FACTOR = 3.0
"""A worker that says it cannot draw by its seeds is audited this many times as often."""
WAITING_MAX = 256
WAITING_TOKENS_MAX = 1 << 20
WORKERS_MAX = 16_384
KIND_SEEN = 16.0
"""Prior weight, in rollouts: once a worker has sent this many of a kind, that kind's own audited share outweighs the
worker's overall share."""
SEEN_MIN = 64
"""A worker's unaudited share is reported once it has this many rollouts."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnPassage:
    """A rollout drawn for audit. `kind`: the properties that a worker may influence (`kind_of`). `at_s`: when it was drawn."""

    worker: PeerId
    kind: str
    passage: Passage
    at_s: float


@dataclass(slots=True)
class _Account:
    """One worker's counts: `seen`, rollouts trained on, and `looked`, rollouts audited, by kind; `tokens` drawn for audit."""

    seen: Counter[str] = field(default_factory=Counter)
    looked: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def share(self) -> float:
        """Audited share of the rollouts; smoothed, so that among workers without audits the one with most rollouts is first."""
        return (self.looked.total() + 1.0) / (self.seen.total() + 1.0)

    def share_of(self, kind: str) -> float:
        """Audited share of one kind; close to the worker's overall share until enough of the kind were seen."""
        return (self.looked[kind] + KIND_SEEN * self.share()) / (self.seen[kind] + KIND_SEEN)


@dataclass(frozen=True, slots=True, eq=False)
class _InLine:
    drawn: DrawnPassage
    dice: float


@dataclass(slots=True)
class AuditDraw:
    """`share`: the share of rollouts to audit, for a worker that draws by its seeds. `rng`: must be unpredictable to workers.
    `given_up`: rollouts drawn but not audited, because the queue was full or their versions are not kept any longer."""

    share: float
    rng: random.Random
    given_up: int = 0
    _waiting: list[_InLine] = field(default_factory=list)
    _accounts: dict[PeerId, _Account] = field(default_factory=dict)

    def falls_on(self, worker: PeerId, kind: str, draws_by_seed: bool) -> bool:
        """Counts a complete rollout that was trained on; returns whether to audit it. If so, the caller `add`s it."""
        account = self._account(worker)
        account.seen[kind] += 1
        chance = self.share if draws_by_seed else OWN_NOISE_FACTOR * self.share
        return account.tokens < NEWCOMER_TOKENS or self.rng.random() < chance

    def add(self, drawn: DrawnPassage) -> None:
        """Queues a rollout for which `falls_on` returned True; drops rollouts while the queue is over its limits."""
        self._account(drawn.worker).tokens += len(drawn.passage.places)
        self._waiting.append(_InLine(drawn, self.rng.random()))
        while len(self._waiting) > WAITING_MAX or self._waiting_tokens() > WAITING_TOKENS_MAX:
            self._waiting.remove(max(self._waiting, key=self._seen_enough))
            self.given_up += 1

    def take(self, tokens_max: int) -> list[DrawnPassage]:
        """Takes rollouts from the queue: least audited worker first, up to `tokens_max` tokens, at least one rollout."""
        taken: list[_InLine] = []
        for one in sorted(self._waiting, key=self._turn):
            tokens_max -= len(one.drawn.passage.token_ids)
            if taken and tokens_max < 0:
                break
            taken.append(one)
        self._waiting = [one for one in self._waiting if one not in taken]
        return [one.drawn for one in taken]

    def looked_at(self, drawn: DrawnPassage, tokens: int) -> None:
        """Counts a rollout as audited if `tokens` of it were scored; with 0 (its versions are not kept), as given up."""
        if tokens:
            self._account(drawn.worker).looked[drawn.kind] += 1
        else:
            self.given_up += 1

    def forget(self, worker: PeerId) -> None:
        """Resets the worker's counts, as for a newcomer, and drops its queued rollouts."""
        self._accounts.pop(worker, None)
        self._waiting = [one for one in self._waiting if one.drawn.worker != worker]

    @property
    def waiting(self) -> list[DrawnPassage]:
        return [one.drawn for one in self._waiting]

    @property
    def unaudited(self) -> dict[PeerId, float]:
        """Share of each worker's rollouts that was not audited, for workers with at least `SEEN_MIN` rollouts."""
        known = {worker: account for worker, account in self._accounts.items() if account.seen.total() >= SEEN_MIN}
        return {worker: 1.0 - account.looked.total() / account.seen.total() for worker, account in known.items()}

    def _turn(self, one: _InLine) -> tuple[float, float]:
        return self._account(one.drawn.worker).share(), one.dice

    def _seen_enough(self, one: _InLine) -> tuple[float, float, float]:
        account = self._account(one.drawn.worker)
        return account.share(), account.share_of(one.drawn.kind), one.dice

    def _waiting_tokens(self) -> int:
        return sum(len(one.drawn.passage.token_ids) for one in self._waiting)

    def _account(self, worker: PeerId) -> _Account:
        if worker not in self._accounts and len(self._accounts) >= WORKERS_MAX:
            del self._accounts[next(iter(self._accounts))]
        return self._accounts.setdefault(worker, _Account())


def kind_of(rollout: Rollout, piece_count: int) -> str:
    """What a worker may influence: finish reason, number of pieces (up to 3), bit length of the token count."""
    return f"{rollout.finish_reason.value}/{min(3, piece_count)}/{len(rollout.token_ids).bit_length()}"

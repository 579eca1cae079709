"""Which rollouts an audit looks at: drawn by dice of the learner's own, after the reports are in.

Guarantees: every rollout that is trained on is drawn with the same chance, whatever its versions, turns, length and end;
what is drawn and waits is bounded in rollouts and tokens, and what then is given up, or looked at first, is chosen so that
the share looked at is even over workers, and over the kinds of rollout of each worker: being slow to look at, or coming
when the queue is full, hides nothing. What could not be looked at counts against nobody and is counted (`unaudited`).
Leaves to others: scoring (audit), the verdict (suspicion).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from echo2.base.ids import PeerId
from echo2.learner.audit import Passage

NEWCOMER_TOKENS = 2048
OWN_NOISE_FACTOR = 3.0
"""A worker that cannot draw by its seeds, as it says, is looked at this many times as often."""
WAITING_MAX = 256
WAITING_TOKENS_MAX = 1 << 20
WORKERS_MAX = 16_384
SEEN_MIN = 64
"""The share of a worker that is not looked at is told from so many rollouts on."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnPassage:
    """`kind`: what a worker may choose of a rollout, as text."""

    worker: PeerId
    kind: str
    passage: Passage
    at_s: float


@dataclass(slots=True)
class _Account:
    """Of one worker: rollouts trained on and looked at, and tokens looked at or waiting."""

    seen: Counter[str] = field(default_factory=Counter)
    looked: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def share(self, kind: str = "") -> float:
        """Looked at of the seen, of one kind or of all; a little above 0 so that larger accounts come first."""
        seen = self.seen[kind] if kind else self.seen.total()
        return ((self.looked[kind] if kind else self.looked.total()) + 1.0) / (seen + 1.0)


@dataclass(slots=True)
class AuditDraw:
    """`share`: of the rollouts of a worker that draws by its seeds. `rng`: nobody else can know its numbers. `given_up`: drawn,
    and not looked at for want of room, or of a version that is kept."""

    share: float
    rng: random.Random
    given_up: int = 0
    waiting: list[DrawnPassage] = field(default_factory=list)
    _accounts: dict[PeerId, _Account] = field(default_factory=dict)

    def consider(self, drawn: DrawnPassage, draws_by_seed: bool) -> None:
        """A rollout that was trained on, and whose every token is in."""
        account = self._account(drawn.worker)
        account.seen[drawn.kind] += 1
        chance = self.share if draws_by_seed else OWN_NOISE_FACTOR * self.share
        if account.tokens >= NEWCOMER_TOKENS and self.rng.random() >= chance:
            return
        account.tokens += len(drawn.passage.places)
        self.waiting.append(drawn)
        while len(self.waiting) > WAITING_MAX or self._waiting_tokens() > WAITING_TOKENS_MAX:
            self.waiting.remove(max(self.waiting, key=self._order))
            self.given_up += 1

    def take(self, tokens_max: int) -> list[DrawnPassage]:
        """What to look at now: the least looked at first, up to so many tokens and one rollout at least."""
        taken: list[DrawnPassage] = []
        for one in sorted(self.waiting, key=self._order):
            tokens_max -= len(one.passage.token_ids)
            if taken and tokens_max < 0:
                break
            taken.append(one)
        self.waiting = [one for one in self.waiting if one not in taken]
        return taken

    def looked_at(self, drawn: DrawnPassage, tokens: int) -> None:
        """Of `tokens` of it; none where its versions are not kept any longer."""
        if tokens:
            self._account(drawn.worker).looked[drawn.kind] += 1
        else:
            self.given_up += 1

    def forget(self, worker: PeerId) -> None:
        """Its account begins anew, as a newcomer's."""
        self._accounts.pop(worker, None)
        self.waiting = [one for one in self.waiting if one.worker != worker]

    @property
    def unaudited(self) -> dict[PeerId, float]:
        """The share of each worker's rollouts that was not looked at."""
        known = {worker: account for worker, account in self._accounts.items() if account.seen.total() >= SEEN_MIN}
        return {worker: 1.0 - account.looked.total() / account.seen.total() for worker, account in known.items()}

    def _order(self, one: DrawnPassage) -> tuple[float, float, float]:
        account = self._account(one.worker)
        return account.share(), account.share(one.kind), one.at_s

    def _waiting_tokens(self) -> int:
        return sum(len(one.passage.token_ids) for one in self.waiting)

    def _account(self, worker: PeerId) -> _Account:
        if worker not in self._accounts and len(self._accounts) >= WORKERS_MAX:
            del self._accounts[next(iter(self._accounts))]
        return self._accounts.setdefault(worker, _Account())


def kind_of(passage: Passage) -> str:
    """What a worker may choose of a rollout: how it ends, over how many versions and hands, how long it is."""
    rollout, length = passage.rollout, len(passage.places)
    return f"{rollout.finish_reason.value}/{min(3, len(passage.pieces))}/{length.bit_length()}"

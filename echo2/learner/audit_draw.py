"""Which rollouts an audit looks at: drawn by dice of the learner's own, after the reports are in.

Guarantees: every rollout that is trained on is drawn with the same chance, whatever its versions, turns, length and end;
what is drawn and waits is bounded in rollouts and tokens, and what then is given up is chosen so that the share looked at
is even over workers, and over the kinds of rollout of each worker: being slow to look at, or coming when the queue is
full, hides nothing. Which of a worker's rollouts is looked at next is for dice to say and for nothing that can be seen of it:
bets on how rollouts end would otherwise be bets on the order. What could not be looked at counts against nobody and is
counted (`unaudited`).
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
OWN_NOISE_FACTOR = 3.0
"""A worker that cannot draw by its seeds, as it says, is looked at this many times as often."""
WAITING_MAX = 256
WAITING_TOKENS_MAX = 1 << 20
WORKERS_MAX = 16_384
KIND_SEEN = 16.0
"""Rollouts of a kind from which on its own share counts more than that of all its worker's."""
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

    def share(self) -> float:
        """Looked at of the seen; a little above 0 so that larger accounts come first."""
        return (self.looked.total() + 1.0) / (self.seen.total() + 1.0)

    def share_of(self, kind: str) -> float:
        """The same of one kind, which is as any other until enough of it were seen."""
        return (self.looked[kind] + KIND_SEEN * self.share()) / (self.seen[kind] + KIND_SEEN)


@dataclass(frozen=True, slots=True, eq=False)
class _InLine:
    drawn: DrawnPassage
    dice: float


@dataclass(slots=True)
class AuditDraw:
    """`share`: of the rollouts of a worker that draws by its seeds. `rng`: nobody else can know its numbers. `given_up`: drawn,
    and not looked at for want of room, or of a version that is kept."""

    share: float
    rng: random.Random
    given_up: int = 0
    _waiting: list[_InLine] = field(default_factory=list)
    _accounts: dict[PeerId, _Account] = field(default_factory=dict)

    def falls_on(self, worker: PeerId, kind: str, draws_by_seed: bool) -> bool:
        """Whether a rollout that was trained on, and whose every token is in, is to be looked at: then it is `add`ed."""
        account = self._account(worker)
        account.seen[kind] += 1
        chance = self.share if draws_by_seed else OWN_NOISE_FACTOR * self.share
        return account.tokens < NEWCOMER_TOKENS or self.rng.random() < chance

    def add(self, drawn: DrawnPassage) -> None:
        """One on which the dice fell."""
        self._account(drawn.worker).tokens += len(drawn.passage.places)
        self._waiting.append(_InLine(drawn, self.rng.random()))
        while len(self._waiting) > WAITING_MAX or self._waiting_tokens() > WAITING_TOKENS_MAX:
            self._waiting.remove(max(self._waiting, key=self._seen_enough))
            self.given_up += 1

    def take(self, tokens_max: int) -> list[DrawnPassage]:
        """What to look at now: of the worker least looked at first, up to so many tokens and one rollout at least."""
        taken: list[_InLine] = []
        for one in sorted(self._waiting, key=self._turn):
            tokens_max -= len(one.drawn.passage.token_ids)
            if taken and tokens_max < 0:
                break
            taken.append(one)
        self._waiting = [one for one in self._waiting if one not in taken]
        return [one.drawn for one in taken]

    def looked_at(self, drawn: DrawnPassage, tokens: int) -> None:
        """Of `tokens` of it; none where its versions are not kept any longer."""
        if tokens:
            self._account(drawn.worker).looked[drawn.kind] += 1
        else:
            self.given_up += 1

    def forget(self, worker: PeerId) -> None:
        """Its account begins anew, as a newcomer's."""
        self._accounts.pop(worker, None)
        self._waiting = [one for one in self._waiting if one.drawn.worker != worker]

    @property
    def waiting(self) -> list[DrawnPassage]:
        return [one.drawn for one in self._waiting]

    @property
    def unaudited(self) -> dict[PeerId, float]:
        """The share of each worker's rollouts that was not looked at."""
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
    """What a worker may choose of a rollout: how it ends, over how many versions and hands, how long it is."""
    return f"{rollout.finish_reason.value}/{min(3, piece_count)}/{len(rollout.token_ids).bit_length()}"

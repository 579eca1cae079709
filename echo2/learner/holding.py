"""Whose completions hold up the scorers: counted for each worker, told when it is far more than the others'.

A completion that used up its scorer's time, memory or output limit, or killed it, counts. The policy may learn to write
such things by itself, and then honest workers hand them in alike; so a worker stands out only beside the rest of the fleet.

Guarantees: a worker is told of once, after `HELD_MIN` completions of its that held a scorer, if their share is `TIMES_OTHERS`
times that of all others, who must have had `OTHERS_MIN` scored. Counts halve, so that an account is of the recent past.
Leaves to others: the reward of such a completion (tasks/runtime/rewards), what becomes of the worker (runtime/orders).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.base.ids import PeerId

HELD_MIN = 16
TIMES_OTHERS = 8.0
OTHERS_MIN = 64
RECENT_MAX = 4096
WORKERS_MAX = 16_384


@dataclass(slots=True)
class Account:
    """Of one worker, recent: completions scored, those of them that held a scorer, and the seconds these took."""

    scored: float = 0.0
    held: float = 0.0
    held_s: float = 0.0
    is_told: bool = False


@dataclass(slots=True)
class Holding:
    """`seconds_held` is of all workers since the start."""

    seconds_held: float = 0.0
    completions_held: int = 0
    _accounts: dict[PeerId, Account] = field(default_factory=dict)

    def scored(self, worker: PeerId, seconds: float, is_held: bool) -> str | None:
        """Counts a completion; what to tell the operator of its worker, if that is due."""
        account = self._account(worker)
        account.scored += 1
        if account.scored > RECENT_MAX:
            account.scored, account.held, account.held_s = account.scored / 2, account.held / 2, account.held_s / 2
        if not is_held:
            return None
        self.seconds_held += seconds
        self.completions_held += 1
        account.held += 1
        account.held_s += seconds
        if account.is_told or not self._stands_out(worker, account):
            return None
        account.is_told = True
        return (
            f"{account.held:.0f} of its {account.scored:.0f} recent completions held up their scorer, for "
            f"{account.held_s:.0f} s in all; others' hardly do"
        )

    def forget(self, worker: PeerId) -> None:
        """Its account begins anew."""
        self._accounts.pop(worker, None)

    def _account(self, worker: PeerId) -> Account:
        if worker not in self._accounts and len(self._accounts) >= WORKERS_MAX:
            del self._accounts[next(iter(self._accounts))]
        return self._accounts.setdefault(worker, Account())

    def _stands_out(self, worker: PeerId, account: Account) -> bool:
        if account.held < HELD_MIN:
            return False
        others = [other for name, other in self._accounts.items() if name != worker and not other.is_told]
        scored, held = sum(other.scored for other in others), sum(other.held for other in others)
        return scored >= OTHERS_MIN and account.held / account.scored >= TIMES_OTHERS * (held + 1) / (scored + 1)

"""Counts, for each worker, completions that blocked their scorer, and reports workers with far more of them than others.

A completion counts if it exhausted its scorer's limit of time, memory or output, or killed the scorer. The policy may learn
to write such completions, and then all honest workers deliver them; so a worker is compared with the rest of the fleet.

Guarantees: a worker is reported once, after at least `HELD_MIN` such completions, if their share is at least `TIMES_OTHERS`
times that of all other workers, which must have had at least `OTHERS_MIN` completions scored. Counts are halved from time to
time, so that an account reflects the recent past. Leaves to others: the reward of such a completion (tasks/runtime/rewards),
what happens to the worker (runtime/orders).
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
    """One worker's recent completions: number scored, number that blocked their scorer, and the seconds that those took."""

    scored: float = 0.0
    held: float = 0.0
    held_s: float = 0.0
    is_told: bool = False


@dataclass(slots=True)
class Holding:
    """`seconds_held`, `completions_held`: totals over all workers since the start."""

    seconds_held: float = 0.0
    completions_held: int = 0
    _accounts: dict[PeerId, Account] = field(default_factory=dict)

    def scored(self, worker: PeerId, seconds: float, is_held: bool) -> str | None:
        """Counts a completion. Returns a text about the worker for the operator when the worker first stands out, else None."""
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
        """Resets the worker's account."""
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

"""Fair queueing among senders, some of whose requests take long: the sender that has used least is next.

Guarantees: a sender that was charged for much waits behind those charged for little, so its requests delay only its
own; being away gains a sender nothing; a sender in debt has at most one request running, so that others always
find a process. Leaves to others: threads and locks (runtime/pool). Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
SENDERS_MAX = 16_384


@dataclass(slots=True)
class _Sender(Generic[Item]):
    used_s: float
    waiting: deque[Item] = field(default_factory=deque)
    running: int = 0
    is_in_debt: bool = False


class FairQueue(Generic[Item]):
    """Call `push`, `pop`, and `done` with the seconds used. `len` counts queued requests."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender[Item]] = {}
        self._level_s = 0.0  # usage of the sender served last: newcomers start there
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, sender: str, item: Item) -> None:
        account = self._senders.get(sender)
        if account is None:
            self._make_room()
            account = self._senders[sender] = _Sender(self._level_s)
        elif not account.waiting and not account.running:
            account.used_s = max(account.used_s, self._level_s)
        account.waiting.append(item)
        self._waiting += 1

    def pop(self) -> tuple[str, Item] | None:
        """The next sender and request; None if nothing may run now."""
        ready = [
            (account.used_s, name)
            for name, account in self._senders.items()
            if account.waiting and not (account.is_in_debt and account.running)
        ]
        if not ready:
            return None
        _, name = min(ready)
        account = self._senders[name]
        self._level_s = max(self._level_s, account.used_s)
        account.running += 1
        self._waiting -= 1
        return name, account.waiting.popleft()

    def done(self, sender: str, seconds: float, is_held: bool) -> None:
        """A request of `sender` took `seconds`. `is_held`: it hit a limit; the sender is in debt until one does not."""
        account = self._senders.get(sender)
        if account is None:
            return
        account.running -= 1
        account.used_s += seconds
        account.is_in_debt = is_held

    def drain(self) -> list[Item]:
        """Removes and returns all queued requests."""
        items = [item for account in self._senders.values() for item in account.waiting]
        self._senders.clear()
        self._waiting = 0
        return items

    def _make_room(self) -> None:
        if len(self._senders) >= SENDERS_MAX:
            idle = next((name for name, one in self._senders.items() if not one.waiting and not one.running), None)
            if idle is not None:
                del self._senders[idle]

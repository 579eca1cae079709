"""Whose request is next, where some senders' requests take long: the one who has used least.

Guarantees: a sender that is charged for much waits behind those who were charged for little, so its requests delay its
own; one that was away gains nothing by it; of a sender in debt at most one request runs at a time, so that others always
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
    """`push`, `pop`, and `done` with the seconds that it took. `len` counts what waits."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender[Item]] = {}
        self._level_s = 0.0  # what the sender served last had used: a newcomer begins there
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
        """The next sender and request; None where nothing may run now."""
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
        """A request of `sender` took so long. `is_held`: it went against a limit; the sender is in debt until one does not."""
        account = self._senders.get(sender)
        if account is None:
            return
        account.running -= 1
        account.used_s += seconds
        account.is_in_debt = is_held

    def drain(self) -> list[Item]:
        """All that waits, taken out."""
        items = [item for account in self._senders.values() for item in account.waiting]
        self._senders.clear()
        self._waiting = 0
        return items

    def _make_room(self) -> None:
        if len(self._senders) >= SENDERS_MAX:
            idle = next((name for name, one in self._senders.items() if not one.waiting and not one.running), None)
            if idle is not None:
                del self._senders[idle]

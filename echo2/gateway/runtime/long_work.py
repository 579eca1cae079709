"""Runs long work of single calls in threads, so that it does not block other calls on the event loop.

Guarantees: at most THREADS jobs run at a time, at most one per caller; a caller's jobs run in the order in which they came. Leaves
to others: deciding what is short enough for the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = 2
T = TypeVar("T")


class LongWork:
    """One per gateway, on its event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gateway")
        self._turns: dict[str, asyncio.Lock] = {}
        self._asked: Counter[str] = Counter()  # jobs running or waiting, by caller

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """Runs `work` in a thread; returns or raises what it does."""
        turn = self._turns.setdefault(caller, asyncio.Lock())
        self._asked[caller] += 1
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._asked[caller] -= 1
            if not self._asked[caller]:
                del self._asked[caller], self._turns[caller]

    def close(self) -> None:
        """Cancels waiting jobs; running ones finish by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

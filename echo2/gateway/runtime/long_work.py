"""Long work of one call, in threads, so that it holds up nobody else's.

Guarantees: THREADS pieces of work run at a time, one of each caller; those of a caller wait for one another, in the order in which
they came. Leaves to others: what is short enough for the loop.
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
        self._asked: Counter[str] = Counter()  # by caller, pieces of work that run or wait

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""
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
        """What runs ends by itself; what waits is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

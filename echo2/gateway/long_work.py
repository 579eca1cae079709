"""Runs long work of single calls in threads, so that it does not block other calls on the event loop.

Guarantees: at most THREADS jobs run at a time, at most one per caller; a caller's jobs run in the order in which they came. Leaves
to others: deciding what is short enough for the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

THREADS = 2  # one long job of a caller leaves the other thread to everybody else
T = TypeVar("T")


class LongWork:
    """One per gateway, on its event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gateway")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of callers with jobs

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """Runs `work` in a thread; returns or raises what it does."""
        async with self._turns.setdefault(caller, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Cancels waiting jobs; running ones finish by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

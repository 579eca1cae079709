"""How tasks are ended: asked to, and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> list[Any]:
    """Cancels the tasks and waits until all have ended, which may take as long as their own `finally`. Returns what each ended
    with, in order: its result, its error, or a CancelledError."""
    ending = tuple(tasks)  # a task that ends may leave the set that it came from
    for task in ending:
        task.cancel()
    return await asyncio.gather(*ending, return_exceptions=True)

"""Logs the progress of a long piece of work now and then.

Guarantees: quick work is not mentioned; then one line every `LINE_EVERY_S`; the caller gets what the work returns or raises.
Waits for the work; woken by its end or by the next line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from echo2.base.units import format_bytes

LINE_EVERY_S = 3.0  # docs/howto-join.md: a line every 3 s
T = TypeVar("T")


async def under_way(log: logging.Logger, what: str, work: Awaitable[T], far: Callable[[], str] = str) -> T:
    """Awaits `work` and logs its progress. `far`: the progress in words; empty if unknown."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    def tell() -> None:
        log.info("%s: %s", what, ", ".join(filter(None, (far(), f"{loop.time() - began:.0f} s so far"))))

    return await ticking(work, tell, LINE_EVERY_S)


async def ticking(work: Awaitable[T], tick: Callable[[], None], every_s: float) -> T:
    """Awaits `work`, calling `tick` every `every_s` seconds meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=every_s))[0]:
            tick()
        return await task
    finally:
        if not task.done():  # the caller was cancelled
            task.cancel()


def far_text(done_bytes: int, whole_bytes: int, passed_s: float) -> str:
    """`1.2 GB of 16.4 GB, 300.0 MB/s, 51 s left`, as far as known."""
    rate = done_bytes / passed_s if passed_s > 0 else 0.0
    whole = f" of {format_bytes(whole_bytes)}" if whole_bytes else ""
    left = f", {(whole_bytes - done_bytes) / rate:.0f} s left" if rate > 0 and whole_bytes >= done_bytes else ""
    return f"{format_bytes(done_bytes)}{whole}, {format_bytes(int(rate))}/s{left}"

"""A daemon's access to the world: clock, network, files, randomness. Real in production, virtual in the simulator.

Guarantees: `here()` returns the outside of the calling daemon: each of its tasks, timers and threads inherits it
from its creator. If none was entered, it is the machine itself. Timers, tasks and thread work need no seam of
their own: they go through the running asyncio loop, which the simulator replaces as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterator
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Protocol

from echo2.outside.files import Files, MachineFiles

if TYPE_CHECKING:
    from echo2.outside.net import Net


class OutsideClock(Protocol):
    def unix_now(self) -> float: ...

    def monotonic(self) -> float: ...

    def since_boot(self) -> float:
        """As `monotonic`, and it goes on while the machine sleeps."""
        ...


class MachineClock:
    """The system's clocks."""

    __slots__ = ()

    def unix_now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def since_boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class Outside(Protocol):
    @property
    def clock(self) -> OutsideClock: ...

    @property
    def net(self) -> Net: ...

    @property
    def files(self) -> Files: ...

    @property
    def rng(self) -> random.Random:
        """Cryptographically secure on a machine: fit for keys and tokens."""
        ...


class Machine:
    """The real machine. gRPC is loaded on first use, because many commands do not need it."""

    def __init__(self) -> None:
        self.clock: OutsideClock = MachineClock()
        self.files: Files = MachineFiles()
        self.rng: random.Random = random.SystemRandom()

    @functools.cached_property
    def net(self) -> Net:
        from echo2.outside.net import GrpcNet

        return GrpcNet()


MACHINE = Machine()  # one per process
_HERE: ContextVar[Outside | None] = ContextVar("outside", default=None)  # inherited by tasks, timers and threads


def here() -> Outside:
    """The outside of the calling daemon."""
    return _HERE.get() or MACHINE


def outside_of(context: Context) -> Outside | None:
    """The outside that was entered in a task's or timer's context, if any."""
    return context.get(_HERE)


@contextlib.contextmanager
def entered(outside: Outside) -> Iterator[None]:
    """Everything started within the block keeps this outside."""
    token = _HERE.set(outside)
    try:
        yield
    finally:
        _HERE.reset(token)


class SteadyClock:
    """The `Clock` that core code expects: `now` returns `monotonic`."""

    __slots__ = ()

    def now(self) -> float:
        return monotonic()


def unix_now() -> float:
    """Seconds since 1970 by the wall clock, which may be set back."""
    return here().clock.unix_now()


def monotonic() -> float:
    """Seconds on a clock that never goes back; its zero is arbitrary."""
    return here().clock.monotonic()

"""What a daemon is handed to reach the world: clock, network, files, randomness. Real in production, virtual in the simulator.

Guarantees: `here()` is the outside of the daemon whose code calls it: each task, timer and thread of a daemon inherits it
from whatever started it. Without one that was entered it is the machine itself. Timers, tasks and work for threads need no
seam of their own: they go through the running asyncio loop, which the simulator replaces as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Protocol

from echo2.outside.clock import MachineClock, OutsideClock
from echo2.outside.files import Files, MachineFiles

if TYPE_CHECKING:
    from echo2.outside.net import Net


class Outside(Protocol):
    @property
    def clock(self) -> OutsideClock: ...

    @property
    def net(self) -> Net: ...

    @property
    def files(self) -> Files: ...

    @property
    def rng(self) -> random.Random:
        """Fit for keys and tokens."""
        ...


class Machine:
    """The machine itself. gRPC is loaded when it is first needed: many commands do without."""

    def __init__(self) -> None:
        self.clock: OutsideClock = MachineClock()
        self.files: Files = MachineFiles()
        self.rng: random.Random = random.SystemRandom()

    @functools.cached_property
    def net(self) -> Net:
        from echo2.outside.grpc_net import GrpcNet

        return GrpcNet()


MACHINE = Machine()
_HERE: ContextVar[Outside | None] = ContextVar("outside", default=None)


def here() -> Outside:
    """The outside of the daemon that calls."""
    return _HERE.get() or MACHINE


def outside_of(context: Context) -> Outside | None:
    """Which outside was entered in a task's or timer's context."""
    return context.get(_HERE)


@contextlib.contextmanager
def entered(outside: Outside) -> Iterator[None]:
    """Whatever is started meanwhile has this outside, for good."""
    token = _HERE.set(outside)
    try:
        yield
    finally:
        _HERE.reset(token)


class SteadyClock:
    """`OutsideClock` of the core's protocols: `monotonic` under the name that they are handed."""

    __slots__ = ()

    def now(self) -> float:
        return monotonic()


def unix_now() -> float:
    """Seconds since 1970 by the wall clock, which may be set back."""
    return here().clock.unix_now()


def monotonic() -> float:
    """Seconds on a clock that never goes back; its zero means nothing."""
    return here().clock.monotonic()

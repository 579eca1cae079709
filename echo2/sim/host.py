"""A machine of the simulated cluster, with at most one process on it, and that process's view of time.

Guarantees: what a process scheduled dies with it; a frozen process does nothing and goes on with what waited when it is
thawed; an `EchoError` that nobody caught ends the process, as it ends a daemon. Leaves to others: what the process is
(drivers), when it is started again (cluster).
"""

from __future__ import annotations

from collections.abc import Callable

from echo2.base.errors import EchoError
from echo2.sim.clock import VirtualClock
from echo2.sim.story import Story

UNIX_EPOCH_S = 1_700_000_000.0


class Host:
    """`clock_offset_s`, `drift`: how far its wall clock is off, and how many of its seconds pass in a true one."""

    def __init__(self, name: str, clock: VirtualClock, story: Story) -> None:
        self.name = name
        self.clock = clock
        self.story = story
        self.incarnation = 0
        self.is_up = False
        self.is_frozen = False
        self.clock_offset_s = 0.0
        self.drift = 1.0
        self.on_error: Callable[[EchoError], None] = lambda error: None
        self._held: list[Callable[[], None]] = []

    def now(self) -> float:
        """Its monotonic clock."""
        return self.clock.now() * self.drift

    def unix(self) -> float:
        """Its wall clock."""
        return UNIX_EPOCH_S + self.clock.now() + self.clock_offset_s

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Runs `act` in `delay_s` of its seconds, if this very process still lives."""
        self.clock.after(max(0.0, delay_s) / self.drift, self.bound(act))

    def bound(self, act: Callable[[], None]) -> Callable[[], None]:
        """`act` as something that only this very process does, and not while it is frozen."""
        born = self.incarnation

        def run() -> None:
            if not self.is_up or self.incarnation != born:
                return
            if self.is_frozen:
                self._held.append(run)
                return
            try:
                act()
            except EchoError as error:
                self.on_error(error)

        return run

    def rise(self) -> None:
        """A process begins."""
        assert not self.is_up, f"{self.name} runs already"
        self.incarnation += 1
        self.is_up, self.is_frozen = True, False

    def fall(self) -> None:
        """The process ends, whatever it was about to do."""
        self.is_up = self.is_frozen = False
        self.incarnation += 1
        self._held.clear()

    def thaw(self) -> None:
        if not self.is_frozen:
            return
        self.is_frozen = False
        held, self._held = self._held, []
        for act in held:
            act()

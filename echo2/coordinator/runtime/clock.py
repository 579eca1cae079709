"""Unix time that never goes back: the system's time at the start plus the monotonic clock. Deadlines outlive the process,
so they are in unix time; within a process, a step of the system's clock must not end leases."""

from __future__ import annotations

from echo2.outside import monotonic, unix_now


class SteadyUnixClock:
    """`Clock` in unix seconds."""

    __slots__ = ("_offset_s",)

    def __init__(self) -> None:
        self._offset_s = unix_now() - monotonic()

    def now(self) -> float:
        return monotonic() + self._offset_s

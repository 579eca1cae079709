"""Samples this process's connections while they carry data, and sets their congestion control.

Waits UPLINK_INTERVAL_S between samples. Leaves to others: pacing (session, governor) and the choice of congestion
control (congestion).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from echo2.broadcast.congestion import CongestionChooser
from echo2.broadcast.events import UplinkSeen
from echo2.broadcast.runtime.meter import Meter
from echo2.broadcast.runtime.sockets import SEGMENT_BYTES, SocketTotals, SocketWatch
from echo2.broadcast.session import BroadcastSession

log = logging.getLogger("echo2.broadcast")
UPLINK_INTERVAL_S = 0.1


class UplinkWatch:
    def __init__(
        self, meter: Meter, session: BroadcastSession, act: Callable[[UplinkSeen], None],
        hold_back: Callable[[SocketTotals, float], None] = lambda sent, now: None,
    ) -> None:  # fmt: skip
        """`hold_back`: called with each sample if BBR is not available, because then every loss slows a connection."""
        self._meter, self._session, self._act, self._hold_back = meter, session, act, hold_back
        self._sockets = SocketWatch()
        self._chooser = CongestionChooser()
        self._is_new = True
        self._sent_before = 0

    def expect_new(self) -> None:
        """A connection was made: sample it even if nothing is being sent."""
        self._is_new = True

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(UPLINK_INTERVAL_S)
            self._look(loop.time())

    def _look(self, now: float) -> None:
        """Takes one sample. The first one of a connection also tells the session that there is an uplink to pace."""
        is_new, sent = self._is_new, self._meter.sent_bytes
        is_sending = sent != self._sent_before or self._session.is_waiting
        self._sent_before, self._is_new = sent, False
        if is_new:
            self._sockets.expect_new()
        if is_new or is_sending:
            seen = self._sockets.look()
            if seen.delivered_bytes or (is_new and self._sockets.has_connections):
                self._act(UplinkSeen(seen.delivered_bytes, seen.queue_s, SEGMENT_BYTES * seen.retransmitted))
            if is_sending:
                self._chooser.sent(seen.retransmitted, seen.queue_s, now)
                if not self._sockets.is_fast_offered:
                    self._hold_back(seen, now)
        self._sockets.limit_unsent(self._session.governor.rate_bytes_per_s)
        was_offered = self._sockets.is_fast_offered
        self._sockets.use(self._chooser.control(now))
        if was_offered and not self._sockets.is_fast_offered:
            log.info(
                "this kernel does not let us use BBR: sending a version takes longer to reach full speed, especially with losses"
            )

"""Which congestion control this node's connections use: one that finds its rate fast, or the one that they came with. Pure.

The governor paces below the uplink's rate, so a connection's own control has two duties left: not to be the limit when a
version begins, and not to take a random loss for a full queue. The usual ones (CUBIC, Reno) fail at both: after a pause
they begin with ten segments and leave slow start at the first delay; each loss takes a third of their window. BBR does
both well, but every ten seconds it all but stops each connection for 0.2 s, all of them at about the same time.

So: BBR when sending begins after a pause, for START_S; then what the connection came with; BBR as long as looks at the
connections show losses while the uplink's queue is short. Overflowing queues lose many packets within few looks, random
loss few within many; so looks are counted, not packets.

Leaves to others: whether the kernel offers BBR, and setting it (runtime/sockets.py).
"""

from __future__ import annotations

from collections import deque
from enum import Enum

PAUSE_S = 1.0  # connections idle for this long begin anew
START_S = 8.0
SHORT_QUEUE_S = 0.045
LOOKS = 50
LOSSY_LOOKS, CLEAN_LOOKS = 6, 1  # of LOOKS: from so many on a path is lossy, until it is down to so few


class Control(Enum):
    """FAST: BBR, where there is one."""

    FAST = "bbr"
    USUAL = "usual"


class CongestionChooser:
    """Told of every look at the connections."""

    def __init__(self) -> None:
        self._begun_at = float("-inf")
        self._last_sent_at = float("-inf")
        self._was_lossy_look: deque[bool] = deque(maxlen=LOOKS)
        self.is_lossy = False

    def sent(self, retransmitted: int, queue_s: float, now: float) -> None:
        """Something was sent since the last look, so many segments of it again; `queue_s` is the uplink's queue."""
        if now - self._last_sent_at > PAUSE_S:
            self._begun_at = now
        self._last_sent_at = now
        if now - self._begun_at < START_S and not self.is_lossy:
            return  # finding its rate, BBR overflows queues itself
        self._was_lossy_look.append(retransmitted > 0 and queue_s < SHORT_QUEUE_S)
        lossy_looks = sum(self._was_lossy_look)
        if lossy_looks >= LOSSY_LOOKS:
            self.is_lossy = True
        elif lossy_looks <= CLEAN_LOOKS and len(self._was_lossy_look) == LOOKS:
            self.is_lossy = False

    def control(self, now: float) -> Control:
        is_starting = now - self._begun_at < START_S or now - self._last_sent_at > PAUSE_S
        return Control.FAST if is_starting or self.is_lossy else Control.USUAL

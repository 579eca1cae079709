"""Which congestion control this node's connections use: BBR, or the one that they came with. Pure.

The governor paces below the uplink's rate, so a connection's own congestion control has two duties left: not to be the
limit when a version begins, and not to mistake random loss for a full queue. CUBIC and Reno fail at both: after an idle
time they restart with ten segments and leave slow start at the first delay, and each loss costs a third of their window.
BBR does both well, but every ten seconds it nearly stops each connection for 0.2 s, all of them at about the same time.

So: BBR for START_S when sending begins after a pause; then the connection's original control; BBR again while samples
show losses although the uplink's queue is short. An overflowing queue loses many packets within few samples, random loss
few packets within many; so samples with losses are counted, not packets.

Leaves to others: whether the kernel offers BBR, and setting it (runtime/sockets.py).
"""

from __future__ import annotations

from collections import deque
from enum import Enum

PAUSE_S = 1.0  # connections idle for this long begin anew
START_S = 8.0
SHORT_QUEUE_S = 0.045
LOOKS = 50
LOSSY_LOOKS, CLEAN_LOOKS = 6, 1  # of LOOKS: a path becomes lossy at the first count and stops being lossy at the second


class Control(Enum):
    """FAST: BBR, if the kernel offers it."""

    FAST = "bbr"
    USUAL = "usual"


class CongestionChooser:
    """Chooses from samples of the connections."""

    def __init__(self) -> None:
        self._begun_at = float("-inf")
        self._last_sent_at = float("-inf")
        self._was_lossy_look: deque[bool] = deque(maxlen=LOOKS)
        self.is_lossy = False

    def sent(self, retransmitted: int, queue_s: float, now: float) -> None:
        """Data was sent since the last sample; `retransmitted`: segments of it; `queue_s`: seconds of queue at the uplink."""
        if now - self._last_sent_at > PAUSE_S:
            self._begun_at = now
        self._last_sent_at = now
        if now - self._begun_at < START_S and not self.is_lossy:
            return  # while BBR probes for its rate it overflows queues itself
        self._was_lossy_look.append(retransmitted > 0 and queue_s < SHORT_QUEUE_S)
        lossy_looks = sum(self._was_lossy_look)
        if lossy_looks >= LOSSY_LOOKS:
            self.is_lossy = True
        elif lossy_looks <= CLEAN_LOOKS and len(self._was_lossy_look) == LOOKS:
            self.is_lossy = False

    def control(self, now: float) -> Control:
        is_starting = now - self._begun_at < START_S or now - self._last_sent_at > PAUSE_S
        return Control.FAST if is_starting or self.is_lossy else Control.USUAL

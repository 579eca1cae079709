"""Decides whether a download from a model hub is still worth waiting for. Pure.

Guarantees: a download is given up only if no byte arrived for `STALLED_S`, or if the rest of it, at the rate of the last
`WINDOW_S`, would take more than `KEYFRAME_TIMES` times as long as a keyframe from peers; its size alone is no reason. Leaves to
others: the download (runtime/hub), how long a keyframe takes (broadcast).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

STALLED_S = 60.0
WINDOW_S = 60.0
JUDGED_FROM_S = 30.0
"""The rate is not judged before this: a connection needs its first seconds to ramp up."""
KEYFRAME_TIMES = 2.0
"""The hub may take this many times longer than peers: its download loads no peer, and estimates of link rates are inexact."""
LOOKS_MAX = 1024


@dataclass(slots=True)
class HubPace:
    """Tracks how many bytes have arrived, and when. `began_s`: start, on the clock of `now`. `whole_bytes`: size of the
    checkpoint; 0: not known."""

    began_s: float
    whole_bytes: int = 0
    _moved_s: float = field(init=False)
    _looks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=LOOKS_MAX))

    def __post_init__(self) -> None:
        self._moved_s = self.began_s

    @property
    def came_bytes(self) -> int:
        return self._looks[-1][1] if self._looks else 0

    def seen(self, came_bytes: int, now: float) -> None:
        """Records that `came_bytes` of the download are on disk at `now`."""
        if not self._looks or came_bytes > self.came_bytes:
            self._moved_s = now
        self._looks.append((now, came_bytes))
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()

    def why_given_up(self, keyframe_s: float, now: float) -> str:
        """Why to give up the download; empty: continue. `keyframe_s`: seconds that a keyframe from peers would take."""
        if now - self._moved_s >= STALLED_S:
            return f"nothing came for {now - self._moved_s:.0f} s"
        if not self.whole_bytes or now - self.began_s < JUDGED_FROM_S or len(self._looks) < 2:
            return ""
        (then, before), (last, came) = self._looks[0], self._looks[-1]
        rate = max(1.0, (came - before) / max(1e-9, last - then))
        left_s = (self.whole_bytes - came) / rate
        if left_s > KEYFRAME_TIMES * keyframe_s:
            return f"it would take {left_s:.0f} s more, a keyframe from peers about {keyframe_s:.0f} s"
        return ""

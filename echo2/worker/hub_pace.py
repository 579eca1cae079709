"""Whether a download from a model hub is still worth waiting for. Pure.

Guarantees: a download is given up where nothing came for `STALLED_S`, or where the rest of it, at the rate of the last
`WINDOW_S`, would take `KEYFRAME_TIMES` times as long as a keyframe from peers; its size alone is no reason. Leaves to others: the
download (runtime/hub), how long a keyframe takes (broadcast).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

STALLED_S = 60.0
WINDOW_S = 60.0
JUDGED_FROM_S = 30.0
"""A connection needs its first seconds to reach its rate."""
KEYFRAME_TIMES = 2.0
"""What the hub sends loads no peer, and no estimate of a link is exact: so the hub may take longer than peers would."""
LOOKS_MAX = 1024


@dataclass(slots=True)
class HubPace:
    """Bytes that came, and when. `began_s`: as `now` counts. `whole_bytes`: of the checkpoint; 0: not known."""

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
        """So many bytes are on the disk."""
        if not self._looks or came_bytes > self.came_bytes:
            self._moved_s = now
        self._looks.append((now, came_bytes))
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()

    def why_given_up(self, keyframe_s: float, now: float) -> str:
        """Empty: it goes on."""
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

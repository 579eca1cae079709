"""Records a simulated run: a hash over all events, and readable lines for the important ones.

Guarantees: two runs have the same hash only if the same events happened at the same virtual times in the same order;
memory is bounded (the last `KEPT_MAX` lines are kept).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator

KEPT_MAX = 20_000  # some MB of text; the hash covers all


class EventLog:
    """`left_out`: text to mask because it differs between runs without meaning, such as a folder's random name."""

    def __init__(self, now: Callable[[], float], left_out: str = "") -> None:
        self._now, self._left_out = now, left_out
        self._hash = hashlib.blake2b(digest_size=16)
        self._lines: deque[str] = deque(maxlen=KEPT_MAX)

    def trace(self, who: str, text: str) -> None:
        """Adds an event to the hash only."""
        if self._left_out:
            text = text.replace(self._left_out, "~").replace(
                self._left_out.encode().hex(), "~"
            )  # frames are traced in hex
        self._hash.update(f"{self._now():.9f} {who} {text}\n".encode())

    def tell(self, who: str, text: str) -> None:
        """Adds an event to the hash and to the readable lines."""
        if self._left_out:
            text = text.replace(self._left_out, "~")
        self.trace(who, text)
        self._lines.append(f"{self._now():9.3f} s  {who:<12} {text}")

    def lines(self, last: int = KEPT_MAX) -> Iterator[str]:
        yield from list(self._lines)[-last:]

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

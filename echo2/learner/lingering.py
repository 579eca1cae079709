"""How long a finished learner stays up to serve its last version.

Guarantees: it stays while any connected worker lacks part of that version, and `QUIET_S` longer, so that a worker whose link
is down can reconnect; never longer than its limit. Later workers fetch the version from other workers. Leaves
to others: which workers are fetching (broadcast), waiting (runtime).
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET_S = 3.0


@dataclass(slots=True)
class Lingering:
    """Polled by the runtime with `is_over`. `began`, `needed_at`: seconds, same clock as `now`."""

    began: float
    limit_s: float
    needed_at: float | None = None

    def is_over(self, is_needed: bool, now: float) -> bool:
        if is_needed:
            self.needed_at = now
        quiet_since = self.began if self.needed_at is None else self.needed_at
        return now - self.began >= self.limit_s or now - quiet_since >= QUIET_S

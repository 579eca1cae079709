"""How long a finished learner stays to serve its last version.

Guarantees: it stays while a worker that is connected fetches that version, or has not got it whole, and `QUIET_S` beyond,
in which one whose link is down comes back; never longer than its limit: whoever is later has it from other workers. Leaves
to others: who fetches (broadcast), waiting (runtime).
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET_S = 3.0


@dataclass(slots=True)
class Lingering:
    """From `began`; asked again and again."""

    began: float
    limit_s: float
    needed_at: float | None = None

    def is_over(self, is_needed: bool, now: float) -> bool:
        if is_needed:
            self.needed_at = now
        quiet_since = self.began if self.needed_at is None else self.needed_at
        return now - self.began >= self.limit_s or now - quiet_since >= QUIET_S

"""Counts impossible reports of each worker, and accuses a worker that sends too many to be an accident.

A report is refused if it is plainly wrong (a version that was never published, a token outside the vocabulary), and the
group goes back to the queue. A worker that is refused again and again takes leases from workers that would use them, and
may stop the run's progress; so it is accused.

Guarantees: each refusal adds one, each admitted rollout subtracts one; a worker whose count reaches `UNTRUTHS_MAX` is
accused. Leaves to others: what is wrong with a report (plausible), what happens to the accused (learner/runtime/orders,
coordinator).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.base.ids import PeerId

UNTRUTHS_MAX = 16
WORKERS_MAX = 16_384


@dataclass(slots=True)
class Untruths:
    """The counts. `take` returns the accusations since its last call."""

    _counts: dict[PeerId, int] = field(default_factory=dict)
    _accused: list[tuple[PeerId, str]] = field(default_factory=list)

    def told(self, worker: PeerId, problem: str) -> None:
        """A report of this worker was refused because of `problem`."""
        if worker not in self._counts and len(self._counts) >= WORKERS_MAX:
            del self._counts[next(iter(self._counts))]
        self._counts[worker] = self._counts.get(worker, 0) + 1
        if self._counts[worker] == UNTRUTHS_MAX:
            text = f"{UNTRUTHS_MAX} of its reports could not be true, the last: {problem}"
            self._accused.append((worker, text))

    def admitted(self, worker: PeerId) -> None:
        """A rollout of this worker was admitted: its count falls by one."""
        if self._counts.get(worker, 0) > 0:
            self._counts[worker] -= 1

    def forget(self, worker: PeerId) -> None:
        """Resets the worker's count."""
        self._counts.pop(worker, None)

    def take(self) -> list[tuple[PeerId, str]]:
        taken, self._accused = self._accused, []
        return taken

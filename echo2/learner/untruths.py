"""What a worker said that cannot be so: counted, until it is too much for an accident.

Reports are refused for what is plainly wrong in them (a version that was never published, a token outside the
vocabulary), and the group goes back to the queue. A worker that is refused again and again takes leases from those who
would make something of them, and may keep a run from going on; so it is accused, which ends that.

Guarantees: each refusal counts one, each admitted rollout takes one away, and `UNTRUTHS_MAX` accuse, once. Leaves to
others: what is wrong with a report (batcher), what becomes of the accused (learner/runtime/orders, coordinator).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.base.ids import PeerId

UNTRUTHS_MAX = 16
WORKERS_MAX = 16_384


@dataclass(slots=True)
class Untruths:
    """`take` gives the accusations since the last call: whom, and why."""

    _counts: dict[PeerId, int] = field(default_factory=dict)
    _accused: list[tuple[PeerId, str]] = field(default_factory=list)

    def told(self, worker: PeerId, problem: str) -> None:
        """A report of this worker was refused."""
        if worker not in self._counts and len(self._counts) >= WORKERS_MAX:
            del self._counts[next(iter(self._counts))]
        self._counts[worker] = self._counts.get(worker, 0) + 1
        if self._counts[worker] == UNTRUTHS_MAX:
            text = f"{UNTRUTHS_MAX} of its reports could not be true, the last: {problem}"
            self._accused.append((worker, text))

    def admitted(self, worker: PeerId) -> None:
        """A rollout of this worker was admitted."""
        if self._counts.get(worker, 0) > 0:
            self._counts[worker] -= 1

    def forget(self, worker: PeerId) -> None:
        """Its account begins anew."""
        self._counts.pop(worker, None)

    def take(self) -> list[tuple[PeerId, str]]:
        taken, self._accused = self._accused, []
        return taken

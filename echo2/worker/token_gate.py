"""Holds tokens between the engine and the desk while the weights that sampled them are unproven.

Guarantees: tokens of an unproven version reach the desk after its proof or never; once a sequence has lost tokens, only its end
passes, as an abort, and its lease is handed back. The held tokens are bounded by the engine's outbox and the duration of one
fingerprint. Leaves to others: the proof (runtime/weights).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from echo2.base.ids import LeaseId, Version
from echo2.base.rollout import FinishReason
from echo2.worker.engine import TokenChunk


@dataclass(slots=True)
class TokenGate:
    """`passed` receives chunks in order; `spoiled` receives the leases whose tokens were discarded."""

    passed: Callable[[tuple[TokenChunk, ...]], None]
    spoiled: Callable[[LeaseId], None]
    discards: int = 0  # times the engine's weights turned out to be of no version
    _unproven: Version | None = None
    _held: list[TokenChunk] = field(default_factory=list)
    _held_requests: set[str] = field(default_factory=set)
    _spoiled_requests: set[str] = field(default_factory=set)

    @property
    def is_holding(self) -> bool:
        """Whether the live weights are not proven yet."""
        return self._unproven is not None

    def hold(self, version: Version) -> None:
        self._unproven = version

    def release(self) -> None:
        held, self._held = self._held, []
        self._held_requests.clear()
        self._unproven = None
        if held:
            self.passed(tuple(held))

    def discard(self) -> None:
        """Discards the held tokens, which were sampled by weights of no version, and reports their leases as spoiled."""
        self.discards += 1
        held, self._held = self._held, []
        self._held_requests.clear()
        self._unproven = None
        self._spoiled_requests |= {chunk.request_id for chunk in held}
        ends = self._without_spoiled(held)
        for lease_id in sorted({chunk.request_id.rpartition("/")[0] for chunk in held}):
            self.spoiled(LeaseId(lease_id))
        if ends:
            self.passed(tuple(ends))

    def take(self, chunks: Sequence[TokenChunk]) -> None:
        """Takes chunks from the engine; holds those of the unproven version and all later ones of the same sequences."""
        passing = []
        for chunk in self._without_spoiled(chunks) if self._spoiled_requests else chunks:
            if self._unproven is not None and (
                chunk.version == self._unproven or chunk.request_id in self._held_requests
            ):
                self._held.append(chunk)
                self._held_requests.add(chunk.request_id)
            else:
                passing.append(chunk)
        if passing:
            self.passed(tuple(passing))

    def _without_spoiled(self, chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
        kept = []
        for chunk in chunks:
            if chunk.request_id not in self._spoiled_requests:
                kept.append(chunk)
            elif chunk.finish_reason is not FinishReason.UNFINISHED:
                self._spoiled_requests.discard(chunk.request_id)
                kept.append(TokenChunk(chunk.request_id, (), (), (), chunk.version, FinishReason.ABORTED))
        return kept

"""Chunk bytes per artifact, and the rates over the last busy second, sent and received."""

from __future__ import annotations

from echo2.broadcast.manifest import ArtifactId

ARTIFACTS_MAX = 256
BUSY_SPAN_S = 1.0


class BusyRate:
    """Bytes per second while bytes flow; 0 before the first busy second."""

    __slots__ = ("_span_begun_at", "_span_bytes", "bytes_per_s")

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._span_begun_at = float("-inf")
        self._span_bytes = 0

    def add(self, size_bytes: int, now: float) -> None:
        span_s = now - self._span_begun_at
        if span_s > 2 * BUSY_SPAN_S:  # after a pause, start a new span
            self._span_begun_at, self._span_bytes = now, 0
            return
        self._span_bytes += size_bytes
        if span_s >= BUSY_SPAN_S:
            rate = self._span_bytes / span_s
            self.bytes_per_s = rate if self.bytes_per_s == 0.0 else 0.7 * self.bytes_per_s + 0.3 * rate
            self._span_begun_at, self._span_bytes = now, 0


class Meter:
    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.sent_by_artifact: dict[ArtifactId, int] = {}
        self.received_by_artifact: dict[ArtifactId, int] = {}
        self.uplink = BusyRate()
        self.downlink = BusyRate()

    def sent(self, artifact: ArtifactId | None, size_bytes: int, now: float) -> None:
        self.sent_bytes += size_bytes
        _add(self.sent_by_artifact, artifact, size_bytes)
        self.uplink.add(size_bytes, now)

    def received(self, artifact: ArtifactId, size_bytes: int) -> None:
        self.received_bytes += size_bytes
        _add(self.received_by_artifact, artifact, size_bytes)


def _add(table: dict[ArtifactId, int], artifact: ArtifactId | None, size_bytes: int) -> None:
    if artifact is None:
        return
    table[artifact] = table.get(artifact, 0) + size_bytes
    if len(table) > ARTIFACTS_MAX:
        del table[next(iter(table))]

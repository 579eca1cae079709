"""A malicious worker that has the keys and the certificate of an honest one.

It runs the real daemon and alters the messages that leave its machine. Guarantees: it can do only what a real one could:
it cannot sign as the learner or the coordinator. Leaves to others: what must hold in spite of it (checkers), lies of its
engine (`ByzantineMachine.engines`).
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from echo2.sim.process import PEERS, MessageFilter
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2, ingest_pb2, rollout_pb2
from echo2.worker.engines.making import Engines

REPORTS_KEPT = 64  # of several versions, so that stale ones are among them
REPLAYS_SHARE = 0.3  # most of its reports stay honest, else it would only be slow
REPLAYED = 1 << 40
"""Replayed reports have sequence numbers from here on; the daemon does not know of them."""
SPEED, ROOM = 40.0, 1 << 20  # above any honest worker's, within the bounds of the message
SESSION, REPORT = "/echo2.v1.Coordinator/WorkerSession", "/echo2.v1.Ingest/Report"  # the calls whose messages it alters


class ByzantineMachine(MessageFilter, Protocol):
    """A dishonest worker's machine: it alters messages (as a `MessageFilter`) and may replace its daemon's engines."""

    @property
    def name(self) -> str: ...

    def engines(self, own: Engines) -> Engines:
        """The engines that its daemon gets instead of `own`."""
        ...


class Misbehaviour(enum.Enum):
    CORRUPT_CHUNKS = "corrupt chunks"
    LYING_HAVE_MAPS = "lying have-maps"
    REPLAYED_ROLLOUTS = "replayed rollouts"
    WRONG_LOGPROBS = "wrong log-probabilities"
    WRONG_VERSION = "wrong version"
    FALSE_PROGRESS = "tells of progress and reports nothing"
    FALSE_ENDS = "tells that it has finished and reports nothing"
    FALSE_SPEED = "says that it is the fastest of all, for nothing, and works as it did"
    FALSE_ROOM = "asks for a million rollouts and reports nothing"


SILENT = (Misbehaviour.FALSE_PROGRESS, Misbehaviour.FALSE_ENDS, Misbehaviour.FALSE_ROOM)
"""These never report rollouts."""
CLAIMS = (Misbehaviour.FALSE_SPEED, Misbehaviour.FALSE_ROOM)  # these say something untrue about the worker itself


class ByzantineSender:
    """A `ByzantineMachine` with an honest engine."""

    def __init__(self, kind: Misbehaviour, rng: random.Random) -> None:
        self.kind, self.name, self._rng = kind, kind.value, rng
        self.lies_told = 0
        self._leases: dict[str, int] = {}  # lease granted to it -> tokens that it claims
        self._version = 0
        self._kept: list[ingest_pb2.RolloutReport] = []
        self._tickets: dict[str, rollout_pb2.LeaseTicket] = {}

    def engines(self, own: Engines) -> Engines:
        return own

    # ---- outgoing messages

    def says(self, method: str, side: int, data: bytes) -> Sequence[bytes]:
        speak = _SAYS.get((method, side))
        said = speak(self, data) if speak is not None else (data,)
        self.lies_told += list(said) != [data]
        return said

    def to_coordinator(self, data: bytes) -> Sequence[bytes]:
        message = coordinator_pb2.WorkerMessage.FromString(data)
        match message.WhichOneof("kind"):
            case "hello" if self.kind is Misbehaviour.FALSE_SPEED:
                message.hello.price_usd_per_hour = 0.0
            case "heartbeat":
                return self._beat(message)
            case "lease_request" if self.kind is Misbehaviour.FALSE_ROOM:
                message.lease_request.free_rollouts = ROOM
            case "lease_ended":
                self._leases.pop(message.lease_ended.lease_id, None)
        return (message.SerializeToString(),)

    def _beat(self, message: coordinator_pb2.WorkerMessage) -> Sequence[bytes]:
        beat, more = message.heartbeat, list[coordinator_pb2.WorkerMessage]()
        self._version = beat.version
        if self.kind in CLAIMS:
            beat.rollouts_per_s, beat.tokens_per_s = SPEED, 100 * SPEED
            beat.rollout_s_mean = beat.rollout_s_p95 = 0.1
        if self.kind is Misbehaviour.FALSE_ROOM and beat.has_version:
            wish = coordinator_pb2.LeaseRequest(free_rollouts=ROOM, version=beat.version)
            more.append(coordinator_pb2.WorkerMessage(lease_request=wish))
        for lease_id in list(self._leases):
            if self.kind is Misbehaviour.FALSE_PROGRESS:
                self._leases[lease_id] += 1
                told = coordinator_pb2.LeaseProgress(lease_id=lease_id, tokens=self._leases[lease_id])
                more.append(coordinator_pb2.WorkerMessage(lease_progress=told))
            elif self.kind is Misbehaviour.FALSE_ENDS:
                del self._leases[lease_id]
                finished = coordinator_pb2.LeaseEnded.REASON_FINISHED
                ended = coordinator_pb2.LeaseEnded(lease_id=lease_id, reason=finished)
                more.append(coordinator_pb2.WorkerMessage(lease_ended=ended))
        return [one.SerializeToString() for one in (message, *more)]

    def to_learner(self, data: bytes) -> Sequence[bytes]:
        if self.kind in SILENT:
            return ()
        report = ingest_pb2.RolloutReport.FromString(data)
        if report.HasField("ticket"):
            self._tickets[report.lease_id] = report.ticket
        for segment in report.segments:
            self._change(segment)
        said = [report.SerializeToString()]
        if self.kind is Misbehaviour.REPLAYED_ROLLOUTS:
            self._kept = [*self._kept, report][-REPORTS_KEPT:]
            if self._rng.random() < REPLAYS_SHARE:
                said.append(self._replay().SerializeToString())
        return said

    def _replay(self) -> ingest_pb2.RolloutReport:
        """A kept report under its old ticket: its lease may be over, and the group may be leased to another worker now."""
        again = ingest_pb2.RolloutReport()
        again.CopyFrom(self._rng.choice(self._kept))
        again.sequence = REPLAYED + self._rng.randrange(1 << 20)
        if again.lease_id in self._tickets:
            again.ticket.CopyFrom(self._tickets[again.lease_id])
        return again

    def _change(self, segment: rollout_pb2.RolloutSegment) -> None:
        if self.kind is Misbehaviour.WRONG_LOGPROBS:
            lies = [-self._rng.randrange(1, 4096) / 1024.0 for _ in segment.logprobs]
            segment.logprobs[:] = segment.raw_logprobs[:] = lies
        elif self.kind is Misbehaviour.WRONG_VERSION:
            for span in segment.version_spans:  # an unpublished version, an old one, or the true one
                span.version = max(0, span.version + self._rng.choice((-6, 0, 1, 2, 50)))

    def to_peers(self, data: bytes) -> Sequence[bytes]:
        message = broadcast_pb2.PeerMessage.FromString(data)
        match message.WhichOneof("kind"):
            case "chunk" if self.kind is Misbehaviour.CORRUPT_CHUNKS and message.chunk.payload:
                if self._rng.random() < 0.5:
                    payload = bytearray(message.chunk.payload)
                    payload[self._rng.randrange(len(payload))] ^= 1
                    message.chunk.payload = bytes(payload)
            case "have" if self.kind is Misbehaviour.LYING_HAVE_MAPS:
                held = int.from_bytes(message.have.bitmap, "little") | (1 << self._rng.randrange(1, 40)) - 1
                message.have.bitmap = held.to_bytes((held.bit_length() + 7) // 8, "little")
            case _:
                return (data,)
        return (message.SerializeToString(),)

    # ---- incoming messages

    def hears(self, method: str, side: int, data: bytes) -> bool:
        if (method, side) == (SESSION, 0):
            self._ordered(coordinator_pb2.WorkerOrder.FromString(data))
        elif (method, side) == (REPORT, 0):
            return ingest_pb2.RolloutVerdict.FromString(data).sequence < REPLAYED
        return True

    def _ordered(self, order: coordinator_pb2.WorkerOrder) -> None:
        if order.HasField("lease_grant"):
            self._leases.setdefault(order.lease_grant.ticket.lease_id, 0)
        elif order.HasField("lease_revoke"):
            self._leases.pop(order.lease_revoke.lease_id, None)


# By method and side of the connection.
_SAYS: dict[tuple[str, int], Callable[[ByzantineSender, bytes], Sequence[bytes]]] = {
    (SESSION, 0): ByzantineSender.to_coordinator,
    (REPORT, 0): ByzantineSender.to_learner,
    (PEERS, 0): ByzantineSender.to_peers,
    (PEERS, 1): ByzantineSender.to_peers,
}

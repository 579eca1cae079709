"""Feeds the checkers: observes every message on the wires, every stored transaction and every trained step. Also keeps the run's
record: a hash over all events, and readable lines for the important ones.

Guarantees: looks at messages and files rather than asking daemons; reports a `Violation` at the moment it happens; two runs have
the same hash only if the same events happened at the same virtual times in the same order. Leaves to others: what must hold
(checkers).
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import Message

from echo2.base.ids import GroupId, LeaseId, PeerId, Version
from echo2.base.rollout import Verdict
from echo2.coordinator.fleet.record import COMPLETE
from echo2.coordinator.leases.lease import Lease
from echo2.coordinator.store import StateChanges
from echo2.learner.rollouts.admission import OpenGroups
from echo2.learner.rollouts.groups import Batch, evaluated_version
from echo2.learner.rollouts.journal import GroupDropped, Record
from echo2.sim.checkers import Truth, Violation
from echo2.sim.process import Process
from echo2.sim.wires import End
from echo2.trust.identity import NodeCertificate
from echo2.wire.gen.echo2.v1 import coordinator_pb2, ingest_pb2
from echo2.wire.rollout import segments_from_report, verdicts_from_message

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


_SAID: dict[tuple[str, int], type[Message]] = {
    ("/echo2.v1.Coordinator/WorkerSession", 0): coordinator_pb2.WorkerMessage,
    ("/echo2.v1.Coordinator/WorkerSession", 1): coordinator_pb2.WorkerOrder,
    ("/echo2.v1.Coordinator/LearnerSession", 0): coordinator_pb2.LearnerMessage,
    ("/echo2.v1.Coordinator/LearnerSession", 1): coordinator_pb2.LearnerOrder,
    ("/echo2.v1.Ingest/Report", 0): ingest_pb2.RolloutReport,
    ("/echo2.v1.Ingest/Report", 1): ingest_pb2.RolloutVerdict,
}
"""Message type by method and sending side: 0 the caller, 1 the server."""


class Observer:
    """Observes a world. Calls `failed` with each violation. `holds_leases`: whether the named worker has leases."""

    def __init__(
        self,
        truth: Truth,
        failed: Callable[[Violation], None],
        trace: Callable[[str, str], None],
        holds_leases: Callable[[str], bool],
    ) -> None:
        self.truth, self._failed, self._trace = truth, failed, trace
        self.counts: Counter[str] = Counter()
        self.said: set[str] = set()  # `message.field` of all fields ever set in a message
        self.kept_leases: set[tuple[LeaseId, int]] = set()  # (lease, attempt) ever stored by the coordinator
        self.run_fingerprints: dict[Version, str] = {}
        self.groups: OpenGroups | None = None
        self.holds_leases = holds_leases
        self._methods: dict[tuple[int, int], str] = {}
        self._silent: Counter[str] = Counter()  # consecutive heartbeats of an idle worker that name no wait

    def _judge(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Violation as violation:
            self._failed(violation)

    # ---- the wires

    def tap(self, end: End, frame: Any) -> None:
        """Called with every frame as it leaves its sender: of a call, or of a stream between nodes."""
        number, kind, payload = frame if len(frame) == 3 else (0, "frame", frame[0])
        key = (end.wire.number, number)
        if kind == "frame":
            self._called(end)
        elif kind == "open":
            self._methods[key] = payload[0]
            self._called(end)
        text = payload.hex() if isinstance(payload, bytes) else str(payload[0]) if isinstance(payload, tuple) else ""
        self._trace(end.process.name, f"{end.peer.process.name} {number} {kind} {text}")
        if kind != "message":
            return
        kind_of = _SAID.get((self._methods.get(key, ""), end.side))
        if kind_of is not None:
            message = kind_of.FromString(payload)
            self._note_fields(message)
            self._judge(lambda: self._said(end.process, end.peer.process, message))

    def _called(self, end: End) -> None:
        """Learns a liar's peer ID from the certificate with which it calls."""
        pair = end.wire.caller_pair
        if end.side == 0 and pair is not None and end.process.name in self.truth.liars:
            self.truth.liar_ids.add(NodeCertificate.parse(pair[1], "a liar's").peer_id)

    def _note_fields(self, message: Any) -> None:
        for field, value in message.ListFields():
            self.said.add(f"{message.DESCRIPTOR.name}.{field.name}")
            if field.message_type is not None:
                for one in value if field.is_repeated else (value,):
                    self._note_fields(one)

    def _said(self, sender: Process, receiver: Process, message: Any) -> None:
        match message:
            case coordinator_pb2.WorkerMessage():
                if message.HasField("heartbeat"):
                    self._beat(sender.name, message.heartbeat)
            case coordinator_pb2.WorkerOrder():
                if message.HasField("lease_grant"):
                    self._granted(message.lease_grant)
            case coordinator_pb2.LearnerMessage():
                self._learner_said(message)
            case ingest_pb2.RolloutReport():
                self.truth.reported(sender.name, segments_from_report(message))
            case ingest_pb2.RolloutVerdict():
                self._judged(message)

    def _beat(self, who: str, beat: coordinator_pb2.Heartbeat) -> None:
        if who in self.truth.liars:
            return
        is_idle = not (beat.running_sequences or beat.waiting_sequences or self.holds_leases(who))
        self._silent[who] = self._silent[who] + 1 if is_idle and not beat.waits_for else 0
        is_idle = self._silent[who] > 1  # a lease may have ended after the heartbeat was composed
        self._judge(lambda: self.truth.waits(who, is_idle, beat.waits_for))
        if beat.has_version:
            expected = self.run_fingerprints.get(Version(beat.version))
            holds = beat.fingerprint == expected
            self.truth.check(3, holds, f"{who} is at version {beat.version} with {beat.fingerprint}, not {expected}")

    def _granted(self, grant: coordinator_pb2.LeaseGrant) -> None:
        ticket = grant.ticket
        self.counts["leases granted"] += not grant.is_renewal
        is_kept = (LeaseId(ticket.lease_id), ticket.attempt) in self.kept_leases
        self.truth.check(5, is_kept, f"lease {ticket.lease_id} is told before it is kept")
        if ticket.worker_peer_id in self.truth.liar_ids:
            self.truth.tainted.add(GroupId(ticket.group_id))  # its tokens are not checked from now on

    def _learner_said(self, message: coordinator_pb2.LearnerMessage) -> None:
        match message.WhichOneof("kind"):
            case "accused":
                self.truth.accused(PeerId(message.accused.peer_id), message.accused.reason)
            case "close":
                answered = message.close.group_ids if message.close.reason == COMPLETE else ()
                self.counts["questions answered"] += sum(
                    evaluated_version(GroupId(name)) is not None for name in answered
                )
            case "published":
                kind = "keyframes" if not message.published.has_parent else "deltas"
                self.counts[f"{kind} published"] += 1

    def _judged(self, message: ingest_pb2.RolloutVerdict) -> None:
        for verdict in verdicts_from_message(message):
            self.counts[f"segments answered: {verdict.verdict.value}"] += 1
            if verdict.verdict is Verdict.ADMITTED:
                self.truth.acknowledged(verdict.group_id, verdict.index)

    # ---- what daemons store and train

    def kept(self, changes: StateChanges) -> None:
        """The coordinator's store has committed `changes`."""
        leases = (row for row in changes.rows.values() if isinstance(row, Lease))
        self.kept_leases.update((lease.lease_id, lease.attempt) for lease in leases)

    def trained(self, process: Process, batch: Batch, fingerprint: int) -> None:
        if not process.has_ended:
            self._judge(lambda: self.truth.trained(batch, fingerprint))

    def learner_prepared(self, process: Process, groups: OpenGroups) -> None:
        """A learner has restored its state."""
        if process.has_ended:
            return
        self.groups = groups
        # Groups that became stale during the outage; the learner reports and journals them when it first settles.
        for closure in groups.closures:
            self.truth.dropped(closure.group_id, closure.reason)
        self._judge(lambda: self.truth.learner_restored(groups))

    def noted(self, process: Process, record: Record) -> None:
        """The learner has appended `record` to its journal."""
        if isinstance(record, GroupDropped) and not process.has_ended:
            self.truth.dropped(record.group_id, "closed untrained")

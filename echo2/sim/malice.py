"""A worker that wants to do harm, with the keys and the certificate of an honest one.

It may send corrupt chunks, claim chunks that it does not hold, replay its rollouts, invent log-probabilities and name
versions that it does not run. Guarantees: it can do only what a real one could: it cannot sign as the learner or the
coordinator. Leaves to others: what must hold in spite of it (checkers).
"""

from __future__ import annotations

import enum
import random
from dataclasses import replace

from echo2.base.ids import LeaseId, Version
from echo2.base.rng import derived_rng
from echo2.base.rollout import RolloutSegment, VersionSpan
from echo2.broadcast import events as be
from echo2.broadcast.manifest import Chunk
from echo2.coordinator import lease_events as le
from echo2.coordinator.telemetry import Heartbeat, WorkerHello
from echo2.sim import messages as m
from echo2.sim.broadcast_driver import BroadcastDriver
from echo2.sim.checkers import Truth
from echo2.sim.host import Host
from echo2.sim.network import Network
from echo2.sim.scene import Scene
from echo2.sim.worker_driver import WorkerDriver, WorkerMachine

REPLAY_S = 7.0
REPORTS_KEPT = 64
PRETEND_S = 3.0
SPEED, ROOM = 40.0, 1 << 20


class Malice(enum.Enum):
    CORRUPT_CHUNKS = "corrupt chunks"
    LYING_HAVE_MAPS = "lying have-maps"
    REPLAYED_ROLLOUTS = "replayed rollouts"
    WRONG_LOGPROBS = "wrong log-probabilities"
    WRONG_VERSION = "wrong version"
    FALSE_PROGRESS = "tells of progress and reports nothing"
    FALSE_ENDS = "tells that it has finished and reports nothing"
    FALSE_SPEED = "says that it is the fastest of all, for nothing, and works as it did"
    FALSE_ROOM = "asks for a million rollouts and reports nothing"


LATER_KINDS = (Malice.FALSE_PROGRESS, Malice.FALSE_ENDS)
"""Drawn on their own: seeds run before there were these mean what they meant."""
CLAIMS = (Malice.FALSE_SPEED, Malice.FALSE_ROOM)
"""In scenes of their own."""


class MaliciousBroadcast(BroadcastDriver):
    malice: Malice
    rng: random.Random

    def outgoing(self, chunk: Chunk) -> Chunk:
        if self.malice is Malice.CORRUPT_CHUNKS and chunk.payload and self.rng.random() < 0.5:
            data = bytearray(chunk.payload)
            data[self.rng.randrange(len(data))] ^= 1
            return replace(chunk, payload=bytes(data))
        return chunk

    def message_of(self, action: be.Action) -> object | None:
        if self.malice is Malice.LYING_HAVE_MAPS and isinstance(action, be.SendHave):
            return m.HaveMessage(action.key, action.bitmap | (1 << self.rng.randrange(1, 40)) - 1, action.is_sealed)
        return super().message_of(action)


class MaliciousWorker(WorkerDriver):
    def __init__(
        self, scene: Scene, truth: Truth, host: Host, machine: WorkerMachine, network: Network, malice: Malice
    ) -> None:
        self.malice = malice
        self.rng = derived_rng(scene.seed, "malice", machine.name)
        self.pretends: set[LeaseId] = set()
        self.kept: list[tuple[m.Ticket, tuple[RolloutSegment, ...]]] = []
        super().__init__(scene, truth, host, machine, network)

    def make_broadcast(self) -> BroadcastDriver:
        node = MaliciousBroadcast(
            self.host, self.network, self.machine.identity, self.machine.disk, self._address_of, self._weights_changed,
            self.scene.seed,
        )  # fmt: skip
        node.malice, node.rng = self.malice, self.rng
        return node

    def start(self) -> None:
        super().start()
        if self.malice is Malice.REPLAYED_ROLLOUTS:
            self.host.after(REPLAY_S, self._replay)

    def hello(self) -> WorkerHello:
        price = 0.0 if self.malice is Malice.FALSE_SPEED else self.machine.price
        return replace(super().hello(), price_usd_per_hour=price)

    def heartbeat(self) -> Heartbeat:
        if self.malice is Malice.FALSE_ROOM and self.live is not None:
            self.claim(le.Wanted(self.me, ROOM, self.live))
        if self.malice not in CLAIMS:
            return super().heartbeat()
        return replace(
            super().heartbeat(), rollouts_per_s=SPEED, tokens_per_s=100 * SPEED, rollout_s_mean=0.1, rollout_s_p95=0.1
        )

    def report(self, lease_id: LeaseId, segments: tuple[RolloutSegment, ...]) -> None:
        if self.malice is Malice.FALSE_ROOM:
            return
        if self.malice in LATER_KINDS:
            self._pretend(lease_id)
            return
        changed = tuple(self._changed(segment) for segment in segments)
        ticket = self.ticket_of(lease_id)
        if ticket is not None:
            self.kept = [*self.kept, (ticket, changed)][-REPORTS_KEPT:]
        super().report(lease_id, changed)

    def _changed(self, segment: RolloutSegment) -> RolloutSegment:
        match self.malice:
            case Malice.WRONG_LOGPROBS:
                lies = tuple(-self.rng.randrange(1, 4096) / 1024.0 for _ in segment.logprobs)
                return replace(segment, logprobs=lies, raw_logprobs=lies)
            case Malice.WRONG_VERSION:
                spans = tuple(self._span(span) for span in segment.version_spans)
                return replace(segment, version_spans=spans)
            case _:
                return segment

    def _span(self, span: VersionSpan) -> VersionSpan:
        """Its own version plus something: the newest, one to come, or one long gone."""
        version = Version(max(0, span.version + self.rng.choice((-6, 0, 1, 2, 50))))
        return VersionSpan(version, span.count)

    def _pretend(self, lease_id: LeaseId) -> None:
        """A little progress for ever, or an end at once; the learner hears nothing."""
        if lease_id in self.pretends or self.ticket_of(lease_id) is None:
            return
        if self.malice is Malice.FALSE_ENDS:
            self.claim(le.Ended(self.me, lease_id, le.EndReason.FINISHED, ""))
            return
        self.pretends.add(lease_id)

        def go_on(tokens: int) -> None:
            if self.ticket_of(lease_id) is None:
                self.pretends.discard(lease_id)
                return
            self.claim(le.Progressed(self.me, lease_id, 0, tokens))
            self.host.after(PRETEND_S, lambda: go_on(tokens + 1))

        go_on(1)

    def _replay(self) -> None:
        """Reports of leases long over, and of groups that others make now, under its old tickets."""
        if self.kept:
            ticket, segments = self.rng.choice(self.kept)
            self.send_raw(m.WorkerReport(self.rng.randrange(1 << 20), ticket, segments))
        self.host.after(REPLAY_S * self.rng.random(), self._replay)

"""Composes what the worker reports about itself: hello and heartbeat for the coordinator, status for its owner.

Guarantees: every figure is counted or measured here or in the part that it describes. Leaves to others: sending.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.broadcast.runtime.p2p.host_facts import HostFacts
from echo2.broadcast.runtime.progress import NodeStats
from echo2.broadcast.runtime.transport_mixed import MixedTransport
from echo2.control.waits import Waits
from echo2.cost_model.sizing import Quantisation
from echo2.outside import SteadyClock
from echo2.trust.runtime.tls import PROTOCOL_VERSION
from echo2.wire.gen.echo2.v1 import coordinator_pb2, rollout_pb2
from echo2.worker.engine import Engine
from echo2.worker.findings import Finding, advertised_finding
from echo2.worker.options import EngineChoice, WorkerOptions
from echo2.worker.price import Price
from echo2.worker.runtime.addresses import reach_of
from echo2.worker.runtime.control import CommandAnswer
from echo2.worker.runtime.desk import Desk
from echo2.worker.runtime.log_tail import LogTail
from echo2.worker.runtime.reporting import Reporting
from echo2.worker.runtime.weights import WeightKeeper

_log = logging.getLogger("echo2.worker")


BEATS_BETWEEN_LINKS = 6
MEMORY_INTERVAL_S = 10.0
"""How often memory use is read, which takes a file for every thread and process of this worker."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """How others reach this worker: the addresses it advertises, and what the transport finds out. `own`: where it listens; `port`:
    where others dial its gRPC service; `is_told`: the operator named the address."""

    advertised: list[str]
    own: list[str]
    port: int
    is_told: bool
    transport: MixedTransport
    coordinator: PeerId


class Telling:
    def __init__(
        self,
        options: WorkerOptions,
        desk: Desk,
        waits: Waits,
        node: BroadcastNode,
        reporting: Reporting,
        whereabouts: Whereabouts,
        run_id: RunId,
        machine: tuple[str, EngineChoice, Price, Callable[[], tuple[int, int]]],
    ) -> None:
        self._options = options
        self._desk = desk
        self._waits = waits
        self._node = node
        self._reporting = reporting
        self.where = whereabouts
        self._told_links: tuple[tuple[str, str, str], ...] | None = None
        self._beats = 0
        self._idle_since: float | None = None
        self._memory_bytes, self._memory_due = (0, 0), -math.inf
        self.run_id = run_id
        self._gpu, self._choice, self._price, self._look_at_memory = machine
        self._clock = SteadyClock()
        self.slot_count = options.slot_count  # replaced by the engine's once that is known
        self.log: LogTail | None = None  # None: this process keeps no log tail
        self._told_lines = 0
        self.findings: dict[str, Finding] = {}

    def hello(self) -> coordinator_pb2.WorkerHello:
        self._told_links, self._told_lines = None, 0  # a new stream, perhaps to a new coordinator: send all of it again
        quantisation = self._options.quantisation
        return coordinator_pb2.WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name=self._options.name,
            run_id=self.run_id,
            addresses=self.where.advertised,
            price_usd_per_hour=self._price.usd_per_hour,
            is_spot=self._options.is_spot,
            gpu=self._gpu,
            engine=self._choice.value,
            slot_count=self.slot_count,
            link=self._link(),
            held_tickets=self._held_tickets(),
            quantisation="" if quantisation is Quantisation.NONE else quantisation.value,
            provider=self._options.place.provider,
            region=self._options.place.region,
        )

    def met_as(self, facts: HostFacts) -> None:
        """Records the relay's check of whether this worker answers at the address that its operator named."""
        if self.where.is_told and facts.is_reachable is not None:
            self.found(advertised_finding(self.where.advertised[0], facts.public_host, facts.is_reachable))

    def found(self, finding: Finding) -> None:
        """Logs a finding about the machine and keeps it for the status."""
        if self.findings.get(finding.what) != finding:
            self.findings[finding.what] = finding
            _log.log(logging.INFO if finding.is_good else logging.WARNING, "%s", finding.line())

    def _held_tickets(self) -> list[rollout_pb2.LeaseTicket]:
        tickets = (self._reporting.ticket_of(lease_id) for lease_id in self._desk.machine.lease_ids)
        return [ticket for ticket in tickets if ticket is not None]

    def _link(self) -> coordinator_pb2.Link:
        """The link's rates: as declared by the emulation or the uplink limit, else as measured; 0: not known."""
        link = self._options.link
        measured = self._node.stats().uplink_bytes_per_s
        return coordinator_pb2.Link(
            uplink_bytes_per_s=link.uplink_bytes_per_s or self._options.uplink_limit_bytes_per_s or measured,
            downlink_bytes_per_s=link.downlink_bytes_per_s,
            rtt_s=link.rtt_s,
        )

    def heartbeat(self, engine: Engine | None, keeper: WeightKeeper | None) -> coordinator_pb2.Heartbeat:
        rates, window = self._desk.rates.rates(self._clock.now()), self._desk.rates
        node = self._node.stats()
        live = keeper.machine.live if keeper else None
        waits_for, waits_s = self._wait(live, node)
        stats = engine.stats() if engine else None
        used_bytes, total_bytes = self._memory()
        return coordinator_pb2.Heartbeat(
            version=live or 0,
            has_version=live is not None,
            running_sequences=stats.running_sequences if stats else 0,
            waiting_sequences=stats.waiting_sequences if stats else 0,
            sampled_tokens=window.sampled_tokens,
            finished_rollouts=window.finished_rollouts,
            rollouts_per_s=rates.rollouts_per_s,
            tokens_per_s=rates.tokens_per_s,
            rollout_s_mean=rates.rollout_s_mean,
            rollout_s_p95=rates.rollout_s_p95,
            swap_s=keeper.swap_s if keeper else 0.0,
            apply_s=keeper.apply_s if keeper else 0.0,
            link=self._link(),
            sent_chunk_bytes=node.sent_chunk_bytes,
            received_chunk_bytes=node.received_chunk_bytes,
            newest_chunk_count=node.newest_chunk_count,
            newest_chunks_held=node.newest_chunks_held,
            newest_version_in_flight=node.newest_version_in_flight,
            waits_for=waits_for,
            waits_since_s=waits_s,
            fingerprint=keeper.live_fingerprint if keeper else "",
            memory_used_bytes=used_bytes,
            memory_total_bytes=total_bytes,
            reach=reach_of(self.where.transport.facts, self.where.own, self.where.port, self.where.coordinator),
            links=self._links_if_changed(node),
            log=self._log_if_news(),
        )

    def _log_if_news(self) -> coordinator_pb2.LogTail | None:
        """The log tail if it has new lines. None before the first: the coordinator then keeps the previous process's last lines."""
        if self.log is None or self.log.count == self._told_lines:
            return None
        self._told_lines = self.log.count
        return self.log.message()

    def _wait(self, live: Version | None, node: NodeStats) -> tuple[str, float]:
        """What this worker has been waiting for longest, and for how many seconds; empty while it generates."""
        now, has_work = self._clock.now(), bool(self._desk.machine.lease_ids)
        self._idle_since = None if has_work or live is None else self._idle_since or now
        text, since_s = self._waits.longest()
        if text or has_work:
            is_silent = not text and not self._desk.machine.is_running
            return ("the learner's word on finished rollouts", 0.0) if is_silent else (text, since_s)
        if self._idle_since is None:
            return node.waits_for, 0.0
        return "a lease", now - self._idle_since

    def _memory(self) -> tuple[int, int]:
        now = self._clock.now()
        if now >= self._memory_due:
            self._memory_due = now + MEMORY_INTERVAL_S
            self._memory_bytes = self._look_at_memory()
        return self._memory_bytes

    def _links_if_changed(self, node: NodeStats) -> coordinator_pb2.LinkTable | None:
        """The links if they changed, and every `BEATS_BETWEEN_LINKS` heartbeats, since one may have been lost; else None."""
        self._beats += 1
        links = tuple(sorted((one.peer_id, one.way.kind.value, one.way.reason) for one in node.links))
        if links == self._told_links and self._beats < BEATS_BETWEEN_LINKS:
            return None
        self._told_links, self._beats = links, 0
        return coordinator_pb2.LinkTable(
            links=[coordinator_pb2.PeerLink(peer_id=peer, kind=kind, reason=reason) for peer, kind, reason in links]
        )

    def status(self, engine: Engine | None, keeper: WeightKeeper | None) -> CommandAnswer:
        """For `echo-worker status`."""
        told, beats, lines = self._told_links, self._beats, self._told_lines
        beat = self.heartbeat(engine, keeper)
        counted = engine.stats() if engine else None
        # Restored, because the coordinator has not received this heartbeat.
        self._told_links, self._beats, self._told_lines = told, beats, lines
        facts = self.where.transport.facts
        return {
            "run": self.run_id,
            "name": self._options.name,
            "engine": self._choice.value,
            "version": beat.version if beat.has_version else None,
            "weights": keeper.machine.state if keeper else "no engine yet",
            "fingerprint": beat.fingerprint,
            "leases": len(self._desk.machine.lease_ids),
            "running": beat.running_sequences,
            "waiting": beat.waiting_sequences,
            "sampled_tokens": beat.sampled_tokens,
            "finished_rollouts": beat.finished_rollouts,
            "prompt_tokens": counted.prompt_tokens if counted else 0,
            "shared_prompt_tokens": counted.shared_prompt_tokens if counted else 0,
            "prefilled_tokens": counted.prefilled_tokens if counted else 0,
            "tokens_per_s": round(beat.tokens_per_s, 1),
            "rollouts_per_s": round(beat.rollouts_per_s, 3),
            "tokens_not_reported": self._desk.machine.unheld_tokens,
            "newest_version_in_flight": beat.newest_version_in_flight,
            "chunks": f"{beat.newest_chunks_held} of {beat.newest_chunk_count or '?'}",
            "price_usd_per_hour": self._price.usd_per_hour,
            "slots": self.slot_count,
            **{finding.what: finding.text for finding in self.findings.values()},
            "way": self._node.stats().way,
            "waits_for": beat.waits_for,
            "waits_since_s": round(beat.waits_since_s, 1),
            "also_waits_for": "; ".join(f"{text} ({since_s:.1f} s)" for text, since_s in self._waits.by_age()[1:]),
            "can_be_dialled": {True: "yes", False: "no", None: "not known"}[facts.is_reachable],
            "relays": len(facts.relays),
            "links": [f"{link.peer_id[-8:]} {link.way}" for link in self._node.stats().links],
        }

"""What the worker reports about itself: hello and heartbeat for the coordinator, status for its owner.

Every figure is counted or measured here or in the part that it describes. To add a field to the heartbeat, declare it in
`proto/echo2/v1/coordinator.proto` and set it in `WorkerStatus.heartbeat`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING

from echo2.base.clock import Waits
from echo2.base.ids import PeerId, Version
from echo2.base.units import address_of, is_loopback
from echo2.broadcast.nat.reach import HostFacts, outward_host
from echo2.broadcast.node import BroadcastNode, NodeStats
from echo2.outside import SteadyClock
from echo2.outside.net import EVERY_ADDRESS
from echo2.trust.identity import JoinLink
from echo2.trust.tls import PROTOCOL_VERSION
from echo2.wire.bounds import LOG_CHARS_MAX, LOG_LINES_MAX
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2
from echo2.worker.control import CommandAnswer
from echo2.worker.generation import Generation
from echo2.worker.links import Reports
from echo2.worker.machine import Finding, Hardware, advertised_finding
from echo2.worker.options import WorkerOptions

if TYPE_CHECKING:
    from echo2.worker.weights import Weights  # torch, which who only asks `reach_of` does without

BEATS_BETWEEN_LINKS = 6  # unchanged links are sent again after this many heartbeats, since one may have been lost
MEMORY_INTERVAL_S = 10.0  # how often memory use is read, which takes a file for every thread and process of this worker
_log = logging.getLogger("echo2.worker")


class LogTail(logging.Handler):
    """Keeps the newest warnings and errors of this process, each as one printable line; any thread may log. `count`: lines kept so
    far, those dropped since included."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[coordinator_pb2.LogLine] = deque(maxlen=LOG_LINES_MAX)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        line = " ".join(text.split())
        line = "".join(c if c.isprintable() else "?" for c in line[:LOG_CHARS_MAX])
        is_error = record.levelno >= logging.ERROR
        self._lines.append(coordinator_pb2.LogLine(unix_s=record.created, is_error=is_error, text=line))
        self.count += 1

    def message(self) -> coordinator_pb2.LogTail:
        return coordinator_pb2.LogTail(lines=list(self._lines))


def listen_host(options: WorkerOptions, link: JoinLink) -> str:
    """The host given by the operator; else loopback if the coordinator is on loopback, else every address."""
    # The coordinator's address family, because ::1 and 127.0.0.1 appear to others as two hosts.
    loopback = link.host if ":" in link.host else "127.0.0.1"
    return options.listen_host or (loopback if is_loopback(link.host) else EVERY_ADDRESS)


def dialled_port(options: WorkerOptions, port: int) -> int:
    """The port at which others reach the service that listens on `port`; a NAT may map a different one to it."""
    return int(options.advertised_addresses[0].rpartition(":")[2]) if options.advertised_addresses else port


def reach_of(facts: HostFacts, addresses: list[str], port: int, coordinator: PeerId) -> coordinator_pb2.Reach | None:
    """How peers reach a worker with these facts. The coordinator's relay comes first, to spare the learner's uplink."""
    if facts.is_reachable is None:
        return None
    if facts.is_reachable:
        return coordinator_pb2.Reach(addresses=[address_of(facts.public_host, port)])
    relays = sorted(facts.relays, key=lambda peer: (peer != coordinator, peer))
    access = broadcast_pb2.PeerAccess(lan_addresses=addresses, public_host=facts.public_host, relays=relays)
    return coordinator_pb2.Reach(access=access)


class WorkerStatus:
    """One per worker. `own_addresses`: where it listens, as its own network sees it. `weights` is None until the engine has
    started; `slot_count` is the engine's once that is known."""

    def __init__(
        self,
        options: WorkerOptions,
        hardware: Hardware,
        generation: Generation,
        reports: Reports,
        node: BroadcastNode,
        port: int,
        waits: Waits,
        log: LogTail | None,
    ) -> None:
        self.weights: Weights | None = None
        self.slot_count = options.config.worker.slots
        self.findings: dict[str, Finding] = {}
        link = JoinLink.parse(options.join_link)
        host = outward_host(options.listen_host, link.address)
        self.own_addresses = [address_of(host, port)] if host else []
        self._advertised = list(options.advertised_addresses) or self.own_addresses
        self._port, self._coordinator = dialled_port(options, port), link.peer_id
        self._options, self._hardware, self._generation = options, hardware, generation
        self._leases, self._reports, self._node, self._waits = generation.leases, reports, node, waits
        self._clock = SteadyClock()
        self._memory_bytes, self._memory_due = (0, 0), -math.inf
        self._log_tail, self._sent_lines = log, 0
        self._sent_links: list[coordinator_pb2.PeerLink] | None = None
        self._beats = 0
        self._idle_since: float | None = None

    def add_finding(self, finding: Finding) -> None:
        if self.findings.get(finding.what) != finding:
            self.findings[finding.what] = finding
            _log.log(logging.INFO if finding.is_good else logging.WARNING, "%s", finding.line())

    def on_host_facts(self, facts: HostFacts) -> None:
        """Records the relay's check of whether this worker answers at the address that its operator named."""
        if self._options.advertised_addresses and facts.is_reachable is not None:
            self.add_finding(advertised_finding(self._advertised[0], facts.public_host, facts.is_reachable))

    def hello(self) -> coordinator_pb2.WorkerHello:
        self._sent_links, self._sent_lines = None, 0  # a new stream, perhaps to a new coordinator: send all of it again
        options, worker = self._options, self._options.config.worker
        tickets = (self._reports.ticket_of(lease_id) for lease_id in self._leases.lease_ids)
        return coordinator_pb2.WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name=options.name,
            run_id=self._reports.credentials.run_id,
            addresses=self._advertised,
            price_usd_per_hour=self._hardware.price_usd_per_hour,
            is_spot=worker.is_spot,
            gpu=self._hardware.machine.gpu_text,
            engine=self._hardware.engine,
            slot_count=self.slot_count,
            link=self._link(),
            held_tickets=[ticket for ticket in tickets if ticket is not None],
            quantisation="" if worker.quantisation == "none" else worker.quantisation,
            provider=self._hardware.provider,
            region=self._hardware.region,
        )

    def heartbeat(self) -> coordinator_pb2.Heartbeat:
        now, node, weights = self._clock.now(), self._node.stats(), self.weights
        rates, window = self._leases.rates.rates(now), self._leases.rates
        live = weights.live if weights else None
        stats = self._generation.engine.stats() if self._generation.engine else None
        waits_for, waits_since_s = self._wait(live, node)
        if now >= self._memory_due:
            self._memory_due, self._memory_bytes = now + MEMORY_INTERVAL_S, self._hardware.read_memory()
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
            swap_s=weights.pause_s if weights else 0.0,
            apply_s=weights.apply_s if weights else 0.0,
            link=self._link(),
            sent_chunk_bytes=node.sent_chunk_bytes,
            received_chunk_bytes=node.received_chunk_bytes,
            newest_chunk_count=node.newest_chunk_count,
            newest_chunks_held=node.newest_chunks_held,
            newest_version_in_flight=node.newest_version_in_flight,
            waits_for=waits_for,
            waits_since_s=waits_since_s,
            fingerprint=weights.fingerprint if weights else "",
            memory_used_bytes=self._memory_bytes[0],
            memory_total_bytes=self._memory_bytes[1],
            reach=reach_of(self._node.nat.facts, self.own_addresses, self._port, self._coordinator),
            links=self._links_if_changed(node),
            log=self._log_if_changed(),
        )

    def answer(self) -> CommandAnswer:
        sent = self._sent_links, self._beats, self._sent_lines
        beat, node = self.heartbeat(), self._node.stats()
        self._sent_links, self._beats, self._sent_lines = sent  # the coordinator has not received this heartbeat
        stats = self._generation.engine.stats() if self._generation.engine else None
        facts = self._node.nat.facts
        return {
            "run": self._reports.credentials.run_id,
            "name": self._options.name,
            "engine": self._hardware.engine,
            "version": beat.version if beat.has_version else None,
            "weights": self.weights.state if self.weights else "no engine yet",
            "fingerprint": beat.fingerprint,
            "leases": len(self._leases.lease_ids),
            "running": beat.running_sequences,
            "waiting": beat.waiting_sequences,
            "sampled_tokens": beat.sampled_tokens,
            "finished_rollouts": beat.finished_rollouts,
            "prompt_tokens": stats.prompt_tokens if stats else 0,
            "shared_prompt_tokens": stats.shared_prompt_tokens if stats else 0,
            "prefilled_tokens": stats.prefilled_tokens if stats else 0,
            "tokens_per_s": round(beat.tokens_per_s, 1),
            "rollouts_per_s": round(beat.rollouts_per_s, 3),
            "tokens_not_reported": self._leases.unheld_tokens,
            "newest_version_in_flight": beat.newest_version_in_flight,
            "chunks": f"{beat.newest_chunks_held} of {beat.newest_chunk_count or '?'}",
            "price_usd_per_hour": self._hardware.price_usd_per_hour,
            "slots": self.slot_count,
            **{finding.what: finding.text for finding in self.findings.values()},
            "way": node.way,
            "waits_for": beat.waits_for,
            "waits_since_s": round(beat.waits_since_s, 1),
            "also_waits_for": "; ".join(f"{text} ({since_s:.1f} s)" for text, since_s in self._waits.by_age()[1:]),
            "can_be_dialled": {True: "yes", False: "no", None: "not known"}[facts.is_reachable],
            "relays": len(facts.relays),
            "links": [f"{link.peer_id[-8:]} {link.way}" for link in node.links],
        }

    def _link(self) -> coordinator_pb2.Link:
        """The link: as declared by the emulation or the uplink limit, else as measured; 0: not known."""
        worker, measured = self._options.config.worker, self._node.stats()
        link = worker.emulated_link
        return coordinator_pb2.Link(
            uplink_bytes_per_s=link.uplink_bytes_per_s or worker.uplink_limit or measured.uplink_bytes_per_s,
            downlink_bytes_per_s=link.downlink_bytes_per_s,
            rtt_s=link.rtt_s or measured.rtt_s,
        )

    def _wait(self, live: Version | None, node: NodeStats) -> tuple[str, float]:
        """What this worker has been waiting for longest, and for how many seconds; empty while it generates."""
        now, has_work = self._clock.now(), bool(self._leases.lease_ids)
        self._idle_since = None if has_work or live is None else self._idle_since or now
        text, since_s = self._waits.longest()
        if text or has_work:
            is_silent = not text and not self._leases.is_running
            return ("the learner's verdict on finished rollouts", 0.0) if is_silent else (text, since_s)
        if self._idle_since is None:
            return node.waits_for, 0.0
        return "a lease", now - self._idle_since

    def _log_if_changed(self) -> coordinator_pb2.LogTail | None:
        """The log tail if it has new lines. None before the first: the coordinator then keeps the previous process's last lines."""
        if self._log_tail is None or self._log_tail.count == self._sent_lines:
            return None
        self._sent_lines = self._log_tail.count
        return self._log_tail.message()

    def _links_if_changed(self, node: NodeStats) -> coordinator_pb2.LinkTable | None:
        self._beats += 1
        links = [
            coordinator_pb2.PeerLink(peer_id=link.peer_id, kind=link.way.kind.value, reason=link.way.reason)
            for link in sorted(node.links, key=lambda link: (link.peer_id, link.way.kind.value, link.way.reason))
        ]
        if links == self._sent_links and self._beats < BEATS_BETWEEN_LINKS:
            return None
        self._sent_links, self._beats = links, 0
        return coordinator_pb2.LinkTable(links=links)

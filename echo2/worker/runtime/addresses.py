"""Determines the addresses at which peers reach this worker's broadcast service."""

from __future__ import annotations

from echo2.base.hosts import joined
from echo2.base.ids import PeerId
from echo2.broadcast.runtime.addresses import is_loopback, outward_host
from echo2.broadcast.runtime.p2p.host_facts import HostFacts
from echo2.outside.families import EVERY_ADDRESS
from echo2.trust.identity import JoinLink
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2
from echo2.worker.options import WorkerOptions


def advertised_addresses(options: WorkerOptions, link: JoinLink, port: int) -> list[str]:
    """The addresses given by the operator; else those of `own_addresses`."""
    return list(options.advertised_addresses) or own_addresses(options, link, port)


def own_addresses(options: WorkerOptions, link: JoinLink, port: int) -> list[str]:
    """Where the service listens, as its own network sees it; for 'any address', the one from which it reaches the coordinator."""
    host = outward_host(options.listen_host, link.address)
    return [joined(host, port)] if host else []


def listen_host(options: WorkerOptions, link: JoinLink) -> str:
    """The host given by the operator; else loopback if the coordinator is on loopback, else every address."""
    # The coordinator's address family, because ::1 and 127.0.0.1 appear to others as two hosts.
    own = link.host if ":" in link.host else "127.0.0.1"
    return options.listen_host or (own if is_loopback(link.host) else EVERY_ADDRESS)


def dialled_port(options: WorkerOptions, port: int) -> int:
    """The port at which others reach the service that listens on `port`; a NAT may map a different one to it."""
    return int(options.advertised_addresses[0].rpartition(":")[2]) if options.advertised_addresses else port


def reach_of(facts: HostFacts, own: list[str], port: int, coordinator: PeerId) -> coordinator_pb2.Reach | None:
    """How peers reach this worker, as found out by the transport; None while unknown, so that the hello's addresses apply.

    `own`: where the service listens, for peers on the same network; `port`: the port that others dial. The coordinator's relay
    comes first, to keep relayed traffic off the learner's uplink.
    """
    if facts.is_reachable is None:
        return None
    if facts.is_reachable:
        return coordinator_pb2.Reach(addresses=[joined(facts.public_host, port)])
    access = broadcast_pb2.PeerAccess(
        lan_addresses=own,
        public_host=facts.public_host,
        relays=sorted(facts.relays, key=lambda peer: (peer != coordinator, peer)),
    )
    return coordinator_pb2.Reach(access=access)

"""At which addresses peers reach this worker's broadcast service."""

from __future__ import annotations

from echo2.base.hosts import joined
from echo2.base.ids import PeerId
from echo2.broadcast.runtime.addresses import is_loopback, outward_host
from echo2.broadcast.runtime.p2p.host_facts import HostFacts
from echo2.trust.identity import JoinLink
from echo2.wire.gen.echo2.v1 import broadcast_pb2, coordinator_pb2
from echo2.worker.options import WorkerOptions


def advertised_addresses(options: WorkerOptions, link: JoinLink, port: int) -> list[str]:
    """As told; else where it listens, and for 'any address' the one from which it reaches the coordinator."""
    if options.advertised_addresses:
        return list(options.advertised_addresses)
    host = outward_host(options.listen_host, link.address)
    return [joined(host, port)] if host else []


def listen_host(options: WorkerOptions, link: JoinLink) -> str:
    """As told; else loopback for a run of this machine's own, and every address for any other."""
    own = link.host if ":" in link.host else "127.0.0.1"  # ::1 and 127.0.0.1 are two hosts to whoever sees us come
    return options.listen_host or (own if is_loopback(link.host) else "0.0.0.0")


def reach_of(facts: HostFacts, advertised: list[str], port: int, coordinator: PeerId) -> coordinator_pb2.Reach | None:
    """What has been found out; None while nothing has, so that the hello's addresses count.

    The coordinator's relay goes first: the learner's uplink has better things to carry.
    """
    if facts.is_reachable is None:
        return None
    if facts.is_reachable:
        return coordinator_pb2.Reach(addresses=[joined(facts.public_host, port)])
    access = broadcast_pb2.PeerAccess(
        lan_addresses=advertised,
        public_host=facts.public_host,
        relays=sorted(facts.relays, key=lambda peer: (peer != coordinator, peer)),
    )
    return coordinator_pb2.Reach(access=access)

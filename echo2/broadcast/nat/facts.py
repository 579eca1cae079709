"""Options of a libp2p host, and what it has found out about itself.

Kept apart from the host, so that processes that cross no NAT do not load libp2p (60 MB).
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.errors import TrustError
from echo2.base.ids import PeerId
from echo2.broadcast.nat.relay_book import RelayBook
from echo2.outside.net import EVERY_ADDRESS
from echo2.trust.identity import NodeCertificate


@dataclass(frozen=True, slots=True)
class HostOptions:
    """`port` 0: any. `own_port`: where others dial this node; 0: it is not checked whether they can. `book`: of a relay.
    `is_barred`: members to refuse; `proven`: called with each member's address that a dial-back reached (both in trio).
    """

    listen_host: str = EVERY_ADDRESS
    port: int = 0
    own_port: int = 0
    book: RelayBook | None = None
    is_barred: Callable[[PeerId], bool] = lambda peer: False
    proven: Callable[[PeerId, str], None] = lambda peer, address: None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is known about how this node can be reached. `is_reachable` None: not checked yet."""

    public_host: str = ""
    is_reachable: bool | None = None
    relays: tuple[PeerId, ...] = ()
    trouble: str = ""


def outward_host(listen_host: str, towards: str) -> str:
    """The listening host; for a wildcard, the address from which this machine reaches `towards` (host:port). Empty: no route."""
    host = listen_host.strip("[]")
    if not _is_any(host):
        return host
    there, _, port = towards.rpartition(":")
    there = there.strip("[]")
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, int(port)))  # sends nothing: the system picks the route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def loopback_of(listen_host: str) -> str:
    """The host at which this machine itself reaches that listener."""
    host = listen_host.strip("[]")
    return "127.0.0.1" if _is_any(host) else host


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


PROBE_S = 4.0  # two handshakes over 500 ms and lost packets
_log = logging.getLogger("echo2.broadcast")


def shows_certificate(host: str, port: int, peer_id: PeerId, authority_pem: bytes) -> bool:
    """Whether `peer_id` answers there with its certificate of the run. We present none: theirs is shown anyway."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), timeout=PROBE_S) as raw, context.wrap_socket(raw) as connection:
            shown = connection.getpeercert(binary_form=True)
        certificate = NodeCertificate.parse(shown or b"", f"{host}:{port}")
        certificate.check_peer(peer_id)
        certificate.check_issuer(authority_pem)
    except (OSError, TrustError) as error:
        _log.debug("%s:%d is not %s: %s", host, port, peer_id, error)
        return False
    return True

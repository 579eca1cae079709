"""Checks whether a node answers at an address: a TLS handshake with its gRPC port, which must show that node's certificate.

Waits PROBE_S for each IP address of the host; blocks, so call it in a thread.
"""

from __future__ import annotations

import logging
import socket
import ssl

from echo2.base.errors import TrustError
from echo2.base.ids import PeerId
from echo2.trust.identity import NodeCertificate

PROBE_S = 4.0
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

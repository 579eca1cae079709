"""TLS contexts for connections other than gRPC's: mutual TLS 1.3 with the certificates of the run.

Guarantees: the same as for channels and servers of tls.py: a dialler talks to exactly the peer it expects, and reads its identity
from the certificate, including the libp2p extension; a listener refuses peers without a certificate of the run. A renewed
certificate is used from the next handshake on. Leaves to others: sockets, deadlines.
"""

from __future__ import annotations

import functools
import os
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

from echo2.base.errors import TrustError
from echo2.base.ids import PeerId
from echo2.outside import unix_now
from echo2.trust.identity import NodeCertificate, PeerIdentity
from echo2.trust.runtime.tls import Credentials


class MutualTls:
    """The TLS contexts of one node."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._made: tuple[tuple[bytes, bytes], ssl.SSLContext, ssl.SSLContext] | None = None

    @property
    def dialling(self) -> ssl.SSLContext:
        """Context for dialling; use it with `server_hostname=dns_name_of(peer_id)`."""
        return self._contexts()[0]

    @property
    def listening(self) -> ssl.SSLContext:
        return self._contexts()[1]

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        pair = self._credentials.key_and_certificate()
        if self._made is None or self._made[0] != pair:
            make = functools.partial(_context, pair, self._credentials.authority_pem)
            self._made = pair, make(ssl.PROTOCOL_TLS_CLIENT), make(ssl.PROTOCOL_TLS_SERVER)
        return self._made[1:]


def peer_shown(shown: ssl.SSLObject | None, whose: str, expected: PeerId | None = None) -> PeerIdentity:
    """The peer of a connection after its handshake. TrustError if it is not `expected`."""
    der = shown.getpeercert(binary_form=True) if shown is not None else None
    if not der:
        raise TrustError(f"{whose}: expected a certificate of the run, got none")
    certificate = _certificate(der)
    certificate.check_time(unix_now())
    if expected is not None:
        certificate.check_peer(expected)
    return certificate.whose


@functools.lru_cache(maxsize=4096)
def _certificate(der: bytes) -> NodeCertificate:
    return NodeCertificate.parse(der, "the peer's certificate")


def _context(pair: tuple[bytes, bytes], authority_pem: bytes, protocol: int) -> ssl.SSLContext:
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=authority_pem.decode())
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        made.num_tickets = 0  # a resumed session would not show a renewed certificate
    _with_file(b"\n".join(pair), made.load_cert_chain)
    return made


def _with_file(data: bytes, use: Callable[[str], object]) -> None:
    """Passes `data` to `use` as a file path, because `ssl` reads keys only from files; in memory if the system can."""
    memory_file = getattr(os, "memfd_create", None)
    if memory_file is not None:
        handle = memory_file("echo2-tls")
        try:
            os.write(handle, data)
            use(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
        return
    with tempfile.TemporaryDirectory(prefix="echo2-tls-") as folder:  # of mode 0700
        path = Path(folder) / "pair.pem"
        path.write_bytes(data)
        use(str(path))

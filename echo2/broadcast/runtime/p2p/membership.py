"""Which libp2p peers belong to the run: both sides of a connection show their certificate of the run.

libp2p proves that a peer holds the key of its peer ID; the certificate, issued by the run's authority for that
peer ID, proves that it may take part. Guarantees: `identity_of` returns only peers whose certificate was checked by this
process and has not expired; a certificate of another peer or another run, or an expired one, raises
TrustError. Waits HANDSHAKE_S for the other side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p.custom_types import TProtocol

from echo2.base.errors import MalformedMessage, TrustError
from echo2.base.ids import PeerId
from echo2.trust.identity import NodeCertificate, PeerIdentity
from echo2.trust.runtime.tls import Credentials

PROTOCOL = TProtocol("/echo2/member/1")
CERTIFICATE_BYTES_MAX = 16 << 10
HANDSHAKE_S = 10.0
MEMBERS_MAX = 20_000
_LENGTH_BYTES = 4


@dataclass(slots=True)
class Members:
    credentials: Credentials
    is_barred: Callable[[PeerId], bool] = lambda peer: False
    _known: dict[PeerId, NodeCertificate] = field(default_factory=dict)

    def identity_of(self, peer_id: PeerId) -> PeerIdentity | None:
        """The peer's identity in the run; None unless it has shown a valid certificate."""
        certificate = self._known.get(peer_id)
        if certificate is None or certificate.not_after_unix_s < time.time() or self.is_barred(peer_id):
            return None
        return certificate.whose

    async def wait_known(self, peer_id: PeerId) -> bool:
        """Waits up to HANDSHAKE_S for the peer's certificate, which may be on its way; returns whether it is known."""
        until = trio.current_time() + HANDSHAKE_S
        while self.identity_of(peer_id) is None and trio.current_time() < until:
            await trio.sleep(0.05)
        return self.identity_of(peer_id) is not None

    def admit(self, peer_id: PeerId, pem: bytes) -> PeerIdentity:
        """Checks the certificate shown by `peer_id`, whose key libp2p has verified; raises TrustError."""
        certificate = NodeCertificate.parse(pem, f"certificate of {peer_id}")
        certificate.check_peer(peer_id)
        certificate.check_issuer(self.credentials.authority_pem)
        certificate.check_time(time.time())
        if certificate.run_id != self.credentials.run_id:
            raise TrustError(f"peer {peer_id}: expected a certificate of run {self.credentials.run_id!r}")
        while len(self._known) >= MEMBERS_MAX:
            del self._known[next(iter(self._known))]  # it shows its certificate again when it reconnects
        self._known[peer_id] = certificate
        return certificate.whose

    async def show(self, stream: Any, peer_id: PeerId) -> PeerIdentity:
        """Shows our certificate and checks theirs, on a stream that we opened."""
        with trio.fail_after(HANDSHAKE_S):
            await write_block(stream, self.credentials.certificate.pem)
            return self.admit(peer_id, await read_block(stream, CERTIFICATE_BYTES_MAX, f"peer {peer_id}"))

    async def answer(self, stream: Any, peer_id: PeerId) -> PeerIdentity:
        """The accepting side: checks the peer's certificate before showing ours."""
        with trio.fail_after(HANDSHAKE_S):
            identity = self.admit(peer_id, await read_block(stream, CERTIFICATE_BYTES_MAX, f"peer {peer_id}"))
            await write_block(stream, self.credentials.certificate.pem)
        return identity


async def write_block(stream: Any, block: bytes) -> None:
    """Writes a 4-byte length, then the bytes."""
    await stream.write(len(block).to_bytes(_LENGTH_BYTES, "big") + block)


async def read_block(stream: Any, limit: int, whose: str) -> bytes:
    """Reads a block of `write_block`; MalformedMessage if it exceeds `limit`, before reading it."""
    size = int.from_bytes(await read_exactly(stream, _LENGTH_BYTES), "big")
    if size > limit:
        raise MalformedMessage(f"{whose}: expected at most {limit} bytes in a message, it announces {size}")
    return await read_exactly(stream, size)


async def read_exactly(stream: Any, count: int) -> bytes:
    """Reads `count` bytes; EOFError if the stream ends first."""
    parts = bytearray()
    while len(parts) < count:
        part = await stream.read(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)

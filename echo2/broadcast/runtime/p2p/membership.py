"""Who of the libp2p peers is of the run: both sides of a connection show their certificate of the run.

libp2p proves that a peer holds the key of its peer ID; the certificate, issued by the run's authority for that very
peer ID, proves that it may take part. Guarantees: `identity_of` names only peers whose certificate was checked on this
process's connections and has not ended; a certificate of another peer, another run or one that has ended is refused
with TrustError. Waits HANDSHAKE_S for the other side.
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
        """The peer's role in the run, if it has shown it."""
        certificate = self._known.get(peer_id)
        if certificate is None or certificate.not_after_unix_s < time.time() or self.is_barred(peer_id):
            return None
        return certificate.whose

    async def wait_known(self, peer_id: PeerId) -> bool:
        """Whether the peer shows its certificate, which may just be under way, within HANDSHAKE_S."""
        until = trio.current_time() + HANDSHAKE_S
        while self.identity_of(peer_id) is None and trio.current_time() < until:
            await trio.sleep(0.05)
        return self.identity_of(peer_id) is not None

    def admit(self, peer_id: PeerId, pem: bytes) -> PeerIdentity:
        """Checks what `peer_id`, proven by libp2p, has shown."""
        certificate = NodeCertificate.parse(pem, f"certificate of {peer_id}")
        certificate.check_peer(peer_id)
        certificate.check_issuer(self.credentials.authority_pem)
        certificate.check_time(time.time())
        if certificate.run_id != self.credentials.run_id:
            raise TrustError(f"peer {peer_id}: expected a certificate of run {self.credentials.run_id!r}")
        while len(self._known) >= MEMBERS_MAX:
            del self._known[next(iter(self._known))]  # it shows its certificate again when it comes back
        self._known[peer_id] = certificate
        return certificate.whose

    async def show(self, stream: Any, peer_id: PeerId) -> PeerIdentity:
        """Our side of the exchange, on a stream that we opened."""
        with trio.fail_after(HANDSHAKE_S):
            await write_block(stream, self.credentials.certificate.pem)
            return self.admit(peer_id, await read_block(stream, CERTIFICATE_BYTES_MAX, f"peer {peer_id}"))

    async def answer(self, stream: Any, peer_id: PeerId) -> PeerIdentity:
        """The other side: nothing is shown to a peer that has not been admitted."""
        with trio.fail_after(HANDSHAKE_S):
            identity = self.admit(peer_id, await read_block(stream, CERTIFICATE_BYTES_MAX, f"peer {peer_id}"))
            await write_block(stream, self.credentials.certificate.pem)
        return identity


async def write_block(stream: Any, block: bytes) -> None:
    """A length, then the bytes."""
    await stream.write(len(block).to_bytes(_LENGTH_BYTES, "big") + block)


async def read_block(stream: Any, limit: int, whose: str) -> bytes:
    """What `write_block` wrote; MalformedMessage beyond `limit`, before any of it is read."""
    size = int.from_bytes(await read_exactly(stream, _LENGTH_BYTES), "big")
    if size > limit:
        raise MalformedMessage(f"{whose}: expected at most {limit} bytes in a message, it announces {size}")
    return await read_exactly(stream, size)


async def read_exactly(stream: Any, count: int) -> bytes:
    """EOFError when the stream ends before."""
    parts = bytearray()
    while len(parts) < count:
        part = await stream.read(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)

"""AutoNAT: a public node checks whether a member's gRPC port can be reached from outside.

The library's service checks whether its host can connect to an already connected peer, which is always true
(0.8.1, `_try_dial`), and knows only libp2p ports. Here the dial-back is a TLS handshake with the member's gRPC port,
which must show that member's certificate. Guarantees: only addresses at the member's observed IP are dialled
(the library ensures that), only for the member itself, ADDRESSES_MAX per request, one request per member at a time and
PAUSE_S apart; `proven` is called with each address that answered. Waits: PROBE_S per dial, in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import trio
from libp2p.host.autonat.autonat import AutoNATService
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.host.basic_host import BasicHost
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from echo2.base.hosts import joined
from echo2.base.ids import PeerId
from echo2.broadcast.runtime.dial_back import PROBE_S, shows_certificate
from echo2.broadcast.runtime.p2p.membership import Members
from echo2.broadcast.runtime.p2p.relay import peer_of_stream, reset

ADDRESSES_MAX = 2
PAUSE_S = 1.0
ANSWER_S = 2 * PROBE_S * ADDRESSES_MAX
PROBES_AT_ONCE = 16
_asking: ContextVar[PeerId] = ContextVar("asking")
"""The authenticated peer whose request this task serves; the library passes on only the ID claimed in the request."""
_log = logging.getLogger("echo2.broadcast")


class ReachabilityService(AutoNATService):  # type: ignore[misc]  # untyped library
    """`is_serving` False: only sends requests."""

    def __init__(
        self, host: BasicHost, members: Members, *, is_serving: bool, proven: Callable[[PeerId, str], None]
    ) -> None:
        super().__init__(host, serve=is_serving)
        self._members, self._proven = members, proven
        self._asked_at: dict[PeerId, float] = {}
        self._limit = trio.CapacityLimiter(PROBES_AT_ONCE)

    async def handle_stream(self, stream: Any) -> None:
        member, now = peer_of_stream(stream), trio.current_time()
        is_early = now - self._asked_at.get(member, -PAUSE_S) < PAUSE_S
        if self._members.identity_of(member) is None or is_early:
            await reset(stream)
            return
        self._asked_at = {peer: at for peer, at in self._asked_at.items() if now - at < PAUSE_S}
        self._asked_at[member] = now
        _asking.set(member)
        await super().handle_stream(stream)

    async def _try_dial(self, peer_id: ID, addrs: list[bytes]) -> bytes | None:
        peer = PeerId(peer_id.to_base58())
        if peer != _asking.get():
            return None
        for raw in addrs[:ADDRESSES_MAX]:
            host, port = _host_and_port(raw)
            if await trio.to_thread.run_sync(
                shows_certificate, host, port, peer, self._members.credentials.authority_pem, limiter=self._limit
            ):
                self._proven(peer, joined(host, port))
                return raw
        return None

    async def is_reachable(self, server: PeerId, host: str, port: int) -> bool | None:
        """Asks `server` whether our gRPC port at `host` can be reached; None if it does not answer."""
        kind = "ip6" if ":" in host else "ip4"
        asked = Multiaddr(f"/{kind}/{host}/tcp/{port}").to_bytes()
        status, _ = await self.query_server(ID.from_base58(server), [asked], ANSWER_S)
        return {int(Message.OK): True, int(Message.E_DIAL_ERROR): False}.get(status)


def _host_and_port(raw: bytes) -> tuple[str, int]:
    address = Multiaddr(raw)
    kind = "ip6" if "/ip6/" in str(address) else "ip4"
    return str(address.value_for_protocol(kind)), int(str(address.value_for_protocol("tcp")))

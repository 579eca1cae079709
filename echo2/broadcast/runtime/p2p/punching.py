"""Hole punching (DCUtR over TCP simultaneous open), with the library's exchange and dials but our own sequence of events.

The library's driver first dials the peer's private addresses for ten seconds, and starts on both sides at once, which
spoils the timing (0.8.1: 19 s until a hole between two Linux NATs; here under one). Guarantees: one attempt per
peer at a time, at most len(PAUSES_S) of them, PAUSES_S apart; `story` tells how they went. Works if the NAT keeps a connection's
source port (most do); if it chooses ports at random, no dial can predict them and the link stays relayed.
"""

from __future__ import annotations

import logging
from typing import Any

import trio
from libp2p.host.basic_host import BasicHost
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2 import DCUtRProtocol
from multiaddr import Multiaddr

from echo2.base.ids import PeerId
from echo2.broadcast.runtime.p2p.dial_gate import DialGate
from echo2.broadcast.runtime.p2p.membership import Members
from echo2.broadcast.runtime.p2p.relay import peer_of_stream, reset

PAUSES_S = (0.0, 10.0, 60.0)
PEERS_MAX = 64
ADDRESSES_MAX = 4
_log = logging.getLogger("echo2.broadcast")


class HolePuncher(DCUtRProtocol):  # type: ignore[misc]  # untyped library
    def __init__(self, host: BasicHost, members: Members, gate: DialGate) -> None:
        super().__init__(host)
        self._gate = gate
        self._members = members
        self._stories: dict[PeerId, str] = {}
        self._at_work: set[PeerId] = set()

    async def punch(self, peer: PeerId) -> None:
        """Tries to punch a hole until there is a direct connection, the peer is gone, or all attempts have failed."""
        if peer in self._at_work or len(self._at_work) >= PEERS_MAX:
            return
        self._at_work.add(peer)
        target = ID.from_base58(peer)
        try:
            if not await self._members.wait_known(peer):
                return
            for number, pause_s in enumerate(PAUSES_S, start=1):
                await trio.sleep(pause_s)
                if not self.host.get_network().connections.get(target):
                    return
                self._stories[peer] = f"attempt {number} to punch a hole under way"
                if await self.initiate_hole_punch(target):
                    self._stories[peer] = "a hole was punched"
                    _log.info("libp2p: punched a hole to %s", peer)
                    return
                self._stories[peer] = f"no hole after {number} of {len(PAUSES_S)} attempts"
        except Exception as error:  # the relayed link stays
            self._stories[peer] = f"no hole: {error or type(error).__name__}"
        finally:
            self._at_work.discard(peer)
            while len(self._stories) > PEERS_MAX:
                del self._stories[next(iter(self._stories))]

    def story(self, peer: PeerId) -> str:
        return self._stories.get(peer, "no hole punched yet")

    async def _handle_dcutr_stream(self, stream: Any) -> None:
        if not await self._members.wait_known(peer_of_stream(stream)):
            await reset(stream)
            return
        await super()._handle_dcutr_stream(stream)

    async def _perform_hole_punch(self, peer_id: ID, addrs: list[Multiaddr], as_responder: bool = False) -> bool:
        """Dials at most ADDRESSES_MAX of the addresses that the peer named in this exchange, none named earlier."""
        self.host.get_peerstore().clear_addrs(peer_id)
        kept = [address for address in addrs if self._gate.lets_through(address)][:ADDRESSES_MAX]
        return bool(await super()._perform_hole_punch(peer_id, kept, as_responder))

    async def _dial_peer(
        self, peer_id: ID, addr: Multiaddr, source: tuple[str, int] | None = None, as_responder: bool = False
    ) -> None:
        """Dials from the listener of the address's own IP family; the library would take the first listener it finds."""
        if source is not None:
            source = ("::" if "/ip6/" in str(addr) else "0.0.0.0", source[1])
        await super()._dial_peer(peer_id, addr, source, as_responder)

    async def _spam_udp_for_hole_punch(self, *_: Any) -> None:
        """Disabled: only TCP is punched."""

    async def _auto_drive_loop(self) -> None:
        """Disabled: attempts start in `punch`, on one side only."""
        await trio.sleep_forever()

    async def _try_unilateral_upgrade(self, peer_id: ID) -> bool:
        """Disabled: links are relayed only between peers that are known not to be dialable."""
        return False
